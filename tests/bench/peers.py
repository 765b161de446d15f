"""Peers: the servers that are compared, how each is installed, started, held still and measured.

Each has an environment of its own under .clients/, this project's apart. A server that waits for
its turn is held by a signal, so that it costs those that run nothing but memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
from attrs import define, field, frozen

from kernel.extension import SWITCH
from tests.clients.environments import ROOT, environment

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
MODEL = "smollm2-135m"
START_S = 120.0
KEPT_VARIABLES = ("PATH", "LANG", "HOME", "XDG_CACHE_HOME", "MLXTAPE_CACHE", "OPENBLAS_NUM_THREADS")
"""No other setting of whoever measures reaches a server."""
OPENBLAS = f"ngsolve-openblas=={version('ngsolve-openblas')}"
MLX = f"mlx[cpu]=={version('mlx')}"
MLX_LM = f"mlx-lm=={version('mlx-lm')}"
VLLM_NEEDS = (
    *("fastapi", "uvicorn", "psutil", "prometheus-client", "jsonschema", "requests"),
    *("tabulate", "pytz", "pillow", "pyyaml", "python-multipart"),
)
"""What its server imports; its own list brings PyTorch as well, for pictures and speech."""
SLOTS, SLOT_TOKENS = 32, 1024
LONG_SLOTS, LONG_SLOT_TOKENS = 8, 8192
"""llama.cpp divides its context among its slots: many short ones, or few long ones."""


class Unavailable(Exception):
    """Why a server is not measured, in a sentence."""


@frozen
class Peer:
    """A server to compare with. prepare: installs it, and returns its interpreter. command: from
    (interpreter, port, whether prompts are long). packages: whose versions are told. model: the
    name to ask for. variables: of its environment, known once it is installed.
    """

    name: str
    prepare: Callable[[], Path]
    command: Callable[[Path, int, bool], list[str]]
    packages: tuple[str, ...]
    model: str
    fits_all: bool = True
    """Whether one process takes short and long prompts alike."""
    variables: Callable[[], dict[str, str]] = dict


def model_folder() -> Path:
    """The model for servers that read no GGUF, made if it is not there yet."""
    folder = ROOT / "bench-model"
    subprocess.run([sys.executable, "-m", "tests.bench.export_model", str(folder)], check=True)
    return folder


def gguf_file() -> Path:
    """The model's file, fetched if it is not there yet."""
    done = subprocess.run(
        [sys.executable, "-m", "kernel.bundled"], check=True, capture_output=True, text=True
    )
    return Path(done.stdout.splitlines()[-1])


def _ours(*flags: str) -> Callable[[Path, int, bool], list[str]]:
    def command(python: Path, port: int, _long: bool) -> list[str]:
        serve = [str(python), "-m", "server.cli", "serve", "--model", MODEL, "--port", str(port)]
        return [*serve, "--log-level", "error", *flags]

    return command


def _installed(name: str, *installs: tuple[str, ...]) -> Callable[[], Path]:
    def prepare() -> Path:
        try:
            folder = environment(name, *installs)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"it could not be installed: {error}") from error
        return folder / "python"

    return prepare


def _with_blas(module: str, *arguments: str) -> Callable[[Path, int, bool], list[str]]:
    def command(python: Path, port: int, _long: bool) -> list[str]:
        launch = [str(python), "-P", str(HERE / "launch_with_blas.py"), str(PROJECT), module]
        return [*launch, *arguments, "--port", str(port)]

    return command


def _mlx_lm(python: Path, port: int, _long: bool) -> list[str]:
    server = str(python.with_name("mlx_lm.server"))
    return [server, "--model", str(ROOT / "bench-model"), "--port", str(port)]


def _llama_cpp(python: Path, port: int, long: bool) -> list[str]:
    slots, tokens = (LONG_SLOTS, LONG_SLOT_TOKENS) if long else (SLOTS, SLOT_TOKENS)
    launch = [str(python), "-P", str(HERE / "launch_llama_cpp.py"), str(gguf_file()), str(port)]
    return [*launch, str(slots), str(slots * tokens)]


