"""Forward: run the real model again, with the recorded batches and tokens.

The batch of each step is made again from its events, its tokens from the tape (teacher-forced), so
that one wrong token does not make the next. A step runs when it is answered: steps are answered in
their order, and tokens that nobody had read when a step was issued are known by then. On the device
and BLAS of the tape all must be equal: observations, shadow findings, tokens, and fingerprints to
the last bit. Elsewhere tokens go by the margin rule: another token is excused where the top two
scores here are closer than the margin; excused flips are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msgspec import structs

from server.draft_model import drafted_arrival
from statemachine.events import BlockLoaded
from statemachine.geometry import has_state
from statemachine.records import (
    Checkpoint,
    Drafted,
    Gap,
    Header,
    Observation,
    Record,
    RequestArrived,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .answers import Answers
from .batches import Batches, Planned
from .divergence import CONTENT, CRASH, OBSERVATION, TOKEN, Diverged, Divergence, Values
from .drafted import header_of, told_at
from .errors import Unusable
from .fold import Fold
from .models import Loaded, kernel_for, load, other_kernels
from .observed import Pieces, tag_text

if TYPE_CHECKING:
    from kernel.batch import Kernel, StepResult

    from .run import Options

BUILD = "build"
VOID = "void"


class ForwardChecker:
    """The forward depth."""

    needs_fold = True

    def __init__(self, options: Options, fold: Fold) -> None:
        self._options = options
        self._fold = fold
        self._answers = Answers()
        self._kernel: Kernel | None = None
        self._exact = True
        self._margin = 0.0
        self._note = ""
        self._header: Header | None = None
        self._loaded: Loaded | None = None
        self._batches = Batches()
        self._steps = 0
        self._tokens = 0
        self._scores = 0
        self._excused = 0
        self._largest = 0.0
        self._built_here: list[int] = []
        self._draft: ForwardChecker | None = None

    def feed(self, record: Record) -> None:
        """One record on. Raises Diverged, Unusable."""
        self._answers.begin(record)
        if isinstance(record, Header):
            self._load(record)
        elif isinstance(record, RequestArrived):
            if self._loaded is not None:
                self._loaded.require(record)
            if self._draft is not None:
                self._draft.feed(drafted_arrival(record))
        elif isinstance(record, Drafted):
            if self._draft is not None:
                with told_at(self._fold.newest_step + 1):
                    self._draft.feed(record.record)
        elif isinstance(record, Gap):
            self._refuse("has a gap, and the rows of the steps in it are not known", record)
        elif isinstance(record, Checkpoint) and record.step and self._fold.counts.records == 2:
            self._refuse("does not begin at the first step", record)
        elif isinstance(record, StepPlanned):
            self._need_no_store(record)
            self._batches.plan(record.step, self._fold.pieces[record.step], self._answers)
        elif isinstance(record, StepDone):
            self._done(record)
        elif isinstance(record, StepFailed):
            self._failed(record)
        for answer in self._answers.ended(record):
            if self._draft is not None:
                self._draft.forget(answer.arrived.request)

    def forget(self, request: int) -> None:
        """A request is over, whether or not its sequence was ever opened here."""
        self._answers.live.pop(request, None)

    def finish(self) -> None:
        """Nothing is left to compare."""

    def figures(self) -> dict[str, int | float | str]:
        """Steps and tokens that were run again, and how close they came."""
        figures: dict[str, int | float | str] = {
            "steps run again": self._steps,
            "tokens sampled again": self._tokens,
        }
        if self._draft is not None:
            figures["steps of the draft model run again"] = self._draft._steps
        if self._scores:
            figures["prompt tokens scored again"] = self._scores
        if self._built_here:
            figures["failed builds that do not fail here"] = (
                f"{len(self._built_here)}, the first in step {self._built_here[0]}"
            )
        if self._exact:
            return {**figures, "rule": "equal bit for bit (same device and BLAS)"}
        return {
            **figures,
            "rule": f"margin {self._margin} ({self._note})",
            "excused flips": self._excused,
            "largest difference of a logit": self._largest,
        }

    def use(self, kernel: Kernel, exact: bool = True, margin: float = 0.0, note: str = "") -> None:
        """Run on this kernel, in place of the one that the header names."""
        self._kernel, self._exact, self._margin, self._note = kernel, exact, margin, note

    def _load(self, record: Header) -> None:
        if self._kernel is None:
            loaded = self._loaded = load(record, self._options)
            kernel = kernel_for(record, loaded)
            other = other_kernels(record, kernel)
            note = "; ".join(filter(None, (loaded.note, other)))
            self.use(kernel, loaded.exact and not other, loaded.margin, note)
        inner = header_of(record)
        if inner is not None and self._draft is None:
            assert self._fold.drafted is not None, "the fold comes first"
            self._draft = ForwardChecker(self._options.for_draft(), self._fold.drafted)
            self._draft.feed(inner)

    def _need_no_store(self, record: StepPlanned) -> None:
        """Rows that were kept in another server's life are not on this tape."""
        if any(isinstance(event, BlockLoaded) for event in record.events):
            raise Unusable(
                f"step {record.step} loads blocks that a prefix store kept, whose rows are not on "
                f"tape, so --depth forward cannot fill the pages: use --until {record.step - 1}, "
                "or --depth reference, which runs each request alone"
            )

    def _refuse(self, why: str, record: Record) -> NoReturn:
        raise Unusable(
            f"the tape {why}, so --depth forward cannot fill the pages after it: use --until, or "
            "--depth reference, which runs each request alone"
        )

    def _done(self, record: StepDone) -> None:
        planned = self._batches.take(record.step)
        pieces = planned.pieces
        if pieces.seqs:
            result = self._run(planned, record.sampled)
            self._steps += 1
            self._compare(record, pieces, result)
        self._batches.done(record, pieces)
        self._answers.done(record, pieces)

    def _run(self, planned: Planned, sampled: tuple[int, ...]) -> StepResult:
        from kernel.batch import BuildFailed, EvalFailed

        assert self._kernel is not None
        try:
            batch = self._batches.batch(planned, sampled)
            return self._kernel.collect(self._kernel.issue(batch))
        except (BuildFailed, EvalFailed) as error:
            what = f"the forward raises here, and did not on tape: {error}"
            raise Diverged(
                Divergence(
                    CRASH, planned.step, what, "StepDone", neighbours=planned.pieces.neighbours()
                )
            ) from error

    def _failed(self, record: StepFailed) -> None:
        """Bring the pages to where the failed step left them."""
        from kernel.batch import BuildFailed, EvalFailed

        assert self._kernel is not None
        planned = self._batches.take(record.step)
        if record.stage == VOID:
            return  # it was issued behind a step that lost the pages, and went with them
        if record.stage != BUILD:
            self._kernel.reset_pages()
        elif planned.pieces.seqs:
            # Its copies stand; whatever else is written here lies behind every offset. A state
            # does not: pieces that would go on from one are left out.
            try:
                batch = self._batches.batch(planned, None)
                if has_state(self._kernel.geometry):
                    batch = structs.replace(batch, pieces=())
                self._kernel.collect(self._kernel.issue(batch))
                if batch.pieces:
                    self._built_here.append(record.step)
            except BuildFailed:
                return
            except EvalFailed as error:
                raise Unusable(f"step {record.step} fails at eval here: {error}") from error

    def _compare(self, record: StepDone, pieces: Pieces, result: StepResult) -> None:
        if not self._as_seen(record.observation, result.observation):
            self._observation(record, pieces, result)
        if result.shadow.found != record.shadow.found:
            it = result.shadow.findings[0] if result.shadow.findings else None
            what = f"{result.shadow.found} rows are wrong here, {record.shadow.found} on tape"
            if it is not None:
                what += f"; the first: position {it.position} holds {tag_text(it.found)}"
            self._raise(CONTENT, record, pieces, -1 if it is None else _place(pieces, it.seq), what)
        if result.shadow.checked != record.shadow.checked and not self._built_here:
            # A build that failed on tape and not here is one more step for the sanitizer here.
            what = (
                f"the sanitizer compared {result.shadow.checked} rows here, and "
                f"{record.shadow.checked} on tape"
            )
            self._raise(CONTENT, record, pieces, -1, what)
        columns = zip(
            record.sampled, record.tokens, record.logits, record.margins,
            result.tokens, result.logits, result.margins, strict=True,
        )  # fmt: skip
        for piece, token, logit, margin, here, logit_here, margin_here in columns:
            if self._options.only not in (None, pieces.seqs[piece]):
                continue
            self._tokens += 1
            values = (
                Values("token", token, None, here),
                Values("logit of the token", logit, None, logit_here),
                Values("margin of the top two", margin, None, margin_here),
            )
            if self._exact:
                self._exactly(record, pieces, piece, values)
            else:
                self._nearly(record, pieces, piece, values)

        self._compare_scores(record, pieces, result)

    def _compare_scores(self, record: StepDone, pieces: Pieces, result: StepResult) -> None:
        """Log-probabilities of prompt tokens: equal, or within the margin on another device."""
        if result.scored != record.scored or len(record.scored) != len(record.scores):
            here, tape = len(result.scored), len(record.scored)
            what = f"{here} prompt tokens were scored here, {tape} on tape, or of other sequences"
            self._raise(TOKEN, record, pieces, -1, what)
        columns = zip(record.scored, record.scores, result.score_column, strict=True)
        for piece, score, here_score in columns:
            if self._options.only not in (None, pieces.seqs[piece]):
                continue
            self._scores += 1
            off = abs(score - here_score)
            self._largest = max(self._largest, off)
            if off > (0.0 if self._exact else self._margin):
                what = f"a prompt token's log-probability is {here_score} here, {score} on tape"
                values = (Values("log-probability", score, None, here_score),)
                self._raise(TOKEN, record, pieces, piece, what, values)

    def _exactly(
        self, record: StepDone, pieces: Pieces, piece: int, values: tuple[Values, ...]
    ) -> None:
        for value in values:
            if value.recorded != value.observed:
                what = f"{value.name} {value.observed} here, {value.recorded} on tape"
                self._raise(TOKEN, record, pieces, piece, what, values)

    def _nearly(
        self, record: StepDone, pieces: Pieces, piece: int, values: tuple[Values, ...]
    ) -> None:
        token, logit, margin = values
        if token.recorded == token.observed:
            self._largest = max(
                self._largest, abs(_number(logit.recorded) - _number(logit.observed))
            )
            return
        if _number(margin.observed) < self._margin or _number(margin.recorded) < self._margin:
            self._excused += 1
            return
        what = f"token {token.observed} here, {token.recorded} on tape, and the margin is clear"
        self._raise(TOKEN, record, pieces, piece, what, values)

    def _as_seen(self, tape: Observation, here: Observation) -> bool:
        """Other kernels may read the offset once for queries and keys; modules do so twice."""
        if not self._exact and min(tape.offset_reads) > 0 < min(here.offset_reads):
            here = structs.replace(here, offset_reads=tape.offset_reads)
        return tape == here

    def _observation(self, record: StepDone, pieces: Pieces, result: StepResult) -> NoReturn:
        for name in type(record.observation).__struct_fields__:
            tape = getattr(record.observation, name)
            here = getattr(result.observation, name)
            if tape == here:
                continue
            piece = -1
            if name in ("starts", "rows", "visible", "tables") and len(tape) == len(here):
                piece = next(
                    at for at, pair in enumerate(zip(tape, here, strict=True)) if pair[0] != pair[1]
                )
                tape, here = tape[piece], here[piece]
            what = f"the caches saw {name} {here} here, {tape} on tape"
            self._raise(OBSERVATION, record, pieces, piece, what, (Values(name, tape, None, here),))
        raise AssertionError("equal observations")

    def _raise(
        self,
        kind: str,
        record: StepDone,
        pieces: Pieces,
        piece: int,
        what: str,
        values: tuple[Values, ...] = (),
    ) -> NoReturn:
        seq = pieces.seqs[piece] if piece >= 0 else -1
        raise Diverged(
            Divergence(
                kind=kind,
                step=record.step,
                summary=what,
                record="StepDone",
                sequence=seq,
                values=values,
                last_events=self._fold.history.of(seq) if seq >= 0 else (),
                neighbours=pieces.neighbours(),
            )
        )


def _place(pieces: Pieces, seq: int) -> int:
    return pieces.seqs.index(seq) if seq in pieces.seqs else -1


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
