"""Drafted: the draft model's pool of a tape, as a tape of its own for those who fold and run it.

Owns the header and checkpoint that this tape within a tape has, and how a divergence in it is told:
at the step of the served model that its round stands before, for it is by these that a tape is
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import structs

from statemachine.codec import decode_state
from statemachine.errors import CodecError
from statemachine.records import Checkpoint, Header

from .divergence import Diverged, Divergence
from .errors import Unusable

NOT_NAMED = "the tape has a draft model's steps, and its header names no draft model"


def header_of(header: Header) -> Header | None:
    """The header of the draft model's pool; None where there is no draft model."""
    draft = header.draft
    if draft is None:
        return None
    return structs.replace(
        header,
        model=draft.model,
        digests=draft.digests,
        geometry=draft.geometry,
        capabilities=draft.capabilities,
        layers=draft.layers,
        adapters=(),
        kv_bits=0,
        draft=None,
    )


def checkpoint_of(record: Checkpoint) -> Checkpoint | None:
    """The checkpoint of the draft model's pool, if there is one. Raises Unusable."""
    held = record.draft
    if held is None:
        return None
    try:
        digest = decode_state(held.state).digest
    except CodecError as error:
        raise Unusable(
            f"the draft model's pool in the checkpoint after step {record.step}: {error}"
        ) from error
    return Checkpoint(held.step, held.state, (), digest)


@contextmanager
def told_at(step: int) -> Iterator[None]:
    """What diverges inside is the draft model's, in the round before a step of the served one."""
    try:
        yield
    except Diverged as diverged:
        raise Diverged(of_draft(diverged.divergence, step)) from diverged


def of_draft(found: Divergence, step: int) -> Divergence:
    """A divergence of the draft model's pool, as the whole tape's."""
    if found.draft_step >= 0:
        return found
    summary = f"in step {found.step} of the draft model: {found.summary}"
    return structs.replace(found, step=step, draft_step=found.step, summary=summary)
