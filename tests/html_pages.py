"""Pages of `replay html`, made and read by code of the tests' own."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

from replay.cli import main
from replay.history import History
from statemachine.records import (
    Record,
)


def made(tape: str | Path, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and text of a tape's page."""
    output = folder / "report.html"
    code = main(["html", str(tape), "-o", str(output), *options])
    return code, output.read_text(encoding="utf-8")


def told(page: str) -> tuple[dict[str, Any], bytes]:
    """The description that the page's script gets, and the bytes behind it."""
    (text,) = re.findall(r'id="data">([^<]*)</script>', page)
    body = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(body[:4], "little")
    return json.loads(body[4 : 4 + length]), body[4 + length :]


def numbers(page: str, name: str) -> list[int]:
    """A column of the page, read by code of its own."""
    description, body = told(page)
    at = 0
    for column, (width, count) in description["columns"].items():
        if column == name:
            raw = [int.from_bytes(body[at + i * width :][:width], "little") for i in range(count)]
            values, value = [], 0
            for it in raw:
                value += -(it + 1) // 2 if it % 2 else it // 2
                values.append(value)
            return values
        at += width * count
    raise KeyError(name)


def history_of(records: list[Record]) -> History:
    history = History()
    for record in records:
        history.feed(record)
    history.finish()
    return history
