"""Loads: who asks what, and when. The same words for every server; no word is drawn twice alike.

Owns the prompts. A load is a function of an asker and a seed that makes its words, so that neither
another load nor a repetition finds in a cache what it should not. It names phases, each a row of
its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

from attrs import frozen

from .asking import Asker, Message

WORDS = (
    *("river", "stone", "light", "table", "green", "seven", "walk", "paper", "cloud", "under"),
    *("minute", "garden", "silver", "bread", "window", "music", "letter", "harbour", "winter"),
)
ASKED = "Write a very long story with all of these words."
PROMPT_WORDS = 100
ANSWER_TOKENS = 64
SHARED_WORDS = 400
TAIL_WORDS = 20
LONG_WORDS = 5_900
"""Some 6,000 tokens."""
LONG_ANSWER_TOKENS = 16
DECODERS = 4
DECODERS_TOKENS = 128
CHATS = 4
CHAT_TURNS = 4
CHAT_WORDS = 30
CHAT_TOKENS = 32


@frozen
class Load:
    """title: for the table. run: asks, and waits for all answers. clients: at once, at most.

    long: a prompt of it is longer than 1,024 tokens.
    """

    title: str
    run: Callable[[Asker, str], Awaitable[None]]
    clients: int
    long: bool = False


def said(drawn: random.Random, words: int) -> str:
    """Words in a random order."""
    return " ".join(drawn.choices(WORDS, k=words))


def told(drawn: random.Random, words: int, place: int) -> str:
    """A prompt that is unlike all others from its beginning on."""
    return f"{place}. {said(drawn, words)}. {ASKED}"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


async def _burst(asker: Asker, seed: str, *, clients: int, words: int, tokens: int) -> None:
    """Clients that ask at once, each something else."""
    drawn = random.Random(seed)
    texts = [told(drawn, words, place) for place in range(clients)]
    await asyncio.gather(*(asker.ask([_user(text)], tokens) for text in texts))


async def _shared(
    asker: Asker, seed: str, *, clients: int, words: int, tail: int, tokens: int
) -> None:
    """Clients whose prompts begin alike: first nobody knows the beginning, then all ask again."""
    drawn = random.Random(seed)
    beginning = f"{ASKED} {said(drawn, words)}."
    for round_, phase in enumerate(("cold", "warm")):
        places = range(round_ * clients, (round_ + 1) * clients)
        texts = [f"{beginning} {place}. {said(drawn, tail)}." for place in places]
        await asyncio.gather(*(asker.ask([_user(text)], tokens, phase) for text in texts))


async def _beside(asker: Asker, seed: str, *, words: int, decoders: int, tokens: int) -> None:
    """A long prompt that comes once some clients have begun to read their answers."""
    drawn = random.Random(seed)
    texts = [told(drawn, PROMPT_WORDS, place) for place in range(decoders)]
    long_one = told(drawn, words, decoders)
    reading = [
        asyncio.create_task(asker.ask([_user(text)], tokens, "those that decode")) for text in texts
    ]
    while len(asker.answers) < decoders or not all(
        answer.pieces_s or answer.failure for answer in asker.answers
    ):
        await asyncio.sleep(0.002)
    await asker.ask([_user(long_one)], LONG_ANSWER_TOKENS, "the long one")
    await asyncio.gather(*reading)


async def _chats(
    asker: Asker, seed: str, *, clients: int, turns: int, words: int, tokens: int
) -> None:
    """Chats of several turns, each a client's own; a turn's prompt holds all that was said."""

    async def chat(client: int) -> None:
        drawn = random.Random(f"{seed} {client}")
        messages: list[Message] = []
        for _ in range(turns):
            messages.append(_user(told(drawn, words, client)))
            answer = await asker.ask(messages, tokens)
            messages.append({"role": "assistant", "content": answer.text})

    await asyncio.gather(*(chat(client) for client in range(clients)))


async def _poisson(
    asker: Asker, seed: str, *, requests: int, rate: float, words: int, tokens: int
) -> None:
    """Requests at random moments, `rate` a second on average, whether or not others ended."""
    drawn = random.Random(seed)
    asked = []
    for place in range(requests):
        text = told(drawn, words, place)
        asked.append(asyncio.create_task(asker.ask([_user(text)], tokens)))
        await asyncio.sleep(drawn.expovariate(rate))
    await asyncio.gather(*asked)


def burst(clients: int, words: int = PROMPT_WORDS, tokens: int = ANSWER_TOKENS) -> Load:
    """A closed loop of one request a client."""
    title = f"{clients} x {words} words"
    return Load(title, partial(_burst, clients=clients, words=words, tokens=tokens), clients)


def shared(
    clients: int,
    words: int = SHARED_WORDS,
    tail: int = TAIL_WORDS,
    tokens: int = ANSWER_TOKENS,
) -> Load:
    """A prefix that all share, cold and warm."""
    run = partial(_shared, clients=clients, words=words, tail=tail, tokens=tokens)
    return Load(f"{clients} sharing {words} words", run, clients)


def beside(
    words: int = LONG_WORDS, decoders: int = DECODERS, tokens: int = DECODERS_TOKENS
) -> Load:
    """A long prompt beside answers that are being read."""
    run = partial(_beside, words=words, decoders=decoders, tokens=tokens)
    return Load(f"{decoders} beside {words} words", run, decoders + 1, long=True)


def chats(
    clients: int = CHATS,
    turns: int = CHAT_TURNS,
    words: int = CHAT_WORDS,
    tokens: int = CHAT_TOKENS,
) -> Load:
    """Conversations."""
    run = partial(_chats, clients=clients, turns=turns, words=words, tokens=tokens)
    return Load(f"{clients} chats of {turns} turns", run, clients)


def poisson(
    requests: int, rate: float, words: int = PROMPT_WORDS, tokens: int = ANSWER_TOKENS
) -> Load:
    """An open loop."""
    run = partial(_poisson, requests=requests, rate=rate, words=words, tokens=tokens)
    return Load(f"{requests} at {rate:g} a second", run, requests)


LOADS = {
    "1": burst(1),
    "4": burst(4),
    "16": burst(16),
    "32": burst(32),
    "shared8": shared(8),
    "shared32": shared(32),
    "long": beside(),
    "chats": chats(),
    "poisson": poisson(20, 1.0),
}
"""By the name that chooses them."""
