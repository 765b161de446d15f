"""P10, P12, P19, P20, P25: blocks that a step needs, takes, and gives back, in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from kernel.batch import Batch
from kernel.fake import Failure
from server.policy import Policy
from statemachine.events import (
    Appended,
    Closed,
    Preempted,
    PrefixAdopted,
    Rewound,
)
from statemachine.geometry import Geometry, Group

from ..sim import Sim, answer_alone
from .serving import settle

COLD = Policy(
    max_batch_tokens=64,
    prefill_chunk=64,
    prefix_cache=False,
    watermark_blocks=0,
    context_tokens=128,
)
ROOM = Geometry(4, (Group(num_blocks=64),))


def pool(num_blocks: int) -> Geometry:
    return Geometry(4, (Group(num_blocks=num_blocks),))


def alone(prompt: tuple[int, ...] | list[int], max_tokens: int) -> tuple[int, ...]:
    return answer_alone(prompt, max_tokens, ROOM, structs.replace(COLD, prefill_chunk=128))


@pytest.mark.parametrize(("num_blocks", "rows"), [(5, 2), (6, 3)])
@pytest.mark.parametrize("lookahead", [False, True])
def test_p10_two_of_three_rows_need_a_block_and_who_finds_none_waits(
    num_blocks: int, rows: int, lookahead: bool, tmp_path: Path
) -> None:
    """Lengths of 4, 8 and 3 hold 4 blocks. A row ahead of its token preempts nobody."""
    sim = Sim(pool(num_blocks), structs.replace(COLD, lookahead=lookahead))
    prompts = ([1] * 4, [2] * 8, [3] * 3)
    inboxes = [sim.submit(prompt, 2) for prompt in prompts]
    sim.step()
    assert sim.engine.status()["free"] == num_blocks - 4
    sim.run()
    assert len(sim.kernel.batches[1].pieces) == rows
    assert sim.events(Preempted) == ([] if lookahead or rows == 3 else [Preempted(2)])
    assert sim.engine.status()["failed_steps"] == 0
    assert [inbox.tokens for inbox in inboxes] == [alone(prompt, 2) for prompt in prompts]
    settle(sim, tmp_path)


def test_p12_a_row_in_flight_at_the_end_of_its_request_frees_only_the_block_that_it_opened(
    tmp_path: Path,
) -> None:
    """The eighth token is the end; the row of the ninth had opened a third block."""
    held: list[int] = []
    sim = Sim(
        pool(4),
        structs.replace(COLD, lookahead=True),
        script=lambda seq, position: 63 if position == 8 else None,
        delay=lambda batch: held.append(sim.engine.status()["held"]),
    )
    inbox = sim.submit(range(6), 20, end_tokens=(63,))
    sim.run()
    assert held == [2, 2, 2, 3]
    assert sim.events(Rewound) == [Rewound(0, 1)]
    assert sim.events(Closed) == [Closed(0, "stop")]
    assert len(inbox.tokens) == 2
    settle(sim, tmp_path)


def test_p19_a_request_that_is_preempted_twice_prefills_9_then_10_rows(tmp_path: Path) -> None:
    """Prompt 6 with 3 tokens out, then with 4. What was the prompt stays apart from the answer.

    Penalties are not served; what they would be asked of is `output_tokens`.
    """
    fail = {4: Failure("eval"), 6: Failure("eval")}
    sim = Sim(pool(6), COLD, fail=fail)
    inbox = sim.submit(range(6), 8)
    told = []
    while sim.step():
        told.append(len(inbox.tokens))
        if 0 in sim.engine.view.requests:
            request = sim.engine.view.requests[0]
            assert request.stream.prompt == tuple(range(6))
            assert request.stream.output() == inbox.tokens
    assert told == [1, 2, 3, 3, 4, 4, 5, 6, 7, 8]
    prefilled = [e.tokens for e in sim.events(Appended) if e.purpose == "prompt"]
    assert [len(tokens or ()) for tokens in prefilled] == [6, 9, 10]
    assert prefilled[1] == (*range(6), *inbox.tokens[:3])
    assert inbox.tokens == alone(list(range(6)), 8)
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p20_two_preemptions_leave_the_cached_count_of_the_first_admission(
    lookahead: bool, tmp_path: Path
) -> None:
    """The youngest makes room for the two before it, twice, and finds more rows each time."""
    policy = structs.replace(COLD, prefix_cache=True, lookahead=lookahead)
    sim = Sim(pool(34), policy)
    prompt = [n % 50 for n in range(60)]
    sim.submit(prompt[:20], 1)
    sim.run()
    sim.submit([61] * 20, 16)
    sim.submit([62] * 20, 76)
    sim.step()
    inbox = sim.submit(prompt, 40)
    sim.run()
    assert sim.events(Preempted) == [Preempted(3)] * 2
    adopted = [len(e.tokens) for e in sim.events(PrefixAdopted) if e.seq == 3]
    assert adopted[0] == 20
    assert sum(adopted) > 60, "or else the sum would be no wrong answer"
    assert {update.cached_tokens for update in inbox.updates} == {20}
    assert inbox.tokens == alone(prompt, 40)
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p25_drafts_at_the_context_limit_stop_there_and_neighbours_keep_their_rows(
    lookahead: bool, tmp_path: Path
) -> None:
    """A limit of 16 rows, 3 drafts a step, 14 tokens there: one draft row is all that may be."""
    policy = structs.replace(COLD, context_tokens=16, draft_tokens=3, lookup_ngram=1)
    offsets: list[int] = []

    def note(batch: Batch) -> None:
        offsets.extend(p.sequence.offset for p in batch.pieces if p.sequence.id == 1)

    sim = Sim(
        pool(12),
        structs.replace(policy, lookahead=lookahead),
        script=lambda seq, position: 1 + position % 3 if seq == 1 else None,
        delay=note,
    )
    prompts = ([9] * 8, [1 + n % 3 for n in range(13)], [11] * 9)
    inboxes = [sim.submit(prompt, 1000) for prompt in prompts]
    sim.run()
    drafted = [e.rows for e in sim.events(Appended) if e.seq == 1 and e.purpose == "draft"]
    # The last token of an answer needs no row: 15 rows are all that 16 tokens take.
    assert (drafted, max(offsets)) == ([2], 15)
    assert [inbox.reason for inbox in inboxes] == ["length"] * 3
    assert [len(inbox.tokens) for inbox in inboxes] == [8, 3, 7]
    cold = structs.replace(policy, draft_tokens=0)
    assert [inboxes[n].tokens for n in (0, 2)] == [
        answer_alone(prompts[n], 1000, ROOM, cold) for n in (0, 2)
    ]
    settle(sim, tmp_path)
