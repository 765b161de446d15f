"""Records: what a tape holds, one after the other, in format 1. Bytes are the codec's business.

Order on tape: Header, Checkpoint (a segment's start), then inputs (RequestArrived,
RequestCancelled, FlushRequested, BlocksOffered) before the StepPlanned that saw them, and for each
StepPlanned one StepDone or StepFailed, in the order of the steps; Finished stands before the
StepDone that it ends a request in. With lookahead one more step is planned before a step's
StepDone: P0 P1 D0 P2 D1.
Order of application is order on tape.
"""

from __future__ import annotations

from msgspec import Struct

from .events import Event, Namespace
from .geometry import Geometry

FORMAT = 1

NO_LOGPROBS = -1
NO_SCORES = -1

NO_PARENT = -1
"""RequestArrived.parent of a request that is nobody's copy."""


class Parameters(Struct, frozen=True, omit_defaults=True):
    """How a request is sampled and when it ends.

    temperature 0 is greedy; top_k 0 and top_p 1 and min_p 0 are off. seed is 64 bits.
    end_tokens end a request and are no part of its answer. priority: lower ones are served first,
    where the policy goes by it.

    frequency_penalty times a token's count in the answer, and presence_penalty if it is in there,
    are taken from its logit (OpenAI's rule); repetition_penalty, 1 is off, divides positive logits
    of tokens in prompt or answer and multiplies negative ones (Keskar et al., CTRL, 2019).
    logit_bias: (token, what is added to its logit). grammar: what the answer must match, in the
    kernel's words; empty is free text.

    logprobs: how many of the likeliest tokens are told with each answer token's log-probability;
    NO_LOGPROBS tells none. score_from: from this position on, prompt tokens' log-probabilities are
    told too; NO_SCORES tells none. embed: the last prompt row's hidden state is the answer.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    end_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    priority: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    logprobs: int = NO_LOGPROBS
    score_from: int = NO_SCORES
    embed: bool = False

    @property
    def penalised(self) -> bool:
        """Whether what was said before changes what is sampled next."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )

    @property
    def reads_prompt(self) -> bool:
        """Whether tokens of the prompt change logits, beyond what the model made of them."""
        return self.repetition_penalty != 1.0

    @property
    def reads_answer(self) -> bool:
        """Whether a token can be sampled only once all tokens before it are known."""
        # Asked of every row of every step, so in one piece.
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.grammar
        )


class AdapterUsed(Struct, frozen=True, omit_defaults=True):
    """An adapter that requests may have. digest: of its files, 128 bits in hex; the first 64 are
    the version in its requests' namespaces. path: where it was.
    """

    name: str
    digest: str
    path: str = ""


class DraftModel(Struct, frozen=True, omit_defaults=True):
    """A model that guesses ahead for the one that is served, and its pool (Drafted).

    vocab_size: both models know the token ids below it.
    """

    model: str
    digests: dict[str, str]
    geometry: Geometry
    capabilities: dict[str, bool | int | str]
    layers: int = 0
    vocab_size: int = 0


class Header(Struct, frozen=True, tag=True, omit_defaults=True):
    """What ran: enough to run it again, and to refuse where that is not the same.

    created_ns: wall clock, the only time outside of StepTimed. digests: of weights, tokenizer and
    configuration, by name. policy, capabilities: the scheduler's settings and the model's limits.
    adapters: those of the start; later ones are in the namespaces of their requests only. kv_bits:
    of a number in the pages, where rows are quantised; 0 where not. draft: the model that guesses.
    """

    format: int
    software: str
    created_ns: int
    model: str
    digests: dict[str, str]
    geometry: Geometry
    policy: dict[str, bool | int | float | str]
    capabilities: dict[str, bool | int | str]
    device: str = ""
    blas: str = ""
    sanitize: str = "edges"
    context_tokens: int = 0
    layers: int = 0
    rank: int = 0
    world: int = 1
    segment: int = 0
    redacted: bool = False
    seeds: dict[str, int] = {}
    adapters: tuple[AdapterUsed, ...] = ()
    kv_bits: int = 0
    draft: DraftModel | None = None


class RequestArrived(Struct, frozen=True, tag=True, omit_defaults=True):
    """A request entered the queue; `request` is also its sequence's id.

    parent: a request of the same prompt and namespace, whose rows this one may share by a fork
    (n > 1); NO_PARENT for most.
    """

    request: int
    external_id: str
    tokens: tuple[int, ...]
    parameters: Parameters
    namespace: Namespace = Namespace()
    parent: int = NO_PARENT


class RequestCancelled(Struct, frozen=True, tag=True, omit_defaults=True):
    """The client went away, or the server gave the request up (`reason`)."""

    request: int
    reason: str = "cancelled"


