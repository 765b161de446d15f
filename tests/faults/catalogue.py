"""Catalogue: all faults, by what they break. `ALL` is what `make faults` runs."""

from __future__ import annotations

from . import blocks, layers, lengths, policy
from .fault import Fault

ALL: tuple[Fault, ...] = (
    *lengths.FAULTS.faults,
    *blocks.FAULTS.faults,
    *policy.FAULTS.faults,
    *layers.FAULTS.faults,
)

BY_NAME = {fault.name: fault for fault in ALL}
