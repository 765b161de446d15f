"""The `mkl` extra: oneMKL as pip installs it multiplies for MLX, and what it makes is replayed.

It stands in an environment of its own, which is shown to this one: not every checkout wants 1.1 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.real_server import SMOLLM2
from tests.test_blas import DIRECT, LINUX_CPU, PRODUCT

from .environments import mkl_packages, run_client

LOAD = "from kernel.blas import load_blas; name = load_blas()"
ROOT = Path(__file__).parents[2]

if LINUX_CPU:

    @pytest.fixture(scope="module")
    def shown() -> str:
        """Where Python finds oneMKL."""
        return f"{mkl_packages()}:{ROOT}"

    def run_python(folder: Path, shown: str, program: str, **variables: str) -> str:
        command = [sys.executable, "-c", program]
        return run_client(command, folder, PYTHONPATH=shown, **variables)

    def test_a_product_of_mlx_is_the_one_that_onemkl_computes(tmp_path: Path, shown: str) -> None:
        out = run_python(tmp_path, shown, f"{LOAD}; print(name){PRODUCT}{DIRECT}")
        name, by_mlx, direct, file = out.splitlines()
        assert name.startswith("oneMKL 2026.2 ")
        assert "libmkl_rt" in file
        assert by_mlx == direct

    @pytest.mark.parametrize(
        ("chosen", "name"), [("openblas", "OpenBLAS 0."), ("mkl", "oneMKL 2026.2 ")]
    )
    def test_the_environment_chooses_between_onemkl_and_openblas(
        tmp_path: Path, shown: str, chosen: str, name: str
    ) -> None:
        program = f"{LOAD}; print(name){PRODUCT}{DIRECT}"
        out = run_python(tmp_path, shown, program, MLXTAPE_BLAS=chosen).splitlines()
        assert out[0].startswith(name)
        assert out[1] == out[2]

    @pytest.mark.parametrize(("given", "found"), [({}, "1"), ({"KMP_BLOCKTIME": "7"}, "7")])
    def test_idle_threads_spin_for_a_millisecond_or_as_long_as_they_are_told(
        tmp_path: Path, shown: str, given: dict[str, str], found: str
    ) -> None:
        program = f"{LOAD}{PRODUCT}library = __import__('ctypes').CDLL('libiomp5.so')\n"
        out = run_python(tmp_path, shown, f"{program}print(library.kmp_get_blocktime())", **given)
        assert out.splitlines()[-1] == found

    def test_an_interface_of_64_bit_integers_is_refused_with_what_to_do(
        tmp_path: Path, shown: str
    ) -> None:
        with pytest.raises(AssertionError, match=r"MKL_INTERFACE_LAYER asks .* unset it"):
            run_python(tmp_path, shown, LOAD, MKL_INTERFACE_LAYER="ILP64")

    def test_a_tape_that_was_made_with_onemkl_is_clean_at_all_depths(
        tmp_path: Path, shown: str
    ) -> None:
        tape = tmp_path / "capture.log"
        words = ["generate", "--prompt", "What is the capital of France?", "--max-tokens", "12"]
        words += ["--temperature", "0"]
        scripts, settings = Path(sys.executable).parent, {"PYTHONPATH": shown}
        said = run_client(
            [str(scripts / "mlxtape"), *words, "--model", SMOLLM2, "--capture", str(tape)],
            tmp_path,
            **settings,
        )
        assert "Paris" in said
        for depth in ("fold", "plan", "forward", "reference"):
            command = [str(scripts / "replay"), str(tape), "--depth", depth]
            assert run_client(command, tmp_path, **settings).startswith(f"CLEAN at depth {depth}: ")

    @pytest.mark.parametrize(
        "given",
        [{"MKL_THREADING_LAYER": "TBB"}, {"MKL_INTERFACE_LAYER": "GNU"}],
    )
    def test_where_onemkl_would_end_the_process_openblas_is_used(
        tmp_path: Path, shown: str, given: dict[str, str]
    ) -> None:
        out = run_python(tmp_path, shown, f"{LOAD}; print(name)", **given)
        assert out.startswith("OpenBLAS ")
