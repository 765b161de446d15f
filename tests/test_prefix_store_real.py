"""Kept prefixes over a real model: rows out of the pages, into a file, and into other pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from kernel.block_arrays import block_spec, to_device, to_host
from kernel.block_io import BlockRows
from kernel.pages import LayerShape, Pages
from replay.cli import main as replay_command
from replay.errors import Unusable
from replay.run import Options
from replay.run import replay as run_replay
from server.build import build_engine
from server.kept import check_storable
from server.kept_file import StoreError
from server.settings import Settings, SettingsError, load_settings
from statemachine.geometry import Geometry, Group

from .real_server import Served, cached_of, replayed, serving, text_of, tiny_folder

QUESTION = "Tell me of the sea, of its tides and of the moon, in as many words as it takes."
OTHER = "Count the stones of the shore, one after the other, and say how many these are."
SMALL: dict[str, Any] = {"num_blocks": 16, "block_size": 16, "sanitize": "full"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def _metric(served: Served, name: str) -> float:
    text = httpx.get(served.server.url + "/metrics").text
    (line,) = [it for it in text.splitlines() if it.startswith(f"mlxtape_{name}_total{{")]
    return float(line.split()[-1])


def test_a_later_server_answers_from_kept_rows_just_as_the_first(
    model: Path, tmp_path: Path
) -> None:
    tape, store = tmp_path / "tape.log", str(tmp_path / "store")
    with serving(model, prefix_store=store, **SMALL) as served:
        cold = served.ask(QUESTION)
        served.idle()
    with serving(model, prefix_store=store, capture=str(tape), **SMALL) as served:
        warm = served.ask(QUESTION)
        served.idle()
        loaded = _metric(served, "kept_blocks_loaded")
    assert cached_of(cold) == 0
    assert cached_of(warm) == 16 * loaded >= 64
    assert text_of(warm) == text_of(cold)
    assert replayed(tape) == [0, 0]
    assert run_replay(str(tape), Options("reference", model=str(model))).divergence is None


def test_forward_says_that_loaded_rows_are_not_on_tape(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape, store = tmp_path / "tape.log", str(tmp_path / "store")
    for _ in range(2):
        tape.unlink(missing_ok=True)
        with serving(model, prefix_store=store, capture=str(tape), **SMALL) as served:
            served.ask(QUESTION)
            served.idle()
    assert replay_command([str(tape), "--depth", "forward", "--model", str(model)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step 1 loads blocks that a prefix store kept, whose rows are not on tape" in said
    assert "--depth reference" in said


def test_rows_that_others_pushed_out_come_back(model: Path, tmp_path: Path) -> None:
    """A pool of two prompts; the third pushes the first out, with lookahead on."""
    tape = tmp_path / "tape.log"
    with serving(model, prefix_store=str(tmp_path / "store"), capture=str(tape), **SMALL) as served:
        first = served.ask(QUESTION)
        for number in range(3):
            served.ask(f"{number} {OTHER}")
        assert _metric(served, "kept_blocks_dropped") == 0
        again = served.ask(QUESTION)
        status = served.idle()
        assert _metric(served, "kept_blocks_loaded") > 0
    assert status["shadow_found"] == 0
    assert cached_of(again) >= 64
    assert text_of(again) == text_of(first)
    assert replayed(tape) == [0, 0]


def test_quantised_rows_are_kept_as_they_are_and_found_by_the_same_bits_only(
    tmp_path: Path,
) -> None:
    model = tiny_folder(tmp_path / "model", head_dim=32)
    store = str(tmp_path / "store")
    with serving(model, prefix_store=store, kv_bits=8, **SMALL) as served:
        cold = served.ask(QUESTION)
    with serving(model, prefix_store=store, **SMALL) as served:
        assert cached_of(served.ask(QUESTION)) == 0
    with serving(model, prefix_store=store, kv_bits=8, **SMALL) as served:
        warm = served.ask(QUESTION)
    assert cached_of(warm) >= 64
    assert text_of(warm) == text_of(cold)


def test_a_folder_that_others_can_write_stops_the_start(model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="can be written by other users"):
        build_engine(Settings(model=str(model), prefix_store=str(tmp_path), num_blocks=16))


@pytest.mark.parametrize("kind", [Group("window", 8, window=4), Group("opaque")])
def test_only_pools_that_keep_all_rows_have_a_store(kind: Group) -> None:
    with pytest.raises(StoreError, match=f"groups are full, {kind.kind}: leave it out"):
        check_storable(Geometry(groups=(Group(num_blocks=4), kind)))


def test_a_store_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(SettingsError, match="leave prefix_cache on"):
        load_settings({"prefix_store": "x", "prefix_cache": "false"}, {})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32])
def test_rows_come_back_bit_by_bit_in_every_dtype_of_pages(dtype: mx.Dtype) -> None:
    layers = (LayerShape(0, 2, 8, 4, dtype), LayerShape(0, 1, 6, 0, dtype))
    geometry = Geometry(4, (Group(num_blocks=5),))
    pages = Pages(geometry, layers)
    generator = np.random.default_rng(1)
    spec = block_spec(4, layers)
    assert {name: it.shape for name, it in spec.items()} == {
        "k.0": (4, 2, 8), "v.0": (4, 2, 4), "k.1": (4, 1, 6),
    }  # fmt: skip
    rows = [
        BlockRows({name: generator.bytes(it.nbytes) for name, it in spec.items()}, (1, 2, 3, 4))
        for _ in range(2)
    ]
    pages.write_blocks([3, 1], to_device(rows, spec, layers))
    back = to_host(pages.read_blocks([1, 3, 0]), [(), (), ()])
    assert [it.tensors for it in back[:2]] == [rows[1].tensors, rows[0].tensors]
    assert set(b"".join(back[2].tensors.values())) == {0}


def test_moving_blocks_copies_no_page_array() -> None:
    layers = (LayerShape(0, 4, 64, 64, mx.float32),)
    pages = Pages(Geometry(16, (Group(num_blocks=2048),)), layers)
    array_bytes = pages.nbytes // 2
    rows = to_host(pages.read_blocks([5, 6]), [(), ()])
    spec = block_spec(16, layers)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        pages.write_blocks([1, 2], to_device(rows, spec, layers))
        pages.read_blocks([3])
    assert mx.get_peak_memory() - before < array_bytes // 8
    assert mx.get_active_memory() - before < array_bytes // 8


def test_forward_runs_up_to_the_step_before_a_load(model: Path, tmp_path: Path) -> None:
    tape, store = tmp_path / "tape.log", str(tmp_path / "store")
    with serving(model, prefix_store=store, **SMALL) as served:
        served.ask(QUESTION)
    with serving(model, prefix_store=store, capture=str(tape), **SMALL) as served:
        served.ask(OTHER)
        served.idle()
        before = served.engine.next_step - 1
        served.ask(QUESTION)
        served.idle()
    outcome = run_replay(str(tape), Options("forward", model=str(model), until=before))
    assert outcome.divergence is None
    with pytest.raises(Unusable, match=f"step {before + 1} loads blocks .* use --until {before},"):
        run_replay(str(tape), Options("forward", model=str(model)))
