"""Catalogue: all faults, by what they break. `ALL` is what `make faults` runs."""

from __future__ import annotations

from . import (
    adapters,
    ahead,
    blocks,
    draft_model,
    drafts,
    forks,
    kept,
    layers,
    lengths,
    model_owned,
    pending,
    policy,
    queueing,
    states,
    tables,
)
from .fault import Fault

ALL: tuple[Fault, ...] = (
    *lengths.FAULTS.faults,
    *blocks.FAULTS.faults,
    *policy.FAULTS.faults,
    *layers.FAULTS.faults,
    *ahead.FAULTS.faults,
    *pending.FAULTS.faults,
    *drafts.FAULTS.faults,
    *draft_model.FAULTS.faults,
    *forks.FAULTS.faults,
    *queueing.FAULTS.faults,
    *model_owned.FAULTS.faults,
    *kept.FAULTS.faults,
    *adapters.FAULTS.faults,
    *states.FAULTS.faults,
    *tables.FAULTS.faults,
)

BY_NAME = {fault.name: fault for fault in ALL}