class BlocksOffered(Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks [first, end) of a waiting request's prompt were read from the prefix store and hold:
    its admission may load them.
    """

    request: int
    first: int
    end: int


class Finished(Struct, frozen=True, tag=True, omit_defaults=True):
    """An end that only the engine can see (a stop string): keep that many answer tokens."""

    request: int
    tokens_kept: int
    reason: str


class FlushRequested(Struct, frozen=True, tag=True, omit_defaults=True):
    """Somebody wants the prefix index emptied: the next plan evicts all cached blocks."""

    reason: str = ""


class Observation(Struct, frozen=True, omit_defaults=True, array_like=True):
    """What the caches of one forward saw, not what they were told.

    Per forward, smallest and largest over layers: reads of `offset`, calls of `update_and_fetch`,
    rows it was given (from the array's shape), calls of `attend`; `strangers` counts uses of other
    metadata than the step's own. Per piece, in batch order, from the host arrays that the layers
    used: first RoPE position, rows written (pads included), and per group the visible rows of the
    last row and xxh3_64 of the block table as read.
    """

    offset_reads: tuple[int, int]
    updates: tuple[int, int]
    rows_updated: tuple[int, int]
    attends: tuple[int, int]
    strangers: int
    starts: tuple[int, ...]
    rows: tuple[int, ...]
    visible: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...]


class ShadowFinding(Struct, frozen=True, omit_defaults=True, array_like=True):
    """A physical row that holds another row than its sequence should read there."""

    seq: int
    group: int
    position: int
    block: int
    expected: int
    found: int


class ShadowReport(Struct, frozen=True, omit_defaults=True, array_like=True):
    """Rows compared in this step, findings (at most 16 kept), and how many there were."""

    checked: int = 0
    found: int = 0
    findings: tuple[ShadowFinding, ...] = ()


class StepPlanned(Struct, frozen=True, tag=True, omit_defaults=True):
    """A step's opening events, in order; the pieces of the batch follow from its appends.

    digest: of the state after these events.
    """

    step: int
    events: tuple[Event, ...]
    digest: int


class StepDone(Struct, frozen=True, tag=True, omit_defaults=True):
    """A step's results and closing events.

    sampled: piece numbers (batch order) that sampled, each as often as it has samples (a piece that
    verifies drafts has several); tokens, logits, margins: one for each of them: the token, its
    logit, and how far the best stood above the runner-up (float32), of the logits that it was
    chosen from: after penalties, bias and grammar.
    scored: piece numbers that scored prompt tokens, each as often as it did; scores: the
    log-probability (natural, float32) of each of these tokens, in the order of their positions.
    offsets: the offset of each piece's sequence after the closing events (-1: closed);
    digest: of the state after them.
    """

    step: int
    observation: Observation
    shadow: ShadowReport
    sampled: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[float, ...]
    margins: tuple[float, ...]
    events: tuple[Event, ...]
    offsets: tuple[int, ...]
    digest: int
    scored: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


class StepFailed(Struct, frozen=True, tag=True, omit_defaults=True):
    """A forward raised, at `build` (pages are sound) or at `eval` (they are lost).

    Stage `void`: it was issued behind a step that lost the pages, and nobody read its result.

    events: what undid it. `blamed` are the requests that fail for it; the others run again.
    """

    step: int
    stage: str
    error: str
    blamed: tuple[int, ...]
    events: tuple[Event, ...]
    digest: int


class StepTimed(Struct, frozen=True, tag=True, omit_defaults=True):
    """Wall times of a step in microseconds, by part; the only record that differs each run."""

    step: int
    parts_us: dict[str, int]


class Drafted(Struct, frozen=True, tag=True):
    """A record of the draft model's pool: a state machine of its own, whose steps are numbered
    apart and whose sequences have the ids of the requests.

    A round of its steps stands before the StepPlanned that may use its guesses: P1 P2 D1 P3 D2 D3.
    """

    record: StepPlanned | StepDone | StepFailed


class Gap(Struct, frozen=True, tag=True, omit_defaults=True):
    """The disk was full: that many records are missing before this one; a Checkpoint follows."""

    records: int
    reason: str


class RequestSnapshot(Struct, frozen=True, omit_defaults=True):
    """A live request inside of a checkpoint. `passed`: requests that were admitted before it."""

    arrived: RequestArrived
    output: tuple[int, ...]
    running: bool
    cached_tokens: int = -1
    passed: int = 0


class DraftSnapshot(Struct, frozen=True, omit_defaults=True):
    """The draft model's pool inside of a checkpoint.

    step: its last one. guesses: by request, what was guessed since its last token. failures: steps
    of it that failed in a row. vocab_size: as in DraftModel.
    """

    step: int
    state: bytes
    guesses: tuple[tuple[int, tuple[int, ...]], ...] = ()
    failures: int = 0
    vocab_size: int = 0


class Checkpoint(Struct, frozen=True, tag=True, omit_defaults=True):
    """State and live requests, so that a reader can start here; `state` is the codec's bytes.

    requests: running ones in admission order, then the queue in its order. alone: sequences of a
    step that failed at build, still to be tried one by one. stuck: the queue's front cannot start.
    flush: FlushRequested came in and no step was planned since. offered: what waiting requests may
    load. draft: of the draft model, where there is one.
    """

    step: int
    state: bytes
    requests: tuple[RequestSnapshot, ...]
    digest: int
    alone: tuple[int, ...] = ()
    stuck: bool = False
    flush: bool = False
    offered: tuple[BlocksOffered, ...] = ()
    draft: DraftSnapshot | None = None


class TapeEnded(Struct, frozen=True, tag=True, omit_defaults=True):
    """The server stopped in order; a tape without it was cut, or its process died."""

    steps: int


Record = (
    Header
    | RequestArrived
    | RequestCancelled
    | Finished
    | StepPlanned
    | StepDone
    | StepFailed
    | StepTimed
    | Gap
    | Checkpoint
    | TapeEnded
    | FlushRequested
    | BlocksOffered
    | Drafted
)
