"""`python -m tests.faults [NAME ...]`: run faults and print the table; exit code 0: all found."""

from __future__ import annotations

import sys
import time

from .catalogue import ALL, BY_NAME
from .fault import Fault
from .runner import Result, run

ROW = "{:<26} {:<9} {:<11} {:<26} {:<26} {}"


def main(names: list[str]) -> int:
    """Run the named faults, or all of them."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        print(f"there is no fault {unknown[0]!r}; there are {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    print(
        ROW.format("fault", "depth", "class", "first wrong event", "found at", "what replay says")
    )
    faults = [BY_NAME[name] for name in names] or list(ALL)
    results = [_show(fault) for fault in faults]
    return _total(results, time.perf_counter() - started)


def _show(fault: Fault) -> Result:
    """Run one fault and print its line, or lines where something is not as it should be."""
    result = run(fault)
    first, found = result.first, result.divergence
    print(
        ROW.format(
            fault.name,
            fault.depth,
            found.kind if found else "-",
            _place(first.step, first.sequence, first.record) if first else "nowhere",
            _place(found.step, found.sequence, found.record) if found else "NOT FOUND",
            found.summary if found else fault.sentence,
        ),
        flush=True,
    )
    return result


def _place(step: int, sequence: int, record: str) -> str:
    whose = "" if sequence < 0 else f" seq {sequence}"
    return f"step {step}{whose} {record}"


def _total(results: list[Result], seconds: float) -> int:
    held = sum(result.holds for result in results)
    exact = sum(result.holds and not result.fault.late_steps for result in results)
    print(
        f"\n{len(results)} faults, {held} found as the catalogue says, "
        f"{exact} of them at the first wrong event ({seconds:.0f} s)"
    )
    for result in results:
        if not result.holds:
            print(f"not as expected: {result.fault.name}: {result.fault.sentence}")
    return 0 if held == len(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
