"""Parameters: those with which no request can be served, refused in one sentence each. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from statemachine.records import Parameters

from .submission import RequestRefused

TOP_LOGPROBS_MAX = 20
"""The most likely tokens that a kernel tells beside a chosen one."""

REPETITION_MIN, REPETITION_MAX = 0.01, 100.0
"""Bounds of repetition_penalty: logits divided or multiplied by these stay numbers in float32."""

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")


def refuse_parameters(
    parameters: Parameters, vocab_size: int = 0, cannot: Mapping[str, str] | None = None
) -> None:
    """Raise RequestRefused. vocab_size 0: ids are only not negative. cannot: what this engine's
    kernel does for no request, with the reasons (batch.Kernel.cannot).
    """
    for name in _NUMBERS:
        value = getattr(parameters, name)
        if not math.isfinite(value):
            raise RequestRefused(f"{name} must be a finite number, not {value}", param=name)
    repetition = parameters.repetition_penalty
    if not REPETITION_MIN <= repetition <= REPETITION_MAX:
        raise RequestRefused(
            f"repetition_penalty must be between {REPETITION_MIN} and {REPETITION_MAX:g}, not "
            f"{repetition} (1 changes nothing)",
            param="repetition_penalty",
        )
    _refuse_bias(parameters, vocab_size)
    if parameters.logprobs > TOP_LOGPROBS_MAX:
        raise RequestRefused(
            f"at most {TOP_LOGPROBS_MAX} likely tokens can be told for each token, not "
            f"{parameters.logprobs}",
            param="top_logprobs",
        )
    reasons = cannot or {}
    for name in ("grammar", "embed"):
        if getattr(parameters, name) and name in reasons:
            raise RequestRefused(reasons[name], param=name)
    if parameters.grammar:
        _refuse_grammar(parameters)


def _refuse_bias(parameters: Parameters, vocab_size: int) -> None:
    for token, value in parameters.logit_bias:
        if token < 0 or (vocab_size and token >= vocab_size):
            raise RequestRefused(
                f"token {token} of logit_bias is outside of the vocabulary", param="logit_bias"
            )
        if not math.isfinite(value):
            raise RequestRefused(
                f"the bias of token {token} must be a finite number, not {value}",
                param="logit_bias",
            )


def _refuse_grammar(parameters: Parameters) -> None:
    from kernel.grammar import check_grammar

    if not parameters.end_tokens:
        raise RequestRefused(
            "an answer under a grammar ends by an end token, and this request has none",
            param="grammar",
        )
    wrong = check_grammar(parameters.grammar)
    if wrong:
        raise RequestRefused(wrong, param="grammar")
