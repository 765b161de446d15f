"""Refusals: each claim that an event may not make, one by one, on one state; nothing changes.

seq   rows                                             blocks of group 0 (full)   group 1 (window 4)
0     8 committed, published; front-trimmed            0 1                        -1 1
1     adopted 7 of the same                            0 1                        -1 1
2     5 committed, 1 draft                             2 3                        2 3
3     2 committed, 1 lookahead in step 3               4                          4
4     2 committed, 2 pads                              5                          5
5, 6  6 committed, shared by fork                      6 7                        6 7
7     empty                                            preempted
8     empty, in another namespace
"""

from __future__ import annotations

import pytest

from statemachine import commands, invariants
from statemachine import events as ev
from statemachine.errors import InvariantBroken
from statemachine.events import Event, Namespace
from statemachine.geometry import Geometry, Group
from statemachine.state import State, new_state
from statemachine.transitions import apply, apply_all

from .model import plain

GEOMETRY = Geometry(4, (Group("full", 12), Group("window", 10, window=4)))


def pool() -> State:
    state = new_state(GEOMETRY)

    def do(events: tuple[Event, ...]) -> None:
        nonlocal state
        state = apply_all(state, events)

    do(commands.open_sequence(state, 0))
    do(commands.append(state, 0, 1, tuple(range(8))))
    do(commands.step_written(state, 1))
    do(commands.publish(state, 0))
    do(commands.front_trims(state, 0))
    for seq in range(1, 5):
        do(commands.open_sequence(state, seq))
    do(commands.adopt(state, 1, tuple(range(8))))
    do(commands.append(state, 2, 2, (20, 21, 22, 23, 24)))
    do(commands.append(state, 3, 2, (30, 31)))
    do(commands.append(state, 4, 2, (40, 41)))
    do(commands.append(state, 4, 2, None, 2, ev.PAD))
    do(commands.open_sequence(state, 5))
    do(commands.append(state, 5, 2, tuple(range(50, 56))))
    do(commands.step_written(state, 2))
    do(commands.fork(state, 5, 6))
    do(commands.open_sequence(state, 7))
    do(commands.preempt(state, 7))
    do(commands.open_sequence(state, 8, Namespace("other")))
    do(commands.append(state, 2, 3, (25,), None, ev.DRAFT))
    do(commands.append(state, 3, 3, None, 1, ev.LOOKAHEAD))
    return state


POOL = pool()
KEY_0, KEY_1 = POOL.sequences[0].keys
NONE = ((), ())

