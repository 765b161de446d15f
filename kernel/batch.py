"""Batch: what the engine hands a kernel for one step, and what comes back.

The kernel decides no length: each piece carries its sequence as it stands after the step's opening
events, and positions, tables and visible rows are derived from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from statemachine.events import BlockCopied
from statemachine.geometry import Geometry
from statemachine.records import Observation, Parameters, ShadowReport
from statemachine.sequence import Sequence

GATHER = "gather"
"""Pages are attended to by an array of the rows that are read, made with MLX's own operations; what
a header says nothing of.
"""


class Piece(Struct, frozen=True):
    """One sequence's rows in a step.

    sequence: after this step's Appended events, so its offset is one past the piece's last row.
    tokens: what is fed, one a row. pending: rows after them (one at most) whose token is what the
    step before sampled last for the same sequence, and nobody has read yet. pads: rows after those.
    samples: how many of the rows before the pads are sampled, counted from the last: 0 where the
    piece ends inside the prompt, more than 1 where it verifies drafts.

    answer: the request's answer up to the first sampled token, only where its parameters read it
    (`Parameters.reads_answer`); drafts that a later sample follows are the last of `tokens`.
    prompt: its prompt, only where a repetition penalty counts it. targets: prompt tokens whose
    log-probabilities are asked for, each predicted by one of the rows right before the sampled
    ones (or by the last rows, where none is sampled).
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    pads: int = 0
    pending: int = 0
    samples: int = 0
    parameters: Parameters | None = None
    answer: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of this piece, pads included."""
        return len(self.tokens) + self.pending + self.pads

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.sequence.offset - self.rows

    @property
    def target_rows(self) -> range:
        """Which of the piece's rows predict its targets."""
        end = len(self.tokens) + self.pending - self.samples
        return range(end - len(self.targets), end)

    @property
    def sample_positions(self) -> range:
        """The positions that the sampled tokens take: each one after the row it is drawn at."""
        end = self.sequence.offset - self.pads
        return range(end - self.samples + 1, end + 1)


class Batch(Struct, frozen=True):
    """A step: copies first, then the pieces in batch order."""

    step: int
    pieces: tuple[Piece, ...]
    copies: tuple[BlockCopied, ...] = ()


class Logprob(Struct, frozen=True, array_like=True):
    """A token's log-probability, and the likeliest tokens at its place with theirs, best first.

    Natural logarithm of the model's own distribution: before bias, penalties, temperature, grammar.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepResult(Struct, frozen=True):
    """What a step observed and sampled.

    sampled: piece numbers that sampled, in batch order, each as often as it has samples; tokens,
    logits (chosen logit, float32) and margins (top logit minus runner-up, float32): one entry each,
    of the logits that the token was chosen from: after penalties, bias and grammar.
    logprobs: empty, or one for each sample, None where nobody asked. scores: by piece number, those
    of its targets. embeddings: by piece number, the hidden state [D] of the last row.
    """

    observation: Observation
    shadow: ShadowReport
    sampled: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[float, ...]
    margins: tuple[float, ...]
    logprobs: tuple[Logprob | None, ...] = ()
    scores: Mapping[int, tuple[Logprob, ...]] = {}
    embeddings: Mapping[int, tuple[float, ...]] = {}

    @property
    def scored(self) -> tuple[int, ...]:
        """Piece numbers, each as often as it has scores: as on tape."""
        return tuple([piece for piece, told in self.scores.items() for _ in told])

    @property
    def score_column(self) -> tuple[float, ...]:
        """All scores, in the order of `scored`."""
        return tuple([it.logprob for told in self.scores.values() for it in told])


class BuildFailed(Exception):
    """Raised while the graph was built: the pages are sound. `seq`: the one at fault, if known.

    wished: its request asked for what cannot be done, and nothing is wrong with model or engine.
    """

    def __init__(self, message: str, seq: int | None = None, wished: bool = False) -> None:
        super().__init__(message)
        self.seq = seq
        self.wished = wished


class EvalFailed(Exception):
    """Raised by eval: what the pages hold now is garbage; `reset_pages` before the next step."""


class Kernel(Protocol):
    """What the engine needs of a kernel; one thread makes every call.

    A step may be issued before the one before it was collected. Steps are collected in the order
    of their issue.
    """

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool that the pages were made for."""

    @property
    def cannot(self) -> Mapping[str, str]:
        """What no request may ask of it, by the name in Parameters, each with its reason."""

    def issue(self, batch: Batch) -> object:
        """Build and start a step; the ticket is for `collect`. Raises BuildFailed or EvalFailed."""

    def collect(self, ticket: object) -> StepResult:
        """Wait for a step's samples. Raises EvalFailed."""

    def reset_pages(self) -> None:
        """Throw the page arrays away, unread, and make new ones."""
