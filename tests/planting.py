"""Planting: a fault's load many times over, so that what it breaks stands among 200 requests.

Owns the large load and the moment at which the fault goes in. The fault comes in at a step in the
middle, unless its own load names early steps, so that most requests are served rightly.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from attrs import evolve

from .faults import loads, real
from .faults.fault import Fault, Witness
from .faults.loads import FAKE, VOCAB, Load, Request

REQUESTS = 200


def many(load: Load, count: int = REQUESTS) -> Load:
    """A load, again and again with other tokens, until it has that many requests."""
    period = max(request.at for request in load.requests) + 3
    found: list[Request] = []
    while len(found) < count:
        round_, first = len(found) // len(load.requests), len(found)
        for request in load.requests[: count - len(found)]:
            found.append(_again(request, round_, round_ * period, first))
    return evolve(load, name=f"{load.name}, many", requests=tuple(found))


def _again(request: Request, round_: int, later: int, first: int) -> Request:
    """A request of a later round: the same lengths, and what was alike stays alike."""
    if not round_:
        return request
    mixed = tuple(1 + (token + round_) % (VOCAB - 1) for token in request.tokens)
    return evolve(
        request,
        tokens=mixed,
        at=request.at + later,
        cancel_at=None if request.cancel_at is None else request.cancel_at + later,
        parent=None if request.parent is None else request.parent + first,
    )


def plant(fault: Fault, path: Path, count: int = REQUESTS, share: float = 0.5) -> None:
    """A tape of `count` requests, with the fault in from the step at which that share arrived."""
    load = many(fault.load, count)
    early = fault.load.fail or fault.load.flush_at or fault.load.kernel != FAKE
    steps = sorted(request.at for request in load.requests)
    begin_at = 0 if early else steps[int(len(steps) * share)]
    witness = Witness()
    with real.attending(fault.load), ExitStack() as stack:

        def begin(step: int) -> None:
            if step >= begin_at and not witness.step:
                stack.enter_context(fault.active(witness))
            witness.step = step if step >= begin_at else 0

        make = None
        if load.kernel != FAKE:
            real.model(load.kernel)
            make = real.parts(load)
        loads.play(load, path, begin, make)
