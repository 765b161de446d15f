"""The two kinds of refusal: the caller's fault, and ours."""

from __future__ import annotations


class StateMachineError(Exception):
    """Base of everything that this package raises on purpose."""


class IllegalCommand(StateMachineError):
    """A command that may not be carried out on this state; the caller's fault. Nothing changed."""


class PoolExhausted(StateMachineError):
    """A command needs more blocks than are free or can be evicted. Nothing changed.

    `needed`, `free` and `cached` count blocks of the group that fell short.
    """

    def __init__(self, needed: int, free: int, cached: int, group: int = 0) -> None:
        self.needed = needed
        self.free = free
        self.cached = cached
        self.group = group
        super().__init__(
            f"group {group} needs {needed} blocks, but {free} are free and {cached} can be evicted"
        )


class InvariantBroken(StateMachineError):
    """An event claims what cannot be: a bug on the emitting side, or a tape that does not fold."""


class CodecError(StateMachineError):
    """Bytes that are no tape, or not a tape that this version reads."""
