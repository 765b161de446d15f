"""Which BLAS multiplies for MLX, asked of fresh processes: the order of imports is the point.
What oneMKL does where it is installed stands in tests/clients/test_mkl.py.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from kernel import blas
from kernel.errors import BlasError

LINUX_CPU = sys.platform.startswith("linux") and blas._installed(blas.CPU_BACKEND)


def run_python(program: str) -> str:
    """Output of `program` in a fresh process, which must succeed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def raised(program: str) -> str:
    """The last line of the traceback that `program` ends with."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


OPENBLAS = (
    "from kernel import blas; blas.MKL_PACKAGE = 'not-installed'; load_blas = blas.load_blas;"
)
PRODUCT = """
import zlib
import mlx.core as mx
import numpy as np
a, b = np.random.default_rng(1).normal(size=(2, 512, 512)).astype(np.float32)
print(zlib.crc32(np.array(mx.array(a) @ mx.array(b)).tobytes()))
"""

DIRECT = """
import ctypes
out = np.zeros_like(a)
pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, out)]
one, zero, size = ctypes.c_float(1), ctypes.c_float(0), 512
library = ctypes.CDLL(None)
library.cblas_sgemm(101, 111, 111, size, size, size, one, pointers[0], size, pointers[1], size,
                    zero, pointers[2], size)
print(zlib.crc32(out.tobytes()))

class Where(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]

where = Where()
library.dladdr(ctypes.cast(library.cblas_sgemm, ctypes.c_void_p), ctypes.byref(where))
print(where.file.decode())
"""


if LINUX_CPU:

    def test_the_blas_in_use_is_openblas_by_its_own_report() -> None:
        out = run_python(
            f"{OPENBLAS} name = load_blas(); import ctypes;"
            "get = ctypes.CDLL(None).openblas_get_config; get.restype = ctypes.c_char_p;"
            "print(name); print(get().decode())"
        )
        name, config = out.splitlines()
        assert name.startswith("OpenBLAS 0.")
        assert name.endswith(" threads")
        assert config.split()[:2] == name.split()[:2]

    def test_a_product_of_mlx_is_the_one_that_openblas_computes() -> None:
        # The libraries sum in another order, so their bits differ; mlx's must be OpenBLAS's.
        out = run_python(f"{OPENBLAS} load_blas(){PRODUCT}{DIRECT}")
        by_mlx, direct, file = out.splitlines()
        assert "openblas" in file
        assert by_mlx == direct
        assert by_mlx != run_python(PRODUCT).strip()

    def test_importing_mlx_first_is_refused_with_what_to_do() -> None:
        last = raised("import mlx.core; from kernel.blas import load_blas; load_blas()")
        assert last.startswith("kernel.errors.BlasError: mlx.core was imported before")
        assert "load_blas() before the first import of mlx" in last

    def test_calling_it_again_after_mlx_changes_nothing() -> None:
        out = run_python(
            "from kernel.blas import load_blas; first = load_blas(); import mlx.core;"
            "print(first == load_blas())"
        )
        assert out == "True\n"

    def test_without_any_openblas_one_warning_says_what_to_install() -> None:
        out = run_python(
            "import logging, sys; logging.basicConfig(stream=sys.stdout); from kernel import blas;"
            "blas._candidates = lambda _: iter(['libnowhere.so']);"
            "print(blas.load_blas()); print(blas.load_blas())"
        )
        warning, *names = out.splitlines()
        assert names == [blas.REFERENCE, blas.REFERENCE]
        assert "install the PyPI package ngsolve-openblas" in warning

    @pytest.mark.parametrize("chosen", ["openblas", "path"])
    def test_the_environment_may_name_a_blas_or_a_librarys_path(
        monkeypatch: pytest.MonkeyPatch, chosen: str
    ) -> None:
        program = f"from kernel.blas import load_blas; print(load_blas()){PRODUCT}{DIRECT}"
        *_, file = run_python(f"{OPENBLAS} load_blas(){PRODUCT}{DIRECT}").splitlines()
        monkeypatch.setenv(blas.CHOICE, file if chosen == "path" else chosen)
        name, by_mlx, direct, found = run_python(program).splitlines()
        assert name.startswith("OpenBLAS 0.")
        assert by_mlx == direct
        assert found == file

    @pytest.mark.parametrize(
        ("chosen", "said"),
        [
            ("OpenBLAS", "must be mkl, openblas or the path of a library, not 'OpenBLAS'"),
            (
                "/none/libopenblas.so",
                "asks for /none/libopenblas.so, and no such oneMKL or OpenBLAS runs here: install "
                "it, or unset MLXTAPE_BLAS",
            ),
            (
                "mkl",
                "asks for mkl, and no such oneMKL or OpenBLAS runs here: install it, or unset "
                "MLXTAPE_BLAS",
            ),
        ],
    )
    def test_a_blas_that_is_named_and_not_there_is_refused_and_no_other_one_taken(
        monkeypatch: pytest.MonkeyPatch, chosen: str, said: str
    ) -> None:
        monkeypatch.setenv(blas.CHOICE, chosen)
        assert raised(f"{OPENBLAS} load_blas()") == f"kernel.errors.BlasError: MLXTAPE_BLAS {said}"


def test_a_blas_that_is_named_is_the_only_one_that_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blas, "_of_package", lambda package, _: iter([package]))
    names = list(blas.DISTRIBUTION_NAMES)
    assert list(blas._candidates()) == ["mkl", "ngsolve-openblas", *names]
    assert list(blas._candidates("openblas")) == ["ngsolve-openblas", *names]
    assert list(blas._candidates("mkl")) == ["mkl"]
    assert list(blas._candidates("/a/libblas.so")) == ["/a/libblas.so"]


def test_a_library_of_a_package_is_tried_before_the_distributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = metadata.PackagePath("folder/libopenblasp-r0.3.so")
    file.dist = metadata.Distribution.from_name("attrs")
    other = metadata.PackagePath("folder/README.md")
    monkeypatch.setattr(blas, "_installed", lambda name: name == "ngsolve-openblas")
    monkeypatch.setattr(metadata, "files", lambda name: [other, file])
    first, *rest = blas._candidates()
    assert first.endswith("folder/libopenblasp-r0.3.so")
    assert rest == list(blas.DISTRIBUTION_NAMES)


def test_without_a_backend_one_sentence_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_installed", lambda name: False)
    with pytest.raises(BlasError) as caught:
        blas._load_linux.__wrapped__()
    assert "install mlxtape[cpu], or mlxtape[cuda13]" in str(caught.value)
    assert "never both" in str(caught.value)
