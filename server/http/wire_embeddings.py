"""Bodies of /v1/embeddings, in OpenAI's shapes."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from .wire import ApiError, read_body
from .wire_completions import Prompt

FORMATS = ("float", "base64")


class EmbeddingRequest(Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Prompt
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class Embedding(Struct):
    """One input's vector [D]; in base64: float32, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def read_embedding_request(body: bytes) -> EmbeddingRequest:
    """The request in `body`, checked. Raises ApiError (400), with the field's name in `param`."""
    request = read_body(_decoder, body)
    if request.encoding_format not in (None, *FORMATS):
        raise ApiError(
            f"encoding_format is {request.encoding_format!r}; it must be float or base64.",
            param="encoding_format",
        )
    return request


def check_dimensions(asked: int | None, size: int) -> None:
    """Raise ApiError (400) where vectors of another size are asked for than `size`, the model's;
    of a model that makes none (0), the engine says why.
    """
    if size and asked not in (None, size):
        raise ApiError(
            f"dimensions is {asked}, but this model's vectors have {size}; leave it out.",
            param="dimensions",
        )
