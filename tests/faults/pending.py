"""Faults of rows whose token nobody has read: what the device feeds, and how they are tagged."""

from __future__ import annotations

from typing import Any

from . import loads
from .fault import DONE, PLANNED, Catalogue, Witness

FAULTS = Catalogue()


@FAULTS.add(
    "pending-neighbours",
    "on the device a lookahead row is fed its neighbour's token: the index is off by one",
    "kernel.model_kernel:ModelKernel._fed",
    loads.TINY_AHEAD,
    "forward",
    "token",
)
def pending_neighbours(original: Any, witness: Witness) -> Any:
    def fed(kernel: Any, metadata: Any) -> Any:
        found = original(kernel, metadata)
        if not witness.on or found is None or found.shape[0] < 2:
            return found
        witness.note(-1, DONE, metadata.step)
        import mlx.core as mx

        return mx.roll(found, 1)

    return fed


@FAULTS.add(
    "pending-stale",
    "on the device a lookahead row is fed what was sampled two steps before",
    "kernel.model_kernel:ModelKernel._fed",
    loads.TINY_AHEAD,
    "forward",
    "token",
)
def pending_stale(original: Any, witness: Witness) -> Any:
    before: list[Any] = []

    def fed(kernel: Any, metadata: Any) -> Any:
        found = original(kernel, metadata)
        if not witness.on or found is None:
            return found
        stale = before[-1] if before and before[-1].shape == found.shape else found
        if stale is not found:
            witness.note(-1, DONE, metadata.step)
        before.append(found)
        return stale

    return fed


@FAULTS.add(
    "pending-misread",
    "the kernel's book of newest samples has each under the next sequence",
    "kernel.metadata:last_tokens",
    loads.AHEAD,
    "fold",
    "content",
    "not the row",
    late_steps=1,
)
def pending_misread(original: Any, witness: Witness) -> Any:
    def last_tokens(metadata: Any, tokens: Any) -> dict[int, int]:
        found: dict[int, int] = original(metadata, tokens)
        turned = [*list(found.values())[1:], *list(found.values())[:1]]
        if turned != list(found.values()):
            witness.note(-1, PLANNED, metadata.step + 1)
        return dict(zip(found, turned, strict=True))

    return last_tokens


@FAULTS.add(
    "pending-not-retagged",
    "rows that were issued ahead of their tokens keep the tag of a row without one",
    "kernel.shadow:Shadow.learn",
    loads.AHEAD,
    "fold",
    "content",
)
def not_retagged(original: Any, witness: Witness) -> Any:
    def learn(shadow: Any, step: int, tokens: Any) -> None:
        if shadow._waiting.pop(step, None) is not None:
            # The tag is wrong on tape where the row is compared again: in the step after.
            witness.note(-1, PLANNED, step + 2)

    return learn


@FAULTS.add(
    "pending-retagged-wrong",
    "rows that were issued ahead are tagged with the token of the row before",
    "kernel.shadow:Shadow._retag",
    loads.AHEAD,
    "fold",
    "content",
    "not the row",
)
def retagged_wrong(original: Any, witness: Witness) -> Any:
    def retag(shadow: Any, rows: Any, tokens: list[int]) -> None:
        # The tag is wrong on tape where the row is compared again: in the step after.
        witness.note(-1, PLANNED, witness.step + 1)
        original(shadow, rows, [it.tokens[-1] for it in rows.sequences])

    return retag


@FAULTS.add(
    "lookahead-sampled-before",
    "the row that is sampled is counted from the rows whose token is known: the one before",
    "kernel.metadata:_sample_rows",
    loads.TINY_AHEAD,
    "forward",
    "token",
)
def sampled_before(original: Any, witness: Witness) -> Any:
    def sample_rows(pieces: Any, first: Any, sampled: Any) -> Any:
        found = original(pieces, first, sampled)
        for place, number in enumerate(sampled):
            if pieces[number].pending and found[place]:
                witness.note(pieces[number].sequence.id, DONE)
                found[place] -= 1
        return found

    return sample_rows


@FAULTS.add(
    "lookahead-slot",
    "a row that is issued ahead is written in the place of the row before it",
    "kernel.metadata:_slots",
    loads.AHEAD,
    "fold",
    "content",
)
def lookahead_slot(original: Any, witness: Witness) -> Any:
    def slots(pieces: Any, tables: Any, piece_of: Any, positions: Any, geometry: Any) -> Any:
        found = original(pieces, tables, piece_of, positions, geometry)
        at = 0
        for piece in pieces:
            if piece.pending and piece.start % geometry.block_size:
                witness.note(piece.sequence.id)
                found[:, at] -= 1
            at += piece.rows
        return found

    return slots
