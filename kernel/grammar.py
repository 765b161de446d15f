"""Grammar: what an answer must match, and which tokens may come next, by llguidance.

A grammar is a JSON text, one object with one key:

    {"json_schema": {...}}    a JSON document that the schema allows
    {"json_object": {}}       a JSON object
    {"lark": "start: ..."}    llguidance's dialect of Lark
    {"regex": "..."}          Rust's dialect of regular expressions, the whole answer

Owns the matchers. They are derived data: each knows which tokens it went through, and is rolled
back or made anew where an answer does not go on from these. No MLX: the HTTP side checks grammars
with the same function.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from attrs import define
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from statemachine.records import Parameters

from .masks import WORD_BITS, GrammarFailed, Words
from .tokenizer import Tokenizer

MATCHERS_MAX = 256
"""Answers whose matchers are kept; one that fell out is made anew from its answer's tokens."""
GRAMMARS_MAX = 32
"""Grammars that are kept compiled though nobody holds on to them."""
GRAMMAR_CHARS_MAX = 256 << 10
WHITESPACE = r" |\n {0,16}|\n\t{0,8}"
"""Between the tokens of JSON: one blank, or a new line and what it is indented by. Without an end
to it a small model writes blanks until its limit.
"""
LIMITS = LLParserLimits(initial_lexer_fuel=300_000, max_grammar_size=20_000, verbose_errors=False)
"""How long a grammar may hold up the engine: the fuel bounds a regular expression with huge counts,
the size, in symbols, a schema of thousands of properties (their number squared is what it takes).
"""
TOKEN_BYTES_MAX = 1023
"""llguidance panics over a vocabulary that has a longer token. Such a one is never allowed: what it
says can be said by others.
"""
NOTHING_FOLLOWS = "NoExtensionBias"
"""llguidance's word where no token can go on."""


@lru_cache(maxsize=64)
def check_grammar(text: str) -> str:
    """Empty where a grammar can be followed, else why not, in one sentence.

    Special tokens that a Lark grammar names are looked for only once it is used.
    """
    try:
        compiled = _compiled(text)
    except ValueError as error:
        return str(error)
    failed, said = LLMatcher.validate_grammar_with_warnings(compiled, limits=LIMITS)
    if not (failed or said):
        wrong = _begun(compiled)
        failed, said = bool(wrong), [wrong]
    return f"the grammar cannot be followed: {_line(said[0])}" if failed else ""


def lark_term(tokenizer: Tokenizer, text: str) -> str:
    """How a Lark grammar names a marker such as <tool_call>: the one special token that is spelled
    so, or its text.
    """
    token = tokenizer.added_token(text)
    special = token is not None and token in tokenizer.special_tokens
    return f"<[{token}]>" if special else json.dumps(text)


def _begun(compiled: str) -> str:
    """Why no answer can begin, or take its first byte; empty where one can.

    Regular expressions are looked at only by a matcher, over whatever tokens, and by some only as
    they are gone through.
    """
    matcher = LLMatcher(_bytes_tokenizer(), compiled, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        matcher.try_consume_tokens(np.flatnonzero(bits)[:1].tolist())
    wrong: str = matcher.get_error()
    if wrong.startswith(NOTHING_FOLLOWS):
        # Special tokens that a grammar names are none of the bytes.
        return "" if "<" in compiled else "no text matches it"
    return wrong


@define
class _Held:
    """A matcher and the tokens that it went through."""

    grammar: str
    matcher: LLMatcher
    tokens: tuple[int, ...] = ()


@define(eq=False)
class Prepared:
    """A compiled grammar: the matcher that others are copied from, which nobody moves on."""

    matcher: LLMatcher


class Grammars:
    """The masks of a model's answers (adjusting.Masks). All calls come from one thread, but those
    of `prepare`, which does what takes long.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = tokenizer
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._prepared: WeakValueDictionary[str, Prepared] = WeakValueDictionary()
        self._recent: OrderedDict[str, Prepared] = OrderedDict()
        self._lock = Lock()

    def load(self) -> None:
        """Make the vocabulary, which the first grammar needs; llguidance keeps the interpreter's
        lock for most of it (0.7 s for 49,152 tokens), so it had better be done before anybody is
        served.
        """
        self._tokenizer  # noqa: B018

    def prepare(self, grammar: str) -> Prepared | None:
        """Check and compile a grammar on the calling thread, without the interpreter's lock for
        most of it. One that cannot be followed is left alone.

        Whoever holds on to what is returned spares `allowed` from compiling it again: 0.03 MB for
        a schema of 5 properties, 0.6 for one of 100.
        """
        if not check_grammar(grammar):
            with suppress(GrammarFailed):
                return self._compile(grammar)
        return None

    def allowed(
        self, seq: int, parameters: Parameters, answer: tuple[int, ...], certain: int, width: int
    ) -> Words | None:
        """See adjusting.Masks. Where the grammar is satisfied, the request's end tokens may follow,
        and where nothing else may, they alone.
        """
        held = self._at(seq, parameters.grammar, answer)
        if len(held.tokens) < certain:
            raise GrammarFailed(f"token {answer[len(held.tokens)]} of the answer breaks it")
        if len(held.tokens) < len(answer):
            return None
        matcher = held.matcher
        words = np.zeros(width, np.uint32)
        if not matcher.is_stopped():
            found = np.frombuffer(matcher.compute_bitmask(), np.uint32)[:width]
            words[: len(found)] = found
        if matcher.is_error():
            del self._held[seq]
            raise GrammarFailed(_line(matcher.get_error()))
        _set(words, self._source.end_tokens, False)
        if matcher.is_accepting():
            _set(words, parameters.end_tokens, True)
        if not words.any():
            raise GrammarFailed("no token of this model can go on, and none may end the answer")
        return words

    def _at(self, seq: int, grammar: str, answer: tuple[int, ...]) -> _Held:
        """A matcher that went through an answer, or through as much of it as is allowed."""
        held = self._held.pop(seq, None)
        if held is None or held.grammar != grammar or not _back_to(held, answer):
            held = _Held(grammar, self._new(grammar))
        fresh = list(answer[len(held.tokens) :])
        ends = [place for place, token in enumerate(fresh) if token in self._source.end_tokens]
        fresh = fresh[: ends[0]] if ends else fresh
        count = held.matcher.try_consume_tokens(fresh) if fresh else 0
        held.tokens += tuple(fresh[:count])
        self._held[seq] = held
        if len(self._held) > MATCHERS_MAX:
            self._held.popitem(last=False)
        if held.matcher.is_error():
            del self._held[seq]
            raise GrammarFailed(_line(held.matcher.get_error()))
        return held

    def _new(self, grammar: str) -> LLMatcher:
        """A matcher that went through nothing yet."""
        return self._compile(grammar).matcher.deep_copy()

    def _compile(self, grammar: str) -> Prepared:
        """What there is of it already, or what is made now."""
        with self._lock:
            found = self._prepared.get(grammar)
        if found is None:
            try:
                compiled = _compiled(grammar)
            except ValueError as error:
                raise GrammarFailed(str(error)) from None
            matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarFailed(_line(matcher.get_error()))
            found = Prepared(matcher)
        with self._lock:
            self._prepared[grammar] = self._recent[grammar] = found
            self._recent.move_to_end(grammar)
            if len(self._recent) > GRAMMARS_MAX:
                self._recent.popitem(last=False)
        return found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary by its bytes, so that what is allowed is what detokenises to that text."""
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._source)))


