"""Adapters: which of them requests may ask for, by name, and their coming and going.

    name=path -> Shelf.load (the kernel reads it) -> offered -> requests whose `model` is its name
              -> Shelf.unload, or other weights under the name -> retired: who has it keeps it
              -> the last request that has it ended -> the kernel lets go of it

Owns the names. `load`, `unload` and `sweep` run on the engine's thread, as all that touches MLX;
`offered` is a value, to be read from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from statemachine.events import Namespace

from .submission import RequestRefused

NAME_MAX = 128
MODEL_NOT_FOUND = "model_not_found"

Key = tuple[str, int]
"""An adapter's name and version."""


class Adapter(Protocol):
    """An adapter that was read: kernel.adapters.Adapter."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def key(self) -> Key: ...


class Store(Protocol):
    """What holds their tensors: kernel.adapters.Adapters."""

    def load(self, name: str, path: str) -> Adapter:
        """Read a folder. Raises AdapterError."""

    def keep(self, keys: Collection[Key]) -> None:
        """Let go of all others."""


class Shelf:
    """The adapters of an engine. Without a store requests are held to none: a kernel that has no
    model does not look at them.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._retired: set[Key] = set()
        self.offered: Mapping[str, Adapter] = {}

    def load(self, name: str, path: str) -> Adapter:
        """Offer a folder under a name, in place of what that name was. Raises AdapterError."""
        assert self._store is not None, "an engine without a model has no adapters"
        adapter = self._store.load(name, path)
        self._offer({**self.offered, name: adapter})
        return adapter

    def unload(self, name: str) -> None:
        """Offer a name no more. Raises RequestRefused where it is not offered."""
        if name not in self.offered:
            raise RequestRefused(
                f"there is no adapter {name!r} to unload: GET /v1/models lists those that are "
                "loaded",
                code=MODEL_NOT_FOUND,
                param="lora_name",
            )
        self._offer({key: it for key, it in self.offered.items() if key != name})

    def refuse(self, space: Namespace) -> None:
        """Raise RequestRefused where a namespace's adapter is not offered in that version."""
        if self._store is None or not space.adapter:
            return
        adapter = self.offered.get(space.adapter)
        if adapter is None or adapter.key != (space.adapter, space.version):
            raise RequestRefused(
                f"adapter {space.adapter!r} was unloaded, or loaded anew, while this request came "
                "in: send it again",
                code=MODEL_NOT_FOUND,
                param="model",
            )

    @property
    def retired(self) -> bool:
        """Whether `sweep` may have something to do."""
        return bool(self._retired)

    def sweep(self, live: Iterable[Namespace]) -> None:
        """Let go of what is not offered, and what no request of `live` has."""
        held = {(space.adapter, space.version) for space in live}
        if self._store is not None and not self._retired <= held:
            self._retired &= held
            self._store.keep({it.key for it in self.offered.values()} | self._retired)

    def release(self) -> None:
        """The engine has ended: let go of the store, and so of the model."""
        self._store = None

    def _offer(self, offered: Mapping[str, Adapter]) -> None:
        before = {it.key for it in self.offered.values()}
        self.offered = offered
        now = {it.key for it in offered.values()}
        self._retired = (self._retired | before) - now


def named_path(text: str, base: str = "") -> tuple[str, str]:
    """Name and path of `name=path`. Raises ValueError, with what it must be; see check_name."""
    name, found, path = text.partition("=")
    if not found or not path:
        raise ValueError(f"must be NAME=PATH, not {text!r}")
    check_name(name, base)
    return name, path


def check_name(name: str, base: str = "") -> None:
    """Raise ValueError where an adapter cannot have a name: it is what `model` says in a request,
    and must not be the base model's.
    """
    if not 0 < len(name) <= NAME_MAX or not name.isprintable() or name != name.strip():
        raise ValueError(f"must have a name of 1 to {NAME_MAX} printable characters, not {name!r}")
    if base and name in (base, base_name(base)):
        raise ValueError(f"must have another name than the model itself, {name!r}")


def base_name(model: str) -> str:
    """The last part of a model's name, by which it can be asked for too."""
    return model.rstrip("/").rsplit("/", 1)[-1]
