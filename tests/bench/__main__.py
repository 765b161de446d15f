"""`make bench`: all figures, with the machine named, as a table and as bench.json."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kernel.blas import load_blas
from kernel.bundled import BUNDLED

from . import growth, machine, replaying
from .table import Table, about

FOLDER = Path(tempfile.gettempdir())
SECTIONS = ["machine", "replay", "kernels", "model", "http"]
GROWTH = "growth"


def asked_for(arguments: list[str]) -> argparse.Namespace:
    """Sections by name: machine, replay, kernels, model, http, growth; all but growth without a
    name.

    --rows 1e7: the longest tape that replay is measured with.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("sections", nargs="*", metavar="section")
    parser.add_argument("--rows", type=float, default=replaying.ROWS_MAX)
    asked = parser.parse_args(arguments)
    # Not by argparse's choices, which a missing list of them is held against, too.
    if unknown := set(asked.sections) - {*SECTIONS, GROWTH}:
        parser.error(f"sections are {', '.join([*SECTIONS, GROWTH])}, not {', '.join(unknown)}")
    asked.sections = asked.sections or SECTIONS
    return asked


def main(arguments: list[str]) -> int:
    """Measure what is asked for, print it, and keep it."""
    asked = asked_for(arguments)
    blas = load_blas()
    named = about(blas)
    print("\n".join(f"{name}: {value}" for name, value in named.items()))
    table = Table()
    sections = asked.sections
    model = next(iter(BUNDLED))
    plain: dict[int, float] = {}
    if "machine" in sections:
        table.section("what the tape costs (64 decode rows, one core)")
        machine.yardstick(table)
        machine.state_machine(table)
        machine.policy(table)
        machine.encoding(table)
        machine.tape(table)
    if "replay" in sections:
        table.section("how fast decode steps are replayed (one core)")
        replaying.rates(table)
        replaying.side_by_side(table)
        table.section("the same against a tape's length, and the memory of the whole process")
        replaying.growth(table, int(asked.rows))
    if GROWTH in sections:
        growth.curves(table)
        growth.profile()
    if {"kernels", "model"}.intersection(sections):
        from kernel.weights import load_model

        from .kernels import kernels
        from .throughput import throughput

        loaded = load_model(model)
        if "kernels" in sections:
            table.section(f"kernels of this device, {model}'s shapes, a call in a chain")
            kernels(table, loaded.model)
        if "model" in sections:
            table.section(f"{model}, in process (answers of 24 tokens, contexts of 128)")
            plain = throughput(table, loaded)
    if "http" in sections:
        from . import serving

        table.section(f"{model}, through HTTP, streamed, beside other servers")
        rows = serving.over_http(
            serving.chosen([]), serving.loads(["all"]), path=FOLDER / "mlxtape-serving.json"
        )
        serving.against_plain_loops(table, rows, plain)
    path = FOLDER / "mlxtape-bench.json"
    table.save(path, named)
    print(f"\nkept in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
