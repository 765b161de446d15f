"""Wire: what all bodies have in common: refusals, the reading of JSON, usage, models.

Owns OpenAI's shape of a refusal and its words. The types of an endpoint's bodies are in wire_*.py.
Never touches the engine, a tokenizer or a socket. Unknown fields are ignored, for clients send
many; null and absent mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from ..parameters import range_error

Body = TypeVar("Body")
Fields = Mapping[str, Any]
"""A body's fields as a program gives them."""

MESSAGE_CHARACTERS_MAX = 800


class ApiError(Exception):
    """A refusal in OpenAI's shape; `status` is HTTP's, `param` the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(_shortened(message))
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """{"error": {"message", "type", "param", "code"}}."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def _shortened(message: str) -> str:
    """Sentences repeat what was sent, which may be megabytes, and each goes into the log."""
    if len(message) <= MESSAGE_CHARACTERS_MAX:
        return message
    half = MESSAGE_CHARACTERS_MAX // 2
    return f"{message[:half]} ... {message[-half:]}"


class PromptDetails(Struct):
    """cached_tokens: prompt tokens whose rows were computed before."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of the prompt as the template made it, and of the answer as it was delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Model(Struct):
    """A model that is served. max_model_len: tokens of prompt and answer together at most. parent:
    of an adapter, the model that it changes.
    """

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "mlxtape"
    parent: str | UnsetType = UNSET


class ModelList(Struct):
    """Body of GET /v1/models."""

    data: list[Model]
    object: str = "list"


def read_body(decoder: msgspec.json.Decoder[Body], body: bytes | Fields) -> Body:
    """The body as its type. Raises ApiError (400), with the field's name in `param`.

    From a program come fields: they are held against the same type, but are not written as JSON
    first, which would make null, and so the default, of a NaN, and other text of bytes.
    """
    try:
        if isinstance(body, bytes):
            return decoder.decode(body)
        given: Body = msgspec.convert(_plain(body), decoder.type)
        return given
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError("The body is nested too deeply.", code="invalid_json") from None


def _plain(fields: Fields) -> Any:
    """Fields in the types that JSON has, and bytes, which no field takes. Raises ApiError."""
    try:
        plain = msgspec.to_builtins(
            fields, builtin_types=(bytes,), str_keys=True, enc_hook=_of_numpy
        )
        msgspec.json.encode(plain)  # as a tape will hold it, and its texts
    except UnicodeEncodeError:
        raise ApiError(
            "A text has half of a surrogate pair, which UTF-8 has no bytes for; replace it."
        ) from None
    except TypeError as error:
        raise ApiError(f"{error}.") from None
    return plain


def _of_numpy(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(
        f"A value is of type {type(value).__name__}; it must be a text, number, bool, list or dict"
    )


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def _wrong_type(message: str) -> ApiError:
    """msgspec's sentence, as a refusal that names the field."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    path = path.replace("[...]", "")
    if missing := _MISSING.search(what):
        param = ".".join(part for part in (path, missing["name"]) if part)
        return ApiError(f"{param} is missing.", param=param)
    what = what.replace(" | null", "").replace("`", "")
    if not path:
        return ApiError(f"The body must be a JSON object: {what}.")
    return ApiError(f"{path}: {what}.", param=path)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise ApiError (400) where a number is out of its range."""
    if value is not None and (said := range_error(name, value, low, high)):
        raise ApiError(f"{said}.", param=name)
