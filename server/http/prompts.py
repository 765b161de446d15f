"""Prompts: a prompt as text or token ids, or several of them, as lists of token ids.

Completions and embeddings take the same four forms. Never touches the engine.
"""

from __future__ import annotations

from kernel.tokenizer import Tokenizer

from .wire import ApiError


def prompts_of(
    given: str | list[str | int | list[int]], tokenizer: Tokenizer, param: str
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt; a model's start token stands before those that came as text.

    `param` is the field's name. Raises ApiError (400): none, an empty one, mixed forms.
    """
    if isinstance(given, str):
        return (_encoded(given, tokenizer, param),)
    if not given:
        raise ApiError(f"{param} is empty; send a text or token ids.", param=param)
    for place, item in enumerate(given):
        if type(item) is not type(given[0]):
            where = f"{param}[{place}]"
            raise ApiError(
                f"{where} is not like the first one: send texts, token ids or lists of token ids, "
                "not several of these.",
                param=where,
            )
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        return (_checked(ids, tokenizer, param),)
    found: list[tuple[int, ...]] = []
    for place, item in enumerate(given):
        where = f"{param}[{place}]"
        if isinstance(item, str):
            found.append(_encoded(item, tokenizer, where))
        elif isinstance(item, list):
            found.append(_checked(item, tokenizer, where))
    return tuple(found)


def _encoded(text: str, tokenizer: Tokenizer, where: str) -> tuple[int, ...]:
    tokens = tuple(tokenizer.encode(text))
    if not tokens:
        raise ApiError(f"{where} is empty; send some text.", param=where)
    return tokens


def _checked(tokens: list[int], tokenizer: Tokenizer, where: str) -> tuple[int, ...]:
    if not tokens:
        raise ApiError(f"{where} is empty; send at least one token.", param=where)
    check_tokens(tokens, tokenizer, where)
    return tuple(tokens)


def check_tokens(tokens: list[int], tokenizer: Tokenizer, where: str) -> None:
    """Raise ApiError (400) where a token id is out of range."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < tokenizer.vocab_size:
            raise ApiError(
                f"{where} has token {token}; ids are between 0 and {tokenizer.vocab_size - 1}.",
                param=where,
            )
