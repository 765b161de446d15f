"""What a container lends of its machine: cores and memory, as control groups tell it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel import blas, extension, lent

GIB = 2**30
LIBRARIES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
NAMES = (*LIBRARIES, "OMP_NUM_THREADS", "GOTO_NUM_THREADS", extension.THREADS)
V2 = "0::/kube/pod/server\n"
V1 = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n"


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes /proc/self/cgroup and the files below /sys/fs/cgroup say this, on 64 cores."""

    def tell(groups: str, files: dict[str, str]) -> None:
        told = tmp_path / "cgroup"
        told.write_text(groups)
        for name, text in files.items():
            file = tmp_path / "mount" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        monkeypatch.setattr(lent, "GROUPS", told)
        monkeypatch.setattr(lent, "MOUNT", tmp_path / "mount")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        for name in NAMES:  # set first: what was not there is taken away again afterwards
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 128 * GIB, "SC_PAGE_SIZE": 4}.get)

    return tell


CPU, MEMORY = "kube/pod/server/cpu.max", "kube/pod/server/memory.max"


def test_a_machine_without_control_groups_lends_all_it_has(tell) -> None:
    tell("", {})
    lent.GROUPS.unlink()
    assert (lent.cores(), lent.memory_bytes()) == (64, 512 * GIB)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("400000 100000", 4), ("250000 100000", 3), ("5000 100000", 1)],
)
def test_cores_are_the_quota_rounded_up(tell, quota: str, cores: int) -> None:
    tell(V2, {CPU: quota})
    assert lent.cores() == cores


def test_the_least_limit_of_a_group_and_those_above_it_counts(tell) -> None:
    tell(V2, {CPU: "800000 100000", "kube/cpu.max": "200000 100000", "cpu.max": "max 100000"})
    assert lent.cores() == 2
    tell(V2, {MEMORY: str(8 * GIB), "kube/pod/memory.max": str(3 * GIB), "memory.max": "max"})
    assert lent.memory_bytes() == 3 * GIB


def test_version_1_tells_it_in_a_folder_for_each_controller(tell) -> None:
    files = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "50000"}
    tell(
        V1,
        {f"cpu/docker/abc/{name}": text for name, text in files.items()}
        | {"memory/docker/abc/memory.limit_in_bytes": str(5 * GIB)}
        | {"memory/memory.limit_in_bytes": "9223372036854771712"},
    )
    assert (lent.cores(), lent.memory_bytes()) == (3, 5 * GIB)


def test_a_container_that_sees_its_own_group_at_the_top_reads_it_there(tell) -> None:
    tell(V1, {"memory/memory.limit_in_bytes": str(GIB)})
    assert (lent.cores(), lent.memory_bytes()) == (64, GIB)


def test_no_quota_and_files_that_say_nothing_are_no_limit(tell) -> None:
    files = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}
    tell(V1 + "nonsense\n", {f"cpu/{name}": text for name, text in files.items()})
    assert lent.cores() == 64
    tell(V2, {CPU: "", MEMORY: ""})
    assert (lent.cores(), lent.memory_bytes()) == (64, 512 * GIB)


def test_threads_are_as_many_as_the_cores_that_are_lent(
    tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(V2, {CPU: "300000 100000"})
    blas._share_cores()
    assert [os.environ.get(name) for name in LIBRARIES] == ["3", "3"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    extension.find()
    assert os.environ[extension.THREADS] == "3"


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS"])
def test_a_number_of_threads_that_somebody_gave_stays(
    tell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tell(V2, {CPU: "300000 100000"})
    monkeypatch.setenv(name, "7")
    blas._share_cores()
    assert os.environ[name] == "7"
    assert os.environ.get("MKL_NUM_THREADS") == ("3" if name.startswith("OPENBLAS") else None)


def test_where_all_cores_are_lent_libraries_count_them_themselves(tell) -> None:
    tell(V2, {})
    blas._share_cores()
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_the_library_that_multiplies_has_as_many_threads_as_cores_are_lent() -> None:
    lines = "import os; os.cpu_count = lambda: 64; from kernel import blas; blas.cores = lambda: 1"
    code = f"{lines}; print(blas.load_blas())"
    environment = {name: it for name, it in os.environ.items() if name not in NAMES}
    told = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert told.endswith(" 1 threads\n")
