"""The depths that run a model again: over the fake kernel, and over a tiny random llama."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kernel.batch import Batch, BuildFailed
from kernel.blas import load_blas
from kernel.fake import Failure, FakeClock, FakeKernel
from replay import forward, models, reference
from replay.divergence import CONTENT, CRASH, OBSERVATION, TOKEN
from replay.errors import Unusable
from replay.models import Loaded
from replay.run import CLEAN, FORWARD, REFERENCE, Options, Outcome, replay
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Checkpoint,
    Gap,
    Header,
    Parameters,
    Record,
    StepDone,
    StepFailed,
)

from .sim import TIGHT, MemoryCapture, Sim, header, prompts
from .tampering import changed, first_step, with_item, write
from .tapes import golden


def fake_kernel(**options: Any) -> FakeKernel:
    return FakeKernel(TIGHT, end_token=7, **options)


@pytest.fixture
def on_fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the forward depth run on a given kernel."""

    def use(kernel: object, exact: bool = True, margin: float = 0.05) -> None:
        loaded = Loaded(None, exact, margin, "another device")  # type: ignore[arg-type]
        monkeypatch.setattr(forward, "load", lambda *_: loaded)
        monkeypatch.setattr(forward, "kernel_for", lambda *_: kernel)

    return use


def run(folder: Path, records: list[Record], depth: str = FORWARD, **options: Any) -> Outcome:
    return replay(write(folder, records), Options(depth=depth, **options))


def a_decode() -> int:
    return first_step(
        golden.records(), lambda r: isinstance(r, StepDone) and r.observation.rows[:3] == (1, 1, 1)
    )


def test_a_run_with_failed_steps_runs_again_bit_for_bit(tmp_path: Path, on_fake: Any) -> None:
    kernel = fake_kernel()
    on_fake(kernel)
    outcome = run(tmp_path, golden.records())
    assert outcome.divergence is None
    assert kernel.resets == 1
    assert outcome.exit_code == CLEAN
    sampled = sum(len(r.tokens) for r in golden.records() if isinstance(r, StepDone))
    assert outcome.figures["tokens sampled again"] == sampled > 80


def test_steps_that_failed_are_named_and_builds_that_do_not_fail_here_are_counted(
    tmp_path: Path, on_fake: Any
) -> None:
    built = [r for r in golden.records() if isinstance(r, StepFailed) and r.stage == "build"]
    failed = next(r for r in golden.records() if isinstance(r, StepFailed))
    on_fake(fake_kernel())
    outcome = run(tmp_path, golden.records())
    said = f"the first, step {failed.step}, at {failed.stage}: {failed.error}"
    assert any(note.endswith(said) for note in outcome.notes)
    here = outcome.figures["failed builds that do not fail here"]
    assert here == f"{len(built)}, the first in step {built[0].step}"
    on_fake(fake_kernel(fail={r.step: Failure("build") for r in built}))
    assert "failed builds that do not fail here" not in run(tmp_path, golden.records()).figures


@pytest.mark.parametrize("field", ["tokens", "logits", "margins"])
def test_another_token_or_fingerprint_diverges_at_its_step_and_sequence(
    tmp_path: Path, on_fake: Any, field: str
) -> None:
    on_fake(fake_kernel())
    place = a_decode()
    record: Any = golden.records()[place]
    column = getattr(record, field)
    wrong = with_item(column, 1, column[1] + 1)
    outcome = run(tmp_path, changed(golden.records(), place, **{field: wrong}))
    found = outcome.divergence
    assert found is not None
    assert (found.kind, found.step) == (TOKEN, record.step)
    assert found.sequence == found.neighbours[1].sequence
    (value,) = [it for it in found.values if it.recorded == wrong[1]]
    assert value.observed == column[1]


