"""Events: the only things that change a state, frozen, in the past tense.

Fields are plain numbers and tuples, so that an event is its own wire form. `seq`, `step`, `group`
and `block` are ids; `rows` counts rows; `index` is a block's place in a table.
`SnapshotTaken` and `SnapshotRestored` are reserved names of format 1.
"""

from __future__ import annotations

from msgspec import Struct

PROMPT = "prompt"
DECODE = "decode"
DRAFT = "draft"
LOOKAHEAD = "lookahead"
PAD = "pad"
PURPOSES = (PROMPT, DECODE, DRAFT, LOOKAHEAD, PAD)
COMMITTED_AT_ONCE = (PROMPT, DECODE)

RESERVED = ("SnapshotTaken", "SnapshotRestored")

NO_BLOCK = -1
"""A hole in a block table: its block was released at the front of a window."""


class Namespace(Struct, frozen=True, omit_defaults=True):
    """Who may share rows with whom: same adapter (and version of it), same salt."""

    adapter: str = ""
    version: int = 0
    salt: str = ""


class Opened(Struct, frozen=True, tag=True, omit_defaults=True):
    """A sequence exists: offset 0, no blocks. Ids grow and are never used again."""

    seq: int
    namespace: Namespace = Namespace()


class PrefixAdopted(Struct, frozen=True, tag=True, omit_defaults=True):
    """It shares rows computed before; `tokens` are these rows' tokens, `blocks` one table a group.

    len(tokens) <= prompt_rows - 1. The last block may be used in part.
    """

    seq: int
    tokens: tuple[int, ...]
    prompt_rows: int
    blocks: tuple[tuple[int, ...], ...]


class Appended(Struct, frozen=True, tag=True, omit_defaults=True):
    """`rows` rows were issued in `step`; `blocks` are the blocks newly in the table, per group."""

    seq: int
    step: int
    rows: int
    tokens: tuple[int, ...] | None
    blocks: tuple[tuple[int, ...], ...]
    purpose: str


class AppendedEach(Struct, frozen=True, tag=True, omit_defaults=True):
    """One row to each of many sequences, in columns; every row stays inside its block."""

    step: int
    seqs: tuple[int, ...]
    tokens: tuple[int, ...] | None
    purpose: str


class StepWritten(Struct, frozen=True, tag=True, omit_defaults=True):
    """The writes of a step are real; the first closing event of each step."""

    step: int


class Committed(Struct, frozen=True, tag=True, omit_defaults=True):
    """The oldest speculative rows are accepted; a lookahead row learns its token here."""

    seq: int
    tokens: tuple[int, ...]


class Trimmed(Struct, frozen=True, tag=True, omit_defaults=True):
    """Tail rows of any kind are gone."""

    seq: int
    rows: int


class Rewound(Struct, frozen=True, tag=True, omit_defaults=True):
    """Speculative rows at the tail are gone."""

    seq: int
    rows: int


class FrontTrimmed(Struct, frozen=True, tag=True, omit_defaults=True):
    """A window moved on by `rows`; the offset stays."""

    seq: int
    group: int
    rows: int


class BlockCopied(Struct, frozen=True, tag=True, omit_defaults=True):
    """Copy on write: `rows` rows of `source` now also stand in `target`, at `index` of the table.

    The copy runs before any write of `step`; `source` is pinned until that step is written.
    """

    seq: int
    step: int
    group: int
    index: int
    source: int
    target: int
    rows: int


class Forked(Struct, frozen=True, tag=True, omit_defaults=True):
    """`child`, which is new or empty, shares every committed row of `seq`."""

    seq: int
    child: int


class BlockPublished(Struct, frozen=True, tag=True, omit_defaults=True):
    """A full, written, committed block can be found by its key."""

    seq: int
    index: int
    group: int
    block: int
    key: int


class BlockEvicted(Struct, frozen=True, tag=True, omit_defaults=True):
    """A cached block can no longer be found; it is free."""

    group: int
    block: int
    key: int


class Reset(Struct, frozen=True, tag=True, omit_defaults=True):
    """The sequence is emptied and starts again at 0."""

    seq: int


class Preempted(Struct, frozen=True, tag=True, omit_defaults=True):
    """The sequence is emptied and waits; next: PrefixAdopted, Appended(prompt) or Closed."""

    seq: int


class Closed(Struct, frozen=True, tag=True, omit_defaults=True):
    """The sequence is emptied and gone."""

    seq: int
    reason: str = ""


class PoolReset(Struct, frozen=True, tag=True, omit_defaults=True):
    """The page arrays were lost: all live sequences are preempted, the index is empty."""


class BlockStored(Struct, frozen=True, tag=True, omit_defaults=True):
    """A published block's rows were read for the prefix store; changes nothing in the pool.

    The read runs before any copy, load or write of its step.
    """

    group: int
    block: int
    key: int


class BlockLoaded(Struct, frozen=True, tag=True, omit_defaults=True):
    """Rows that the prefix store kept stand in a free block now, which can be found by its key.

    `seq` is the sequence that they were asked for: they belong to its namespace, and to nobody's
    table yet. parent: the index entry of the block before, 0 for a first one. The loads and copies
    of a step run in their order, before its writes.
    """

    seq: int
    step: int
    group: int
    block: int
    parent: int
    tokens: tuple[int, ...]
    key: int


class CommittedEach(Struct, frozen=True, tag=True, omit_defaults=True):
    """The oldest speculative row of each of many sequences is accepted, in columns."""

    seqs: tuple[int, ...]
    tokens: tuple[int, ...]


Event = (
    Opened
    | PrefixAdopted
    | Appended
    | AppendedEach
    | StepWritten
    | Committed
    | Trimmed
    | Rewound
    | FrontTrimmed
    | BlockCopied
    | Forked
    | BlockPublished
    | BlockEvicted
    | Reset
    | Preempted
    | Closed
    | PoolReset
    | BlockStored
    | BlockLoaded
    | CommittedEach
)
