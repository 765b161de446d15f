"""Families: how a model is served, found by trying, and what follows from where its rows live.

Owns the choice between the ways over pages and mlx-lm's own caches, and capabilities in words.
Goes by what a model does, never by its name. Never runs a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen
from mlx_lm.models.cache import make_prompt_cache

from statemachine.geometry import OPAQUE, RECURRENT, WINDOW, Group

from .errors import ModelError
from .handles import HandleMisused
from .layout import (
    ADDED,
    ALONE,
    GATHERED,
    GROUPED,
    PACKED,
    SINGLE,
    SPLIT,
    Layout,
    Way,
    keeps_state,
    look,
    opened,
)
from .pages import LayerShape
from .probe import References, probe

WAYS = (PACKED, GATHERED, GROUPED, ADDED, ALONE, SINGLE)
"""Ways over pages, the best first."""
STATE_WAYS = (SPLIT, ALONE)
"""Those of a model that keeps states from row to row."""


SINGLY = "of several rows at once mlx-lm makes other logits, or none: each is taken as it is alone"


@frozen
class Capability:
    """Whether a family can do something, and why."""

    able: bool
    reason: str


@frozen
class Capabilities:
    """batch: many sequences in a forward. pad: rows that are trimmed afterwards. rewind: rows
    taken back at the tail. share: rows adopted by other sequences. snapshot: state that is kept
    beside the rows, so that sequences can go back to it.
    """

    batch: Capability
    pad: Capability
    rewind: Capability
    share: Capability
    snapshot: Capability

    def as_flags(self) -> dict[str, bool | int | str]:
        """For the tape's header: name -> able, and name_reason -> why not; snapshot where able."""
        flags: dict[str, bool | int | str] = {
            "batch": self.batch.able,
            "pad": self.pad.able,
            "rewind": self.rewind.able,
            "share": self.share.able,
        }
        for name in tuple(flags):
            capability: Capability = getattr(self, name)
            if not capability.able:
                flags[f"{name}_reason"] = capability.reason
        if self.snapshot.able:
            flags["snapshot"] = True
        return flags


@frozen
class Family:
    """How a model is served. layout: over pages; None: over caches of its own. reason: why. singly:
    whether it is right over mlx-lm's own caches for one row at a time only.
    """

    layout: Layout | None
    reason: str
    singly: bool = False

    def groups(self, num_blocks: int = 0, num_slots: int | None = None) -> tuple[Group, ...]:
        """Groups of `num_blocks` blocks each, and of `num_slots` slots where there are states; one
        without any for caches of its own.
        """
        if self.layout is None:
            return owned_groups()
        return self.layout.groups(num_blocks, num_slots)

    @property
    def capabilities(self) -> Capabilities:
        """What this model's sequences can do, and why."""
        return capabilities_of(self.groups(), self.way)

    @property
    def flags(self) -> dict[str, bool | int | str]:
        """For the tape's header: capabilities, the way, and whether few rows' logits are made."""
        flags = self.capabilities.as_flags() | {"way": self.way}
        if self.layout is not None and not self.layout.split:
            flags["split"] = False
        if self.singly:
            flags["singly"] = True
        return flags

    @property
    def way(self) -> str:
        """`packed`, another way over pages, or `opaque`."""
        return "opaque" if self.layout is None else self.layout.way.name


def family_of(model: Any) -> Family:
    """The first way in which a few tokens over pages give what they give without; else the
    model's own caches. Takes as long as some tokens do.
    """
    reasons: dict[str, str] = {}
    ways = _ways(model)
    for references in (References(model), References(model, singly=True)):
        for way in ways:
            reason, layout = _tried(model, way, references)
            if layout is not None:
                held = ["pages"] * bool(layout.shapes) + ["states in slots"] * bool(layout.states)
                where = " and ".join(held)
                reasons.pop(way.name, None)
                said = _because(f"{way.name} over {where}", ways, reasons)
                said = f"{said}; {SINGLY}" if references.singly else said
                return Family(layout, said, references.singly)
            reasons.setdefault(way.name, reason)
    return Family(None, _because("over caches of its own", ways, reasons))


def _tried(model: Any, way: Way, references: References) -> tuple[str, Layout | None]:
    """A way's layout, or None and why it does not go."""
    try:
        return "", probe(model, look(model, way), references)
    except (ModelError, HandleMisused) as error:
        return str(error), None
    except Exception as error:  # whatever a model does that is called in a way it cannot take
        text = " ".join(str(error).split()).split(". ")[0]
        return f"{type(error).__name__}: {text}"[:200], None


