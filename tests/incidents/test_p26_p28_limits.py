"""P26, P27, P28: what the context and the pool cannot hold, and who may pass whom."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from msgspec import structs

from server.admission import PASSES_MAX
from server.policy import Policy
from server.submission import RequestRefused
from statemachine.events import Appended, Closed, Preempted
from statemachine.geometry import Geometry, Group

from ..sim import Sim, answer_alone
from .serving import over_fake, settle

C = 64
UNSET = 1_000_000
POLICY = Policy(max_batch_tokens=64, prefill_chunk=16, context_tokens=C)
ENDLESS = {"script": lambda seq, position: 7}
"""A model that never ends its answer."""


def pool(num_blocks: int) -> Geometry:
    return Geometry(4, (Group(num_blocks=num_blocks),))


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("max_tokens", [UNSET, 1, 10])
@pytest.mark.parametrize(("rows", "most"), [(53, 11), (54, 10), (62, 2), (63, 1), (64, 0), (65, 0)])
def test_p26_prompt_and_answer_never_exceed_the_context(
    rows: int, most: int, max_tokens: int, lookahead: bool, tmp_path: Path
) -> None:
    """One rule: a prompt that leaves no room for a token is refused, so one of 64 is, too."""
    sim = Sim(pool(32), structs.replace(POLICY, lookahead=lookahead), **ENDLESS)
    prompt = [n % 50 for n in range(rows)]
    if not most:
        with pytest.raises(RequestRefused, match=f"has {rows} tokens") as refused:
            sim.submit(prompt, max_tokens)
        assert refused.value.code == "context_length_exceeded"
        return
    inbox = sim.submit(prompt, max_tokens)
    sim.run()
    assert (inbox.reason, len(inbox.tokens)) == ("length", min(most, max_tokens))
    settle(sim, tmp_path)


def test_p26_over_http_too_and_the_slot_is_free_again() -> None:
    with over_fake(pool(32), POLICY, script=lambda seq, position: ord("x")) as served:
        for max_tokens in (None, 1, 10):
            for rows in (63, 64, 65):
                if rows == 63:
                    answer = served.ask("a" * rows, max_tokens=max_tokens)
                    assert answer.choices[0].finish_reason == "length"
                    assert answer.usage.total_tokens == C
                    continue
                with pytest.raises(openai.BadRequestError) as refused:
                    served.ask("a" * rows, max_tokens=max_tokens)
                assert refused.value.code == "context_length_exceeded"
        answer = served.ask("a" * 40, max_tokens=None)
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, C)
        served.idle()


@pytest.mark.parametrize("lookahead", [False, True])
def test_p27_of_a_pair_that_does_not_fit_the_first_ends_before_the_second_gets_a_block(
    lookahead: bool, tmp_path: Path
) -> None:
    """Prompts of 24 and 4 rows of answer are 7 blocks of the 8. Neither is preempted for it."""
    policy = structs.replace(POLICY, context_tokens=128, prefill_chunk=12, lookahead=lookahead)
    sim = Sim(pool(8), policy)
    with pytest.raises(RequestRefused, match="40 tokens"):
        sim.submit(range(40))
    small = sim.submit(range(4), 4)
    sim.run()
    assert small.reason == "length"
    pair = [sim.submit([n] * 24, 4) for n in (5, 6)]
    sim.run(steps_max=60)
    assert [inbox.reason for inbox in pair] == ["length"] * 2
    order = [
        (type(event).__name__, event.seq)
        for event in sim.events(Appended | Closed)  # type: ignore[arg-type]
        if not isinstance(event, Appended) or event.purpose == "prompt"
    ]
    assert order.index(("Closed", 1)) < order.index(("Appended", 2))
    assert sim.events(Preempted) == []
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p28_small_requests_end_before_a_big_one_that_does_not_fit_begins(
    lookahead: bool, tmp_path: Path
) -> None:
    """16 blocks: 8 of them are taken, 12 are wanted, and 2 and 2 fit."""
    policy = structs.replace(POLICY, prefix_cache=False, max_running=8, lookahead=lookahead)
    sim = Sim(pool(16), policy)
    prompts = ([1] * 28, [2] * 44, [3] * 6, [4] * 6)
    answers = (4, 4, 2, 2)
    inboxes = [sim.submit(prompts[0], answers[0])]
    sim.step()
    inboxes += [sim.submit(prompts[n], answers[n]) for n in (1, 2, 3)]
    sim.run()
    order = [
        (type(event).__name__, event.seq)
        for event in sim.events(Appended | Closed)  # type: ignore[arg-type]
    ]
    begins = order.index(("Appended", 1))
    assert all(order.index(("Closed", small)) < begins for small in (2, 3))
    cold = structs.replace(policy, lookahead=False)
    for prompt, most, inbox in zip(prompts, answers, inboxes, strict=True):
        assert inbox.tokens == answer_alone(prompt, most, pool(32), cold)
    settle(sim, tmp_path)


def test_p28_a_stream_of_small_requests_delays_a_big_one_by_a_bounded_number(
    tmp_path: Path,
) -> None:
    """A new small one comes in every step; at most PASSES_MAX get past the big one."""
    policy = structs.replace(POLICY, prefix_cache=False, max_running=4, watermark_blocks=0)
    sim = Sim(pool(16), policy)
    sim.submit([1] * 28, 30)
    sim.step()
    big = sim.submit([2] * 48, 2)
    sim.run({step: [lambda n=step: sim.submit([n] * 4, 2)] for step in range(2, 60)})
    first = [event.seq for event in sim.events(Appended) if event.purpose == "prompt"]
    assert len(set(first[: first.index(1)]) - {0}) == PASSES_MAX
    assert big.reason == "length"
    assert all(inbox.reason == "length" for inbox in sim.inboxes.values())
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p28_a_short_prompt_behind_a_long_one_has_its_first_token_after_one_step(
    lookahead: bool, tmp_path: Path
) -> None:
    """A budget of 16 rows, a prompt of 2,000, and one of 4 that comes before step 2."""
    policy = Policy(16, max_running=8, prefill_chunk=16, context_tokens=4000, lookahead=lookahead)
    sim = Sim(pool(1024), policy)
    long = sim.submit([n % 50 for n in range(2000)], 2)
    sim.step()
    short = sim.submit([60] * 4, 2)
    sim.step()
    assert [p.rows for p in sim.kernel.batches[1].pieces] == [12, 4]
    sim.step()
    assert len(short.tokens) >= 1
    sim.run()
    assert long.reason == short.reason == "length"
    settle(sim, tmp_path)
