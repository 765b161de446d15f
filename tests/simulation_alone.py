"""Alone: what a request answers when nobody else is there, worked out without engine or cache.

The fake kernel draws a token from the tag of the row before it, and the tag of a row is a function
of namespace and tokens, so the answer follows from the request. A test holds it against the real
scheduler with one request in it (sim.answer_alone).
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from kernel.fake import with_wishes
from server.admission import capacity_tokens
from server.submission import LENGTH, STOP
from statemachine.geometry import Geometry
from statemachine.tags import root_key, row_tag

from .simulation_load import Load, Request
from .simulation_play import tokenizer

_pack = struct.Struct("<Q").pack


def alone(load: Load, request: Request) -> tuple[tuple[int, ...], str]:
    """The whole answer, and why it ends."""
    capacity = capacity_tokens(load.geometry, load.policy)
    most = min(request.max_tokens, capacity - len(request.tokens))
    if request.wishes.embed:
        return (), STOP
    seed = request.seed if request.temperature > 0 else 0
    parameters = request.parameters
    tags = _Tags(load.geometry, root_key(load.geometry, request.namespace))
    for token in request.tokens:
        tags.add(token)
    answer: list[int] = []
    while True:
        position = len(request.tokens) + len(answer)
        packed = struct.pack("<QQQ", tags.last(), seed % 2**64, position if seed else 0)
        told = load.told(0, position)
        mix = xxh3_64_intdigest(packed)
        if parameters.logit_bias or parameters.reads_answer:
            said = tuple(answer) if parameters.reads_answer else ()
            prompt = request.tokens if parameters.reads_prompt else ()
            mix = with_wishes(mix, parameters, said, prompt)
        token = mix % load.vocab if told is None else told
        if token in request.end_tokens:
            return tuple(answer), STOP
        answer.append(token)
        if _stopped(request, answer):
            return tuple(answer), STOP
        if len(answer) >= most:
            return tuple(answer), LENGTH
        tags.add(token)


def scores_alone(load: Load, request: Request) -> dict[int, float]:
    """What is told of a prompt, by position."""
    first = request.wishes.score_from
    tags = _Tags(load.geometry, root_key(load.geometry, request.namespace))
    scores: dict[int, float] = {}
    for at, token in enumerate(request.tokens):
        if at and 0 <= first <= at:
            mix = xxh3_64_intdigest(struct.pack("<QQ", tags.last(), token))
            scores[at] = -(mix >> 8 & 0xFFFFFF) / 2**24
        tags.add(token)
    return scores


def _stopped(request: Request, answer: list[int]) -> bool:
    """Whether the text holds a stop string. Once a detokeniser raised, nobody sees one."""
    fails = request.text_raises
    if not request.stop or (fails is not None and len(answer) >= fails):
        return False
    text = tokenizer().decode(answer)
    return any(word in text for word in request.stop)


class _Tags:
    """The tag of the last row of a growing sequence."""

    def __init__(self, geometry: Geometry, root: int) -> None:
        self._geometry = geometry
        self._parent, self._block = root, b""

    def add(self, token: int) -> None:
        """One row more."""
        if len(self._block) == 8 * self._geometry.block_size:
            self._parent, self._block = self.last(), b""
        self._block += _pack(token)

    def last(self) -> int:
        """The newest row's tag."""
        return row_tag(self._geometry, self._parent, self._block)
