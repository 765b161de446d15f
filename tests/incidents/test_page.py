"""docs/incidents.md: every case is there, and every test and script that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = (TESTS.parent / "docs/incidents.md").read_text(encoding="utf-8")
ROWS = {
    cells[1].strip(): cells[3]
    for line in PAGE.split("\n")
    if re.match(r"\| (S|P|)\d+ \|", line)
    for cells in [line.split("|")]
}
CASES = (
    *(f"S{number}" for number in range(1, 16)),
    *(f"P{number:02}" for number in range(1, 39)),
    *(str(number) for number in range(1, 27)),
)


def test_every_case_has_its_row_in_order() -> None:
    assert tuple(ROWS) == CASES


def names_in(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)


def is_about(text: str, case: str) -> bool:
    """Whether a name has a case in it, as test_p05_p07_answers has P07."""
    return case.lower() in text.split("_")


@pytest.mark.parametrize("case", CASES)
def test_what_a_row_names_exists_and_holds_its_case(case: str) -> None:
    named = re.findall(r"`([^`]+)`", ROWS[case])
    assert named, "nothing holds it"
    for name in named:
        file, _, test = name.partition("::")
        path = TESTS / file
        assert path.is_file(), f"there is no {file}"
        if test:
            assert test in names_in(path)
        elif path.suffix == ".py":
            whole = case[0] == "S" and is_about(path.stem, case)
            assert whole or any(is_about(it, case) for it in names_in(path)), name
        elif case[0] in "SP" and re.match(r"[sp]\d", path.stem):
            assert is_about(path.stem, case) or (case, path.stem[:3]) == ("S9", "p03")
        elif path.stem[0] == "n":
            assert is_about(path.stem, f"n{int(case):02}")


def test_every_script_and_every_test_file_of_a_case_is_named() -> None:
    scripts = list((TESTS / "scripts").glob("*.jsonl"))
    files = list((TESTS / "incidents").glob("test_[ps][0-9]*.py"))
    assert len(scripts) > 40
    for path in (*scripts, *files):
        assert f"`{path.relative_to(TESTS)}" in PAGE
