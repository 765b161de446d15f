"""The four packages come from one place, or the programs say so before they import anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("program", ["server", "replay"])
def test_a_program_names_the_package_of_another_project_that_stands_in_the_place_of_ours(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "statemachine").mkdir()
    (tmp_path / "statemachine" / "__init__.py").write_text("STATE = 'of somebody else'\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(HERE)!r}]\n"
        f"from {program}.start import main\nsys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert (
        f"{tmp_path / 'statemachine' / '__init__.py'}, not from mlxtape in {HERE}" in ended.stderr
    )
    assert "install mlxtape in an environment of its own" in ended.stderr


def test_the_programs_start_where_all_four_lie_beside_each_other() -> None:
    code = "import sys\nfrom server.start import main\nsys.argv = ['mlxtape', '--version']\nmain()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("mlxtape 0.")
