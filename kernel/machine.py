"""Machine: what computes, and how much memory there is."""

from __future__ import annotations

import os

import mlx.core as mx


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, so that weights should be float32."""
    return bool(mx.default_device().type == mx.cpu)


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
