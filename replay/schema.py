"""Schema: the JSON schema of all that `--json` prints, made from the reports' structs.

`python -m replay.schema` writes docs/replay.schema.json anew. A command's reports are the structs
in its module whose names end in Report and whose first field is `format`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .cli import COMMANDS

PATH = Path(__file__).parent.parent / "docs" / "replay.schema.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLACE = "#/$defs/{name}"


def reports() -> dict[str, tuple[type[Struct], ...]]:
    """The reports of each command; that of `replay TAPE` stands under ""."""
    modules = {"": "rerun", **{name: command.module for name, command in COMMANDS.items()}}
    found = {name: _reports_of(module) for name, module in modules.items()}
    return {name: kinds for name, kinds in found.items() if kinds}


def _reports_of(module: str) -> tuple[type[Struct], ...]:
    members = vars(importlib.import_module(f"{__package__}.{module}"))
    kinds = {
        name: it
        for name, it in members.items()
        if name.endswith("Report") and inspect.isclass(it) and issubclass(it, Struct)
    }
    return tuple(it for _, it in sorted(kinds.items()) if it.__struct_fields__[:1] == ("format",))


def schema() -> dict[str, Any]:
    """A schema that holds for any report, with one definition for each."""
    kinds = {kind.__name__: kind for many in reports().values() for kind in many}
    ordered = [kinds[name] for name in sorted(kinds)]
    references, definitions = msgspec.json.schema_components(ordered, ref_template=PLACE)
    return {
        "$schema": DIALECT,
        "title": "Reports of replay --json",
        "description": (
            "Each command prints one of these; `format` grows when a field goes or changes its "
            "meaning. Fields that are not described here may be added at any time."
        ),
        "commands": {
            f"replay {name}".strip(): [kind.__name__ for kind in many]
            for name, many in reports().items()
        },
        "anyOf": list(references),
        "$defs": dict(sorted(definitions.items())),
    }


def text() -> str:
    """The schema's file."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
    print(f"{PATH.name} is written", file=sys.stderr)
