"""An architecture under an engine: unlike requests over few small blocks, and what mlx-lm says.

Owns one load that does to rows all that a policy may: prompts in chunks beside decode, prefixes
adopted, drafts taken back, preemption, windows left behind; its comparison with mlx-lm's own
caches, a request at a time; and the table of what was found, for people and for the command line.

    python -m tests.families    writes both anew
"""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernel.blas import load_blas

load_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from attrs import field, frozen  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from msgspec import json, structs  # noqa: E402

from kernel.batch import Batch, StepResult  # noqa: E402
from kernel.families import Family, family_of  # noqa: E402
from kernel.model_kernel import ModelKernel  # noqa: E402
from kernel.model_owned import ModelOwnedKernel  # noqa: E402
from replay.run import PLAN, Options, replay  # noqa: E402
from server.build import suited  # noqa: E402
from server.engine import Engine  # noqa: E402
from server.families_command import ABLE, TABLE, Architecture  # noqa: E402
from server.loop import Parts  # noqa: E402
from server.policy import Policy  # noqa: E402
from server.submission import Submission  # noqa: E402
from statemachine.geometry import Geometry  # noqa: E402
from statemachine.records import Parameters, Record  # noqa: E402

from .paged import random_tokens  # noqa: E402
from .sim import Inbox, MemoryCapture, header  # noqa: E402
from .tampering import write  # noqa: E402
from .tiny_architectures import UNABLE, architecture_model, architectures  # noqa: E402

POLICY = Policy(
    max_batch_tokens=14, max_running=3, prefill_chunk=5, watermark_blocks=0, context_tokens=64,
    lookahead=True, draft_tokens=2, lookup_ngram=1,
)  # fmt: skip
BLOCKS = 13
"""Of 4 rows: two requests fit and three do not."""
ANSWER = 10
VOCAB = 259
OWN_FAULTS = {
    "olmo": "mlx-lm adds the word causal to the scores of several rows, and raises: here they are "
    "masked as they should be",
    "phi3small": "mlx-lm adds true and false to the scores of several rows, which hides nothing: "
    "here it takes one at a time",
    "plamo3": "mlx-lm's own mask of a prompt is a row wider than its window at decode: here both "
    "are the window",
}
"""Where mlx-lm contradicts itself: there one by one is right."""
ROOT = Path(__file__).parent.parent
TABLE_FILE = ROOT / "server" / TABLE
DOCUMENT = ROOT / "docs" / "families.md"
TOLERANCE = 1e-4
"""Of the largest score of a request."""


@frozen
class Drawn:
    """A sampled token: whose, at which position, what was fed from `start` on before it, and its
    score. What is drawn behind a guess that was wrong says nothing.
    """

    seq: int
    position: int
    start: int
    fed: tuple[int, ...]
    token: int
    logit: float

    def tells_of(self, number: int, text: tuple[int, ...]) -> bool:
        """Whether it was drawn behind this request's own text."""
        mine = text[self.start : self.start + len(self.fed)] == self.fed
        return number == self.seq and mine and self.position < len(text)


class Recorder:
    """A kernel that notes what each row drew."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._batches: dict[int, Batch] = {}
        self.drawn: list[Drawn] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def issue(self, batch: Batch) -> Any:
        ticket = self._kernel.issue(batch)
        self._batches[id(ticket)] = batch
        return ticket

    def collect(self, ticket: object) -> StepResult:
        result = self._kernel.collect(ticket)
        pieces = self._batches.pop(id(ticket)).pieces
        places = [
            (piece.sequence.id, position, piece.start, piece.tokens[: position - piece.start])
            for piece in pieces
            for position in piece.sample_positions
        ]
        columns = zip(places, result.tokens, result.logits, strict=True)
        self.drawn += [Drawn(*place, *rest) for place, *rest in columns]
        return result


@frozen
class Outcome:
    """What became of the load. texts: prompt and answer of each request, by its number."""

    texts: dict[int, tuple[int, ...]]
    drawn: list[Drawn]
    records: list[Record] = field(repr=False)

    def count(self, kind: type) -> int:
        """How many events of a kind are on tape."""
        events = [event for record in self.records for event in getattr(record, "events", ())]
        return sum(isinstance(event, kind) for event in events)


def prompts() -> list[list[int]]:
    """The second shares most of the first's prompt, the last is the first again."""
    first = random_tokens(3, 19, VOCAB)
    other = [*first[:13], *random_tokens(4, 8, VOCAB)]
    return [first, other, random_tokens(5, 7, VOCAB), random_tokens(6, 14, VOCAB), first]


def serve(model: Any, family: Family) -> Outcome:
    """The load over a pool of BLOCKS blocks: one request alone, then the others at once."""
    first, *others = prompts()
    return run(model, family, [[first], others], POLICY, BLOCKS)


def run(
    model: Any, family: Family, turns: list[list[list[int]]], policy: Policy, blocks: int
) -> Outcome:
    """Prompts of a turn at once, after those of the turn before it, over so many blocks."""
    pool = Geometry(4, family.groups(blocks), "family")
    flags, layout = family.flags, family.layout
    kernel: Any
    if layout is None:
        kernel = ModelOwnedKernel(model, pool)
    else:
        kernel = ModelKernel(model, pool, sanitize="full", layout=layout)
    recorder, policy, capture = Recorder(kernel), suited(policy, flags), MemoryCapture()
    head = structs.replace(
        header(pool, policy), sanitize="off" if layout is None else "full", capabilities=flags
    )
    parts: Any = Parts(recorder, policy, capture, head, vocab_size=VOCAB)
    engine = Engine(lambda: parts)
    engine.open()
    inboxes = []
    for turn in turns:
        for prompt in turn:
            inboxes.append(Inbox())
            engine.submit(Submission(tuple(prompt), Parameters(max_tokens=ANSWER)), inboxes[-1])
        while engine.step():
            pass
    engine.stop()
    assert [inbox.error for inbox in inboxes] == [""] * len(inboxes)
    texts = zip([prompt for turn in turns for prompt in turn], inboxes, strict=True)
    told = {n: (*prompt, *inbox.tokens) for n, (prompt, inbox) in enumerate(texts)}
    return Outcome(told, recorder.drawn, capture.records)


