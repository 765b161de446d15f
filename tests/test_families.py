"""How every architecture of mlx-lm is served, as docs/families.md says, and each of them proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from kernel import attention, gathered, layout, probe, recurrent
from kernel.errors import ModelError
from kernel.families import STATE_WAYS, WAYS, family_of
from kernel.handles import HandleMisused
from server import cli
from server.families_command import architectures as told
from statemachine.events import Preempted, PrefixAdopted
from statemachine.geometry import FULL, RECURRENT, Group

from . import families  # first: it loads the BLAS before MLX
from .families import OWN_FAULTS
from .tiny_architectures import UNABLE, architecture_model, architectures
from .tiny_families import family_folder

TABLE = {line.name: line for line in told()}
SERVED = [name for name in architectures() if name not in UNABLE]
PAGED = [name for name in SERVED if TABLE[name].way != "opaque"]
STATEFUL = [name for name in SERVED if "recurrent" in TABLE[name].groups]
EVERY_WAY = {way.name: way for way in (*WAYS, *STATE_WAYS)}
WINDOWED = [
    name for name in SERVED if TABLE[name].way == "packed" and "window" in TABLE[name].groups
]
"""Others mask by windows themselves, whatever the pages hold."""


def test_the_table_has_every_architecture_of_mlx_lm_and_so_many_go_each_way() -> None:
    assert list(TABLE) == architectures()
    assert families.counts_of(told()) == {
        "added": 1,
        "alone": 2,
        "gathered": 3,
        "grouped": 1,
        "opaque": 1,
        "packed": 90,
        "single": 1,
        "split": 25,
        "untested": 2,
    }


def test_the_document_is_what_is_made_of_the_table() -> None:
    assert families.DOCUMENT.read_text() == families.document(told())


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_each_architecture_is_served_as_the_table_says_and_says_what_mlx_lm_says(
    name: str, tmp_path: Path
) -> None:
    model = architecture_model(name)
    family = family_of(model)
    assert families.line_of(name, family) == TABLE[name]
    outcome = families.serve(model, family)
    scores = families.step_scores if name in OWN_FAULTS else families.full_scores
    assert families.wrong(model, outcome, scores) == ""
    assert families.replayed(outcome, tmp_path) == ""
    able = TABLE[name].able
    # What only keeps a window or a state holds few blocks, and leaves others soon evicted.
    full = "full" in TABLE[name].groups
    assert (outcome.count(PrefixAdopted) > int(full)) == ("share" in able)
    assert (outcome.count(Preempted) > 0) == (full and "batch" in able)


@pytest.mark.parametrize("name", OWN_FAULTS)
def test_where_mlx_lm_contradicts_itself_it_does(name: str) -> None:
    model, text = architecture_model(name), tuple(families.prompts()[0])
    steps = families.step_scores(model, text)
    if name == "olmo":
        with pytest.raises(ValueError, match="Cannot perform inplace addition"):
            families.full_scores(model, text)
        return
    full = families.full_scores(model, text)
    seen = np.isfinite(full)
    full, steps = full[seen], steps[seen]
    assert np.abs(full - steps).max() > 0.1 * np.abs(full).max()


@pytest.mark.parametrize("name", UNABLE)
def test_what_is_untested_says_why_and_is_in_no_better_way(name: str) -> None:
    assert (TABLE[name].way, TABLE[name].note) == ("untested", UNABLE[name])


def refusal(name: str, way: layout.Way = layout.PACKED) -> str:
    """What the probe says of a model that is called in one way."""
    model = architecture_model(name)
    found = layout.look(model, way)
    with pytest.raises((ModelError, HandleMisused)) as caught:
        probe.probe(model, found)
    return str(caught.value)


DIFFERS = "over pages it differs from mlx-lm's own caches by"


@pytest.mark.parametrize("name", WINDOWED)
def test_the_probe_refuses_a_window_that_is_dropped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = probe.small

    def unbounded(*arguments: Any) -> Any:
        pool = small(*arguments)
        groups = tuple(Group(FULL, group.num_blocks) for group in pool.groups)
        return structs.replace(pool, groups=groups)

    monkeypatch.setattr(probe, "small", unbounded)
    assert refusal(name).startswith(DIFFERS)


@pytest.mark.parametrize("name", ["qwen3", "gemma", "gpt2", "deepseek_v3", "gpt_bigcode", "jamba"])
def test_the_probe_refuses_a_table_that_is_turned_round(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = probe._sequence

    def turned(geometry: Any, seq: int, start: int, end: int) -> Any:
        sequence = right(geometry, seq, start, end)
        if start < 8:
            return sequence
        tables = tuple(table[::-1] for table in sequence.tables)
        return structs.replace(sequence, tables=tables)

    monkeypatch.setattr(probe, "_sequence", turned)
    assert refusal(name, EVERY_WAY[TABLE[name].way]).startswith(DIFFERS)


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_the_probe_refuses_sinks_that_are_not_heeded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *arguments: right(*arguments[:6]))
    assert refusal(name).startswith(DIFFERS)


@pytest.mark.parametrize("name", ["llama", "stablelm", "gemma3n"])
def test_the_probe_refuses_positions_that_are_those_of_another_sequence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = layout.PagedCache.offset.fget
    assert offset is not None
    monkeypatch.setattr(layout.PagedCache, "offset", property(lambda cache: offset(cache)[::-1]))
    assert refusal(name).startswith(DIFFERS)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "longcat_flash"])
def test_the_probe_refuses_gathered_rows_without_their_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered.GatheredCache, "make_mask", lambda *_, **__: None)
    assert refusal(name, layout.GATHERED).startswith(DIFFERS)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_probe_refuses_states_that_are_never_put_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "put_slots", lambda held, *_: held)
    assert refusal(name, layout.SPLIT).startswith(DIFFERS)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_probe_refuses_states_that_are_those_of_another_sequence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = probe.build

    def swapped(*arguments: Any) -> Any:
        metadata = right(*arguments)
        if metadata.start.all():
            metadata.state_reads[:] = metadata.state_reads[:, ::-1].copy()
        return metadata

    monkeypatch.setattr(probe, "build", swapped)
    assert refusal(name, layout.SPLIT).startswith(DIFFERS)


def test_the_layout_has_what_every_state_is_and_how_many_bytes_a_slot_takes() -> None:
    found = layout.look(architecture_model("granitemoehybrid"), layout.SPLIT)
    assert [slot.state for slot in layout.leaves(found.slots)] == [0, None, 1, None]
    assert [slot.layer for slot in layout.leaves(found.slots)] == [None, 0, None, 1]
    sizes = [[kind and kind.shape for kind in state.arrays] for state in found.states]
    assert sizes == [[(3, 160), (8, 16, 8)]] * 2
    assert found.slot_bytes == 4 * 2 * (3 * 160 + 8 * 16 * 8)
    full, slots = found.groups(9, 4)
    assert (full, slots) == (Group(FULL, 9), Group(RECURRENT, 4))


def test_a_state_that_is_a_window_of_rows_has_the_shape_that_it_has_once_it_is_full() -> None:
    model = architecture_model("longcat_flash_ngram")
    (state, *_) = layout.look(model, layout.SPLIT).states
    (tokens,) = state.arrays
    assert tokens is not None
    assert (tokens.shape, tokens.dtype) == ((model.args.emb_neighbor_num - 1,), mx.int64)


def test_windows_that_only_masks_name_become_groups() -> None:
    found = layout.look(architecture_model("mistral3"))
    assert [kind.window for kind in found.kinds] == [8, 0, 8, 0]
    assert [(group.kind, group.window) for group in found.groups(7)] == [("window", 8), ("full", 0)]


def test_layers_of_a_group_may_have_rows_of_unlike_sizes() -> None:
    sizes = [
        (shape.kv_heads, shape.key_dim, shape.value_dim)
        for shape in layout.look(architecture_model("mimo_v2_flash")).shapes
    ]
    assert sizes == [(1, 16, 8), (2, 16, 16), (1, 16, 8), (2, 16, 16)]
    openelm = layout.look(architecture_model("openelm")).shapes
    assert [(shape.group, shape.kv_heads) for shape in openelm] == [(0, 2), (0, 2), (0, 1), (0, 1)]


def test_a_cache_that_is_never_written_has_no_pages() -> None:
    found = layout.look(architecture_model("nemotron-nas"))
    assert [slot.layer for slot in layout.leaves(found.slots)] == [None, 0, 1]


def test_families_lists_all_architectures_and_how_many_go_which_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["architecture", "served", "rows", "kept", "can"]
    assert len(lines) == len(TABLE) + 3
    qwen = next(line for line in lines if line.startswith("qwen3 "))
    assert qwen.split() == ["qwen3", "packed", "full", "batch", "pad", "rewind", "share"]
    assert lines[-1].startswith("126 architectures: 1 added, 2 alone, 3 gathered, ")


MINISTRAL = """\
ministral (ministral3) is served packed over pages

2 layers keep the last 8 rows
2 layers keep all rows

batch     yes  all rows of a step go through the model in one call
pad       yes  window 8: pad rows are trimmed before a window moves on
rewind    yes  window 8: rewind up to what is still held
share     yes  window 8: share where each group holds what the next query needs
snapshot  no   all rows are in pages: there is no other state to keep
"""


def test_families_tells_of_a_model_each_capability_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = family_folder(tmp_path / "ministral", "ministral3")
    assert cli.main(["families", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == MINISTRAL


def test_families_of_a_path_that_is_none_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["families", "--model", str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "none does not exist: give a Hugging Face folder" in err


MAMBA2 = """\
mamba2 (mamba2) is served split over states in slots

2 layers keep the state behind the last row

batch     yes  decode rows go through the model together, prompts one by one
pad       no   recurrent state: what pad rows do to it cannot be taken back
rewind    no   recurrent state: taken back to edges of blocks alone
share     yes  recurrent state: shared at edges of blocks, where it was kept
snapshot  yes  recurrent state: the slot of a full block is kept at its edge
"""


def test_families_tells_of_states_and_what_they_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = family_folder(tmp_path / "mamba2", "mamba2")
    assert cli.main(["families", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == MAMBA2
