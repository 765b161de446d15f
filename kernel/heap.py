"""Heap: what the arrays of MLX's CPU backend give back, the process keeps for the next ones.

glibc maps an array of more than 128 KiB to 32 MiB (it learns where in between) by itself, and
unmaps it when it is freed: each of its pages is then cleared and mapped anew by the system, a third
of the processor's time of a long prompt, whose scores are arrays of some ten MB.
"""

from __future__ import annotations

import ctypes

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
"""Arrays beyond that are mapped by themselves, as before; so much free memory at the heap's end is
kept.
"""


def keep_freed() -> None:
    """From now on, for the whole process; where malloc is not glibc's, nothing changes."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, KEPT_BYTES)
        set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)
