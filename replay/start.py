"""Start: the console script `replay`."""

from __future__ import annotations

from collections.abc import Callable

from server.home import start


def _load() -> Callable[[], int]:
    from .cli import main

    return main


def main() -> int:
    """The exit code."""
    return start("replay", _load)
