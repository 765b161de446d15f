"""Sampling fields: what chat and completions bodies say of how tokens are chosen, alike.

Owns the fields, their ranges, and their way into Parameters.
"""

from __future__ import annotations

import re

from msgspec import Struct

from kernel.tokenizer import Tokenizer
from statemachine.events import Namespace
from statemachine.records import NO_LOGPROBS, NO_SCORES, Parameters

from ..parameters import BOUNDS, bias_error
from .asking import NO_LIMIT, SEED_MASK, random_seed
from .wire import ApiError, check_range
from .wire_grammar import Constrained

STOPS_MAX = 4
STOP_CHARACTERS_MAX = 1000
COPIES_MAX = 128
_TOKEN = re.compile("[0-9]{1,18}")
"""A token id; Python refuses to read numbers of many thousand digits."""


class StreamOptions(Struct):
    """include_usage: one more chunk, with usage and no choices, before the end."""

    include_usage: bool | None = None


class Sampling(Constrained, kw_only=True):
    """Fields that both bodies have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    salt: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None

    @property
    def slow(self) -> bool:
        """Whether it takes a while to make an Ask of it, however short it is."""
        return self.constrained

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def answer_tokens_max(self) -> int | None:
        """The most tokens that an answer may have."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def namespace(self) -> Namespace:
        """Who may share its rows: only requests of the same salt."""
        return Namespace(salt=self.salt or self.cache_salt or self.prompt_cache_key or "")

    def parameters(
        self, *, logprobs: int = NO_LOGPROBS, score_from: int = NO_SCORES, grammar: str = ""
    ) -> Parameters:
        """As the engine takes them; defaults are OpenAI's. A seed is drawn where none is named."""
        asked = self.answer_tokens_max
        return Parameters(
            max_tokens=NO_LIMIT if asked is None else asked,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=random_seed() if self.seed is None else self.seed & SEED_MASK,
            stop=self.stops,
            priority=self.priority or 0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=bias_of(self.logit_bias),
            grammar=grammar,
            logprobs=logprobs,
            score_from=score_from,
        )


_RANGES = {
    **BOUNDS,
    "top_k": (-1, BOUNDS["top_k"][1]),  # which is off, too
    "seed": (-(2**63), BOUNDS["seed"][1]),  # signed ones are taken as the unsigned of their bits
    "n": (1, COPIES_MAX),
}


def check_sampling(request: Sampling, stops_param: str = "stop") -> None:
    """Raise ApiError (400) where a field is out of its range."""
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(request, name), low, high)
    if request.top_p == 0:
        raise ApiError("top_p is 0; it must be above 0 (temperature 0 is greedy).", param="top_p")
    _check_stops(request.stops, stops_param)
    bias_of(request.logit_bias)


def _check_stops(stops: tuple[str, ...], param: str) -> None:
    if len(stops) > STOPS_MAX:
        raise ApiError(
            f"{param} has {len(stops)} strings; at most {STOPS_MAX} are allowed.", param=param
        )
    for text in stops:
        if not 1 <= len(text) <= STOP_CHARACTERS_MAX:
            raise ApiError(
                f"{param} has a string of {len(text)} characters; "
                f"each must have 1 to {STOP_CHARACTERS_MAX}.",
                param=param,
            )


def bias_of(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """(token, bias) pairs, by token. Raises ApiError (400)."""
    found: dict[int, float] = {}
    for name, bias in (biases or {}).items():
        if not _TOKEN.fullmatch(name):
            raise ApiError(
                f"logit_bias names the token {name[:20]!r}; token ids are numbers.",
                param="logit_bias",
            )
        if said := bias_error(name, bias):
            raise ApiError(f"{said}.", param="logit_bias")
        found[int(name)] = bias
    return tuple(sorted(found.items()))


def check_vocabulary(request: Sampling, tokenizer: Tokenizer) -> None:
    """Raise ApiError (400) where logit_bias names a token that there is not."""
    for name in request.logit_bias or ():
        if int(name) >= tokenizer.vocab_size:
            raise ApiError(
                f"logit_bias names token {name}, but there are {tokenizer.vocab_size}.",
                param="logit_bias",
            )
