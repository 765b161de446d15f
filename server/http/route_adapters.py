"""Routes: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes.

Refused with 403 unless the setting `adapter_loading` allows them, which needs API keys. A name that
is loaded already is loaded anew: a new version, which shares no rows with the old one.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kernel.errors import AdapterError

from ..adapters import MODEL_NOT_FOUND, check_name
from ..submission import EngineStopped, RequestRefused
from .desk import Desk, unavailable
from .routing import desk_of, read_body
from .wire import ApiError
from .wire import read_body as decode


class LoadRequest(Struct, kw_only=True):
    """Body of POST /v1/load_lora_adapter. lora_path: a folder on the server's machine."""

    lora_name: str
    lora_path: str


class UnloadRequest(Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


_load = msgspec.json.Decoder(LoadRequest)
_unload = msgspec.json.Decoder(UnloadRequest)


async def load_lora_adapter(request: Request) -> Response:
    """POST /v1/load_lora_adapter."""
    desk = _allowed(request)
    asked = decode(_load, await read_body(request, desk.max_body_bytes))
    try:
        check_name(asked.lora_name, desk.model.id)
    except ValueError as error:
        raise ApiError(f"An adapter {error}.", param="lora_name") from None
    try:
        await asyncio.to_thread(desk.engine.load_adapter, asked.lora_name, asked.lora_path)
    except AdapterError as error:
        raise ApiError(f"{error}.", param="lora_path") from None
    except EngineStopped:
        raise unavailable(desk.closing) from None
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """POST /v1/unload_lora_adapter."""
    desk = _allowed(request)
    asked = decode(_unload, await read_body(request, desk.max_body_bytes))
    try:
        await asyncio.to_thread(desk.engine.unload_adapter, asked.lora_name)
    except RequestRefused as error:
        message = f"{str(error)[0].upper()}{str(error)[1:]}."
        raise ApiError(message, status=404, param=error.param, code=MODEL_NOT_FOUND) from None
    except EngineStopped:
        raise unavailable(desk.closing) from None
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _allowed(request: Request) -> Desk:
    """The desk. Raises ApiError (403) where adapters are not to come and go."""
    if not request.app.state.settings.adapter_loading:
        raise ApiError(
            "This server loads no adapters while it runs; start it with --adapter-loading.",
            status=403,
            code="adapter_loading_off",
        )
    return desk_of(request)
