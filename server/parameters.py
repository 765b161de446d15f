"""Parameters: with which numbers requests can be served, whatever way they came. Pure.

Owns the bounds: the HTTP side holds its bodies against the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from statemachine.records import Parameters

from .submission import RequestRefused

TOP_LOGPROBS_MAX = 20
"""The most likely tokens that a kernel tells beside a chosen one."""

BIAS_MAX = 100

BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "max_tokens": (0, 2**31 - 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    # Logits divided or multiplied by these stay numbers in float32.
    "repetition_penalty": (0.01, 100.0),
    "priority": (-(2**31), 2**31 - 1),
}
"""The least and the most of Parameters' numbers, by name; OpenAI's where it has some."""


def range_error(name: str, value: float, low: float, high: float) -> str:
    """What is wrong with a number; empty where nothing is. NaN is in no range."""
    return "" if low <= value <= high else f"{name} is {value}; it must be between {low} and {high}"


def refuse_parameters(
    parameters: Parameters, vocab_size: int = 0, cannot: Mapping[str, str] | None = None
) -> None:
    """Raise RequestRefused. vocab_size 0: ids are only not negative. cannot: what this engine's
    kernel does for no request, with the reasons (batch.Kernel.cannot).
    """
    for name, (low, high) in BOUNDS.items():
        if said := range_error(name, getattr(parameters, name), low, high):
            raise RequestRefused(said, param=name)
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


def bias_error(token: int | str, bias: float) -> str:
    """What is wrong with what is added to a token's logit; empty where nothing is."""
    return range_error(f"logit_bias of token {token}", bias, -BIAS_MAX, BIAS_MAX)


def _refuse_bias(parameters: Parameters, vocab_size: int) -> None:
    for token, value in parameters.logit_bias:
        if token < 0 or (vocab_size and token >= vocab_size):
            raise RequestRefused(
                f"token {token} of logit_bias is outside of the vocabulary", param="logit_bias"
            )
        if said := bias_error(token, value):
            raise RequestRefused(said, param="logit_bias")


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