@pytest.mark.parametrize(("margin", "excused"), [(0.0, 0), (1.1, 1)])
def test_elsewhere_a_flip_is_excused_below_the_margin_only_and_counted(
    tmp_path: Path, on_fake: Any, margin: float, excused: int
) -> None:
    on_fake(fake_kernel(), exact=False, margin=margin)
    records = golden.records()
    place = max(at for at, r in enumerate(records) if isinstance(r, StepDone) and r.tokens)
    tokens: Any = getattr(records[place], "tokens")  # noqa: B009
    outcome = run(tmp_path, changed(records, place, tokens=with_item(tokens, 0, tokens[0] + 1)))
    assert (outcome.divergence is None) == bool(excused)
    assert outcome.figures["excused flips"] == excused


def test_a_kernel_that_sees_other_lengths_is_an_observation(tmp_path: Path, on_fake: Any) -> None:
    class Ahead(FakeKernel):
        def collect(self, ticket: Any) -> Any:
            result = super().collect(ticket)
            seen = result.observation
            starts = with_item(seen.starts, 0, seen.starts[0] + 1)
            return structs.replace(result, observation=structs.replace(seen, starts=starts))

    on_fake(Ahead(TIGHT, end_token=7))
    found = run(tmp_path, golden.records()).divergence
    assert found is not None
    assert (found.kind, found.step, found.sequence) == (OBSERVATION, 1, 0)
    assert "saw starts 1 here, 0 on tape" in found.summary


def test_a_kernel_that_loses_rows_is_content(tmp_path: Path, on_fake: Any) -> None:
    class Forgets(FakeKernel):
        def issue(self, batch: Batch) -> Any:
            if batch.step == 6:
                self.reset_pages()
            return super().issue(batch)

    on_fake(Forgets(TIGHT, end_token=7))
    found = run(tmp_path, golden.records()).divergence
    assert found is not None
    assert (found.kind, found.step) == (CONTENT, 6)
    assert "a row that was never written" in found.summary


def test_a_sanitizer_that_compares_other_rows_than_on_tape_is_content(
    tmp_path: Path, on_fake: Any
) -> None:
    """Findings alone do not tell a sanitizer that looks from one that does not; how many rows it
    compares by its edges only the kernel knows.
    """
    sim = Sim(TIGHT, sanitize="edges")
    for prompt in prompts(4):
        sim.submit(prompt)
    sim.run()
    first, *rest = sim.capture.records
    records: list[Record] = [structs.replace(first, sanitize="edges"), *rest]
    place = first_step(
        records, lambda r: isinstance(r, StepDone) and r.shadow.checked > len(r.offsets)
    )
    done: Any = records[place]
    fewer = structs.replace(done.shadow, checked=done.shadow.checked - 1)
    on_fake(FakeKernel(TIGHT, sanitize="edges"))
    assert run(tmp_path, records).divergence is None
    on_fake(FakeKernel(TIGHT, sanitize="edges"))
    found = run(tmp_path, changed(records, place, shadow=fewer)).divergence
    assert found is not None
    assert (found.kind, found.step) == (CONTENT, done.step)
    assert f"{done.shadow.checked} rows here, and {fewer.checked} on tape" in found.summary


def test_a_forward_that_raises_here_is_a_crash(tmp_path: Path, on_fake: Any) -> None:
    class Raises(FakeKernel):
        def issue(self, batch: Batch) -> Any:
            if batch.step == 5:
                raise BuildFailed("no memory")
            return super().issue(batch)

    on_fake(Raises(TIGHT))
    found = run(tmp_path, golden.records()).divergence
    assert found is not None
    assert (found.kind, found.step) == (CRASH, 5)
    assert "no memory" in found.summary


def test_what_cannot_fill_the_pages_is_refused_and_until_stops_before_it(
    tmp_path: Path, on_fake: Any
) -> None:
    records = golden.records()
    start = next(record for record in records if isinstance(record, Checkpoint))
    on_fake(fake_kernel())
    with pytest.raises(Unusable, match="has a gap"):
        run(tmp_path, [*records[:20], Gap(3, "full"), start])
    with pytest.raises(Unusable, match="does not begin at the first step"):
        run(tmp_path, [records[0], structs.replace(start, step=4), *records[2:]])


