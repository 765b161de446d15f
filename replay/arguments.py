"""Arguments: what several commands' options have in common."""

from __future__ import annotations

import argparse
import contextlib
import sys

from server.adapters import named_path

TAPE_HELP = "a capture: file, .zst, folder of segments, or - (stdin)"


def number(text: str) -> int:
    """A whole number of 0 or more, for argparse."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, not {text!r}")


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")


def place(text: str) -> int:
    """A whole number, negative ones from the end, for argparse."""
    if text.removeprefix("-").isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(
        f"must be a step, or a number from the end like -1, not {text!r}"
    )


def margin(text: str) -> float:
    """A number of 0 or more, for argparse."""
    with contextlib.suppress(ValueError):
        if (value := float(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of 0 or more, not {text!r}")


def named_folder(text: str) -> tuple[str, str]:
    """An adapter as NAME=PATH, for argparse."""
    try:
        return named_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tell(text: str) -> None:
    """A line for a person, on the error stream."""
    with contextlib.suppress(OSError):  # nobody has to read it
        print(f"replay: {text}", file=sys.stderr, flush=True)
