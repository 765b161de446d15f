"""Reference: each request alone through mlx-lm's own caches, unbatched, unpaged, unpadded.

Teacher-forced on the recorded tokens, so that every position is judged by itself. Scores differ in
their last bits from a batch's, so the margin rule holds. For greedy requests another token is
excused where the reference scores its own no more than the margin above the recorded one. A sampled
request's token is drawn again by the same function from the reference's scores; another token is
excused where the reference scores the recorded one within the margin of what the tape says, for
then the two drew from the same distribution, beside an edge. Excused flips are counted. A recorded
score that is off by the margin diverges even where the token is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from statemachine.records import Header, Record, StepDone, StepFailed, StepPlanned

from .answers import Answer, Answers, Sampled
from .divergence import TOKEN, Diverged, Divergence, Values
from .errors import Unusable
from .fold import Fold
from .models import Loaded, caches_of, load
from .observed import Pieces

if TYPE_CHECKING:
    from kernel.grammar import Grammars

    from .run import Options

CHUNK_ROWS = 256
"""Rows of a dense forward: bounds the scores in memory."""


class ReferenceChecker:
    """The reference depth. Runs a request when it ends, and keeps only the earliest divergence."""

    needs_fold = True

    def __init__(self, options: Options, fold: Fold) -> None:
        self._options = options
        self._fold = fold
        self._answers = Answers()
        self._pieces: dict[int, Pieces] = {}
        self._loaded: Loaded | None = None
        self._masks: Grammars | None = None
        self._caches: Callable[[], list[Any]] = list
        self._chunk_rows = CHUNK_ROWS
        self._first: Divergence | None = None
        self._requests = 0
        self._tokens = 0
        self._excused = 0
        self._largest = 0.0

    def feed(self, record: Record) -> None:
        """One record on. Raises Unusable."""
        self._answers.begin(record)
        if isinstance(record, Header) and self._loaded is None:
            from kernel.grammar import Grammars

            self._loaded = load(record, self._options)
            self._loaded.add_adapters(record)
            self._caches = caches_of(self._loaded.model.model, record)
            # Of some models mlx-lm is right for one row at a time only.
            self._chunk_rows = 1 if record.capabilities.get("singly") else CHUNK_ROWS
            self._masks = Grammars(self._loaded.model.tokenizer)
        elif isinstance(record, StepPlanned):
            self._pieces[record.step] = self._fold.pieces[record.step]
        elif isinstance(record, StepDone):
            self._answers.done(record, self._pieces.pop(record.step))
        elif isinstance(record, StepFailed):
            del self._pieces[record.step]
        for answer in self._answers.ended(record):
            self._judge(answer)

    def finish(self) -> None:
        """Judge what is still live. Raises Diverged with the earliest step's divergence."""
        for answer in self._answers.live.values():
            self._judge(answer)
        self._answers.live = {}
        if self._first is not None:
            raise Diverged(self._first)

    def figures(self) -> dict[str, int | float | str]:
        """Requests and tokens that were judged, and how close they came."""
        assert self._loaded is not None
        return {
            "requests run alone": self._requests,
            "tokens judged": self._tokens,
            "rule": f"margin {self._loaded.margin}",
            "excused flips": self._excused,
            "largest difference of a logit": round(self._largest, 6),
        }

    def _judge(self, answer: Answer) -> None:
        if not answer.samples or self._options.only not in (None, answer.arrived.request):
            return
        assert self._loaded is not None
        self._requests += 1
        self._options.tell(f"request {answer.arrived.request} alone")
        with self._loaded.serving(answer.arrived):
            model, caches = self._loaded.model.model, self._caches()
            for first, rows in dense_rows(model, answer, caches, self._chunk_rows):
                self._compare(answer, first, rows)

    def _compare(self, answer: Answer, first: int, rows: Any) -> None:
        """Samples from number `first` on against scores [n, vocab]."""
        import mlx.core as mx
        import numpy as np

        from kernel.sampling import is_greedy, plan_samples, sample

        samples = answer.samples[first : first + rows.shape[0]]
        parameters = answer.arrived.parameters
        begin = len(answer.arrived.tokens) + len(answer.before) + first
        rows = self._adjusted(answer, first, rows)
        drawn = sample(rows, plan_samples((parameters, begin + at) for at in range(len(samples))))
        recorded = mx.array(np.array([it.token for it in samples], np.uint32))[:, None]
        scores = mx.take_along_axis(rows, recorded, axis=-1)[:, 0]
        top = rows.max(axis=-1)
        columns = [np.array(it).tolist() for it in (drawn.tokens, scores, top)]
        for it, token, score, best in zip(samples, *columns, strict=True):
            self._tokens += 1
            self._largest = max(self._largest, abs(score - it.logit))
            self._one(answer, it, token, score, best - score, is_greedy(parameters))

    def _adjusted(self, answer: Answer, first: int, rows: Any) -> Any:
        """The scores as tokens were chosen from them; each is told the recorded answer before it.

        Raises Unusable where the answer breaks its grammar.
        """
        from kernel.adjusting import Asked, adjusted, plan_adjustments
        from kernel.metadata import BadBatch

        request, parameters, output = answer.arrived, answer.arrived.parameters, answer.output
        if not (parameters.logit_bias or parameters.reads_answer):
            return rows
        known = len(answer.before) + first
        count, vocab = rows.shape
        asked = [
            Asked(at, request.request, parameters, output[: known + at], known + at, request.tokens)
            for at in range(count)
        ]
        try:
            return adjusted(rows, plan_adjustments(asked, count, vocab, self._masks))
        except BadBatch as error:
            raise Unusable(f"request {request.request}: {error}") from error

    def _one(
        self, answer: Answer, it: Sampled, token: int, score: float, behind: float, greedy: bool
    ) -> None:
        assert self._loaded is not None
        margin, off = self._loaded.margin, abs(score - it.logit)
        what = ""
        if token != it.token:
            if (behind if greedy else off) < margin:
                self._excused += 1
            else:
                what = f"the reference says token {token}, the tape {it.token}"
        if not what and off > max(margin, 1e-3):
            what = f"the reference scores token {it.token} {score:.6g}, the tape {it.logit:.6g}"
        if not what or (self._first is not None and self._first.step <= it.step):
            return
        seq = answer.arrived.request
        self._first = Divergence(
            kind=TOKEN,
            step=it.step,
            summary=what,
            record="StepDone",
            sequence=seq,
            values=(
                Values("token", it.token, token, None),
                Values("logit of the recorded token", it.logit, score, None),
                Values("behind the best", it.margin, behind, None),
            ),
            last_events=self._fold.history.of(seq),
        )


def dense_rows(model: Any, answer: Answer, cache: list[Any], chunk_rows: int = CHUNK_ROWS) -> Any:
    """Yield (number of the first sample, scores [n, vocab] float32) for all samples of an answer.

    The row that fed token p gives the scores of position p + 1.
    """
    import mlx.core as mx

    stream = answer.stream[:-1]
    first_row = len(answer.arrived.tokens) + len(answer.before) - 1
    for begin in range(0, len(stream), chunk_rows):
        chunk = stream[begin : begin + chunk_rows]
        scores = model(mx.array(chunk)[None], cache=cache)[0]
        end = begin + len(chunk)
        if end <= first_row:
            mx.eval([layer.state for layer in cache])
            continue
        skipped = max(0, first_row - begin)
        rows = scores[skipped:].astype(mx.float32)
        mx.eval(rows)
        yield begin + skipped - first_row, rows
