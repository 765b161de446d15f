"""Faults of decisions: who runs, who is preempted, what joins an answer, when it ends."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from server.tokenlog import log_of
from server.waiting import Waiting
from statemachine import commands
from statemachine.events import BlockPublished, Event, Preempted
from statemachine.records import RequestArrived

from . import loads
from .fault import DONE, FAILED, PLANNED, Catalogue, First, Witness

FAULTS = Catalogue()


@FAULTS.add(
    "S13",
    "an error at eval is undone like one at build, and pages that hold garbage are read again",
    "server.failing:fail_step",
    loads.EVAL_FAILS,
    "fold",
    "fold",
    "PoolReset",
)
def eval_undone_as_build(original: Any, witness: Witness) -> Any:
    def fail_step(view: Any, plan: Any, stage: str, blamed: Any = ()) -> tuple[Event, ...]:
        if stage == "eval":
            witness.note(-1, FAILED)
            stage = "build"
        return tuple(original(view, plan, stage, blamed))

    return fail_step


@FAULTS.add(
    "S13-index",
    "after an error at eval the prefix index stays: rows that were lost can be found",
    "statemachine.commands:pool_reset",
    loads.EVAL_FAILS,
    "fold",
    "fold",
    "PoolReset",
)
def index_stays(original: Any, witness: Witness) -> Any:
    def pool_reset(state: Any) -> tuple[Event, ...]:
        witness.note(-1, FAILED)
        return tuple(Preempted(seq) for seq in sorted(state.sequences))

    return pool_reset


@FAULTS.add(
    "prompt-row-skipped",
    "the second chunk of a prompt starts one row late",
    "server.scheduler:_plan_piece",
    loads.MIXED,
    "plan",
    "plan",
    "of StepPlanned",
)
def row_skipped(original: Any, witness: Witness) -> Any:
    def plan_piece(draft: Any, seq: int, rows: int, pads: int) -> bool:
        first = draft.state.sequences[seq].committed
        if not first or rows < 3 or pads:
            return bool(original(draft, seq, rows, pads))
        witness.note(seq)
        request = draft.request(seq)
        tokens = request.stream.slice(0, request.stream.length)
        shifted = structs.replace(
            request, stream=log_of((*tokens[:first], *tokens[first + 1 :], tokens[-1]))
        )
        view = draft.view
        draft.view = structs.replace(view, requests=view.requests.set(seq, shifted))
        try:
            return bool(original(draft, seq, rows, pads))
        finally:
            draft.view = view

    return plan_piece


@FAULTS.add(
    "other-token-kept",
    "the token that joins the answer is not the one that was sampled",
    "server.closing:settle",
    loads.MIXED,
    "plan",
    "plan",
    "AppendedEach",
)
def other_token(original: Any, witness: Witness) -> Any:
    def settle(view: Any, plan: Any, found: Any, events: Any, *state: Any) -> Any:
        if plan.step != 4:
            return original(view, plan, found, events, *state)
        wrong = tuple(
            structs.replace(it, tokens=tuple(token ^ 1 for token in it.tokens)) for it in found
        )
        witness.note(step=5)  # the token is issued in the step after
        return original(view, plan, wrong, events, *state)

    return settle


@FAULTS.add(
    "answer-forgotten",
    "a preempted request starts again from its prompt: its answer is computed, and sent, twice",
    "server.scheduler:begin",
    loads.TIGHT,
    "plan",
    "plan",
)
def answer_forgotten(original: Any, witness: Witness) -> Any:
    forgotten: set[int] = set()

    def begin(view: Any, plan: Any) -> Any:
        for event in plan.events:
            if getattr(event, "seq", -1) in forgotten and not isinstance(event, Preempted):
                witness.note(event.seq)
        after = original(view, plan)
        requests = after.requests
        for event in plan.events:
            if isinstance(event, Preempted):
                request = requests[event.seq]
                if request.output_tokens:
                    forgotten.add(event.seq)
                fresh = structs.replace(request, stream=log_of(request.stream.prompt))
                requests = requests.set(event.seq, fresh)
        return structs.replace(after, requests=requests)

    return begin


@FAULTS.add(
    "wrong-victim",
    "the oldest request is preempted, and so may never end",
    "server.scheduler:Draft.make_room",
    loads.TIGHT,
    "plan",
    "plan",
    "Preempted",
)
def wrong_victim(original: Any, witness: Witness) -> Any:
    def make_room(draft: Any) -> None:
        witness.note()
        victim = min(draft.running)
        draft.do(commands.preempt(draft.state, victim))
        draft.running.remove(victim)
        draft.waiting = draft.waiting.add(victim, 0)
        draft.preempted = True

    return make_room


@FAULTS.add(
    "watermark-ignored",
    "an admission takes the last blocks while others decode",
    "server.admission:_fits",
    loads.TIGHT,
    "plan",
    "plan",
    "of StepPlanned",
)
def watermark_ignored(original: Any, witness: Witness) -> Any:
    def fits(draft: Any, state: Any, request: int, rows: int) -> bool:
        right = original(draft, state, request, rows)
        policy, draft.policy = draft.policy, structs.replace(draft.policy, watermark_blocks=0)
        try:
            found = bool(original(draft, state, request, rows))
        finally:
            draft.policy = policy
        if found != right:
            witness.note()
        return found

    return fits


@FAULTS.add(
    "one-token-more",
    "an answer ends one token after max_tokens",
    "server.closing:outcomes",
    loads.MIXED,
    "plan",
    "plan",
    "of StepDone",
)
def one_more(original: Any, witness: Witness) -> Any:
    def outcomes(view: Any, plan: Any, tokens: Any, finished: Any) -> Any:
        found = original(view, plan, tokens, finished)
        late = []
        for outcome in found:
            request = view.requests[outcome.seq]
            limit = request.arrived.parameters.max_tokens
            if outcome.reason == "length" and request.output_tokens + 1 == limit:
                witness.note(outcome.seq, DONE)
                outcome = structs.replace(outcome, reason=None)
            late.append(outcome)
        return tuple(late)

    return outcomes


@FAULTS.add(
    "end-token-missed",
    "an end token does not end an answer (S9: what follows it is kept)",
    "server.closing:outcomes",
    loads.ENDING,
    "plan",
    "plan",
    "of StepDone",
)
def end_missed(original: Any, witness: Witness) -> Any:
    def outcomes(view: Any, plan: Any, tokens: Any, finished: Any) -> Any:
        found = original(view, plan, tokens, finished)
        kept = []
        for outcome, token in zip(found, tokens, strict=True):
            if outcome.reason == "stop":
                witness.note(outcome.seq, DONE)
                outcome = structs.replace(outcome, tokens=(token,), reason=None)
            kept.append(outcome)
        return tuple(kept)

    return outcomes


@FAULTS.add(
    "cancel-leaks",
    "a client that went away leaves its blocks behind",
    "server.view:_cancelled",
    loads.CANCELS,
    "plan",
    "plan",
    "Closed",
)
def cancel_leaks(original: Any, witness: Witness) -> Any:
    def cancelled(view: Any, request: int) -> Any:
        after = original(view, request)
        if after.closing:
            witness.note(request, PLANNED)
        return structs.replace(after, closing=())

    return cancelled


@FAULTS.add(
    "last-come-first-served",
    "the newest request of the queue is admitted first",
    "server.scheduler:admit",
    loads.TIGHT,
    "plan",
    "plan",
    "of StepPlanned",
)
def lifo(original: Any, witness: Witness) -> Any:
    def admit(draft: Any) -> None:
        if len(draft.waiting) > 1:
            witness.note()
        draft.waiting = _turned(draft.waiting)
        original(draft)
        draft.waiting = _turned(draft.waiting)

    return admit


class _Turned(Waiting, frozen=True):
    """A queue whose last request comes first."""

    def first(self, count: int) -> tuple[int, ...]:
        return tuple(self)[::-1][:count]


def _turned(queue: Waiting) -> Waiting:
    kind = Waiting if isinstance(queue, _Turned) else _Turned
    return kind(queue.by_priority, queue.chunks)


@FAULTS.add(
    "tokens-reordered",
    "the samples of two rows of a batch change places",
    "server.closing:outcomes",
    loads.MIXED,
    "plan",
    "plan",
    "AppendedEach",
)
def tokens_reordered(original: Any, witness: Witness) -> Any:
    def outcomes(view: Any, plan: Any, tokens: Any, finished: Any) -> Any:
        if len(tokens) > 1 and tokens[0] != tokens[1]:
            witness.note(step=plan.step + 1)  # a token is issued after the step that sampled it
        swapped = (tokens[1], tokens[0], *tokens[2:]) if len(tokens) > 1 else tokens
        return original(view, plan, swapped, finished)

    return outcomes


@FAULTS.add(
    "checkpoint-forgets",
    "a checkpoint leaves the queue out: whoever starts there loses requests",
    "server.view:checkpoint",
    loads.SEGMENTS,
    "plan",
    "plan",
    "other requests",
)
def checkpoint_forgets(original: Any, witness: Witness) -> Any:
    def checkpoint(view: Any) -> Any:
        if view.waiting and witness.first is None:
            # A checkpoint stands for the state after the step before.
            witness.first = First(view.step - 1, -1, "Checkpoint")
        return original(structs.replace(view, waiting=Waiting()))

    return checkpoint


@FAULTS.add(
    "prompt-cut",
    "a prompt loses its last token between arrival and queue",
    "server.view:log_of",
    loads.MIXED,
    "plan",
    "plan",
    "end their streams",
)
def prompt_cut(original: Any, witness: Witness) -> Any:
    def log_of(prompt: tuple[int, ...], output: tuple[int, ...] = ()) -> Any:
        if len(prompt) == 17:
            witness.note(-1, DONE)
            return original(prompt[:-1], output)
        return original(prompt, output)

    return log_of


@FAULTS.add(
    "not-published",
    "a block that a decode row fills is not published",
    "server.closing:_close_piece",
    loads.MIXED,
    "plan",
    "plan",
    "BlockPublished",
)
def not_published(original: Any, witness: Witness) -> Any:
    def close(state: Any, plan: Any, seq: int, pads: int, reason: Any) -> tuple[Event, ...]:
        events: tuple[Event, ...] = original(state, plan, seq, pads, reason)
        purpose = next(piece.purpose for piece in plan.pieces if piece.seq == seq)
        if purpose != "decode" or not any(isinstance(it, BlockPublished) for it in events):
            return events
        witness.note(seq, DONE)
        return tuple(it for it in events if not isinstance(it, BlockPublished))

    return close


@FAULTS.add(
    "window-not-trimmed",
    "a window never moves on: its blocks stay until the request ends",
    "statemachine.commands:front_trims",
    loads.WINDOWS,
    "plan",
    "plan",
    "FrontTrimmed",
)
def window_not_trimmed(original: Any, witness: Witness) -> Any:
    def front_trims(state: Any, seq: int) -> tuple[Event, ...]:
        if original(state, seq):
            witness.note(seq, DONE)
        return ()

    return front_trims


@FAULTS.add(
    "arrival-lost",
    "a request's arrival is not on tape",
    "server.capture:CaptureWriter.write",
    loads.MIXED,
    "plan",
    "plan",
    "of StepPlanned",
)
def arrival_lost(original: Any, witness: Witness) -> Any:
    def write(capture: Any, records: list[Any]) -> None:
        kept = [it for it in records if not (isinstance(it, RequestArrived) and it.request == 2)]
        if len(kept) < len(records):
            witness.note(2)
        original(capture, kept)

    return write