def full_scores(model: Any, text: tuple[int, ...]) -> np.ndarray:
    """Scores of a text in one forward over mlx-lm's own caches: [tokens, vocab]."""
    scores = model(mx.array([text]), cache=make_prompt_cache(model))[0]
    return np.array(scores.astype(mx.float32))


def step_scores(model: Any, text: tuple[int, ...]) -> np.ndarray:
    """The same one by one."""
    caches = make_prompt_cache(model)
    rows = [model(mx.array([[token]]), cache=caches)[0, 0] for token in text]
    return np.array(mx.stack(rows).astype(mx.float32))


def wrong(model: Any, outcome: Outcome, scores_of: Any = full_scores) -> str:
    """The first token or score that mlx-lm's own caches do not give, in words; else nothing."""
    for number, text in outcome.texts.items():
        scores = scores_of(model, text)
        bound = TOLERANCE * max(1.0, float(np.abs(scores[np.isfinite(scores)]).max()))
        for place in range(len(text) - ANSWER, len(text)):
            row = scores[place - 1]
            if row.max() - row[text[place]] > bound:
                return f"request {number} says {text[place]} at {place}, not {row.argmax()}"
        for drawn in outcome.drawn:
            if drawn.tells_of(number, text):
                off = abs(float(scores[drawn.position - 1].max()) - drawn.logit)
                if not off <= bound:
                    return f"request {number} at {drawn.position}: a score is off by {off:.2g}"
    return ""


def replayed(outcome: Outcome, folder: Path) -> str:
    """What replay says of the tape at plan depth; empty where it is clean."""
    found = replay(write(folder, outcome.records), Options(depth=PLAN))
    return "" if found.divergence is None else str(found.divergence)


def line_of(name: str, family: Family | None) -> Architecture:
    """How an architecture is served, by what was found of its model; None: it cannot be run."""
    if family is None:
        return Architecture(name, "untested", note=UNABLE[name])
    able = [held for held in ABLE if getattr(family.capabilities, held).able]
    kinds = tuple(group.kind for group in family.groups())
    note = re.sub(r" by [^ ]+ of the largest.*?rounding\)", "", family.reason.partition("; ")[2])
    note = note.replace("'mlx.core.", "'")  # 3.11 does not say where it is from
    return Architecture(name, family.way, kinds, tuple(able), OWN_FAULTS.get(name, note))


HEAD = """# How each architecture is served

Made by `python -m tests.families` for every architecture of mlx-lm {version}, with tiny random
float32 models (`tests/tiny_architectures.py`), and held by `tests/test_families.py`. `mlxtape
families` prints the same table, `mlxtape families --model PATH` what is found of your model.

- **packed**: all rows of a step in one call, K and V in pages, attention over pages.
- **gathered**: K and V in pages, gathered for the model's own attention: decode rows together,
  prompts one by one.
- **grouped**: the same, for models that want masks of five dimensions.
- **added**: the same, for models that add masks to their scores.
- **split**: the same, for models that keep states which go from row to row (of convolutions, of
  a state space): these are in slots, one a sequence and one at each edge of a block that is kept.
- **alone**: as gathered, with a call for each sequence.
- **single**: as gathered, with a call for each row.
- **opaque**: over the caches that mlx-lm makes, one request at a time.
- **untested**: cannot be run here.

Nothing goes by a name: a model is looked at as it is loaded, and a probe compares a few tokens over
pages with mlx-lm's own caches. Each line but the untested ones was put under an engine with blocks
of 4 rows, windows of 8 and a pool that is too small: prompts in chunks beside decode, adopted
prefixes, lookahead, rewound drafts, preemption, as far as it can. All scores are those of one
forward of mlx-lm's over its own caches, to 1e-4 of the largest, and the tape replays clean.

{counts}

| architecture | served | rows kept | can | why in no better way |
|---|---|---|---|---|
"""


def counts_of(table: list[Architecture]) -> dict[str, int]:
    """How many architectures go which way."""
    return dict(sorted(Counter(line.way for line in table).items()))


def document(table: list[Architecture]) -> str:
    """docs/families.md."""
    counts = ", ".join(f"{count} {way}" for way, count in counts_of(table).items())
    lines = [
        f"| {it.name} | {it.way} | {' + '.join(it.groups) or '-'} | {', '.join(it.able) or '-'} "
        f"| {it.note.replace('|', '/')} |"
        for it in table
    ]
    head = HEAD.format(version=version("mlx-lm"), counts=f"{len(table)} architectures: {counts}.")
    return head + "\n".join(lines) + "\n"


def main() -> None:
    """Write the table anew."""
    found = {
        name: None if name in UNABLE else family_of(architecture_model(name))
        for name in architectures()
    }
    table = [line_of(name, family) for name, family in found.items()]
    lines = ",\n".join(json.encode(line).decode() for line in table)
    TABLE_FILE.write_text(f"[\n{lines}\n]\n")
    DOCUMENT.write_text(document(table))


if __name__ == "__main__":
    main()
