"""Machine: what computes."""

from __future__ import annotations

import mlx.core as mx


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, so that weights should be float32."""
    return bool(mx.default_device().type == mx.cpu)
