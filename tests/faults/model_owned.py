"""Faults of models over their own caches: nobody makes these anew, or nobody can take rows back."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kernel.batch import Batch, Piece
from server.policy import Policy

from . import loads
from .fault import DONE, Catalogue, Witness
from .loads import EXAONE4, LONGCAT, MAMBA, NEMOTRON, Load, Request

FAULTS = Catalogue()

POLICY = Policy(
    max_batch_tokens=64, max_running=1, prefill_chunk=16, prefix_cache=False, context_tokens=96
)
"""What a model's capabilities leave of a policy."""


MIDDLE_OF_AN_ANSWER = 23


def in_a_row(kernel: str, policy: Policy = POLICY) -> Load:
    """Two requests, one after the other, longer than a window of 8 and than a chunk."""
    asked = (Request(loads.tokens(21, 1), 5), Request(loads.tokens(19, 2), 5))
    padded = "" if policy.prefill_tile == 1 else f", padded to {policy.prefill_tile}"
    return Load(f"two in a row over their own caches{padded}", asked, policy, kernel=kernel)


def _kept(original: Any, witness: Witness) -> Any:
    """A sequence starts in the caches as they are: what a missing reset makes of them."""

    def open_in_place(kernel: Any, seq: int) -> None:
        held = kernel._held
        if held is None:
            original(kernel, seq)
            return
        witness.note(seq)
        held.seq = seq

    return open_in_place


@FAULTS.add(
    "S6",
    "nothing resets a model's own caches when a new run opens: it goes on behind the one before",
    "kernel.model_owned:ModelOwnedKernel._open",
    in_a_row(EXAONE4),
    "fold",
    "observation",
    "start 25, where the state has 0",
)
def stale_caches(original: Any, witness: Witness) -> Any:
    return _kept(original, witness)


@FAULTS.add(
    "S6-state",
    "nothing resets a running state, which has no length of its own, when a new run opens",
    "kernel.model_owned:ModelOwnedKernel._open",
    in_a_row(MAMBA),
    "fold",
    "observation",
    "start 25, where the state has 0",
)
def stale_state(original: Any, witness: Witness) -> Any:
    return _kept(original, witness)


@FAULTS.add(
    "S10",
    "another engine over the same model feeds its rows into the caches of a run that goes on",
    "kernel.model_owned:ModelOwnedKernel.issue",
    in_a_row(EXAONE4),
    "fold",
    "observation",
    "start 27, where the state has 23",
)
def shared_caches(original: Any, witness: Witness) -> Any:
    def issue(kernel: Any, batch: Batch) -> Any:
        piece = batch.pieces[0]
        if witness.on and piece.start == MIDDLE_OF_AN_ANSWER and witness.first is None:
            witness.note(piece.sequence.id)
            kernel._held.feed(kernel._model, _array([[9, 8, 7, 6]]))
        return original(kernel, batch)

    return issue


@FAULTS.add(
    "S5",
    "pad rows are fed to a model that cannot give them back: the trim goes over an empty list",
    "kernel.model_owned:ModelOwnedKernel._only_piece",
    in_a_row(EXAONE4, structs.replace(POLICY, prefill_tile=8, prefill_chunk=32)),
    "fold",
    "observation",
    "start 24, where the state has 21",
)
def pads_fed(original: Any, witness: Witness) -> Any:
    padded: set[int] = set()

    def only_piece(kernel: Any, batch: Batch) -> Piece:
        (piece,) = batch.pieces
        seq = piece.sequence.id
        if seq in padded:
            witness.note(seq)
        if piece.pads:
            padded.add(seq)
        fed = piece.tokens + (0,) * piece.pads
        taken = structs.replace(piece, tokens=fed, pads=0)
        return original(kernel, structs.replace(batch, pieces=(taken,)))

    return only_piece


@FAULTS.add(
    "S7",
    "lengths are read off the first slot, which the model never writes: no rows are ever there",
    "kernel.model_owned:ModelOwnedKernel._offsets",
    in_a_row(NEMOTRON),
    "fold",
    "observation",
    "rows 0, where the state has 16",
)
def first_slot(original: Any, witness: Witness) -> Any:
    def offsets(kernel: Any, held: Any) -> list[int]:
        right: list[int] = original(kernel, held)
        first = held.offsets()[0]
        if any(offset != first for offset in right):
            witness.note(held.seq)
        return [first] * len(right)

    return offsets


@FAULTS.add(
    "S8",
    "the second of two sub-layers attends to its newest key alone, while it counts all",
    "mlx_lm.models.cache:KVCache.update_and_fetch",
    in_a_row(LONGCAT),
    "forward",
    "token",
    "logit",
)
def newest_key_alone(original: Any, witness: Witness) -> Any:
    calls = 0

    def update(held: Any, keys: Any, values: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(held, keys, values)
        if not witness.on or calls % 2 or keys.shape[2] > 1:
            return found
        witness.note(-1, DONE)
        return tuple(_newest(rows) for rows in found)

    return update


def _newest(rows: Any) -> Any:
    """The newest row in the place of every row: [1, heads, L, dim]."""
    import mlx.core as mx

    return mx.broadcast_to(rows[:, :, -1:], rows.shape)


def _array(values: Any) -> Any:
    import mlx.core as mx

    return mx.array(values)
