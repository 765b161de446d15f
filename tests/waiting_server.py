"""`mlxtape serve` as a process of its own over a scripted engine, for tests of its end.

Each answer is "a", then waits for a line on standard input, then is "b". Arguments are those of
`mlxtape`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from kernel.tokenizer import Tokenizer
from server.cli import main

from .fake_engine import END, FakeEngine, byte_tokenizer


class Waiting(FakeEngine):
    """As `build` returns it."""

    def stop(self) -> None:
        self.__exit__()


def build(*_: Any) -> tuple[Waiting, Tokenizer]:
    tokenizer = byte_tokenizer()

    def script(_: object) -> Iterator[int]:
        yield from b"a"
        sys.stdin.readline()
        yield from tokenizer.encode("b" + END)

    engine = Waiting(tokenizer, script)
    engine.__enter__()
    return engine, tokenizer


if __name__ == "__main__":
    sys.exit(main(build=build))
