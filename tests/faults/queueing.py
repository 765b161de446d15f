"""Faults of the queue: who waits, for what, how long, and with what in its hands (S12)."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from server.tokenlog import log_of
from server.waiting import waiting_of
from statemachine import commands
from statemachine.events import BlockEvicted, Event, Preempted
from statemachine.records import FlushRequested

from . import loads
from .fault import Catalogue, Make, Witness

FAULTS = Catalogue()


@FAULTS.add(
    "S12",
    "requests in the queue hold the rows that they found: nobody else gets these blocks",
    "server.admission:admit",
    loads.QUEUED,
    "plan",
    "plan",
    "of StepPlanned",
)
def adopted_in_queue(original: Any, witness: Witness) -> Any:
    def admit(draft: Any) -> None:
        for request in draft.waiting:
            sequence = draft.state.sequences.get(request)
            if sequence is not None and sequence.offset:
                draft.do(commands.reset(draft.state, request))
        original(draft)
        for request in draft.waiting:
            namespace = draft.request(request).arrived.namespace
            if request not in draft.state.sequences:
                draft.do(commands.open_sequence(draft.state, request, namespace))
            found = commands.adopt(draft.state, request, draft.request(request).arrived.tokens)
            if found:
                witness.note(request)
                draft.do(found)

    return admit


@FAULTS.add(
    "prefix-not-awaited",
    "two prompts that share a beginning are both computed, though one waits for nothing else",
    "server.reuse:waits_for_prefix",
    loads.AWARE,
    "plan",
    "plan",
    "of StepPlanned",
)
def prefix_not_awaited(original: Any, witness: Witness) -> Any:
    def waits(draft: Any, state: Any, request: int, tokens: Any) -> bool:
        if original(draft, state, request, tokens):
            witness.note()
        return False

    return waits


@FAULTS.add(
    "prefix-awaited-on",
    "a request waits for a prefix until whoever computes it is gone",
    "server.reuse:waits_for_prefix",
    loads.AWARE,
    "plan",
    "plan",
    "of StepPlanned",
)
def prefix_awaited_on(original: Any, witness: Witness) -> Any:
    def waits(draft: Any, state: Any, request: int, tokens: Any) -> bool:
        size = state.geometry.block_size
        begins = [draft.request(seq).arrived.tokens[:size] for seq in draft.running]
        alike = tokens[:size] in begins
        if alike and not original(draft, state, request, tokens):
            witness.note(request)
        return alike

    return waits


@FAULTS.add(
    "passes-not-counted",
    "nobody counts who was admitted past a long prompt: it waits as long as short ones come",
    "server.admission:_passes",
    loads.STARVING,
    "plan",
    "plan",
    "of StepPlanned",
)
def passes_not_counted(original: Any, witness: Witness) -> Any:
    def passes(draft: Any, request: int) -> int:
        from server.admission import PASSES_MAX

        if original(draft, request) >= PASSES_MAX:
            witness.note()
        return 0

    return passes


@FAULTS.add(
    "flush-nothing",
    "a flush leaves the index as it is",
    "statemachine.commands:flush",
    loads.FLUSHED,
    "plan",
    "plan",
    "BlockEvicted",
)
def flush_nothing(original: Any, witness: Witness) -> Any:
    def flush(state: Any) -> tuple[Event, ...]:
        if original(state):
            witness.note()
        return ()

    return flush


@FAULTS.add(
    "flush-held",
    "a flush takes blocks that running requests read",
    "statemachine.commands:flush",
    loads.FLUSHED,
    "plan",
    "plan",
    "BlockEvicted",
)
def flush_held(original: Any, witness: Witness) -> Any:
    def flush(state: Any) -> tuple[Event, ...]:
        found = list(original(state))
        for number, group in enumerate(state.groups):
            for block, record in sorted(group.blocks.items()):
                if record.refs and record.entry:
                    witness.note()
                    found.append(BlockEvicted(number, block, state.entries[record.entry].key))
        return tuple(found)

    return flush


@FAULTS.add(
    "flush-untold",
    "a flush is not on tape",
    "server.capture:CaptureWriter.write",
    loads.FLUSHED,
    "plan",
    "plan",
    "BlockEvicted",
)
def flush_untold(original: Any, witness: Witness) -> Any:
    def write(capture: Any, records: list[Any]) -> None:
        kept = [it for it in records if not isinstance(it, FlushRequested)]
        if len(kept) < len(records):
            witness.note()
        original(capture, kept)

    return write


def _planned(wrong: Any) -> Make:
    """plan_step of a view that is changed first; noted where that makes it do otherwise."""

    def make(original: Any, witness: Witness) -> Any:
        def plan_step(view: Any, policy: Any) -> Any:
            places = [(it, view.requests[it].priority) for it in view.waiting]
            right = structs.replace(view, waiting=waiting_of(places, True))
            found = original(wrong(right), policy)
            if found.events != original(right, policy).events:
                witness.note()
            return found

        return plan_step

    return make


def _inverted(view: Any) -> Any:
    queue = waiting_of([(it, -view.requests[it].priority) for it in view.waiting], True)
    requests = view.requests
    for request in queue:
        requests = requests.set(request, _with_priority(requests[request], -1))
    return structs.replace(view, waiting=queue, requests=requests)


def _with_priority(request: Any, sign: int) -> Any:
    parameters = request.arrived.parameters
    turned = structs.replace(parameters, priority=sign * parameters.priority)
    return structs.replace(request, arrived=structs.replace(request.arrived, parameters=turned))


def _by_arrival(view: Any) -> Any:
    queue = waiting_of([(it, 0) for it in view.waiting], False)
    return structs.replace(view, waiting=queue)


FAULTS.add(
    "priority-inverted",
    "the request with the largest number is served first, where the smallest is meant",
    "server.scheduler:plan_step",
    loads.PRIORITIES,
    "plan",
    "plan",
    "of StepPlanned",
)(_planned(_inverted))

FAULTS.add(
    "priority-ignored",
    "the queue is served in order of arrival, whatever the priorities",
    "server.scheduler:plan_step",
    loads.PRIORITIES,
    "plan",
    "plan",
    "of StepPlanned",
)(_planned(_by_arrival))


@FAULTS.add(
    "priority-victim",
    "the request with the fewest answer tokens makes room, whatever its priority",
    "server.draft:Draft.make_room",
    loads.PRIORITIES,
    "plan",
    "plan",
    "Preempted",
)
def priority_victim(original: Any, witness: Witness) -> Any:
    def make_room(draft: Any) -> None:
        state, running, waiting = draft.state, list(draft.running), draft.waiting
        events = list(draft.events)
        original(draft)
        right = draft.events[-1]
        draft.state, draft.running, draft.waiting = state, running, waiting
        draft.events = events
        policy, draft.policy = draft.policy, structs.replace(draft.policy, scheduling="fcfs")
        try:
            original(draft)
        finally:
            draft.policy = policy
        if draft.events[-1] != right:
            witness.note()

    return make_room


@FAULTS.add(
    "preempted-last",
    "a preempted request goes to the end of the queue, behind all that came after it",
    "server.scheduler:plan_step",
    loads.PREEMPTS,
    "plan",
    "plan",
    "of StepPlanned",
)
def preempted_last(original: Any, witness: Witness) -> Any:
    back: set[int] = set()

    def plan_step(view: Any, policy: Any) -> Any:
        places = [(it, 1 if it in back else 0) for it in view.waiting]
        requests = view.requests
        for request, place in places:
            arrived = requests[request].arrived
            parameters = structs.replace(arrived.parameters, priority=place)
            arrived = structs.replace(arrived, parameters=parameters)
            changed = structs.replace(requests[request], arrived=arrived)
            requests = requests.set(request, changed)
        wrong = structs.replace(view, waiting=waiting_of(places, True), requests=requests)
        right = structs.replace(view, waiting=waiting_of([(it, 0) for it, _ in places], False))
        found = original(wrong, policy)
        if found.events != original(right, policy).events:
            witness.note()
        back.update(it.seq for it in found.events if isinstance(it, Preempted))
        back.difference_update(seq for seq, _ in found.admitted)
        queue = waiting_of([(it, 0) for it in sorted(found.waiting)], False)
        return structs.replace(found, waiting=queue)

    return plan_step


@FAULTS.add(
    "resumed-one-short",
    "a preempted request is computed again without the token that was sampled last",
    "server.scheduler:begin",
    loads.TIGHT,
    "plan",
    "plan",
)
def resumed_one_short(original: Any, witness: Witness) -> Any:
    short: set[int] = set()

    def begin(view: Any, plan: Any) -> Any:
        for event in plan.events:
            if getattr(event, "seq", -1) in short and not isinstance(event, Preempted):
                witness.note()
        after = original(view, plan)
        requests = after.requests
        for event in plan.events:
            if isinstance(event, Preempted) and requests[event.seq].output_tokens:
                request, output = requests[event.seq], requests[event.seq].stream.output()
                short.add(event.seq)
                stream = log_of(request.stream.prompt, output[:-1])
                requests = requests.set(event.seq, structs.replace(request, stream=stream))
        return structs.replace(after, requests=requests)

    return begin