POLICY = Policy(
    max_batch_tokens=48, max_running=8, prefill_chunk=16, prefill_tile=8, context_tokens=64
)


@functools.cache
def tiny() -> Any:
    """A tiny random llama; BLAS comes before MLX."""
    load_blas()
    from kernel.tiny import tiny_llama

    return tiny_llama(seed=3)


def tiny_kernel() -> Any:
    tiny()
    from kernel.model_kernel import ModelKernel

    return ModelKernel(tiny(), Geometry(8, (Group("full", 24),)), sanitize="full", check=False)


@functools.cache
def tiny_records() -> tuple[Record, ...]:
    """Greedy and sampled requests over real pages, some with a shared prefix."""
    kernel, capture = tiny_kernel(), MemoryCapture()
    pool = kernel.geometry
    head = structs.replace(
        header(pool, POLICY), device=models.device_name(), blas=load_blas(), layers=3
    )
    engine = Engine(lambda: Parts(kernel, POLICY, capture, head), clock=FakeClock())
    engine.open()
    for number, prompt in enumerate(prompts(6, seed=2)):
        parameters = Parameters(6, temperature=0.9 * (number % 2), top_k=20, seed=number)
        engine.submit(Submission(prompt, parameters), lambda update: None)
    while engine.step():
        pass
    engine.stop()
    return tuple(capture.records)


