"""Home: whether the four packages come from one place.

Their names are common ones. Another project's top-level `statemachine` in the same environment
would be imported in place of ours, and an editable install of ours is passed over without a word.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("statemachine", "kernel", "server", "replay")


class WrongHome(Exception):
    """Another project's package stands in the place of ours; one sentence."""


def check_home() -> None:
    """Raise WrongHome unless all four packages lie beside each other. Imports none of them."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin is None or origin.parent.parent != home:
            raise WrongHome(
                f"the package {name!r} comes from {origin or 'nowhere'}, not from mlxtape in "
                f"{home}: install mlxtape in an environment of its own"
            )


def start(name: str, load: Callable[[], Callable[[], int]]) -> int:
    """Run a program: `load` imports it, once it is sure whose packages it gets."""
    try:
        check_home()
    except WrongHome as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return load()()