REFUSALS: list[tuple[Event, str]] = [
    (ev.Opened(7), "used before, or is out of order"),
    (ev.Opened(-1), "used before, or is out of order"),
    (ev.PrefixAdopted(9, (0,), 2, ((0,), (0,))), "not open"),
    (ev.PrefixAdopted(2, (0, 1, 2, 3), 5, ((0,), (0,))), "only an empty one adopts"),
    (ev.PrefixAdopted(7, (), 5, NONE), "at most 4 may be adopted"),
    (ev.PrefixAdopted(7, tuple(range(8)), 8, ((0, 1), (-1, 1))), "at most 7 may be adopted"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((0, 1),)), "one table a group"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((0,), (-1,))), "take 2 blocks a table"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((0, 1), (0, 1))), "reads other places"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((-1, 1), (-1, 1))), "reads other places"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((0, 2), (-1, 1))), "not published"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((0, 11), (-1, 1))), "not published"),
    (ev.PrefixAdopted(7, (0, 1, 2, 3, 4, 5, 6, 9), 9, ((0, 1), (-1, 1))), "holds these rows"),
    (ev.PrefixAdopted(7, (9, 1, 2, 3, 4, 5, 6, 7), 9, ((0, 1), (-1, 1))), "holds these rows"),
    (ev.PrefixAdopted(7, tuple(range(8)), 9, ((1, 0), (-1, 1))), "holds these rows"),
    (ev.PrefixAdopted(7, (0, 1, 2, 3, 4, 9), 9, ((0, 1), (0, 1))), "holds these rows"),
    (ev.Appended(9, 3, 1, (1,), NONE, ev.DECODE), "not open"),
    (ev.Appended(2, 3, 0, (), NONE, ev.DRAFT), "an append of 0 rows"),
    (ev.Appended(2, 3, -1, (), NONE, ev.DRAFT), "an append of -1 rows"),
    (ev.Appended(2, 3, 2, (1,), NONE, ev.DRAFT), "2 draft rows to sequence 2 with 1 tokens"),
    (ev.Appended(2, 3, 1, None, NONE, ev.DRAFT), "with no tokens"),
    (ev.Appended(3, 3, 1, (1,), NONE, ev.LOOKAHEAD), "1 lookahead rows to sequence 3 with 1"),
    (ev.Appended(2, 3, 1, (1,), NONE, "guess"), "purpose 'guess' is none of"),
    (ev.Appended(2, 2, 1, (1,), NONE, ev.DRAFT), "step 2 cannot append"),
    (ev.Appended(2, 3, 1, (1,), NONE, ev.DECODE), "1 speculative rows: decode rows cannot follow"),
    (ev.Appended(2, 3, 1, None, NONE, ev.PAD), "pad rows cannot follow"),
    (ev.Appended(2, 3, 1, None, NONE, ev.LOOKAHEAD), "never mix"),
    (ev.Appended(3, 3, 1, (1,), NONE, ev.DRAFT), "never mix"),
    (ev.Appended(4, 3, 1, (1,), ((8,), (8,)), ev.DECODE), "only pads may follow"),
    (ev.Appended(4, 3, 1, None, ((8,), (8,)), ev.LOOKAHEAD), "only pads may follow"),
    (ev.Appended(7, 3, 1, (1,), ((8,), (8,)), ev.DECODE), "is preempted"),
    (ev.Appended(1, 3, 1, (7,), NONE, ev.PROMPT), "must copy it before it writes"),
    (ev.Appended(5, 3, 1, (1,), NONE, ev.DECODE), "must copy it before it writes"),
    (ev.Appended(0, 3, 1, (1,), ((8,),), ev.DECODE), "names new blocks for each group"),
    (ev.Appended(0, 3, 1, (1,), ((8,), ()), ev.DECODE), "1 new blocks in group 1, not 0"),
    (ev.Appended(0, 3, 1, (1,), ((8, 9), (8,)), ev.DECODE), "1 new blocks in group 0, not 2"),
    (ev.Appended(2, 3, 1, (1,), ((8,), ()), ev.DRAFT), "0 new blocks in group 0, not 1"),
    (ev.Appended(0, 3, 1, (1,), ((2,), (8,)), ev.DECODE), "in use, not free"),
    (ev.Appended(0, 3, 5, (1,) * 5, ((8, 8), (8, 9)), ev.DECODE), "in use, not free"),
    (ev.Appended(0, 3, 1, (1,), ((12,), (8,)), ev.DECODE), "has blocks 0 to 11, not 12"),
    (ev.Appended(0, 3, 1, (1,), ((-1,), (8,)), ev.DECODE), "has blocks 0 to 11, not -1"),
    (ev.Appended(0, 3, 1, (-1,), ((8,), (8,)), ev.DECODE), "unsigned 64-bit"),
    (ev.AppendedEach(3, (), (), ev.DECODE), "names each sequence once"),
    (ev.AppendedEach(3, (2, 2), (1, 1), ev.DRAFT), "names each sequence once"),
    (ev.AppendedEach(3, (2,), (1, 1), ev.DRAFT), "a token a sequence"),
    (ev.AppendedEach(3, (2,), None, ev.DRAFT), "draft rows need tokens"),
    (ev.AppendedEach(3, (3,), (1,), ev.LOOKAHEAD), "lookahead rows have no tokens"),
    (ev.AppendedEach(2, (2,), (1,), ev.DRAFT), "step 2 cannot append"),
    (ev.AppendedEach(3, (9,), (1,), ev.DECODE), "not open"),
    (ev.AppendedEach(3, (9,), (1,), ev.DRAFT), "not open"),
    (ev.AppendedEach(3, (0,), (1,), ev.DECODE), "at a block's edge"),
    (ev.AppendedEach(3, (0,), (1,), ev.DRAFT), "at a block's edge"),
    (ev.AppendedEach(3, (7,), (1,), ev.PROMPT), "at a block's edge"),
    (ev.AppendedEach(3, (2,), (1,), ev.DECODE), "1 speculative rows"),
    (ev.AppendedEach(3, (3,), (1,), ev.DRAFT), "never mix"),
    (ev.AppendedEach(3, (1,), (7,), ev.DECODE), "must copy it before it writes"),
    (ev.AppendedEach(3, (5,), (7,), ev.DECODE), "must copy it before it writes"),
    (ev.AppendedEach(3, (5,), (7,), ev.DRAFT), "must copy it before it writes"),
    (ev.AppendedEach(3, (5,), None, ev.LOOKAHEAD), "must copy it before it writes"),
    (ev.StepWritten(2), "cannot be written now"),
    (ev.StepWritten(4), "cannot be written now"),
    (ev.Committed(2, ()), "0 cannot be committed"),
    (ev.Committed(2, (25, 26)), "2 cannot be committed"),
    (ev.Committed(2, (26,)), "a draft row of token 25 was committed as 26"),
    (ev.Committed(3, (-1,)), "unsigned 64-bit"),
    (ev.Committed(4, (1,)), "has 0 speculative rows"),
    (ev.CommittedEach((), ()), "names each sequence once"),
    (ev.CommittedEach((3, 3), (1, 1)), "names each sequence once"),
    (ev.CommittedEach((3,), ()), "a token a sequence"),
    (ev.CommittedEach((3, 2), (1, 26)), "a draft row of token 25 was committed as 26"),
    (ev.CommittedEach((3,), (-1,)), "unsigned 64-bit"),
    (ev.CommittedEach((3, 4), (1, 1)), "sequence 4 has 0 speculative rows"),
    (ev.CommittedEach((3, 9), (1, 1)), "not open"),
    (ev.Trimmed(2, 0), "0 cannot be trimmed"),
    (ev.Trimmed(2, -5), "-5 cannot be trimmed"),
    (ev.Trimmed(2, 7), "has 6 rows: 7 cannot be trimmed"),
    (ev.Trimmed(0, 1), "a trim to 7 needs rows from 4 on"),
    (ev.Rewound(2, 2), "has 1 speculative rows: 2 cannot be rewound"),
    (ev.Rewound(2, 0), "0 cannot be rewound"),
    (ev.Rewound(4, 1), "trim them first"),
    (ev.FrontTrimmed(5, 0, 1), "only a window moves on"),
    (ev.FrontTrimmed(5, 2, 1), "there is no group 2"),
    (ev.FrontTrimmed(5, -1, 1), "there is no group -1"),
    (ev.FrontTrimmed(5, 1, 0), "not by 0 rows"),
    (ev.FrontTrimmed(5, 1, 4), "may move on to 3, not by 4 rows"),
    (ev.FrontTrimmed(2, 1, 3), "may move on to 2, not by 3 rows"),
    (ev.BlockCopied(5, 3, 0, 0, 6, 8, 4), "not the last"),
    (ev.BlockCopied(5, 3, 0, 1, 6, 8, 2), "not the last"),
    (ev.BlockCopied(5, 3, 2, 1, 7, 8, 2), "there is no group 2"),
    (ev.BlockCopied(5, 3, 0, 1, 7, 8, 1), "has 2 rows in its last block, not 1"),
    (ev.BlockCopied(0, 3, 0, 1, 1, 8, 4), "has 4 rows in its last block"),
    (ev.BlockCopied(5, 2, 0, 1, 7, 8, 2), "step 2 cannot copy"),
    (ev.BlockCopied(5, 3, 0, 1, 7, 6, 2), "in use, not free"),
    (ev.BlockCopied(2, 3, 0, 1, 3, 8, 2), "copies run before its writes"),
    (ev.Forked(7, 9), "cannot fork"),
    (ev.Forked(5, 2), "it cannot be its fork"),
    (ev.BlockPublished(0, 0, 0, 0, KEY_0), "published already"),
    (ev.BlockPublished(0, 0, 1, -1, KEY_0), "not in its table"),
    (ev.BlockPublished(0, 1, 0, 0, KEY_1), "not in its table"),
    (ev.BlockPublished(0, 2, 0, 0, KEY_1), "not full of committed rows"),
    (ev.BlockPublished(2, 1, 0, 3, 0), "not full of committed rows"),
    (ev.BlockPublished(2, 0, 0, 2, KEY_0), "has key"),
    (ev.BlockPublished(2, 0, 2, 2, KEY_0), "there is no group 2"),
    (ev.BlockEvicted(0, 0, KEY_0), "cannot be evicted"),
    (ev.BlockEvicted(0, 9, KEY_0), "is free, not in use"),
    (ev.BlockEvicted(1, 0, KEY_1), "has key"),
    (ev.BlockStored(0, 2, KEY_0), "not published: it cannot be stored"),
    (ev.BlockStored(0, 0, KEY_1), "has key"),
    (ev.BlockStored(2, 0, KEY_0), "there is no group 2"),
    (ev.BlockLoaded(9, 3, 0, 8, 0, (0, 1, 2, 3), KEY_0), "not open"),
    (ev.BlockLoaded(7, 3, 2, 8, 0, (0, 1, 2, 3), KEY_0), "there is no group 2"),
    (ev.BlockLoaded(7, 3, 1, 8, 0, (0, 1, 2, 3), KEY_0), "only groups that keep all rows"),
    (ev.BlockLoaded(7, 3, 0, 8, 0, (0, 1, 2), KEY_0), "with 3 tokens: a kept block is full"),
    (ev.BlockLoaded(7, 3, 0, 8, 0, (0, 1, 2, 3), KEY_1), "under key"),
    (ev.BlockLoaded(7, 3, 0, 8, 0, (0, 1, 2, 9), KEY_0), "under key"),
    (ev.BlockLoaded(7, 3, 0, 8, 9, (4, 5, 6, 7), KEY_1), "below entry 9"),
    (ev.BlockLoaded(8, 3, 0, 8, 1, (4, 5, 6, 7), KEY_1), "not in the namespace of sequence 8"),
    (ev.BlockLoaded(7, 2, 0, 8, 0, (0, 1, 2, 3), KEY_0), "cannot be loaded in step 2"),
    (ev.BlockLoaded(7, 3, 0, 0, 0, (0, 1, 2, 3), KEY_0), "in use, not free"),
    (ev.Reset(9), "not open"),
    (ev.Preempted(9), "not open"),
    (ev.Closed(9), "not open"),
]