class _Vocabulary:
    """A tokenizer as llguidance wants to see one.

    Called with text that a grammar leaves no choice about, it says which tokens to take for it:
    those of the model's own tokenizer, if they are that text and no special token; else, where a
    space is put before each text or a marker is spelled out, the longest ones that fit.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = tokenizer
        self._special = tokenizer.special_tokens
        self.eos_token_id = tokenizer.end_tokens[0] if tokenizer.end_tokens else 0
        self.bos_token_id = None
        written = map(tokenizer.written_bytes, range(tokenizer.vocab_size))
        self.tokens = [data if len(data) <= TOKEN_BYTES_MAX else b"" for data in written]
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: bytes) -> list[int]:
        own = self._source.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        fits = b"".join(self.tokens[token] for token in own) == text
        return own if fits and self._special.isdisjoint(own) else self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._length_max), at, -1)
            end = next((end for end in ends if text[at:end] in self._by_bytes), None)
            if end is None:
                break
            found.append(self._by_bytes[text[at:end]])
            at = end
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        named = enumerate(self.tokens)
        return {data: token for token, data in named if data and token not in self._special}

    @cached_property
    def _length_max(self) -> int:
        return max(map(len, self._by_bytes), default=0)


def _back_to(held: _Held, answer: tuple[int, ...]) -> bool:
    """Roll a matcher back to where it and an answer part; False where it cannot be."""
    known = len(held.tokens)
    if held.tokens == answer[:known]:
        return True
    pairs = zip(held.tokens, answer, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(known, len(answer)))
    if not held.matcher.rollback(known - same):
        return False
    held.tokens = answer[:same]
    return True


def _set(words: Words, tokens: Sequence[int], allowed: bool) -> None:
    for token in tokens:
        word, bit = divmod(token, WORD_BITS)
        if word < len(words):
            if allowed:
                words[word] |= np.uint32(1 << bit)
            else:
                words[word] &= ~np.uint32(1 << bit)


@cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _json_schema(schema: dict[str, Any]) -> str:
    """As text, whose depth is bounded: an object is walked without end, until the stack is out.

    JSON that CPython lets through has 1,000 levels up to 3.11, 10,000 in 3.13, and 20,000 in 3.14.
    """
    defaults: Any = {"whitespace_pattern": WHITESPACE}
    text = msgspec.json.encode(schema).decode()
    return LLMatcher.grammar_from_json_schema(text, defaults=defaults)


_KINDS: dict[str, tuple[type, Callable[[Any], str]]] = {
    "json_schema": (dict, _json_schema),
    "json_object": (dict, lambda _: _json_schema({"type": "object"})),
    "lark": (str, LLMatcher.grammar_from_lark),
    "regex": (str, LLMatcher.grammar_from_regex),
}


def _compiled(text: str) -> str:
    """What llguidance takes. Raises ValueError, in one sentence."""
    if len(text) > GRAMMAR_CHARS_MAX:
        raise ValueError(
            f"the grammar has {len(text)} characters, more than {GRAMMAR_CHARS_MAX}: shorten it"
        )
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the grammar is no JSON object: {error}") from None
    if len(given) != 1 or not given.keys() <= _KINDS.keys():
        names = ", ".join(given) or "none"
        raise ValueError(f"a grammar has one key of {', '.join(_KINDS)}, not {names}")
    ((kind, value),) = given.items()
    wanted, compiled = _KINDS[kind]
    if not isinstance(value, wanted):
        raise ValueError(f"the grammar's {kind} is no {'text' if wanted is str else 'object'}")
    try:
        return compiled(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the grammar cannot be followed: {_line(str(error))}") from None


_PLACE = re.compile(r"\^|\d+ \| |<non-verbose")


def _line(said: str) -> str:
    """An error of llguidance's as part of a sentence: without the lines that show the place."""
    lines = [line.strip() for line in said.splitlines()]
    shown = [it for it in lines if it and not _PLACE.match(it)]
    return " ".join(shown)[:300]
