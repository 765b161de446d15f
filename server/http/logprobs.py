"""Logprobs: token ids and their log-probabilities as OpenAI writes them.

Owns the text that stands for a token. Where its bytes are no text on their own (a part of a
character), they are written in hexadecimal, as OpenAI does: "\\xf0\\x9f", in completions with
"bytes:" before it. A special token has its name.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel.batch import Logprob
from kernel.tokenizer import Detokenizer, Tokenizer

from .stream import Answer
from .wire_chat import TokenLogprob, TopLogprob
from .wire_completions import CompletionLogprobs


def token_text(tokenizer: Tokenizer, token: int, prefix: str = "") -> str:
    """What stands for a token; `prefix` before bytes that are no text."""
    data = tokenizer.written_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprob(tokenizer: Tokenizer, told: Logprob) -> TokenLogprob:
    """As chat completions have it."""
    return TokenLogprob(
        token_text(tokenizer, told.token),
        told.logprob,
        list(tokenizer.written_bytes(told.token)),
        [
            TopLogprob(token_text(tokenizer, token), logprob, list(tokenizer.written_bytes(token)))
            for token, logprob in told.top
        ],
    )


def completion_logprobs(
    tokenizer: Tokenizer, told: Sequence[tuple[int, Logprob | None, int]], top: bool
) -> CompletionLogprobs:
    """As completions have them, of (token, its log-probability if any, where its text begins).

    `top`: whether the likeliest tokens were asked for. The token itself is then always among them.
    """

    def text(token: int) -> str:
        return token_text(tokenizer, token, "bytes:")

    def likeliest(logprob: Logprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
            found.setdefault(text(token), value)
        return found

    tops = [None if logprob is None else likeliest(logprob) for _, logprob, _ in told]
    return CompletionLogprobs(
        tokens=[text(token) for token, _, _ in told],
        token_logprobs=[None if logprob is None else logprob.logprob for _, logprob, _ in told],
        top_logprobs=tops if top else None,
        text_offset=[start for _, _, start in told],
    )


def echoed(tokenizer: Tokenizer, answer: Answer) -> list[tuple[int, Logprob | None, int]]:
    """The prompt's tokens for `completion_logprobs`."""
    decoder, start, found = Detokenizer(tokenizer), 0, []
    for token, score in zip(answer.prompt, answer.scores, strict=True):
        found.append((token, score, start))
        start += len(decoder.add(token))
    return found
