"""Pool size: how many blocks and slots a pool is made with, from the settings and the memory.

Owns that choice and its sentences. Makes no array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .admission import SLOTS_MIN
from .settings import Settings, SettingsError

if TYPE_CHECKING:
    from kernel.layout import Layout

DEFAULT_POOL_TOKENS = 16_384
"""Rows of a pool whose size nobody gave, as far as a quarter of the memory holds them."""
SLOTS_EACH = 4
"""Slots for each request that may run: two that it uses, and two with states of prefixes."""


def pool_blocks(settings: Settings, layout: Layout, beside: int = 0) -> tuple[int, int]:
    """Blocks in each group, and bytes of one of each, with those `beside` them: (0, 0) of a model
    that keeps states alone. Raises SettingsError where memory does not hold them.
    """
    if not layout.shapes and not beside:
        asked = (settings.num_blocks, settings.kv_memory, settings.kv_bits)
        if any(it is not None for it in asked):
            raise SettingsError(
                "this model keeps states, not K and V: leave num_blocks, kv_memory and kv_bits "
                "out, and say with num_slots how many states to hold"
            )
        return 0, 0
    from kernel.pages import block_bytes

    groups = sorted({layer.group for layer in layout.shapes})
    each = beside + sum(block_bytes(layout.shapes, at, settings.block_size) for at in groups)
    memory = memory_bytes()
    if settings.num_blocks is not None:
        blocks = settings.num_blocks
    elif settings.kv_memory is not None:
        blocks = settings.kv_memory // each
    else:
        blocks = min(-(-DEFAULT_POOL_TOKENS // settings.block_size), memory // 4 // each)
    if blocks < 1:
        raise SettingsError(
            f"one block of {settings.block_size} tokens takes {each / 2**20:.1f} MiB, more than "
            "kv_memory (or a quarter of the memory here) holds: give more, or a smaller "
            "block_size"
        )
    if blocks * each > memory:
        raise SettingsError(
            f"{blocks} blocks take {blocks * each / 2**30:.1f} GiB, but there are "
            f"{memory / 2**30:.1f} GiB of memory here: give fewer with num_blocks or kv_memory"
        )
    return int(blocks), each


def pool_slots(settings: Settings, layout: Layout) -> int:
    """Slots of the recurrent group, 0 where there is none. Raises SettingsError."""
    if not layout.states:
        if settings.num_slots is not None:
            raise SettingsError("this model keeps no states: leave num_slots out")
        return 0
    memory, each = memory_bytes(), layout.slot_bytes
    slots = settings.num_slots
    if slots is None:
        slots = max(SLOTS_MIN, min(SLOTS_EACH * settings.max_running, memory // 8 // each))
    if slots * each > memory:
        raise SettingsError(
            f"{slots} slots take {slots * each / 2**30:.1f} GiB, but there are "
            f"{memory / 2**30:.1f} GiB of memory here: give fewer with num_slots"
        )
    return slots


def memory_bytes() -> int:
    """Memory that the pool may be made in: the GPU's where one is used, else what this process may
    use of the machine's.
    """
    import mlx.core as mx

    from kernel import lent

    if mx.default_device().type == mx.gpu and not mx.metal.is_available():
        size = mx.device_info().get("memory_size", 0)
        if size:
            return int(size)
    return lent.memory_bytes()
