"""Values: what may stand behind a setting's name, as text (environment, flags) or typed (TOML).

Owns the kinds of values and the words of a refusal; knows no setting by name.
"""

from __future__ import annotations

import re
from typing import Any, NewType

import cattrs

Size = NewType("Size", int)
"""Bytes; written as a number or with a unit, such as 2GiB."""

Texts = NewType("Texts", tuple[str, ...])
"""Several texts: a list, or one text with commas; a flag may also be repeated."""

MASK = "***"
"""What stands for a secret where settings are printed; as a value it is refused."""


_converter = cattrs.Converter()


def structure(value: Any, kind: Any) -> Any:
    """`value` as a `kind`. Raises ValueError, with what it must be."""
    return _converter.structure(value, kind)


def _whole_number(value: Any, _: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
        return int(value)
    raise ValueError("must be a whole number")


def _number(value: Any, _: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError("must be a number")


_SWITCHES = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False, "0": False, "no": False, "off": False
}  # fmt: skip


def _switch(value: Any, _: Any) -> bool:
    chosen = _SWITCHES.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(chosen, bool):
        raise ValueError("must be true or false")
    return chosen


def _text(value: Any, _: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text that is not empty")
    return value


_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", start=1)
    for name, base in ((letter, 1024), (letter + "ib", 1024), (letter + "b", 1000))
}


def _size(value: Any, _: Any) -> Size:
    """Bytes: 2GiB and 2G are 2 * 1024**3, 2GB is 2 * 1000**3."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or isinstance(value, bool):
        raise ValueError("must be a size such as 512MiB or 2GiB")
    return Size(int(float(match[1]) * unit))


def _texts(value: Any, _: Any) -> Texts:
    pieces = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(piece, str) for piece in pieces):
        raise ValueError("must be a list of texts")
    texts = [text.strip() for piece in pieces for text in piece.split(",")]
    found = Texts(tuple(text for text in texts if text))
    if pieces and not found:
        # As a variable that was meant to hold keys: an empty one must not open a server.
        raise ValueError("must not be empty: leave it out, or give a text")
    return found


_converter.register_structure_hook(int, _whole_number)
_converter.register_structure_hook(float, _number)
_converter.register_structure_hook(bool, _switch)
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook(Size, _size)
_converter.register_structure_hook(Texts, _texts)
