"""Rows of few bits in pages: what they say, what they take, and how they are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from kernel import families  # noqa: E402
from kernel.errors import ModelError  # noqa: E402
from kernel.families import Family  # noqa: E402
from kernel.layout import ALONE, GATHERED, PACKED, Way, look  # noqa: E402
from kernel.pages import block_bytes  # noqa: E402
from kernel.quantised import BITS, Code, quantised  # noqa: E402
from kernel.weights import load_model  # noqa: E402
from replay.cli import main as replay_command  # noqa: E402
from replay.reader import Tape  # noqa: E402
from server.settings import SettingsError, load_settings  # noqa: E402
from statemachine.records import Header  # noqa: E402

from .paged import Runner, random_tokens  # noqa: E402
from .real_server import cached_of, serving, text_of, tiny_folder  # noqa: E402
from .tiny_families import family_config, family_weights  # noqa: E402
from .tiny_models import tiny_config, tiny_weights, write_folder  # noqa: E402

FAR = {8: 0.02, 4: 0.25}
"""Bound of a logit's difference from float pages; the logits have a standard deviation of 0.49."""
PROMPT, ANSWER = 150, 30
TOKENS = random_tokens(3, PROMPT + ANSWER, 250)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny llama whose heads are 32 wide."""
    config = tiny_config(hidden_size=128, head_dim=32, max_position_embeddings=512)
    folder = write_folder(tmp_path_factory.mktemp("model"), config, tiny_weights(config))
    return load_model(str(folder)).model


def logits(model: Any, way: Way, bits: int, chunk: int = PROMPT) -> np.ndarray:
    """Of the prompt's last row, and each row of the answer."""
    layout = look(model, way)
    runner = Runner(model, layout=quantised(layout, bits) if bits else layout)
    rows: list[np.ndarray] = []
    for first in range(0, PROMPT, chunk):
        piece = runner.book.append(0, TOKENS[first : min(PROMPT, first + chunk)])
        rows = [runner.run(piece)]
    rows += [runner.run(runner.book.append(0, [token])) for token in TOKENS[PROMPT:]]
    return np.concatenate(rows)


@pytest.mark.parametrize(("dim", "group"), [(64, 64), (96, 32), (128, 64), (32, 32)])
@pytest.mark.parametrize("bits", BITS)
def test_words_stand_for_the_numbers_that_mlx_quantises_to(bits: int, dim: int, group: int) -> None:
    code = Code(dim, bits, group, mx.float32)
    rows = mx.random.normal((7, 3, dim), key=mx.random.key(dim))
    words = code.encode(rows)
    assert (words.shape, words.dtype) == ((7, 3, code.words), mx.uint32)
    packed = mx.quantize(rows, group_size=group, bits=bits)
    same = mx.dequantize(*packed, group_size=group, bits=bits)
    assert np.array_equal(np.array(code.decode(words)), np.array(same))
    assert np.array_equal(np.array(code.encode(rows[3:4])), np.array(words[3:4]))


def test_rows_of_no_width_have_no_words() -> None:
    code = Code(0, 8, 64, mx.float32)
    assert code.words == 0
    assert code.encode(mx.zeros((5, 1, 0))).shape == (5, 1, 0)
    assert code.decode(mx.zeros((5, 1, 0), mx.uint32)).shape == (5, 1, 0)


@pytest.mark.parametrize("way", [PACKED, GATHERED, ALONE], ids=lambda way: way.name)
@pytest.mark.parametrize("bits", BITS)
def test_logits_stay_within_a_bound_of_those_of_float_pages(
    model: Any, way: Way, bits: int
) -> None:
    exact, rounded = logits(model, way, 0), logits(model, way, bits)
    far = float(np.abs(exact - rounded).max())
    assert FAR[bits] / 100 < far < FAR[bits]


@pytest.mark.parametrize("bits", BITS)
def test_logits_are_those_of_mlx_lms_own_quantised_caches(model: Any, bits: int) -> None:
    caches = [cache.to_quantized(32, bits) for cache in make_prompt_cache(model)]
    rows = [model(mx.array([TOKENS[:PROMPT]]), cache=caches)[0, -1]]
    rows += [model(mx.array([[token]]), cache=caches)[0, -1] for token in TOKENS[PROMPT:]]
    own = np.array(mx.stack(rows))
    np.testing.assert_allclose(logits(model, PACKED, bits), own, atol=1e-4)


