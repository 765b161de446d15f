"""`python -m tests.faults.serve S1 -- serve ...`: the mlxtape command with a fault in it."""

from __future__ import annotations

import sys

from kernel.blas import load_blas
from server.cli import main as mlxtape

from .catalogue import BY_NAME
from .fault import Witness

USAGE = "usage: python -m tests.faults.serve FAULT -- serve [SETTINGS]"


def main(arguments: list[str]) -> int:
    """Run `mlxtape` on what follows `--`, with the fault in from the start."""
    if len(arguments) < 2 or arguments[1] != "--" or arguments[0] not in BY_NAME:
        print(f"{USAGE}\nfaults: {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    load_blas()  # a fault's target may be what imports MLX
    # Nobody counts steps here; the witness only has to know that these are no probes.
    with BY_NAME[arguments[0]].active(Witness(step=1)):
        sys.argv[1:] = arguments[2:]
        return mlxtape()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
