"""Parameters at their ends: what float32 cannot hold never becomes a token that nobody drew."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kernel.blas import load_blas

load_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402

from kernel.sampling import plan_samples, sample  # noqa: E402
from server.http.wire import ApiError  # noqa: E402
from server.http.wire_completions import read_completion_request  # noqa: E402
from server.parameters import refuse_parameters  # noqa: E402
from server.submission import RequestRefused  # noqa: E402
from statemachine.records import Parameters  # noqa: E402


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-39, 1e-31, 1e-30])
def test_a_temperature_too_small_for_float32_chooses_the_likeliest_token(
    temperature: float,
) -> None:
    logits = mx.random.normal((5, 300), key=mx.random.key(3)) * 8
    asked = [(Parameters(max_tokens=1, temperature=temperature, seed=it), it) for it in range(5)]
    tokens = np.array(sample(logits, plan_samples(asked)).tokens)
    np.testing.assert_array_equal(tokens, np.array(logits).argmax(axis=-1))


@pytest.mark.parametrize("penalty", [0.0, 1e-300, 1e-9, 100.5, 1e300])
def test_a_repetition_penalty_that_leaves_no_finite_logit_is_refused(penalty: float) -> None:
    with pytest.raises(ApiError, match=r"must be between 0\.01 and 100") as refused:
        read_completion_request(_body(penalty))
    assert refused.value.status == 400
    with pytest.raises(RequestRefused, match=r"must be between 0\.01 and 100"):
        refuse_parameters(Parameters(max_tokens=1, repetition_penalty=penalty))


@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
def test_repetition_penalties_up_to_the_bounds_are_taken(penalty: float) -> None:
    body = read_completion_request(_body(penalty))
    assert body.parameters().repetition_penalty == penalty
    refuse_parameters(body.parameters())


def _body(penalty: float) -> bytes:
    return msgspec.json.encode({"prompt": "x", "repetition_penalty": penalty})
