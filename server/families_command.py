"""`mlxtape families`: how an architecture, or a model, is served, and what its sequences can do.

Owns what a person reads of it. Without a model it tells of each architecture of the mlx-lm that
this version was tested with, from the table beside this module; with one it loads and probes it.
"""

from __future__ import annotations

import sys
from importlib import resources

import msgspec
from msgspec import Struct

from kernel.blas import load_blas

TABLE = "families.json"
ABLE = ("batch", "pad", "rewind", "share", "snapshot")


class Architecture(Struct, frozen=True, omit_defaults=True):
    """A line of the table. way: packed, split, gathered, alone, opaque, or `untested`. groups: what
    its tiny model keeps. able: what its sequences can do. note: why in no better way.
    """

    name: str
    way: str
    groups: tuple[str, ...] = ()
    able: tuple[str, ...] = ()
    note: str = ""


class GroupReport(Struct, frozen=True):
    """layers: how many caches have rows of this kind; window, sink: in rows, 0 for none."""

    kind: str
    window: int
    sink: int
    layers: int


class CapabilityReport(Struct, frozen=True):
    able: bool
    reason: str


class ModelReport(Struct, frozen=True):
    """How a model is served. way: packed, split, gathered, alone, or opaque. reason: why so."""

    format: int
    model: str
    architecture: str
    way: str
    reason: str
    groups: list[GroupReport]
    capabilities: dict[str, CapabilityReport]


def main(model: str | None, as_json: bool) -> int:
    """Print the table, or what is found of a model. Raises KernelError as loading does."""
    if model is None:
        table = architectures()
        print(msgspec.json.encode(table).decode() if as_json else table_text(table), end="\n")
        return 0
    report = report_of(model)
    print(msgspec.json.encode(report).decode() if as_json else model_text(report))
    return 0


def architectures() -> list[Architecture]:
    """The table that was made by the tests."""
    text = resources.files(__package__).joinpath(TABLE).read_bytes()
    return msgspec.json.decode(text, type=list[Architecture])


def table_text(table: list[Architecture]) -> str:
    """A line for each architecture, and how many there are of each way."""
    wide = max(len(line.name) for line in table)
    lines = [
        f"{line.name:{wide}}  {line.way:8}  {' + '.join(line.groups) or '-':25}  "
        f"{' '.join(line.able) or '-'}"
        for line in table
    ]
    ways = sorted({line.way for line in table})
    counts = ", ".join(f"{sum(line.way == way for line in table)} {way}" for way in ways)
    head = f"{'architecture':{wide}}  {'served':8}  {'rows kept':25}  can"
    return "\n".join([head, *lines, "", f"{len(table)} architectures: {counts}"])


def report_of(path: str) -> ModelReport:
    """Load a model and find how it is served."""
    load_blas()  # before the first import of mlx
    from kernel.families import family_of
    from kernel.weights import load_model

    loaded = load_model(path, progress=lambda text: print(text, file=sys.stderr, flush=True))
    family = family_of(loaded.model)
    shapes = () if family.layout is None else family.layout.shapes
    states = 0 if family.layout is None else len(family.layout.states)
    return ModelReport(
        format=1,
        model=loaded.name,
        architecture=str(loaded.config.get("model_type", "")),
        way=family.way,
        reason=family.reason,
        groups=[
            GroupReport(
                it.kind,
                it.window,
                it.sink,
                states if it.recurrent else sum(shape.group == n for shape in shapes),
            )
            for n, it in enumerate(family.groups())
        ],
        capabilities={
            name: CapabilityReport(held.able, held.reason)
            for name in ABLE
            for held in (getattr(family.capabilities, name),)
        },
    )


def model_text(report: ModelReport) -> str:
    """The verdict first, then the groups, then each capability with its reason."""
    lines = [f"{report.model} ({report.architecture}) is {report.reason}", ""]
    for group in report.groups:
        kept = {
            "window": f"the last {group.window} rows",
            "full": "all rows",
            "recurrent": "the state behind the last row",
        }
        what = kept.get(group.kind, "what the model itself knows of")
        sinks = f" and the first {group.sink}" if group.sink else ""
        lines.append(f"{group.layers or 'all'} layers keep {what}{sinks}")
    lines.append("")
    for name, held in report.capabilities.items():
        lines.append(f"{name:9} {'yes' if held.able else 'no ':3}  {held.reason}")
    return "\n".join(lines)
