"""Lanes of `replay html`: what became of each request, from its arrival to its end."""

from __future__ import annotations

from msgspec import structs

from replay.lanes import MARKS, PHASES, Lane, Lanes
from statemachine import events as ev
from statemachine.records import (
    Checkpoint,
    Finished,
    Parameters,
    RequestArrived,
    RequestCancelled,
    RequestSnapshot,
)

from .html_pages import history_of
from .tapes import golden


def lane_spans(lanes: Lanes, request: int) -> list[tuple[str, int, int]]:
    number = next(it.number for it in lanes.lanes if it.request == request)
    rows = zip(*(lanes.spans[at::4] for at in range(4)), strict=True)
    return [(PHASES[phase], first, last) for lane, phase, first, last in rows if lane == number]


def lane_marks(lanes: Lanes, request: int) -> list[tuple[str, int, int]]:
    number = next(it.number for it in lanes.lanes if it.request == request)
    rows = zip(*(lanes.marks[at::4] for at in range(4)), strict=True)
    return [(MARKS[kind], place, count) for lane, place, kind, count in rows if lane == number]


def lane(lanes: Lanes, request: int) -> Lane:
    (found,) = [it for it in lanes.lanes if it.request == request]
    return found


def test_a_preempted_request_waits_and_computes_its_prompt_again() -> None:
    history = history_of(golden.records())
    lanes = history.lanes
    preempted = [it for it in lanes.lanes if it.preemptions]
    events = [it for record in golden.records() for it in getattr(record, "events", ())]
    alone = {it.seq for it in events if isinstance(it, ev.Preempted)}
    assert alone < {it.request for it in preempted}
    request = min(alone)
    phases = [phase for phase, _, _ in lane_spans(lanes, request)]
    at = phases.index("preempted")
    assert phases[at + 1] == "prefill"
    assert ("preempted", lane_spans(lanes, request)[at][1], 0) in lane_marks(lanes, request)


def test_lanes_go_from_arrival_to_end_without_holes() -> None:
    for records in (golden.records(), golden.flights()):
        history = history_of(records)
        assert len(history.lanes.lanes) == sum(isinstance(it, RequestArrived) for it in records)
        for it in history.lanes.lanes:
            spans = lane_spans(history.lanes, it.request)
            ends = [it.start, *(last for _, _, last in spans)]
            assert [first for _, first, _ in spans] == ends[:-1]
            assert ends[-1] == it.end
            assert it.ended in ("length", "stop", "cancelled", "failed", "error"), it


def arrival(request: int, name: str = "") -> RequestArrived:
    return RequestArrived(request, name, (1, 2, 3), Parameters(8))


def appended(seq: int, purpose: str, rows: int = 1) -> ev.Appended:
    return ev.Appended(seq, 1, rows, None, ((),), purpose)


def test_rewinds_and_forks_are_marked_where_they_happen_with_their_rows() -> None:
    lanes = Lanes()
    lanes.arrived(arrival(4), 0)
    lanes.arrived(arrival(5), 0)
    lanes.apply(appended(4, ev.PROMPT, 3), 2, 2)
    lanes.apply(ev.Forked(4, 5), 3, 3)
    lanes.apply(appended(4, ev.DRAFT, 3), 3, 3)
    lanes.apply(ev.Rewound(4, 2), 3, 4)
    lanes.finish(6)
    assert lane_spans(lanes, 4) == [("queued", 0, 2), ("prefill", 2, 3), ("decode", 3, 6)]
    assert lane_marks(lanes, 4) == [("forked", 3, 5), ("rewound", 3, 2)]
    assert lane_marks(lanes, 5) == [("forked", 3, 4)]


def test_a_trim_of_pads_is_no_mark_and_a_trim_of_rows_is() -> None:
    lanes = Lanes()
    lanes.arrived(arrival(4), 0)
    lanes.apply(appended(4, ev.PROMPT, 3), 0, 0)
    lanes.apply(appended(4, ev.PAD, 5), 0, 0)
    lanes.apply(ev.Trimmed(4, 5), 0, 1)
    assert lane_marks(lanes, 4) == []
    lanes.apply(appended(4, ev.PAD, 1), 1, 1)
    lanes.apply(ev.Trimmed(4, 3), 1, 2)
    assert lane_marks(lanes, 4) == [("trimmed", 1, 2)]


def test_why_a_request_ended_comes_from_what_is_known_best() -> None:
    lanes = Lanes()
    for request in range(5):
        lanes.arrived(arrival(request), 0)
    lanes.cancelled(RequestCancelled(0, "the client left"), 1)
    lanes.apply(appended(1, ev.PROMPT), 1, 1)
    lanes.cancelled(RequestCancelled(1, "too slow"), 2)
    lanes.apply(ev.Closed(1, "cancelled"), 2, 2)
    lanes.finished(Finished(2, 3, "stop"))
    lanes.apply(ev.Closed(2, "length"), 1, 2)
    lanes.failed((3,), 2)
    lanes.apply(ev.Closed(3, "failed"), 2, 3)
    ended = [(it.ended, it.end) for it in lanes.lanes]
    assert ended == [("the client left", 1), ("too slow", 2), ("stop", 2), ("failed", 3), ("", -1)]


def test_after_missing_records_lanes_begin_anew_at_the_checkpoint() -> None:
    records = golden.flights()
    (first,) = [it for it in records[:3] if isinstance(it, Checkpoint)]
    live = RequestSnapshot(arrival(50, "known"), (9,), running=True)
    waiting = RequestSnapshot(arrival(51), (), running=False)
    lanes = Lanes()
    lanes.arrived(arrival(4), 0)
    lanes.checkpoint(structs.replace(first, requests=(live, waiting)), 7)
    lanes.finish(9)
    assert (lane(lanes, 4).ended, lane(lanes, 4).end) == (
        "not known: records are missing here",
        7,
    )
    assert lane_spans(lanes, 50) == [("decode", 7, 9)]
    assert lane_spans(lanes, 51) == [("queued", 7, 9)]
    assert not lane(lanes, 50).arrived
