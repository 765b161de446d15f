"""P33, S9: an answer that ends inside the accepted part of a draft: nothing after it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from server.policy import Policy
from statemachine import commands
from statemachine.events import Appended, Closed, Committed, Namespace, Rewound
from statemachine.geometry import Geometry, Group

from ..sim import Inbox, Sim, answer_alone
from .serving import settle

X, D1, D2, EOS, D4, D5, BONUS = 1, 41, 42, 63, 44, 45, 46
BLOCK = (D1, D2, EOS, D4, D5)
PROMPT = (X, *BLOCK, 51, 50, 50, 51)
"""Its last token stands in it before, so that no row is issued ahead of the first answer token."""
SAID = (X, *BLOCK, BONUS)
"""What the model says behind the prompt: the block that the prompt has behind its X."""
NEIGHBOUR = tuple(range(20, 27))
ROOM = Geometry(2, (Group(num_blocks=64),))
POLICY = Policy(max_batch_tokens=64, draft_tokens=5, lookup_ngram=1, context_tokens=64)


def said(seq: int, position: int) -> int | None:
    at = position - len(PROMPT)
    return SAID[at] if seq == 0 and 0 <= at < len(SAID) else None


class Letters:
    """Token n is the n-th character."""

    def add(self, token: int) -> str:
        return chr(ord("0") + token)

    def finish(self) -> str:
        return ""


def run(lookahead: bool, max_tokens: int, **parameters: Any) -> tuple[Sim, Inbox]:
    policy = structs.replace(POLICY, lookahead=lookahead)
    sim = Sim(ROOM, policy, script=said, decoder=Letters)
    inbox = sim.submit(PROMPT, max_tokens, **parameters)
    other = sim.submit(NEIGHBOUR, 12)
    sim.run()
    plain = structs.replace(POLICY, draft_tokens=0)
    assert other.tokens == answer_alone(NEIGHBOUR, 12, ROOM, plain)
    return sim, inbox


def rows_of(sim: Sim) -> dict[str, Any]:
    """What became of the drafted rows."""
    drafted = [e for e in sim.events(Appended) if e.seq == 0 and e.purpose == "draft"]
    return {
        "drafted": [e.tokens for e in drafted],
        "committed": [e.tokens for e in sim.events(Committed) if e.seq == 0],
        "rewound": [e.rows for e in sim.events(Rewound) if e.seq == 0],
        "closed": [e.reason for e in sim.events(Closed) if e.seq == 0],
    }


def found(sim: Sim) -> int:
    """How many rows of prompt and all that was drafted can be found afterwards."""
    tokens = (*PROMPT, *SAID, 0)
    return commands.lookup(sim.engine.view.state, Namespace(), tokens).rows


@pytest.mark.parametrize("lookahead", [False, True])
def test_p33_an_end_token_inside_the_block_ends_the_answer_there(
    lookahead: bool, tmp_path: Path
) -> None:
    """The rule: an end token is no part of the answer, has no row, and is not counted."""
    sim, inbox = run(lookahead, 20, end_tokens=(EOS,))
    assert (inbox.tokens, inbox.reason) == ((X, D1, D2), "stop")
    assert rows_of(sim) == {
        "drafted": [(X, *BLOCK)],
        "committed": [(X, D1, D2)],
        "rewound": [3],
        "closed": ["stop"],
    }
    # 10 rows of prompt and 3 of answer; the last of them stands alone in its block of two.
    assert found(sim) == 12
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(("max_tokens", "drafted"), [(2, 0), (3, 1), (4, 2), (6, 4)])
def test_p33_max_tokens_bounds_the_block_so_that_no_row_is_drafted_beyond_it(
    max_tokens: int, drafted: int, lookahead: bool, tmp_path: Path
) -> None:
    sim, inbox = run(lookahead, max_tokens)
    assert (inbox.tokens, inbox.reason) == (SAID[:max_tokens], "length")
    rows = rows_of(sim)
    assert rows["drafted"] == ([(X, *BLOCK[:drafted])] if drafted else [])
    assert rows["rewound"] == []
    assert rows["closed"] == ["length"]
    assert found(sim) <= len(PROMPT) + max_tokens - 1
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p33_a_stop_string_inside_the_block_keeps_the_token_that_completes_it(
    lookahead: bool, tmp_path: Path
) -> None:
    stop = Letters().add(D1) + Letters().add(D2)
    sim, inbox = run(lookahead, 20, stop=(stop,))
    assert (inbox.tokens, inbox.reason) == ((X, D1, D2), "stop")
    assert rows_of(sim)["rewound"] == [3]
    assert found(sim) == 12
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p33_a_whole_block_and_the_token_behind_it_are_the_answer_where_nothing_ends_it(
    lookahead: bool, tmp_path: Path
) -> None:
    sim, inbox = run(lookahead, 7)
    assert inbox.tokens == SAID
    assert rows_of(sim) == {
        "drafted": [(X, *BLOCK)],
        "committed": [(X, *BLOCK)],
        "rewound": [],
        "closed": ["length"],
    }
    assert found(sim) == len(PROMPT) + 6
    settle(sim, tmp_path)