@pytest.mark.parametrize(("event", "words"), REFUSALS, ids=lambda value: str(value)[:60])
def test_an_event_that_claims_what_cannot_be_is_refused(event: Event, words: str) -> None:
    before = plain(POOL)
    with pytest.raises(InvariantBroken) as refused:
        apply(POOL, event)
    assert words in str(refused.value)
    assert plain(POOL) == before


def test_the_pool_of_these_refusals_is_sound() -> None:
    """Each sequence is as the module's table says; near each refusal there is an acceptance."""
    invariants.check_all(POOL)
    assert [POOL.sequences[seq].offset for seq in range(9)] == [8, 7, 6, 3, 4, 6, 6, 0, 0]
    assert POOL.sequences[0].tables == ((0, 1), (-1, 1))
    assert POOL.cached_blocks(1) == 1
    accepted: list[Event] = [
        ev.Opened(9, Namespace("A")),
        ev.PrefixAdopted(7, tuple(range(7)), 8, ((0, 1), (-1, 1))),
        ev.Appended(0, 3, 1, (1,), ((11,), (9,)), ev.DECODE),
        ev.Appended(2, 3, 1, (1,), NONE, ev.DRAFT),
        ev.Appended(4, 3, 1, None, ((8,), (8,)), ev.PAD),
        ev.Appended(7, 3, 1, (1,), ((8,), (8,)), ev.PROMPT),
        ev.AppendedEach(3, (3,), None, ev.LOOKAHEAD),
        ev.StepWritten(3),
        ev.Committed(2, (25,)),
        ev.CommittedEach((3, 2), (32, 25)),
        ev.Trimmed(2, 6),
        ev.Rewound(2, 1),
        ev.FrontTrimmed(5, 1, 3),
        ev.FrontTrimmed(2, 1, 2),
        ev.BlockCopied(5, 3, 0, 1, 7, 8, 2),
        ev.BlockCopied(2, 4, 0, 1, 3, 8, 2),
        ev.Forked(1, 9),
        ev.Forked(5, 7),
        ev.Forked(2, 9),
        ev.Forked(4, 9),
        ev.BlockPublished(2, 0, 0, 2, POOL.sequences[2].keys[0]),
        ev.BlockEvicted(1, 0, KEY_0),
        ev.BlockStored(1, 0, KEY_0),
        ev.BlockLoaded(7, 3, 0, 8, 0, (0, 1, 2, 3), KEY_0),
        ev.BlockLoaded(7, 4, 0, 8, 1, (4, 5, 6, 7), KEY_1),
    ]
    for event in accepted:
        invariants.check_all(apply(POOL, event))


