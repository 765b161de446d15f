"""Faults of rows that are shared on purpose: forks for n > 1, adapters, salts, the index."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from xxhash import xxh3_64_intdigest

from kernel.batch import Batch
from statemachine.events import NO_BLOCK, Event, Trimmed

from . import loads
from .blocks import not_copied
from .fault import DONE, Catalogue, Make, Witness

FAULTS = Catalogue()


def _trimmed_by(original: Any, witness: Witness, more: int) -> Any:
    """A fork whose trim takes `more` rows than it should."""

    def fork(draft: Any, state: Any, request: int) -> tuple[Event, ...] | None:
        events: tuple[Event, ...] | None = original(draft, state, request)
        if events is None:
            return None
        witness.note(request)
        *others, trimmed = events
        assert isinstance(trimmed, Trimmed)
        rows = trimmed.rows + more
        return (*others, Trimmed(request, rows)) if rows else (*others,)

    return fork


@FAULTS.add(
    "fork-whole",
    "a fork takes over the prompt's last row too: nothing is left that yields its first token",
    "server.reuse:_fork",
    loads.FORKS,
    "plan",
    "plan",
    "Trimmed",
)
def fork_whole(original: Any, witness: Witness) -> Any:
    return _trimmed_by(original, witness, -1)


@FAULTS.add(
    "fork-short",
    "a fork computes one row of the prompt anew that it could share",
    "server.reuse:_fork",
    loads.FORKS,
    "plan",
    "plan",
    "Trimmed",
)
def fork_short(original: Any, witness: Witness) -> Any:
    return _trimmed_by(original, witness, 1)


@FAULTS.add(
    "fork-not-copied",
    "a fork writes behind its parent's rows: the block is moved in its table and no row copied",
    "server.scheduler:batch",
    loads.FORKS,
    "fold",
    "content",
    "not the row",
)
def fork_not_copied(original: Any, witness: Witness) -> Any:
    return not_copied(original, witness)


@FAULTS.add(
    "fork-copy-into-parent",
    "copy on write changes the parent's block: source and target are mixed up",
    "server.scheduler:batch",
    loads.FORKS,
    "fold",
    "content",
)
def fork_copied_back(original: Any, witness: Witness) -> Any:
    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        if made.copies:
            witness.note()
        turned = [structs.replace(it, source=it.target, target=it.source) for it in made.copies]
        return structs.replace(made, copies=tuple(turned))

    return batch


@FAULTS.add(
    "fork-refs",
    "a fork takes no references: its parent's end frees blocks that it still reads",
    "statemachine.sharing:forked",
    loads.FORKS,
    "fold",
    "fold",
    "shared or published",
)
def fork_refs(original: Any, witness: Witness) -> Any:
    def forked(draft: Any, event: Any) -> None:
        original(draft, event)
        witness.note()
        for group, table in enumerate(draft.sequence(event.child).tables):
            for block in table:
                if block != NO_BLOCK:
                    draft.group(group).release(block, refs=1)

    return forked


@FAULTS.add(
    "fork-takes-lookahead",
    "a fork takes over the row that its parent issued ahead of its token",
    "statemachine.sharing:forked",
    loads.AHEAD_FORKS,
    "fold",
    "fold",
)
def fork_takes_lookahead(original: Any, witness: Witness) -> Any:
    def forked(draft: Any, event: Any) -> None:
        parent = draft.sequence(event.seq)
        original(draft, event)
        if parent.speculative:
            witness.note()
            child = draft.sequence(event.child)
            draft.put(child, structs.replace(child, speculative=parent.speculative))

    return forked


@FAULTS.add(
    "fork-unlike",
    "a request shares the rows of the parent that it names, whose prompt is another one",
    "server.reuse:_parent",
    loads.FORKS,
    "plan",
    "plan",
    "Forked",
)
def fork_unlike(original: Any, witness: Witness) -> Any:
    def parent_of(draft: Any, request: int) -> Any:
        known = draft.request(request)
        parent = draft.view.requests.get(known.arrived.parent)
        if known.output_tokens:
            return None
        if parent is not None and original(draft, request) is None:
            witness.note(request)
        return parent

    return parent_of


@FAULTS.add(
    "fork-alone",
    "a fork does not wait for its parent's prompt: it is computed once for each answer",
    "server.reuse:waits_for_parent",
    loads.FORKS,
    "plan",
    "plan",
    "of StepPlanned",
)
def fork_alone(original: Any, witness: Witness) -> Any:
    def waits(draft: Any, request: int) -> bool:
        if original(draft, request):
            witness.note()
        return False

    return waits


@FAULTS.add(
    "fork-seed",
    "all answers to a prompt are drawn with the seed of the first",
    "server.scheduler:batch",
    loads.TINY_FORKS,
    "forward",
    "token",
    "token",
)
def fork_seed(original: Any, witness: Witness) -> Any:
    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        pieces = list(made.pieces)
        for number, piece in enumerate(pieces):
            parent = view.requests.get(view.requests[piece.sequence.id].arrived.parent)
            if piece.parameters is not None and parent is not None:
                witness.note(piece.sequence.id, DONE)
                seed = parent.arrived.parameters.seed
                same = structs.replace(piece.parameters, seed=seed)
                pieces[number] = structs.replace(piece, parameters=same)
        return structs.replace(made, pieces=tuple(pieces))

    return batch


def _root_of(*kept: str) -> Make:
    """A namespace's root of some of its fields only."""

    def make(original: Any, witness: Witness) -> Any:
        def root_key(geometry: Any, namespace: Any) -> int:
            fields = {name: getattr(namespace, name) for name in kept}
            found = xxh3_64_intdigest(repr((geometry.identity, fields)).encode())
            if any(vars_of(namespace).keys() - fields.keys()):
                witness.note()
            return found

        return root_key

    return make


def vars_of(namespace: Any) -> dict[str, Any]:
    """The fields of a namespace that are set."""
    return {name: value for name, value in structs.asdict(namespace).items() if value}


for _name, _sentence, _load, _kept in (
    (
        "version-not-in-key",
        "an adapter's version is no part of the keys: one that is loaded anew finds old rows",
        loads.ADAPTERS,
        ("adapter", "salt"),
    ),
    (
        "salt-not-in-key",
        "a tenant's salt is no part of the keys",
        loads.SALTED,
        ("adapter", "version"),
    ),
):
    FAULTS.add(_name, _sentence, "statemachine.tags:root_key", _load, "fold", "fold", "digest")(
        _root_of(*_kept)
    )


@FAULTS.add(
    "version-ignored",
    "rows are shared across versions of an adapter: only its name is looked at",
    "server.view:_arrived",
    loads.ADAPTERS,
    "plan",
    "plan",
    "Opened",
)
def version_ignored(original: Any, witness: Witness) -> Any:
    def arrived(view: Any, record: Any) -> Any:
        witness.note(record.request)
        named = structs.replace(record.namespace, version=0)
        return original(view, structs.replace(record, namespace=named))

    return arrived
