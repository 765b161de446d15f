"""Logprobs: token ids and their log-probabilities as OpenAI writes them.

Owns the text that stands for a token. Where its bytes are no text on their own (a part of a
character), they are written in hexadecimal, as OpenAI does: "\\xf0\\x9f", in completions with
"bytes:" before it. A special token has its name.
"""

from __future__ import annotations

from kernel.batch import Logprob
from kernel.tokenizer import Tokenizer

from .wire_chat import TokenLogprob, TopLogprob


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
