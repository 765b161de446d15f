"""Handles: what a layer gets in place of its K, its V, masks of them and where its rows stand.

Owns what a model may do with these beside attending over them; anything else raises. Knows of its
cache that it has a number and tells how many rows are seen.

Some models keep a compressed row in place of a key and the part of it that knows its position in
place of a value. They make scores of the second, `queries @ values.swapaxes(-1, -2)`, hand these
on as a mask, and attend over the first, which is key and value at once. So values can be turned,
and the product of what was turned is a handle again: it is not computed before its rows are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

if TYPE_CHECKING:
    from .caches import PagedCache


class HandleMisused(Exception):
    """A model used its cache, or what the cache returned, in a way that pages cannot serve."""


class Positions(mx.array):
    """Where the batch's rows stand: an array that can be told from others.

    angles: what rotations.py made of it, by its parameters, for all layers.
    """

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.angles: dict[tuple[Any, ...], tuple[Any, ...]] = {}


class _Handle:
    """Stands for an array of a layer's; every use but the dispatch's raises HandleMisused."""

    __slots__ = ("paged_cache",)
    what = "handle"

    def __init__(self, paged_cache: PagedCache) -> None:
        self.paged_cache = paged_cache

    def __repr__(self) -> str:
        return f"<{self.what} of layer {self.paged_cache.layer}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise HandleMisused(
            f"this model reads `{name}` of the {self.what} of layer {self.paged_cache.layer}; "
            "paged rows can only be attended to"
        )


class _Rows(_Handle):
    __slots__ = ("_heads", "_width", "dtype")

    def __init__(self, paged_cache: PagedCache, rows: mx.array) -> None:
        super().__init__(paged_cache)
        self.dtype = rows.dtype
        _, self._heads, _, self._width = rows.shape

    @property
    def shape(self) -> tuple[mx.array | int, ...]:
        """As of an array of all rows that are seen, of which each of the batch's sees as many as
        stand before it, and itself: layers without a cache tell their positions from that.
        """
        seen = self.paged_cache.seen_rows
        return (seen.shape[0], self._heads, seen, self._width)

    def astype(self, dtype: mx.Dtype) -> Any:
        """Attention over pages computes in float32, so a cast to it is what happens anyway."""
        if dtype != mx.float32:
            self.__getattr__("astype")
        return self


class KeyHandle(_Rows):
    """What a layer gets in place of its keys."""

    __slots__ = ()
    what = "keys"


class ValueHandle(_Rows):
    """What a layer gets in place of its values."""

    __slots__ = ()
    what = "values"

    def swapaxes(self, one: int, other: int) -> TurnedValues:
        """The values as the right side of a product of matrices."""
        if {one, other} not in ({-1, -2}, {2, 3}):
            self.__getattr__("swapaxes")
        return TurnedValues(self)


class TurnedValues(mx.array):
    """Values [T, heads, dim, keys], to be multiplied with from the left.

    An array to MLX, whose products take nothing else on their right; one NaN, so that whatever else
    is computed of it is nothing that a probe could take for right.
    """

    def __init__(self, values: ValueHandle) -> None:
        super().__init__(float("nan"))
        object.__setattr__(self, "values", values)

    def __getattribute__(self, name: str) -> NoReturn:
        _values_or_self(self).__getattr__(name)


class ScoresHandle(_Handle):
    """What a layer gets in place of the scores `queries` [T, H, 1, dim] give a layer's values."""

    __slots__ = ("queries", "values")
    what = "scores"

    def __init__(self, values: ValueHandle, queries: mx.array) -> None:
        super().__init__(values.paged_cache)
        self.values = values
        self.queries = queries


class MaskHandle(_Handle):
    """What a layer gets in place of a mask that shows the last `window` rows."""

    __slots__ = ("window",)
    what = "mask"

    def __init__(self, paged_cache: PagedCache, window: int) -> None:
        super().__init__(paged_cache)
        self.window = window


def _values_or_self(handle: Any) -> _Handle:
    """The handle that says what is refused."""
    values: _Handle = (
        object.__getattribute__(handle, "values") if type(handle) is TurnedValues else handle
    )
    return values


def _refuse(name: str) -> Any:
    def refuse(self: Any, *_: object) -> NoReturn:
        _values_or_self(self).__getattr__(name)

    return refuse


_BINARY = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
_OTHER = ["lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem", "setitem"]
_ASKED = ["len", "iter", "contains", "bool", "int", "float", "index", "array"]
for _name in (*_BINARY, *(f"r{_name}" for _name in _BINARY), *_OTHER, *_ASKED):
    setattr(_Handle, f"__{_name}__", _refuse(f"__{_name}__"))
    setattr(TurnedValues, f"__{_name}__", _refuse(f"__{_name}__"))


def _scores(turned: TurnedValues, queries: mx.array) -> ScoresHandle:
    values = _values_or_self(turned)
    assert isinstance(values, ValueHandle)
    return ScoresHandle(values, queries)


setattr(TurnedValues, "__rmatmul__", _scores)  # noqa: B010 - the one product that is allowed
