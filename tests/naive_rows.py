"""Naive rows: a sequence as lists of cells, each of which knows the tokens it was computed from."""

from __future__ import annotations

from statemachine.events import Namespace

STATE = 0
"""Where a slot's state stands among the rows of its block."""


class Cell:
    """One computed row. `identity` is (namespace, tokens 0..i); None while its token is unknown."""

    def __init__(self, identity: tuple[Namespace, tuple[int, ...]] | None, kind: str) -> None:
        self.identity = identity
        self.kind = kind

    def __repr__(self) -> str:
        return f"Cell({self.kind}, {self.identity})"


class ModelSequence:
    """A sequence as lists. `cells` and `steps` have one item for every row of any kind."""

    def __init__(self, namespace: Namespace, groups: int) -> None:
        self.namespace = namespace
        self.groups = groups
        self.preempted = False
        self.clear()

    def clear(self) -> None:
        self.tokens: list[int] = []
        self.speculative: list[int | None] = []
        self.pads = 0
        self.cells: list[Cell] = []
        self.steps: list[int] = []
        self.starts = [0] * self.groups
        self.tables: list[list[int]] = [[] for _ in range(self.groups)]

    @property
    def offset(self) -> int:
        return len(self.cells)

    def written(self, written_step: int) -> int:
        return sum(1 for step in self.steps if step <= written_step)

    def identity(self, row: int) -> tuple[Namespace, tuple[int, ...]]:
        known = [*self.tokens, *self.speculative]
        assert None not in known[: row + 1]
        return self.namespace, tuple(known[: row + 1])  # type: ignore[arg-type]
