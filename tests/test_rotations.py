"""Rotations and norms of few operations: bit for bit what MLX's own functions give on the CPU."""

from __future__ import annotations

from kernel.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kernel import fastmath, rotations  # noqa: E402
from kernel.handles import Positions  # noqa: E402

DIMS = 16
AT = np.array([0, 1, 77, 4000, 123], np.int32)


def rows(dtype: mx.Dtype = mx.float32) -> mx.array:
    mx.random.seed(1)
    return mx.random.normal((len(AT), 3, 1, DIMS)).astype(dtype)


def same(one: mx.array, other: mx.array) -> bool:
    return one.dtype == other.dtype and np.array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_packed_rows_are_turned_to_the_very_numbers_that_mlx_turns_them_to(
    traditional: bool, own: bool
) -> None:
    freqs = mx.random.uniform(1, 50, (DIMS // 2,)) if own else None
    base = None if own else 1e5
    x, how = rows(), {"traditional": traditional, "base": base, "scale": 0.5, "freqs": freqs}
    wanted = rotations.ROPE(x, DIMS, offset=mx.array(AT), **how)
    positions = Positions(AT)
    assert same(rotations.rope(x, DIMS, offset=positions, **how), wanted)
    assert len(positions.angles) == 1


def test_layers_of_a_step_share_their_angles_unless_they_turn_otherwise() -> None:
    positions = Positions(AT)

    def turned(base: float) -> None:
        rotations.rope(rows(), DIMS, traditional=True, base=base, scale=1.0, offset=positions)

    turned(1e4)
    ((cosines, *_),) = positions.angles.values()
    turned(1e4)
    assert [held[0] for held in positions.angles.values()] == [cosines]
    turned(1e6)
    assert len(positions.angles) == 2


@pytest.mark.parametrize("dims", [DIMS, DIMS // 2])
def test_what_is_no_packed_float32_row_is_left_to_mlx(dims: int) -> None:
    how = {"traditional": False, "base": 1e4, "scale": 1.0}
    dtype = mx.float16 if dims == DIMS else mx.float32
    positions = Positions(AT)
    got = rotations.rope(rows(dtype), dims, offset=positions, **how)
    assert same(got, rotations.ROPE(rows(dtype), dims, offset=mx.array(AT), **how))
    got = rotations.rope(rows(), DIMS, offset=7, **how)
    assert same(got, rotations.ROPE(rows(), DIMS, offset=7, **how))
    assert positions.angles == {}


@pytest.mark.parametrize("rows", [1, 5, fastmath.MANY_ROWS, 67])
def test_a_norm_of_few_operations_is_mlx_s_to_the_bit(rows: int) -> None:
    mx.random.seed(2)
    x, weight = mx.random.normal((rows, 1, 576)), mx.random.normal((576,))
    assert same(fastmath.rms_norm(x, weight, 1e-5), fastmath.RMS_NORM(x, weight, 1e-5))
    half = x.astype(mx.float16)
    assert same(fastmath.rms_norm(half, None, 1e-5), fastmath.RMS_NORM(half, None, 1e-5))


def test_powers_below_a_peak_are_those_of_the_difference_and_never_less_than_the_least() -> None:
    values, peaks = mx.array([[1.0, 2.5, -300.0]]), mx.array([[2.5]])
    got = np.array(fastmath.exp2_below(values, peaks))[0]
    np.testing.assert_allclose(got, [2**-1.5, 1.0, 2**-126], rtol=5e-7)
