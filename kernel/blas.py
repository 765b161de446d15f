"""BLAS: which library multiplies matrices for MLX on the CPU.

The Linux wheel of mlx-cpu is linked to the reference BLAS, which is some fifty times slower than
OpenBLAS. A library that is loaded globally before mlx.core is imported takes its place, because
the dynamic linker searches global libraries first: oneMKL where it is installed, else OpenBLAS, or
the one that MLXTAPE_BLAS names. Call `load_blas` before anything imports mlx.

Never imports mlx. Of a library's settings it gives some a default, never another value than one
that the environment names (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS and KMP_BLOCKTIME hold).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .errors import BlasError
from .lent import cores

log = logging.getLogger(__name__)

REFERENCE = "reference BLAS (slow)"

CPU_BACKEND = "mlx-cpu"
CUDA_BACKENDS = ("mlx-cuda-13", "mlx-cuda-12")
MKL_PACKAGE = "mkl"
"""The PyPI package of the `mkl` extra. It multiplies few rows, as steps do, without copying weights
first, in half of OpenBLAS's time.
"""
SPIN_MS = "1"
"""How long an idle thread of MKL's waits for more work before it sleeps. Its own 200 ms keep a core
from Python and from all else that runs on it; at 0 each product wakes threads up.
"""
PACKAGE = "ngsolve-openblas"
"""The PyPI package of the `cpu` extra: plain symbol names, kernels chosen at run time."""
_TRIAL = """
import ctypes, sys
one = ctypes.c_float(1)
multiply = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).cblas_sgemm
scale, number = ctypes.c_float(1), ctypes.byref(one)
multiply(101, 111, 111, 1, 1, 1, scale, number, 1, number, 1, scale, number, 1)
sys.exit(one.value != 2)
"""
"""1 x 1 + 1, row by row, nothing turned."""
CHOICE = "MLXTAPE_BLAS"
"""In the environment: MKL, OPENBLAS, or a library's path."""
MKL, OPENBLAS = "mkl", "openblas"
DISTRIBUTION_NAMES = ("libopenblas.so.0", "libopenblas.so")
GFORTRAN = b"libgfortran.so.5"


def load_blas() -> str:
    """Make MLX use a fast BLAS; returns what is in use, for the log and the tape.

    Examples: "oneMKL 2026.2 2 threads", "OpenBLAS 0.3.31 SkylakeX 2 threads", "Accelerate",
    "cuBLAS", "reference BLAS (slow)". Calling it again changes nothing.
    Raises BlasError where no MLX backend is installed, where mlx.core was imported before, or where
    MLXTAPE_BLAS names what is not there.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if not sys.platform.startswith("linux"):
        return "the platform's BLAS"
    return _load_linux()


@functools.cache
def _load_linux() -> str:
    if any(_installed(name) for name in CUDA_BACKENDS):
        return "cuBLAS"
    if not _installed(CPU_BACKEND):
        raise BlasError(
            "MLX has no backend on this machine: install mlxtape[cpu], or mlxtape[cuda13] for an "
            "NVIDIA GPU (never both in one environment)"
        )
    present = _describe(ctypes.CDLL(None))
    if present is not None:
        return present
    if "mlx.core" in sys.modules:
        raise BlasError(
            "mlx.core was imported before its BLAS was chosen, which makes it some fifty times "
            "slower: call kernel.blas.load_blas() before the first import of mlx"
        )
    chosen = os.environ.get(CHOICE, "")
    if chosen not in ("", MKL, OPENBLAS) and os.sep not in chosen:
        raise BlasError(
            f"{CHOICE} must be {MKL}, {OPENBLAS} or the path of a library, not {chosen!r}"
        )
    _share_cores()
    for candidate in _candidates(chosen):
        if "mkl" in Path(candidate).name and not _multiplies(candidate):
            continue
        if _load_global(candidate) and (found := _describe(ctypes.CDLL(None))) is not None:
            log.info("BLAS: %s from %s", found, candidate)
            return found
    if chosen:
        raise BlasError(
            f"{CHOICE} asks for {chosen}, and no such oneMKL or OpenBLAS runs here: install it, or "
            f"unset {CHOICE}"
        )
    log.warning(
        "no OpenBLAS that runs here was found, so MLX uses the reference BLAS, some fifty times "
        "slower: install the PyPI package ngsolve-openblas, or your distribution's OpenBLAS "
        "(libopenblas0 on Debian and Ubuntu)"
    )
    return REFERENCE


def _share_cores() -> None:
    """As many threads as a container lends cores, where nobody asked for another number: libraries
    count those of the machine.
    """
    lent, others = cores(), {"OMP_NUM_THREADS", "GOTO_NUM_THREADS"}  # which give way to these two
    if lent < (os.cpu_count() or 1) and others.isdisjoint(os.environ):
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, str(lent))


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _candidates(chosen: str = "") -> Iterator[str]:
    """Libraries to try, best first: paths, then names for the linker's search."""
    if os.sep in chosen:
        yield chosen
        return
    if chosen != OPENBLAS:
        yield from _of_package(MKL_PACKAGE, r"libmkl_rt\.so[.0-9]*")
    if chosen != MKL:
        yield from _of_package(PACKAGE, r"libopenblas[^/]*\.so")
        yield from DISTRIBUTION_NAMES


