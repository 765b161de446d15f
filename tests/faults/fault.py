"""Fault: one function to replace, and the witness that notes where it first did otherwise.

Owns putting a function in another's place, wherever it was imported, and taking it out again.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define, field, frozen

from .loads import Load

PACKAGES = ("statemachine", "kernel", "server", "replay")

PLANNED = "StepPlanned"
DONE = "StepDone"
FAILED = "StepFailed"

Make = Callable[[Any, "Witness"], Any]


@frozen
class First:
    """Where a fault first did something else than the function that it replaces.

    sequence -1: nobody in particular. record: the one that holds the wrong event, or, for what the
    caches saw, the event that issued the rows.
    """

    step: int
    sequence: int
    record: str


@define
class Witness:
    """Keeps the first difference. `step` is the step that is being made, set by who steps."""

    step: int = 0
    first: First | None = None

    @property
    def on(self) -> bool:
        """Whether a step is being made: models are probed before that."""
        return self.step > 0

    def note(self, sequence: int = -1, record: str = PLANNED, step: int | None = None) -> None:
        """The fault does otherwise now; step: where that is another than the one being made."""
        if self.first is None and self.on:
            self.first = First(self.step if step is None else step, sequence, record)


@frozen
class Fault:
    """A bug and what replay must say of it.

    sentence: what a real engine had wrong. target: `module:name` or `module:Class.name`. make: from
    the original and a witness to the replacement. depth: at which the first wrong event is found,
    and kind, the divergence's class there. says: words of it. late_steps: how many steps after the
    first wrong one it is found; 0 but for wrong numbers in rows that are read only later. stays:
    replay runs the faulty code too, as it does with a bug that nobody knows of.
    """

    name: str
    sentence: str
    target: str
    make: Make
    load: Load
    depth: str
    kind: str
    says: tuple[str, ...] = ()
    late_steps: int = 0
    stays: bool = False

    @contextmanager
    def active(self, witness: Witness) -> Iterator[None]:
        """The fault is in, inside of the block."""
        with replaced(self.target, lambda original: self.make(original, witness)):
            yield


@define
class Catalogue:
    """Faults in the order in which they were added."""

    faults: list[Fault] = field(factory=list)

    def add(
        self,
        name: str,
        sentence: str,
        target: str,
        load: Load,
        depth: str,
        kind: str,
        *says: str,
        late_steps: int = 0,
        stays: bool = False,
    ) -> Callable[[Make], Make]:
        """Decorates a fault's `make`."""

        def keep(make: Make) -> Make:
            fault = Fault(name, sentence, target, make, load, depth, kind, says, late_steps, stays)
            self.faults.append(fault)
            return make

        return keep


@contextmanager
def replaced(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`make(original)` stands in the place of `target`, inside of the block."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    if isinstance(original, property):
        replacement: Any = property(make(original.fget))
    else:
        replacement = make(original)
    if classes:
        setattr(owner, name, replacement)
        try:
            yield
        finally:
            setattr(owner, name, original)
        return
    _swap(original, replacement)
    try:
        yield
    finally:
        _swap(replacement, original)


def _swap(old: Any, new: Any) -> None:
    """Put `new` wherever a module of ours names `old`, tables of functions included."""
    found = 0
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] not in PACKAGES:
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
                found += 1
            elif isinstance(value, dict) and name.isupper():
                for key in [key for key, held in value.items() if held is old]:
                    value[key] = new
    assert found, f"{old} stands in no module: the fault would do nothing"