FOLDER = str(ROOT / "bench-model")
PEERS = [
    Peer(
        "mlxtape",
        lambda: Path(sys.executable),
        _ours(),
        ("mlx", "mlx-lm", "ngsolve-openblas"),
        MODEL,
    ),
    Peer(
        "mlxtape by MLX's operations",
        lambda: Path(sys.executable),
        _ours(),
        ("mlx", "mlx-lm", "ngsolve-openblas"),
        MODEL,
        variables=lambda: {SWITCH: "off"},
    ),
    Peer(
        "mlx_lm.server as installed",
        _installed("bench-mlx-lm", (MLX_LM, MLX)),
        _mlx_lm,
        ("mlx-lm", "mlx"),
        FOLDER,
    ),
    Peer(
        "mlx_lm.server with OpenBLAS",
        _installed("bench-mlx-lm-openblas", (MLX_LM, MLX, OPENBLAS)),
        _with_blas("mlx_lm.server", "--model", FOLDER),
        ("mlx-lm", "mlx", "ngsolve-openblas"),
        FOLDER,
    ),
    Peer(
        "vllm-mlx with OpenBLAS",
        _installed(
            "bench-vllm-mlx",
            ("--no-deps", "vllm-mlx==0.6.0"),
            ("mlx-lm<0.32", MLX, OPENBLAS, *VLLM_NEEDS),
        ),
        _with_blas("vllm_mlx.cli", "serve", FOLDER, "--continuous-batching"),
        ("vllm-mlx", "mlx-lm", "mlx", "ngsolve-openblas"),
        FOLDER,
    ),
    Peer(
        "llama.cpp, Q4_1",
        _installed("bench-llama-cpp", ("xllamacpp==2026.10.11549",)),
        _llama_cpp,
        ("xllamacpp",),
        "model",
        fits_all=False,
    ),
]


@define
class Running:
    """A peer's process, or none yet."""

    peer: Peer
    python: Path
    folder: Path
    long: bool = False
    process: subprocess.Popen[bytes] | None = None
    address: str = ""
    restarts: int = field(default=-1)

    def ready(self, long: bool) -> None:
        """Be there for a load, and run. Raises Unavailable."""
        dead = self.process is None or self.process.poll() is not None
        if dead or (long != self.long and not self.peer.fits_all):
            self.stop()
            self.long = long
            self._start()
        else:
            self._signal(signal.SIGCONT)

    def hold(self) -> None:
        """Stand still until `ready`."""
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End the process and all that it started."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _start(self) -> None:
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.restarts += 1
        # No network: what it needs is on the disk.
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        empty = self.folder / "hub"
        empty.mkdir(exist_ok=True)
        environ = kept | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(empty)}
        environ |= self.peer.variables()
        log = self.folder / "log"
        with open(log, "wb") as said:
            self.process = subprocess.Popen(
                self.peer.command(self.python, port, self.long),
                stdout=said,
                stderr=said,
                env=environ,
                cwd=PROJECT if self.python == Path(sys.executable) else self.folder,
                start_new_session=True,
            )
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.stop()
                raise Unavailable(f"it did not start: {_last_line(log)}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.address}/v1/models", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def begin_peak(self) -> None:
        """Forget the peak of memory so far, where the system can."""
        for process in self._tree():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """The most memory that its processes held since, summed, in MB; 0 where nobody knows."""
        return sum(_peak_kb(process) for process in self._tree()) / 1e3

    def _tree(self) -> list[int]:
        if self.process is None or not Path("/proc/self/status").exists():
            return []
        found = [self.process.pid]
        for process in found:
            for task in Path(f"/proc/{process}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, task.read_text().split())
        return found


@contextlib.contextmanager
def started(peer: Peer) -> Iterator[Running]:
    """A peer that is installed; its process ends with the block. Raises Unavailable."""
    python = peer.prepare()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        running = Running(peer, python, Path(folder))
        try:
            yield running
        finally:
            running.stop()


def versions(peer: Peer, python: Path) -> str:
    """What it is made of, by the metadata of its environment."""
    asked = (
        "import sys; from importlib.metadata import version;"
        "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
    )
    done = subprocess.run(
        [str(python), "-c", asked, *peer.packages],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | peer.variables(),
    )
    return done.stdout.strip()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _peak_kb(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
