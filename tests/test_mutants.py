"""Mutants: the tool that breaks lines at random breaks what it says, and hears what is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .mutants.__main__ import ROOT, play, try_one
from .mutants.playing import LOADS, PACKAGES, Told
from .mutants.sites import broken, sites
from .mutants.verdict import NOTHING, SAID, SILENT, WRONG, judge

SOURCE = """
LIMIT = 3

def grow(table, rows):
    if rows < LIMIT and table:
        table.append(rows + 1)
    return table
"""


def test_every_place_of_a_line_that_ran_can_be_broken_and_no_other() -> None:
    found = {(it.text, it.kind): broken(SOURCE, it) for it in sites(SOURCE, {5, 6})}
    lines = {key: text.splitlines()[3:5] for key, text in found.items()}
    condition, body = "    if rows < LIMIT and table:", "        table.append(rows + 1)"
    assert lines == {
        ("if rows < LIMIT and table:", "always"): ["    if True:", body],
        ("if rows < LIMIT and table:", "never"): ["    if False:", body],
        ("rows < LIMIT and table", "and for or"): ["    if rows < LIMIT or table:", body],
        ("rows < LIMIT", "compared the other way"): ["    if rows <= LIMIT and table:", body],
        ("table.append(rows + 1)", "left out"): [condition, "        pass"],
        ("rows + 1", "computed another way"): [condition, "        table.append(rows - 1)"],
        ("1", "one more"): [condition, "        table.append(rows + 2)"],
    }
    assert sites(SOURCE, {2}) == []


def test_wrong_answers_of_which_no_tape_says_anything_are_the_worst_verdict(tmp_path: Path) -> None:
    sound = dict.fromkeys(LOADS, Told(answers=((1, 2),), reasons=("length",)))
    assert judge(sound, sound, tmp_path).kind == NOTHING
    loud = sound | {"mixed": Told(reasons=("error",), trouble="the pages are lost")}
    assert judge(sound, loud, tmp_path).kind == SAID
    silent = loud | {"long": Told(answers=((1, 3),), reasons=("length",))}
    verdict = judge(sound, silent, tmp_path)
    assert (verdict.kind, verdict.load) == (SILENT, "long")


@pytest.mark.slow
def test_a_line_of_the_cache_path_that_is_broken_makes_answers_that_replay_calls_wrong(
    tmp_path: Path,
) -> None:
    copy, path = tmp_path / "code", "kernel/attention.py"
    for name in (*PACKAGES, "replay", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    told = play(copy, tmp_path / "sound")
    assert [it.trouble for it in told.values()] == [""] * len(LOADS)
    source = (copy / path).read_text()
    text = "sums + _by_piece(weights.sum(axis=-2), sums)"
    [shared] = [it for it in sites(source, range(source.count("\n"))) if it.text == text]
    verdict = try_one(copy, path, shared, tmp_path / "sound" / "told.json", tmp_path / "broken")
    assert (verdict.kind, verdict.load) == (WRONG, "shared")
    assert verdict.said.startswith("token at step ")
    assert (copy / path).read_text() == source