def _of_package(package: str, pattern: str) -> Iterator[str]:
    if _installed(package):
        files = metadata.files(package) or ()
        yield from (str(file.locate()) for file in files if re.fullmatch(pattern, file.name))


def _multiplies(mkl: str) -> bool:
    """Whether oneMKL works here, found out by another process: where files or settings do not fit
    each other, it ends the process that first calls it.
    """
    command = [sys.executable, "-I", "-c", _TRIAL, mkl]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " ".join((done.stdout + done.stderr).split()) or f"exit status {done.returncode}"
        log.warning("oneMKL is installed and does not work, so it is left out: %s", told)
    return done.returncode == 0


def _load_global(library: str) -> bool:
    """Load `library` for every later library to see; False where it cannot be loaded."""
    if "mkl" in Path(library).name:
        os.environ.setdefault("KMP_BLOCKTIME", SPIN_MS)
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if GFORTRAN.decode() not in str(error) or not _load_gfortran():
            log.debug("%s: %s", library, error)
            return False
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError as again:
            log.debug("%s: %s", library, again)
            return False
    return True


def _load_gfortran() -> bool:
    """Load the Fortran runtime that mlx-cpu ships, under the name that OpenBLAS asks for.

    The wheel's copy is called libgfortran-<hash>.so.5.0.0, and the linker compares names; so a
    copy whose own name is written over, in place, is loaded from memory.
    """
    folder = Path(str(metadata.distribution(CPU_BACKEND).locate_file("mlx_cpu.libs")))
    runtime = next(iter(sorted(folder.glob("libgfortran-*.so.5*"))), None)
    if runtime is None or len(runtime.name) < len(GFORTRAN):
        return False
    name = runtime.name.encode()
    image = runtime.read_bytes().replace(name, GFORTRAN.ljust(len(name), b"\0"))
    descriptor = os.memfd_create("libgfortran.so.5")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(image)
        for needed in sorted(folder.glob("libquadmath-*")):
            ctypes.CDLL(str(needed))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        log.debug("the Fortran runtime of mlx-cpu: %s", error)
        return False
    finally:
        os.close(descriptor)
    return True


def _describe(library: ctypes.CDLL) -> str | None:
    """Version and threads of the oneMKL or OpenBLAS that `library` shows; None where it is none."""
    return _describe_mkl(library) or _describe_openblas(library)


def _describe_mkl(library: ctypes.CDLL) -> str | None:
    try:
        version, threads = library.MKL_Get_Version_String, library.MKL_Get_Max_Threads
    except AttributeError:
        return None
    if "ILP64" in os.environ.get("MKL_INTERFACE_LAYER", ""):
        raise BlasError(
            "MKL_INTERFACE_LAYER asks for 64-bit integers, with which MLX cannot call oneMKL: "
            "unset it"
        )
    text = ctypes.create_string_buffer(256)
    version(text, len(text))
    found = re.search(r"Version (\d+(?:\.\d+)*)", text.value.decode())
    return f"oneMKL {found[1] if found else '(unknown version)'} {threads()} threads"


def _describe_openblas(library: ctypes.CDLL) -> str | None:
    try:
        config, core, threads = (
            library.openblas_get_config,
            library.openblas_get_corename,
            library.openblas_get_num_threads,
        )
    except AttributeError:
        return None
    config.restype = core.restype = ctypes.c_char_p
    text = config().decode()
    if "USE64BITINT" in text:
        raise BlasError(
            f"the OpenBLAS in use has 64-bit integers ({text}), which MLX cannot call: "
            "load the build with 32-bit integers instead"
        )
    return f"{' '.join(text.split()[:2])} {core().decode()} {threads()} threads"
