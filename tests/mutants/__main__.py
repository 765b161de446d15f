"""`python -m tests.mutants COUNT [--seed N]`: break that many lines; 1 where one was silent."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from .playing import PACKAGES, Told, read
from .sites import Site, broken, sites
from .verdict import SAID, SILENT, VERDICTS, Verdict, judge

ROOT = Path(__file__).parents[2]
TIME_S = 300
"""After which a mutant's loads count as hanging."""
OUTSIDE = ("server/http", "server/dialects", "server/cli", "server/logs", "kernel/blas")
"""Paths that no tape is a witness of."""


def main(arguments: list[str]) -> int:
    """Break lines, one at a time, and print what is heard of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mlxtape-mutants-") as folder:
        counts = _run(Path(folder), asked.count, asked.seed)
    print("\n".join(f"{counts[kind]:>5}  {kind}" for kind in VERDICTS))
    return int(counts[SILENT] > 0)


def _run(folder: Path, count: int, seed: int) -> Counter[str]:
    copy = folder / "code"
    for name in (*PACKAGES, "replay", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    play(copy, folder / "sound", "--lines")
    ran = msgspec.json.decode(
        (folder / "sound" / "lines.json").read_bytes(), type=dict[str, list[int]]
    )
    places = [
        (path, site)
        for path, lines in sorted(ran.items())
        if not path.startswith(OUTSIDE)
        for site in sites((ROOT / path).read_text(), lines)
    ]
    print(f"{len(places)} places on lines that ran, of which {count}", flush=True)
    counts: Counter[str] = Counter()
    for path, site in random.Random(seed).sample(places, count):
        verdict = try_one(copy, path, site, folder / "sound" / "told.json", folder / "broken")
        counts[verdict.kind] += 1
        print(f"{path}:{site.line} {site.kind}: `{site.text}`")
        print(f"    {verdict.kind}  {verdict.load}  {verdict.said[:160]}", flush=True)
    return counts


def try_one(copy: Path, path: str, site: Site, sound: Path, folder: Path) -> Verdict:
    """Break one place of the copy, play, mend it, and judge."""
    source = (copy / path).read_text()
    shutil.rmtree(folder, ignore_errors=True)
    (copy / path).write_text(broken(source, site))
    try:
        told = play(copy, folder, "--against", str(sound))
    except subprocess.TimeoutExpired:
        return Verdict(SAID, said=f"nothing came within {TIME_S} s")
    finally:
        (copy / path).write_text(source)
    return judge(read(sound), told, folder)


def play(copy: Path, folder: Path, *options: str) -> dict[str, Told]:
    """What clients hear of the loads, played by a process that runs the code in `copy`."""
    command = [sys.executable, "-B", "-m", "tests.mutants.playing", str(folder), *options]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    subprocess.run(command, cwd=copy, env=environment, timeout=TIME_S, capture_output=True)
    return read(folder / "told.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
