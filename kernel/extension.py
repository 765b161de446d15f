"""Extension: the kernels of `native/`, compiled for this machine's processor and loaded.

Owns the compiler's command, and where what it makes is kept: beside other fetched files, under a
digest of all that it depends on. MLX's CPU backend takes operations of others' as C++ against its
headers, and compiles some of its own with the same compiler while it runs. Where there is none, or
the kernels do not come to work, MLX's own operations serve, and the reason is told.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx
from attrs import frozen

from .bundled import cache_folder
from .errors import describe
from .lent import cores

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
MODULE = "mlxtape_native"
SWITCH, THREADS = "MLXTAPE_CPU_KERNELS", "MLXTAPE_CPU_THREADS"
"""In the environment: OFF leaves all to MLX's own operations; how many threads compute."""
OFF = ("off", "0", "no", "false")
THREADS_MAX = 256
COMPILE_S = 600.0
OPTIONS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden",
    "-fno-strict-aliasing", "-DNDEBUG", "-DNB_DOMAIN=mlx",
)  # fmt: skip
_lock = threading.Lock()
_found: list[Extension] = []


@frozen(eq=False)
class Extension:
    """module: None where there is none. reason: why, where somebody might expect one. name: what
    decides about the bits of results: the processor's instructions, sources and compiler.
    """

    module: Any
    reason: str = ""
    name: str = ""


def extension() -> Extension:
    """The loaded kernels, compiled at the first call on this machine (ten to thirty seconds)."""
    with _lock:  # a module of this kind must not be loaded twice
        if not _found:
            _found.append(find())
        return _found[0]


def find() -> Extension:
    """The same, looked for anew."""
    if not sys.platform.startswith("linux"):
        return Extension(None)
    if os.environ.get(SWITCH, "").lower() in OFF:
        return Extension(None, f"{SWITCH} is off")
    if complaint := _threads_complaint(os.environ.get(THREADS)):
        return Extension(None, complaint)
    os.environ.setdefault(THREADS, str(min(cores(), THREADS_MAX)))  # the pool's, once it is made
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        return Extension(None, f"kernels for this processor need a compiler: install {compiler[0]}")
    if importlib.util.find_spec("nanobind") is None:
        return Extension(None, "kernels for this processor need the PyPI package nanobind")
    try:
        module = _loaded(built(compiler))
        _try(module)
        return Extension(module, name=f"{module.level()} {_identity(compiler)[:8]}")
    except subprocess.CalledProcessError as error:
        return Extension(None, f"kernels for this processor do not compile: {_complaint(error)}")
    except Exception as error:  # whatever is wrong with a compiler, a disk or another package
        return Extension(None, f"kernels for this processor cannot be used: {describe(error)}")


def _threads_complaint(asked: str | None) -> str:
    if asked is None or (asked.isdecimal() and 1 <= int(asked) <= THREADS_MAX):
        return ""
    return f"{THREADS} must be a whole number from 1 to {THREADS_MAX}, not {asked!r}"


def built(compiler: list[str]) -> Path:
    """The library's file, made if it is not there yet, or not whole."""
    command = _command(compiler)
    kept = cache_folder() / "native" / _digest(command, compiler) / f"{MODULE}.so"
    if _is_whole(kept):
        return kept
    log.info("compiling kernels for this processor, once: ten to thirty seconds")
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Put in place in one rename: another process may do the same.
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        subprocess.run(
            [*command, "-o", str(made)],
            capture_output=True, text=True, errors="replace", check=True, timeout=COMPILE_S,
        )  # fmt: skip
        told = Path(folder) / _told(kept).name
        told.write_text(_content_digest(made))
        told.replace(_told(kept))
        made.replace(kept)
    return kept


def _told(kept: Path) -> Path:
    """Where the digest of a library stands."""
    return kept.with_suffix(".sha256")


def _is_whole(kept: Path) -> bool:
    """Whether a library is what was made: to load half of one ends the process."""
    try:
        return _told(kept).read_text() == _content_digest(kept)
    except OSError:
        return False


def _content_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _command(compiler: list[str]) -> list[str]:
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
        *compiler,
        *OPTIONS,
        *(f"-I{it}" for it in headers),
        str(SOURCES / "extension.cpp"),
        str(binding / "src" / "nb_combined.cpp"),
        f"-L{library / 'lib'}",
        "-lmlx",
        f"-Wl,-rpath,{library / 'lib'}",
    ]


def _digest(command: list[str], compiler: list[str]) -> str:
    """Of all that a library depends on, other software's versions and places too."""
    versions = [metadata.version("nanobind"), sys.version, platform.machine()]
    words = [_identity(compiler), *command, *versions]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


def _identity(compiler: list[str]) -> str:
    """A digest of what decides about results: sources, options, compiler, MLX and processor."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.is_file():
            digest.update(source.read_bytes())
    told = [*compiler, "--version"]
    version = subprocess.run(told, capture_output=True, check=True, timeout=COMPILE_S).stdout
    words = [*compiler[1:], *OPTIONS, metadata.version("mlx"), _processor()]
    digest.update(version + "\0".join(words).encode())
    return digest.hexdigest()


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


def _try(module: Any) -> None:
    """Multiply something. Raises where arrays are not MLX's to it, as with a nanobind of another
    ABI, or where it does not come to what MLX says.
    """
    import mlx.core as mx

    weights = mx.arange(32 * 32, dtype=mx.float32).reshape(32, 32)
    x = mx.ones((2, 32))
    product = module.multiplied(x, module.Weights.of_floats(weights, False))
    if not mx.allclose(product, x @ weights.T).item():
        raise ValueError("they multiply wrongly")


def _complaint(error: subprocess.CalledProcessError) -> str:
    """The compiler's first word of an error."""
    lines = [line for line in str(error.stderr).splitlines() if "error" in line.lower()]
    return (lines or [f"exit status {error.returncode}"])[0][-300:]