def _ways(model: Any) -> tuple[Way, ...]:
    return STATE_WAYS if any(map(keeps_state, opened(make_prompt_cache(model)))) else WAYS


def layout_of(model: Any, flags: Mapping[str, bool | int | str]) -> Layout:
    """The layout of a model that was served with these flags, unprobed. Older tapes name no way:
    theirs is packed. Raises ModelError.
    """
    name = flags.get("way", PACKED.name)
    way = next((way for way in (*WAYS, *STATE_WAYS) if way.name == name), None)
    if way is None:
        raise ModelError(f"{name!r} is no way over pages that is known here")
    return evolve(look(model, way), split=bool(flags.get("split", True)))


def _because(how: str, tried: tuple[Way, ...], reasons: dict[str, str]) -> str:
    """How a model is served, and why in no better way."""
    ways: dict[str, list[str]] = {}
    for way, reason in reasons.items():
        ways.setdefault(reason, []).append(way)
    every = [way.name for way in tried]
    why = [
        f"not {'over pages' if names == every else ' or '.join(names)}: {reason}"
        for reason, names in ways.items()
    ]
    return "; ".join([f"served {how}", *why])


def groups_for(model: Any, num_blocks: int) -> tuple[Group, ...]:
    """Groups of a packed model, unprobed: `num_blocks` blocks each."""
    return look(model).groups(num_blocks)


def layer_shapes(model: Any) -> tuple[LayerShape, ...]:
    """Sizes of each layer's rows of a packed model, unprobed."""
    return look(model).shapes


def owned_groups() -> tuple[Group, ...]:
    """The groups of a model that keeps its own caches: it holds no blocks."""
    return (Group(OPAQUE),)


OWNED = Capabilities(
    batch=Capability(False, "the model's own caches hold one sequence at a time"),
    pad=Capability(False, "pad rows cannot be taken back out of the model's own caches"),
    rewind=Capability(False, "the model's own caches cannot give back the rows at their tail"),
    share=Capability(
        False, "rows in the model's own caches are in no block that others could read"
    ),
    snapshot=Capability(False, "what the model's own caches hold is known to it alone"),
)
NO_STATE = Capability(False, "all rows are in pages: there is no other state to keep")
STATE = Capabilities(
    batch=Capability(True, "decode rows go through the model together, prompts one by one"),
    pad=Capability(False, "recurrent state: what pad rows do to it cannot be taken back"),
    rewind=Capability(False, "recurrent state: taken back to edges of blocks alone"),
    share=Capability(True, "recurrent state: shared at edges of blocks, where it was kept"),
    snapshot=Capability(True, "recurrent state: the slot of a full block is kept at its edge"),
)
BATCH = {
    PACKED.name: "all rows of a step go through the model in one call",
    GROUPED.name: "decode rows go through the model together, prompts one by one",
    SPLIT.name: "decode rows go through the model together, prompts one by one",
    GATHERED.name: "decode rows go through the model together, prompts one by one",
    ADDED.name: "decode rows go through the model together, prompts one by one",
    SINGLE.name: "every row of a step goes through the model in a call of its own",
    ALONE.name: "every sequence of a step goes through the model in a call of its own",
}
"""By the way: how many sequences are in a step."""


def capabilities_of(groups: tuple[Group, ...], way: str = PACKED.name) -> Capabilities:
    """What follows from the groups; the way changes only how much a batch gains."""
    if any(group.kind == OPAQUE for group in groups):
        return OWNED
    batch = Capability(True, BATCH[way])
    if any(group.kind == RECURRENT for group in groups):
        return evolve(STATE, batch=batch)
    windows = sorted({group.window for group in groups if group.kind == WINDOW})
    if not windows:
        return Capabilities(
            batch=batch,
            pad=Capability(True, "pad rows are trimmed as any rows at the tail"),
            rewind=Capability(True, "every row is held until its sequence ends"),
            share=Capability(True, "every block can be read by all that begin alike"),
            snapshot=NO_STATE,
        )
    window = f"window {windows[0]}" if len(windows) == 1 else f"windows {windows}"
    return Capabilities(
        batch=batch,
        pad=Capability(True, f"{window}: pad rows are trimmed before a window moves on"),
        rewind=Capability(True, f"{window}: rewind up to what is still held"),
        share=Capability(True, f"{window}: share where each group holds what the next query needs"),
        snapshot=NO_STATE,
    )
