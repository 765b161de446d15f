"""Memory of large arrays is kept: the next ones find their pages there."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
import numpy as np
from kernel.heap import keep_freed
if sys.argv[1] == "kept":
    keep_freed()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    scores = [np.ones(10_000_000, np.float32) for _ in range(2)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(pages())
"""

if sys.platform == "linux":  # it is glibc's malloc that is told

    def test_arrays_of_40_mb_are_made_of_memory_that_the_process_has() -> None:
        found = {}
        for how in ("kept", "as ever"):
            command = [sys.executable, "-c", PROGRAM, how]
            found[how] = int(subprocess.run(command, capture_output=True, check=True).stdout)
        assert found["kept"] < 20 < 200 < found["as ever"]