def test_events_behind_a_refused_one_leave_nothing_behind() -> None:
    """apply_all is all or nothing."""
    before = plain(POOL)
    with pytest.raises(InvariantBroken):
        apply_all(POOL, [ev.Closed(0), ev.PoolReset(), ev.Opened(9), ev.Trimmed(9, 1)])
    assert plain(POOL) == before


def test_a_published_block_is_not_written_though_one_table_alone_holds_it() -> None:
    alone = apply(POOL, ev.Closed(0))
    for event in (
        ev.Appended(1, 3, 1, (7,), NONE, ev.PROMPT),
        ev.AppendedEach(3, (1,), (7,), ev.DECODE),
        ev.AppendedEach(3, (1,), (7,), ev.DRAFT),
    ):
        with pytest.raises(InvariantBroken, match="must copy it before it writes"):
            apply(alone, event)


def test_a_block_is_not_published_before_its_step_is_written() -> None:
    """Not even where an earlier step's rows in it are."""
    state = apply(POOL, ev.Appended(0, 3, 4, (1, 2, 3, 4), ((8,), (8,)), ev.DECODE))
    key = state.sequences[0].keys[2]
    event = ev.BlockPublished(0, 2, 0, 8, key)
    with pytest.raises(InvariantBroken, match="is not written yet"):
        apply(state, event)
    invariants.check_all(apply_all(state, [ev.StepWritten(3), event]))


def test_a_pool_reset_voids_the_steps_in_flight() -> None:
    state = apply(POOL, ev.PoolReset())
    assert (state.issued_step, state.written_step) == (3, 3)
    assert all(sequence.preempted for sequence in state.sequences.values())
    for event in (ev.StepWritten(3), ev.Appended(7, 3, 1, (1,), ((8,), (8,)), ev.PROMPT)):
        with pytest.raises(InvariantBroken):
            apply(state, event)
    invariants.check_all(apply(state, ev.Appended(7, 4, 1, (1,), ((8,), (8,)), ev.PROMPT)))
