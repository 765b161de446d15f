"""Draft models with real forwards: a model guesses for itself, and a random one for SmolLM2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kernel.blas import load_blas
from replay.cli import main as replay_command
from replay.reader import read_header
from replay.stat import stat
from server import Engine
from statemachine.records import Header

load_blas()  # before anything imports mlx

from kernel.errors import ModelError  # noqa: E402
from kernel.weights import load_tokenizer  # noqa: E402
from server.settings import SettingsError  # noqa: E402

from .real_server import SMOLLM2, tiny_folder  # noqa: E402
from .tiny_architectures import architecture_config  # noqa: E402
from .tiny_families import family_weights  # noqa: E402
from .tiny_models import tiny_config, tiny_weights, write_folder  # noqa: E402

PROMPTS = [
    "The quick brown fox",
    "One two three four one two three four one",
    "Name three colours.",
    "To be or not to be, that is",
]
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7}


def answers(
    model: str | Path,
    draft: str | Path | None = None,
    tape: Path | None = None,
    tokens: int = 16,
    **settings: Any,
) -> list[list[str]]:
    """Answers of both kinds, all prompts at once: greedy ones, then drawn ones."""
    given = settings | ({} if tape is None else {"capture": str(tape)})
    if draft is not None:
        given["draft_model"] = str(draft)
    with Engine.load(str(model), **given) as engine:
        return [
            [it.text for it in engine.generate(PROMPTS, max_tokens=tokens, **asked)]
            for asked in ({"temperature": 0}, DRAWN)
        ]


def replays(tape: Path, model: str | Path, draft: str | Path) -> list[int]:
    """Exit codes of all depths that know of guesses."""
    where = ["--model", str(model), "--draft-model", str(draft)]
    return [
        replay_command([str(tape), "--depth", depth, *where])
        for depth in ("fold", "plan", "forward")
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary, whose logits are wider: they are padded."""
    config = tiny_config(vocab_size=320, num_hidden_layers=1, hidden_size=32)
    path = tmp_path_factory.mktemp("models") / "other"
    return write_folder(path, config, tiny_weights(config, seed=8))


def test_a_model_that_guesses_for_itself_is_always_right(tiny: Path, tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    assert answers(tiny, tiny, tape) == answers(tiny)
    report = stat(str(tape))
    assert report.acceptance_rate == 1.0
    assert report.rows.guessed > 60
    assert replays(tape, tiny, tiny) == [0, 0, 0]


def test_a_model_that_guesses_badly_changes_no_answer(
    tiny: Path, other: Path, tmp_path: Path
) -> None:
    tape = tmp_path / "tape"
    settings = {"num_blocks": 24, "max_batch_tokens": 48, "draft_tokens": 3}
    assert answers(tiny, other, tape, **settings) == answers(tiny)
    report = stat(str(tape))
    assert report.acceptance_rate is not None
    assert report.acceptance_rate < 0.5
    assert report.rows.guessed > 60
    assert replays(tape, tiny, other) == [0, 0, 0]


def test_another_draft_model_than_the_tapes_is_refused_at_forward(
    tiny: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tmp_path / "tape"
    answers(tiny, tiny, tape)
    assert replays(tape, tiny, other) == [0, 0, 2]
    assert "is not the model of the tape" in capsys.readouterr().err


@pytest.mark.model
def test_smollm2_says_the_same_with_a_random_model_and_with_itself_to_guess_for_it(
    tmp_path: Path,
) -> None:
    random = tmp_path / "random"
    tokenizer, _ = load_tokenizer(SMOLLM2)
    config = tiny_config(vocab_size=tokenizer.vocab_size, hidden_size=32)
    write_folder(random, config, tiny_weights(config))
    tokenizer._core.save(str(random / "tokenizer.json"))
    small: dict[str, Any] = {"tokens": 8, "kv_memory": "64MiB"}
    plain = answers(SMOLLM2, **small)
    assert answers(SMOLLM2, random, tmp_path / "random.log", **small) == plain
    assert answers(SMOLLM2, SMOLLM2, tmp_path / "itself.log", draft_tokens=3, **small) == plain
    assert stat(str(tmp_path / "random.log")).acceptance_rate == pytest.approx(0.0, abs=0.02)
    assert stat(str(tmp_path / "itself.log")).acceptance_rate == 1.0
    for name in ("random.log", "itself.log"):
        assert replay_command([str(tmp_path / name), "--depth", "plan"]) == 0


def test_a_draft_model_of_another_vocabulary_is_refused_with_a_token_that_differs(
    tiny: Path, other: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "swapped"
    shutil.copytree(other, folder)
    path = folder / "tokenizer.json"
    held = json.loads(path.read_text())
    vocab = held["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(held))
    with pytest.raises(ModelError) as caught:
        Engine.load(str(tiny), draft_model=str(folder))
    assert str(caught.value) == (
        f"swapped cannot guess for tiny, for their vocabularies differ: token 'A' has id "
        f"{vocab['B']} in tiny and id {vocab['A']} in swapped; give a draft model with the same "
        "tokenizer"
    )


def folder_of(path: Path, name: str) -> Path:
    """An architecture with random weights and the tiny models' vocabulary."""
    config = architecture_config(name)
    return write_folder(path, config, family_weights(config))


def test_a_model_that_keeps_states_verifies_guesses_and_makes_none(
    tiny: Path, tmp_path: Path
) -> None:
    states = folder_of(tmp_path / "states", "lfm2")
    tape = tmp_path / "tape"
    assert answers(states, tiny, tape, lookahead=False) == answers(states)
    assert stat(str(tape)).rows.guessed > 30
    assert replays(tape, states, tiny) == [0, 0, 0]
    with pytest.raises(SettingsError, match="states cannot be a draft model: recurrent state"):
        Engine.load(str(tiny), draft_model=str(states))


def test_a_model_over_caches_of_its_own_neither_guesses_nor_verifies(
    tiny: Path, tmp_path: Path
) -> None:
    owned = folder_of(tmp_path / "owned", "deepseek_v41")
    with pytest.raises(SettingsError, match="owned cannot be a draft model: the model's own"):
        Engine.load(str(tiny), draft_model=str(owned))
    with pytest.raises(SettingsError, match=r"owned verifies no guesses: .*leave draft_model out"):
        Engine.load(str(owned), draft_model=str(tiny))


def test_a_pool_has_room_for_the_draft_models_rows_too(
    tiny: Path, other: Path, tmp_path: Path
) -> None:
    def header(name: str, **settings: Any) -> Header:
        with Engine.load(str(tiny), kv_memory="1MiB", capture=str(tmp_path / name), **settings):
            pass
        return read_header(str(tmp_path / name))

    alone, both = header("alone"), header("both", draft_model=str(other))
    assert alone.draft is None
    assert both.draft is not None
    (blocks,), (fewer,), (beside,) = (
        [group.num_blocks for group in geometry.groups]
        for geometry in (alone.geometry, both.geometry, both.draft.geometry)
    )
    # 8 KiB a block in two layers of two heads of 16, and 2 beside in one of two heads of 8.
    assert (blocks, fewer, beside) == (128, 102, 102)
    assert (both.draft.model, both.draft.layers, both.draft.vocab_size) == ("other", 1, 259)
