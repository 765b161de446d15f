"""What all tests share: BLAS is loaded before anything imports MLX, with one thread.

The models here are small, and two threads that wait for each other on a busy machine take many
times as long as one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kernel.blas import load_blas

load_blas()
