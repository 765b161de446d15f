"""Extension: the kernels of `native/`, compiled for this machine's processor and loaded.

Owns the compiler's command, and where what it makes is kept: beside other fetched files, under a
digest of all that it depends on. MLX's CPU backend takes operations of others' as C++ against its
headers, and compiles some of its own with the same compiler while it runs. Where there is none, or
the kernels do not come to work, MLX's own operations serve, and the reason is told.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx
from attrs import frozen

from .bundled import cache_folder

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
MODULE = "mlxtape_native"
SWITCH = "MLXTAPE_CPU_KERNELS"
"""In the environment: `off` leaves all to MLX's own operations."""
OPTIONS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden",
    "-fno-strict-aliasing", "-DNDEBUG", "-DNB_DOMAIN=mlx",
)  # fmt: skip


@frozen(eq=False)
class Extension:
    """module: None where there is none. reason: why, where somebody might expect one."""

    module: Any
    reason: str = ""


@functools.cache
def extension() -> Extension:
    """The loaded kernels, compiled at the first call on this machine (some ten seconds)."""
    if not sys.platform.startswith("linux"):
        return Extension(None)
    if os.environ.get(SWITCH) == "off":
        return Extension(None, f"{SWITCH} is off")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return Extension(None, "kernels for this processor need g++: install it (Debian's g++)")
    if importlib.util.find_spec("nanobind") is None:
        return Extension(None, "kernels for this processor need the PyPI package nanobind")
    try:
        return Extension(_loaded(_built(compiler)))
    except subprocess.CalledProcessError as error:
        return Extension(None, f"kernels for this processor do not compile: {_complaint(error)}")
    except (ImportError, OSError) as error:
        return Extension(None, f"kernels for this processor cannot be used: {error}")


def _built(compiler: str) -> Path:
    """The library's file, made if it is not there yet."""
    command = _command(compiler)
    kept = cache_folder() / "native" / _digest(command) / f"{MODULE}.so"
    if kept.exists():
        return kept
    log.info("compiling kernels for this processor, once: some ten seconds")
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Put in place in one rename: another process may do the same.
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=True)
        made.replace(kept)
    return kept


def _command(compiler: str) -> list[str]:
    found = importlib.util.find_spec("nanobind")
    assert found is not None
    assert found.origin is not None
    binding, library = Path(found.origin).parent, Path(mlx.__path__[0])
    headers = (
        Path(sysconfig.get_paths()["include"]),
        binding / "include",
        binding / "ext" / "robin_map" / "include",
        library / "include",
    )
    return [
        compiler,
        *OPTIONS,
        *(f"-I{it}" for it in headers),
        str(SOURCES / "extension.cpp"),
        str(binding / "src" / "nb_combined.cpp"),
        f"-L{library / 'lib'}",
        "-lmlx",
        f"-Wl,-rpath,{library / 'lib'}",
    ]


def _digest(command: list[str]) -> str:
    """Of the sources, the command, the versions behind it, and the processor."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.is_file():
            digest.update(source.read_bytes())
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    versions = [metadata.version(it) for it in ("mlx", "nanobind")]
    words = [*command, *versions, sys.version, platform.machine(), _processor()]
    digest.update(version + "\0".join(words).encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What it can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({it for it in lines if it.startswith(told)}))


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _complaint(error: subprocess.CalledProcessError) -> str:
    """The compiler's first word of an error."""
    lines = [line for line in str(error.stderr).splitlines() if "error" in line.lower()]
    return (lines or [f"exit status {error.returncode}"])[0][-300:]
