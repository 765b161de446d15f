"""Replays standard input at a depth, and tells what that took: a process to be measured alone."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from replay.run import CLEAN, Options, replay

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """The most memory that this process held; where /proc tells, not what its parent did."""
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        return next(int(it.split()[1]) * 1024 for it in lines if it.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def measured(path: str, depth: str) -> tuple[float, int, int]:
    """Seconds of the processor, rows and steps of a replay."""
    started = time.process_time()
    outcome = replay(path, Options(depth=depth))
    spent = time.process_time() - started
    assert outcome.exit_code == CLEAN, outcome.divergence
    return spent, outcome.counts.rows, outcome.counts.steps


if __name__ == "__main__":
    seconds, rows, steps = measured("-", sys.argv[1])
    told = {"rows": rows, "steps": steps, "seconds": seconds, "peak_bytes": peak_bytes()}
    print(json.dumps(told))