def test_a_block_takes_as_many_bytes_as_its_words(model: Any) -> None:
    layout = look(model)
    # 2 layers, 2 heads, K and V of 32 numbers; one group: a scale and a bias, 4 bytes each.
    rows = 4 * 2 * 2 * 2
    assert block_bytes(layout.shapes, 0, 4) == rows * 32 * 4
    assert block_bytes(quantised(layout, 8).shapes, 0, 4) == rows * (32 + 8)
    assert block_bytes(quantised(layout, 4).shapes, 0, 4) == rows * (16 + 8)
    runner = Runner(model, layout=quantised(layout, 4), num_blocks=10)
    assert runner.pages.nbytes == 10 * rows * (16 + 8)


def test_heads_that_cannot_be_cut_into_groups_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path / "narrow", config, tiny_weights(config))
    said = (
        "layer 0 has heads of 16 and 16, which are no multiples of 32, so its rows cannot be "
        "quantised: leave kv_bits out"
    )
    with pytest.raises(ModelError) as error, serving(folder, kv_bits=8):
        pass
    assert str(error.value) == said


def test_a_model_over_its_own_caches_has_no_rows_to_quantise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = Family(None, "served over caches of its own")
    monkeypatch.setattr(families, "family_of", lambda _: owned)
    folder = tiny_folder(tmp_path)
    with (
        pytest.raises(SettingsError, match="leave num_blocks, num_slots, kv_memory and kv_b"),
        serving(folder, kv_bits=8),
    ):
        pass


def test_other_bits_than_8_and_4_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"^kv_bits must be 8 or 4, not 3$"):
        load_settings({"kv_bits": "3"}, {})
    assert load_settings({"kv_bits": "4"}, {}).kv_bits == 4
    assert load_settings({}, {}).kv_bits is None


@pytest.mark.parametrize(("family", "reference"), [("mistral3", 0), ("exaone4", 2)])
def test_windows_have_a_reference_where_mlx_lms_caches_hold_all_rows(
    family: str, reference: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = family_config(family)
    config.get("text_config", config)["head_dim"] = 32
    folder = write_folder(tmp_path / "windows", config, family_weights(config))
    tape = tmp_path / "tape.log"
    with serving(folder, kv_bits=8, num_blocks=60, capture=str(tape), prefill_chunk=16) as it:
        it.ask("more than a window holds", max_tokens=24)
        it.idle()
    replayed = [
        replay_command([str(tape), "--depth", depth, "--model", str(folder)])
        for depth in ("fold", "plan", "forward", "reference")
    ]
    assert replayed == [0, 0, 0, reference]
    refused = "mlx-lm has no quantised caches of this model's kind" in capsys.readouterr().err
    assert refused is bool(reference)


def test_kept_prefixes_are_found_by_servers_of_the_same_bits_only(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", hidden_size=128, head_dim=32)
    store = str(tmp_path / "store")

    def found(bits: int | None) -> int:
        with serving(folder, kv_bits=bits, num_blocks=100, prefix_store=store) as it:
            answer = it.ask("a prompt that is longer than one block, or than two of them")
            it.idle()
        return cached_of(answer)

    assert [found(bits) > 0 for bits in (8, 4, None, 8, 4, None)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("bits", BITS)
def test_a_server_with_few_bits_is_replayed_without_divergence_at_all_depths(
    tmp_path: Path, bits: int
) -> None:
    folder = tiny_folder(tmp_path / "tiny", hidden_size=128, head_dim=32)
    tape = tmp_path / "tape.log"
    with serving(folder, kv_bits=bits, num_blocks=100, capture=str(tape), sanitize="full") as it:
        long = "a prompt that is longer than one block, or than two of them"
        first = it.ask(long)
        again = it.ask(long)
        assert text_of(first) == text_of(again)
        assert (cached_of(first), cached_of(again) > 16) == (0, True)
        it.idle()
    head = next(record for record in Tape(str(tape)) if isinstance(record, Header))
    assert head.kv_bits == bits
    assert head.geometry.identity == f"{head.digests['weights']}, {bits}-bit rows"
    for depth in ("fold", "plan", "forward", "reference"):
        assert replay_command([str(tape), "--depth", depth, "--model", str(folder)]) == 0
