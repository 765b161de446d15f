"""What all tests share: BLAS is loaded before anything imports MLX."""

from __future__ import annotations

from kernel.blas import load_blas

load_blas()
