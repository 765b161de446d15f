"""Print config: settings as TOML that --config takes, each with where it comes from.

Secrets are masked. A masked value is refused when it is read again, unless a later source gives
the secret: a file of printed settings never starts a server that is open by mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from .settings import Settings
from .values import MASK

HEAD = "# The settings of `mlxtape serve`; a later source wins: a file, the environment, flags.\n"


def config_text(settings: Settings, sources: Mapping[str, str]) -> str:
    """A line for each setting; TOML has no word for none, so that one is a comment."""
    lines = [_line(field, settings, sources) for field in attrs.fields(Settings)]
    return HEAD + "".join(lines)


def _line(field: attrs.Attribute[Any], settings: Settings, sources: Mapping[str, str]) -> str:
    value = getattr(settings, field.name)
    source = _plain(sources.get(field.name, "default"))
    if value is None:
        return f"# {field.name}: none  # {source}\n"
    if field.metadata["secret"]:
        value = [MASK for _ in value]
    return f"{field.name} = {_toml(value)}  # {source}\n"


def _toml(value: Any) -> str:
    """JSON's texts, numbers, lists and switches are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(source: str) -> str:
    """A comment ends with its line; a file's name might have one."""
    return "".join(char if char.isprintable() else "?" for char in source)
