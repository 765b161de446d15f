"""Table: rows of figures, printed as they come and kept for a JSON file."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Table:
    """Figures by name; `unit` says what they are, `against` what a ratio is taken to."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def section(self, title: str) -> None:
        """A heading."""
        print(f"\n{title}", flush=True)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        against: float | None = None,
        what: str = "",
    ) -> None:
        """One row; with `against`, the ratio to it as well."""
        ratio = None if not against else value / against
        self.rows.append(
            {"name": name, "value": value, "unit": unit, "ratio": ratio, "against": what}
        )
        tail = "" if ratio is None else f"   {ratio:6.2f} x {what} ({against:.4g})"
        print(f"  {name:<46} {value:>12,.2f} {unit:<12}{tail}", flush=True)

    def save(self, path: Path, about: dict[str, str]) -> None:
        """All rows, and the machine that they are of."""
        path.write_text(json.dumps({"about": about, "rows": self.rows}, indent=1))


def about(blas: str) -> dict[str, str]:
    """The machine, as far as it names itself."""
    import os
    from importlib.metadata import version

    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        processor = names[0] if names else processor
    except OSError:
        pass
    return {
        "processor": f"{processor}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": f"{version('mlx')}, mlx-lm {version('mlx-lm')}",
        "blas": blas,
    }


def median_us(run: Callable[[], object], *, seconds: float = 1.0, least: int = 20) -> float:
    """Median processor time of this thread in a call, in microseconds, after one not counted."""
    run()
    times: list[int] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        started = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - started)
    return statistics.median(times) / 1e3
