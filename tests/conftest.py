"""What all tests share: BLAS before MLX, with one thread, and a process that stays light.

BLAS is loaded before anything imports MLX. The models here are small, and two threads that wait for
each other on a busy machine take many times as long as one.

Half a million objects are there once all tests are collected: Python's collector, which takes
0.3 s for them, walks them once and never again. What a file's models took goes back to the system
at the end of the file. Logs that a test configured are as before after it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Where it is set, each server and command that a test starts would compile our packages anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from kernel.blas import load_blas

load_blas()

TRIM: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc keeps what was freed in the middle of its heap: of weights, gigabytes."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing is garbage while tests are collected, and what they are is put aside then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        if "hypothesis" in sys.modules:
            _draw_once()
        gc.freeze()


def _draw_once() -> None:
    """Hypothesis makes its random numbers' source at its first draw, and asks the collector who
    holds it: of 3.14's, one who is put aside holds nothing.
    """
    from hypothesis import given
    from hypothesis.strategies import none

    given(none())(lambda _: None)()


@pytest.fixture(scope="module", autouse=True)
def _memory_goes_back() -> Iterator[None]:
    """A model is part of a cycle, MLX keeps buffers, and so does the C library."""
    yield
    if mlx := sys.modules.get("mlx.core"):
        gc.collect()
        mlx.clear_cache()
        if TRIM is not None:
            TRIM(0)


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    yield
    if structlog := sys.modules.get("structlog"):
        structlog.reset_defaults()