@pytest.fixture
def on_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both deep depths load the tiny llama."""
    loaded = Loaded(SimpleNamespace(model=tiny(), tokenizer=None), True, 0.05, "")  # type: ignore[arg-type]
    monkeypatch.setattr(forward, "load", lambda *_: loaded)
    monkeypatch.setattr(reference, "load", lambda *_: loaded)


@pytest.mark.usefixtures("on_tiny")
def test_a_tape_of_other_kernels_is_compared_within_the_margin_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *rest = tiny_records()
    assert isinstance(head, Header)
    here = {"attention": "tables (amx); more is left out", "native": "amx 12345678"}
    monkeypatch.setattr(forward, "kernel_for", lambda *_: Computing(tiny_kernel(), here))

    def rule(**told: str) -> object:
        outcome = run(tmp_path, [structs.replace(head, capabilities=told), *rest])
        assert outcome.divergence is None
        return outcome.figures["rule"]

    assert rule(attention="tables (amx); else", native="amx 12345678") == (
        "equal bit for bit (same device and BLAS)"
    )
    assert rule(attention="tables (avx512)", native="avx512 12345678") == (
        "margin 0.05 (attention here by tables (amx); the tape's by tables (avx512))"
    )
    assert rule(attention="tables (amx)", native="amx 87654321") == (
        "margin 0.05 (products here by amx 12345678; the tape's by amx 87654321)"
    )
    assert rule() == "margin 0.05 (attention here by tables (amx); the tape's by gather)"


@pytest.mark.usefixtures("on_tiny")
def test_a_tape_of_a_gather_with_narrow_products_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *rest = tiny_records()
    assert isinstance(head, Header)
    monkeypatch.setattr(forward, "kernel_for", lambda *_: Computing(tiny_kernel(), {}))
    told = structs.replace(head, capabilities={"native": "amx 12345678"})
    rule = run(tmp_path, [told, *rest]).figures["rule"]
    assert rule == "margin 0.05 (products here by MLX's operations; the tape's by amx 12345678)"


@pytest.mark.parametrize(("exact", "found"), [(True, OBSERVATION), (False, "")])
def test_other_kernels_may_read_the_offset_another_number_of_times(
    tmp_path: Path, on_fake: Any, exact: bool, found: str
) -> None:
    class Twice(FakeKernel):
        def collect(self, ticket: Any) -> Any:
            result = super().collect(ticket)
            reads = tuple(2 * it for it in result.observation.offset_reads)
            seen = structs.replace(result.observation, offset_reads=reads)
            return structs.replace(result, observation=seen)

    on_fake(Twice(TIGHT, end_token=7), exact=exact)
    divergence = run(tmp_path, golden.records()).divergence
    assert ("" if divergence is None else divergence.kind) == found


class Computing:
    """A kernel that says what it computes by."""

    def __init__(self, kernel: Any, computing: dict[str, str]) -> None:
        self._kernel, self.computing = kernel, computing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@pytest.mark.usefixtures("on_tiny")
def test_a_real_model_is_clean_at_both_depths(tmp_path: Path) -> None:
    records = list(tiny_records())
    sampled = sum(len(r.tokens) for r in records if isinstance(r, StepDone))
    again = run(tmp_path, records)
    assert (again.exit_code, again.divergence) == (CLEAN, None)
    assert again.figures["tokens sampled again"] == sampled > 30
    alone = run(tmp_path, records, REFERENCE)
    assert (alone.exit_code, alone.divergence) == (CLEAN, None)
    assert alone.figures["tokens judged"] == sampled
    assert alone.figures["requests run alone"] == 6
    assert 0 < float(alone.figures["largest difference of a logit"]) < 0.01


@pytest.mark.usefixtures("on_tiny")
@pytest.mark.parametrize("seq", [0, 1])
def test_a_token_of_another_context_diverges_from_the_reference_at_its_step(
    tmp_path: Path, seq: int
) -> None:
    """seq 0 is greedy, seq 1 is sampled; their prompts end in one step."""
    records = list(tiny_records())
    place = first_step(
        records,
        lambda r: (
            isinstance(r, StepDone)
            and [s for s in range(len(r.sampled)) if pieces(records, r)[r.sampled[s]] == seq] != []
        ),
    )
    record: Any = records[place]
    at = [pieces(records, record)[piece] for piece in record.sampled].index(seq)
    other = (record.tokens[at] + 11) % 97
    broken = changed(records, place, tokens=with_item(record.tokens, at, other))
    found = run(tmp_path, broken, REFERENCE).divergence
    assert found is not None
    assert (found.kind, found.step, found.sequence) == (TOKEN, record.step, seq)
    assert f"says token {record.tokens[at]}, the tape {other}" in found.summary


@pytest.mark.usefixtures("on_tiny")
def test_a_score_that_is_far_off_diverges_even_where_the_token_is_right(tmp_path: Path) -> None:
    records = list(tiny_records())
    place = first_step(records, lambda r: isinstance(r, StepDone) and len(r.tokens) > 1)
    record: Any = records[place]
    logits = with_item(record.logits, 1, record.logits[1] + 2.0)
    found = run(tmp_path, changed(records, place, logits=logits), REFERENCE).divergence
    assert found is not None
    assert (found.kind, found.step) == (TOKEN, record.step)
    assert "the reference scores token" in found.summary


def pieces(records: list[Record], done: StepDone) -> list[int]:
    """The sequences of a step's batch, in order."""
    found: list[int] = []
    for record in records:
        if type(record).__name__ == "StepPlanned" and getattr(record, "step", 0) == done.step:
            for event in getattr(record, "events", ()):
                if type(event).__name__ == "AppendedEach":
                    found += event.seqs
                elif type(event).__name__ == "Appended" and event.seq not in found:
                    found.append(event.seq)
    return found


def test_another_model_than_the_tapes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_blas()
    import kernel.weights

    other = SimpleNamespace(digests={"weights": "other"})
    monkeypatch.setattr(kernel.weights, "load_model", lambda *_, **__: other)
    head = header(TIGHT, POLICY)
    with pytest.raises(Unusable, match="is not the model of the tape"):
        models.load(head, Options(depth=FORWARD, model="x"))
    with pytest.raises(Unusable, match="redacted"):
        models.load(structs.replace(head, redacted=True), Options(depth=FORWARD))
