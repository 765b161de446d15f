"""Fake states: what stands for the content of recurrent groups' slots where there is no model.

Owns one array of states a group. A state is the tag of the last row that went through it, off by
all that was wrong with the states that it was made from; so a token that is drawn behind a state
that was another sequence's, or not reset, is another token, now and later. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from statemachine.events import NO_BLOCK, BlockCopied
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence
from statemachine.tags import UNWRITTEN, sequence_tags

from .batch import Batch, Piece
from .expected import Tags
from .metadata import StepMetadata


class FakeStates:
    """`slots`: of each recurrent group the states of its slots, by the group's number."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.slots: dict[int, Tags] = {}
        self.reset()

    def reset(self) -> None:
        """No slot has a state."""
        for group, spec in enumerate(self._geometry.groups):
            if spec.recurrent:
                self.slots[group] = np.full(spec.num_blocks, UNWRITTEN, np.uint64)

    def copy(self, copies: Items[BlockCopied]) -> None:
        """All read before any is written."""
        read = [self.slots[it.group][it.source] for it in copies if it.group in self.slots]
        mine = [it for it in copies if it.group in self.slots]
        for copied, state in zip(mine, read, strict=True):
            self.slots[copied.group][copied.target] = state

    def held_tags(self, batch: Batch, metadata: StepMetadata, written: Items[Tags]) -> list[int]:
        """The tag that stands where each row of the batch was `written`, in the first group that
        has rows in blocks; of rows in slots alone, the tag that it has in its sequence. Off by as
        much as its piece's states are. Every piece's states go on.
        """
        if not batch.pieces:
            return []
        groups = enumerate(self._geometry.groups)
        group = next((n for n, spec in groups if spec.paged and not spec.recurrent), None)
        if group is None:
            tags = np.concatenate([self._own(piece) for piece in batch.pieces])
        else:
            tags = written[group][metadata.slots[group]]
        if self.slots:
            tags = tags ^ np.repeat(self._go_on(batch, metadata), metadata.rows)
        found: list[int] = tags.tolist()
        return found

    def _own(self, piece: Piece) -> Tags:
        end = piece.sequence.offset
        tags = sequence_tags(self._geometry, piece.sequence, end - piece.rows, end)
        return np.array(tags, np.uint64)

    def _go_on(self, batch: Batch, metadata: StepMetadata) -> Tags:
        """Every piece goes on from its state and leaves one; how far off each is by then: [P]."""
        off = np.zeros(len(batch.pieces), np.uint64)
        sequences = [piece.sequence for piece in batch.pieces]
        starts = (metadata.start - 1).tolist()
        made = self._tags(sequences, [it.offset - 1 for it in sequences])
        for group, slots in self.slots.items():
            read = metadata.state_reads[group]
            found = np.where(read == NO_BLOCK, np.uint64(UNWRITTEN), slots[read])
            mine = found ^ self._tags(sequences, starts)
            slots[metadata.state_writes[group]] = made ^ mine
            off ^= mine
        return off

    def _tags(self, sequences: Items[Sequence], positions: Items[int]) -> Tags:
        """Tags of one row each; none of a row before the first."""
        return np.array(
            [
                sequence_tags(self._geometry, it, at, at + 1)[0] if at >= 0 else UNWRITTEN
                for it, at in zip(sequences, positions, strict=True)
            ],
            np.uint64,
        )
