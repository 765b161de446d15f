"""Environments: a folder for each client under .clients/, made when it is first asked for.

The versions are pinned: a client that changed shows as a new pin here, not as a red test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".clients"

PYTHON = {
    "instructor": ("instructor==1.17.0",),
    "litellm": ("litellm==1.110.2",),
    "llm": ("llm==0.36",),
    "locust": ("locust==2.47.0",),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "schemathesis": ("schemathesis==4.32.5",),
}
NODE = {"openai": "6.49.0"}
MKL = "mkl==2026.2.0"


def bin_of(name: str) -> Path:
    """The `bin` folder of a client's environment, installed if it is not yet."""
    return environment(name, PYTHON[name])


def environment(name: str, *installs: tuple[str, ...]) -> Path:
    """The `bin` folder of an environment in which pip ran with each of `installs` in turn."""
    home = ROOT / name
    marker = home / "installed"
    wanted = "; ".join(" ".join(arguments) for arguments in installs)
    if not marker.is_file() or marker.read_text() != wanted:
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        for arguments in installs:
            _run([str(home / "bin/python"), "-m", "pip", "install", "--quiet", *arguments])
        marker.write_text(wanted)
    return home / "bin"


def mkl_packages() -> Path:
    """The folder on PYTHONPATH by which this interpreter finds oneMKL (the `mkl` extra)."""
    bin_folder = environment("mkl", (MKL,))
    (packages,) = bin_folder.parent.glob("lib/python*/site-packages")
    return packages


def node_folder() -> Path:
    """A folder with node_modules, in which scripts find their packages."""
    home = ROOT / "node"
    package = home / "package.json"
    wanted = json.dumps({"private": True, "type": "module", "dependencies": NODE})
    installed = (home / "node_modules").is_dir()
    if not installed or package.read_text() != wanted:
        home.mkdir(parents=True, exist_ok=True)
        package.write_text(wanted)
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund"], home)
    return home


def run_client(command: list[str], folder: Path, timeout_s: float = 240.0, **variables: str) -> str:
    """What a client prints; the ends of both streams are in the failure where it ends badly.

    It runs in `folder`, and finds no keys, proxies or settings of whoever runs the tests.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HF_HUB_OFFLINE": "1", "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {said}"
    return done.stdout


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=900)


if __name__ == "__main__":
    for client in PYTHON:
        print(bin_of(client), flush=True)
    print(mkl_packages(), flush=True)
    print(node_folder())
