"""Minimise: a failing load, made as small as it can be while it still fails in the same way.

Delta debugging, without chance: first a request that leaves is tried by itself; then whole requests
go, in halves, then smaller and smaller runs; then one thing after another of what is left is made
simpler, until nothing that is tried still fails. Knows nothing of what a failure is: `fails` names
its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
from attrs import evolve
from msgspec import structs

from server.policy import Policy

from .simulation_load import Load, Request

TRIES = 1_000
"""Runs after which what was found so far has to do."""

Fails = Callable[[Load], str | None]


def minimise(load: Load, fails: Fails, tries: int = TRIES) -> Load:
    """The smallest load found that fails as `load` does. Raises ValueError where it does not."""
    kind = fails(load)
    if kind is None:
        raise ValueError(f"{load.name} does not fail: there is nothing to minimise")
    left = iter(range(tries))

    def same(candidate: Load) -> bool:
        return next(left, None) is not None and fails(candidate) == kind

    load = next((it for it in _lone_requests(load) if same(it)), load)
    load = _fewer_requests(load, same)
    moved = True
    while moved:
        moved = False
        for simpler in (_simpler_load, _simpler_requests, _simpler_policy, _simpler_pool):
            load, did = _descend(load, simpler, same)
            moved = moved or did
    return load


def _lone_requests(load: Load) -> Iterator[Load]:
    """One request that leaves, at another moment: its own has no meaning without the others."""
    leaving = [it for it in load.requests if it.cancel_at is not None]
    for request in leaving if len(load.requests) > 1 else ():
        for step in (2, 3, 4):
            alone = evolve(request, at=1, cancel_at=step, max_tokens=8, parent=None)
            yield evolve(load, requests=(alone,))


def _fewer_requests(load: Load, same: Callable[[Load], bool]) -> Load:
    """Runs of requests go, from halves down to single ones."""
    size = max(1, len(load.requests) // 2)
    while True:
        first = 0
        while first < len(load.requests):
            kept = load.requests[:first] + load.requests[first + size :]
            candidate = evolve(load, requests=kept)
            if kept and same(candidate):
                load = candidate
            else:
                first += size
        if size == 1:
            return load
        size //= 2


def _descend(
    load: Load, simpler: Callable[[Load], Iterator[Load]], same: Callable[[Load], bool]
) -> tuple[Load, bool]:
    """Take the first candidate that still fails, again and again; whether there was one."""
    moved = False
    while (found := next((it for it in simpler(load) if same(it)), None)) is not None:
        load, moved = found, True
    return load, moved


def _simpler_load(load: Load) -> Iterator[Load]:
    """Without a request, or without one of the troubles."""
    for at in range(len(load.requests)):
        if len(load.requests) > 1:
            yield evolve(load, requests=load.requests[:at] + load.requests[at + 1 :])
    plain = ("segment_bytes", "stop_at", "waiting_max", "poison", "sanitize")
    yield from _defaults(load, (*plain, "flush_at", "vocab", "period", "draft", "draft_blocks"))
    for name in ("fail", "full_disk", "draft_fail"):
        given = getattr(load, name)
        for key in given:
            rest = {at: what for at, what in given.items() if at != key}
            yield evolve(load, **{name: rest})
            for earlier in {1, key // 2, key - 1} - {0, key, *given}:
                yield evolve(load, **{name: rest | {earlier: given[key]}})


def _simpler_requests(load: Load) -> Iterator[Load]:
    """With one request that asks for less."""
    for at, request in enumerate(load.requests):
        for simple in _simpler_request(request):
            kept = (*load.requests[:at], simple, *load.requests[at + 1 :])
            yield evolve(load, requests=kept)


def _simpler_request(request: Request) -> Iterator[Request]:
    names = [it.name for it in attrs.fields(Request) if it.name not in ("tokens", "max_tokens")]
    yield from _defaults(request, names)
    for name in ("at", "cancel_at", "max_tokens"):
        value = getattr(request, name)
        if value is not None:
            for less in sorted({1, value // 2, value - 1} - {0, -1, value}):
                yield evolve(request, **{name: less})
    tokens, half = request.tokens, len(request.tokens) // 2
    if half:
        yield evolve(request, tokens=tokens[:half])
        yield evolve(request, tokens=tokens[half:])
        yield evolve(request, tokens=tokens[:-1])
        yield evolve(request, tokens=tokens[1:])
    for at, token in enumerate(tokens):
        if token != 1:
            yield evolve(request, tokens=(*tokens[:at], 1, *tokens[at + 1 :]))


def _simpler_policy(load: Load) -> Iterator[Load]:
    """With one setting at its default."""
    plain = Policy()
    for name in Policy.__struct_fields__:
        if getattr(load.policy, name) != getattr(plain, name):
            changed = structs.replace(load.policy, **{name: getattr(plain, name)})
            yield evolve(load, policy=changed)


def _simpler_pool(load: Load) -> Iterator[Load]:
    """With one group of blocks less, or fewer blocks."""
    geometry = load.geometry
    if geometry.hash != "xxh3":
        yield evolve(load, geometry=structs.replace(geometry, hash="xxh3"))
    for at, group in enumerate(geometry.groups):
        before, after = geometry.groups[:at], geometry.groups[at + 1 :]
        if before + after:
            yield evolve(load, geometry=structs.replace(geometry, groups=before + after))
        for fewer in sorted({group.num_blocks // 2, group.num_blocks - 1} - {0}):
            small = structs.replace(group, num_blocks=fewer)
            groups = (*before, small, *after)
            yield evolve(load, geometry=structs.replace(geometry, groups=groups))


def _defaults(value: Any, names: Any) -> Iterator[Any]:
    """The value with one of the named fields at its default."""
    fields = attrs.fields_dict(type(value))
    for name in names:
        plain = fields[name].default
        if isinstance(plain, attrs.Factory):
            plain = plain.factory()
        if getattr(value, name) != plain:
            yield evolve(value, **{name: plain})
