"""Faults of a draft model (P03): a cache of its own, whose rows go another way than the answer."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from msgspec import structs

from kernel.batch import Batch
from kernel.metadata import StepMetadata
from statemachine import commands
from statemachine.events import Event, Trimmed
from statemachine.geometry import Geometry
from statemachine.state import State

from . import loads
from .ahead import Counted
from .fault import DONE, PLANNED, Catalogue, Witness

FAULTS = Catalogue()
LOAD = evolve(loads.DRAFTS, name="a draft model", draft=3, draft_blocks=50)
"""It is wrong at every third position; a pool of another size tells its kernel's steps apart."""


@FAULTS.add(
    "draft-cache-stays",
    "guesses that were not taken stay in the draft model's cache, and it goes on behind them",
    "server.draft_round:_agree",
    LOAD,
    "plan",
    "plan",
    "of the draft model",
    "of StepPlanned",
)
def cache_stays(original: Any, witness: Witness) -> Any:
    def agree(state: State, stream: Any, seq: int) -> tuple[Event, ...]:
        if original(state, stream, seq):
            witness.note(seq)
        return ()

    return agree


@FAULTS.add(
    "draft-cache-too-short",
    "one row more leaves the draft model's cache than guesses that were not taken",
    "server.draft_round:_agree",
    LOAD,
    "plan",
    "plan",
    "of the draft model",
    "Trimmed",
)
def cache_too_short(original: Any, witness: Witness) -> Any:
    def agree(state: State, stream: Any, seq: int) -> tuple[Event, ...]:
        trims: tuple[Event, ...] = original(state, stream, seq)
        for event in trims:
            assert isinstance(event, Trimmed)
            witness.note(seq)
            return commands.trim(state, seq, event.rows + 1)
        return trims

    return agree


@FAULTS.add(
    "draft-offset-stays",
    "guesses that were not taken leave the draft model's pool, and its offset stays behind them",
    "kernel.metadata:build",
    LOAD,
    "fold",
    "observation",
    "of the draft model",
    "start",
)
def offset_stays(original: Any, witness: Witness) -> Any:
    counted = Counted(original, witness)

    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        found: StepMetadata = (counted if geometry == LOAD.draft_geometry else original)(
            batch, geometry
        )
        return found

    return build


@FAULTS.add(
    "draft-cache-rotated",
    "the draft model's cache reads its blocks one place further than they stand in the table",
    "kernel.metadata:build",
    LOAD,
    "fold",
    "observation",
    "of the draft model",
    "table",
)
def cache_rotated(original: Any, witness: Witness) -> Any:
    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        if geometry == LOAD.draft_geometry:
            pieces = []
            for piece in batch.pieces:
                (table,) = piece.sequence.tables
                if len(set(table)) > 1:
                    witness.note(piece.sequence.id)
                    turned = structs.replace(piece.sequence, tables=((*table[1:], table[0]),))
                    piece = structs.replace(piece, sequence=turned)
                pieces.append(piece)
            batch = structs.replace(batch, pieces=tuple(pieces))
        found: StepMetadata = original(batch, geometry)
        return found

    return build


@FAULTS.add(
    "draft-published",
    "blocks of the draft model are published while guesses stand in them",
    "server.draft_round:_make_ready",
    LOAD,
    "plan",
    "plan",
    "of the draft model",
    "of StepPlanned",
)
def published(original: Any, witness: Witness) -> Any:
    def make_ready(making: Any, view: Any, wanted: Any) -> None:
        for seq in wanted:
            if seq in making.state.sequences:
                making.do(commands.publish(making.state, seq))
        early = len(making.events)
        original(making, view, wanted)
        if early and any(isinstance(event, Trimmed) for event in making.events[early:]):
            witness.note(-1)

    return make_ready


@FAULTS.add(
    "draft-token-shifted",
    "the draft model's rows are taken for what was guessed behind them",
    "server.draft_model:close_draft",
    LOAD,
    "plan",
    "plan",
    "of the draft model",
    "of StepDone",
)
def token_shifted(original: Any, witness: Witness) -> Any:
    def close(view: Any, tokens: tuple[int, ...]) -> tuple[Event, ...]:
        turned = (*tokens[1:], *tokens[:1])
        right: tuple[Event, ...] = original(view, tokens)
        found: tuple[Event, ...] = original(view, turned)
        if found != right:
            witness.note(-1, DONE)
        return found

    return close


@FAULTS.add(
    "guess-of-another",
    "guesses are verified for another request than the one that they were made for",
    "server.draft_model:settle_draft",
    LOAD,
    "plan",
    "plan",
    "of StepPlanned",
)
def guess_of_another(original: Any, witness: Witness) -> Any:
    def settle(view: Any, tokens: tuple[int, ...], *rest: Any) -> Any:
        turned = (*tokens[1:], *tokens[:1])
        if turned != tokens:
            witness.note(-1, PLANNED)
        return original(view, turned, *rest)

    return settle
