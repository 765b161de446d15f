"""Batch: what the engine hands a kernel for one step, and what comes back.

The kernel decides no length: each piece carries its sequence as it stands after the step's opening
events, and positions, tables and visible rows are derived from that.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from statemachine.events import BlockCopied
from statemachine.geometry import Geometry
from statemachine.records import Observation, Parameters, ShadowReport
from statemachine.sequence import Sequence


class Piece(Struct, frozen=True):
    """One sequence's rows in a step.

    sequence: after this step's Appended events, so its offset is one past the piece's last row.
    tokens: what is fed, one a row, pads not included; `pads` more rows follow them.
    sample_position: the position that a sampled token would take (len of prompt + answer so far);
    None where the piece ends inside the prompt and samples nothing.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    pads: int = 0
    sample_position: int | None = None
    parameters: Parameters | None = None

    @property
    def rows(self) -> int:
        """Rows of this piece, pads included."""
        return len(self.tokens) + self.pads

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.sequence.offset - self.rows


class Batch(Struct, frozen=True):
    """A step: copies first, then the pieces in batch order."""

    step: int
    pieces: tuple[Piece, ...]
    copies: tuple[BlockCopied, ...] = ()


class StepResult(Struct, frozen=True):
    """What a step observed and sampled.

    sampled: piece numbers that sampled, in batch order; tokens, logits (chosen logit, float32) and
    margins (top logit minus runner-up, float32) have one entry for each.
    """

    observation: Observation
    shadow: ShadowReport
    sampled: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[float, ...]
    margins: tuple[float, ...]


class BuildFailed(Exception):
    """Raised while the graph was built: the pages are sound. `seq`: the one at fault, if known."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq


class EvalFailed(Exception):
    """Raised by eval: what the pages hold now is garbage; `reset_pages` before the next step."""


class Kernel(Protocol):
    """What the engine needs of a kernel; one thread makes every call."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool that the pages were made for."""

    def issue(self, batch: Batch) -> object:
        """Build and start a step; the ticket is for `collect`. Raises BuildFailed or EvalFailed."""

    def collect(self, ticket: object) -> StepResult:
        """Wait for a step's samples. Raises EvalFailed."""

    def reset_pages(self) -> None:
        """Throw the page arrays away, unread, and make new ones."""
