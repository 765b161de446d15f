"""Purity: imports point one way, and the state machine reads nothing but what it is given."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("statemachine", "kernel", "server", "replay")
MAY_IMPORT = {
    "statemachine": set(),
    "kernel": {"statemachine"},
    "server": {"statemachine", "kernel"},
    "replay": {"statemachine", "server", "kernel"},
}
"""Of our own packages. What replay may import at once is narrowed further below."""

OUTSIDE_OF_STATEMACHINE = {
    *("immutables", "msgspec", "xxhash", "zlib", "struct", "itertools", "functools", "operator"),
    *("collections", "typing", "types", "dataclasses", "enum", "bisect", "heapq", "math"),
    *("__future__", "binascii"),
}
"""All that statemachine imports: nothing there can read a clock, a file or an environment."""

ONLY_IN = {
    "starlette": {"server"},
    "hypercorn": {"server"},
    "structlog": {"server"},
}

MLX = ("mlx", "mlx_lm")


class Import:
    """One import statement: the module it is in, the module it names, whether it runs at once."""

    def __init__(self, path: Path, target: str, top: bool) -> None:
        self.path = path
        self.package = path.relative_to(ROOT).parts[0]
        self.target = target
        self.root = target.split(".")[0]
        self.top = top

    def __repr__(self) -> str:
        return f"{self.path.relative_to(ROOT)}: {self.target}"


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[Import]:
    """Every import of a module, relative ones resolved; those for type checkers are left out."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]

    def walk(node: ast.AST, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(path, alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                module = ".".join((*base, *filter(None, [child.module])))
                for alias in child.names:
                    yield Import(path, f"{module}.{alias.name}", top)
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, top and not function)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


@functools.cache
def all_imports(package: str) -> list[Import]:
    return [found for path in modules(package) for found in imports(path)]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    found = all_imports(package)
    assert len(found) > 20
    ours = {each.root for each in found} & set(PACKAGES)
    assert ours <= MAY_IMPORT[package] | {package}


def test_the_state_machine_imports_nothing_that_could_read_the_world() -> None:
    strange = [
        each
        for each in all_imports("statemachine")
        if each.root not in OUTSIDE_OF_STATEMACHINE | {"statemachine"}
    ]
    assert strange == []


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_a_library_stays_in_its_package(library: str) -> None:
    users = {
        each.package for name in PACKAGES for each in all_imports(name) if each.root == library
    }
    assert users <= ONLY_IN[library]


@pytest.mark.parametrize("package", ["statemachine", "server", "replay"])
def test_mlx_is_imported_at_once_by_the_kernel_only(package: str) -> None:
    """Elsewhere inside of functions, behind the load of a BLAS; by the state machine never."""
    found = [each for each in all_imports(package) if each.root in MLX]
    assert [each for each in found if each.top or package == "statemachine"] == []


def test_replay_imports_the_kernel_only_inside_of_functions() -> None:
    at_once = [each for each in all_imports("replay") if each.top and each.root == "kernel"]
    assert at_once == []


def python(program: str, *arguments: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCKED_IMPORTS = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split(","):
            raise ImportError(f"{name} is imported at once")

sys.meta_path.insert(0, Blocked())
package = importlib.import_module(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(package.__path__, sys.argv[1] + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def test_replay_can_be_imported_without_mlx_and_without_a_web_server() -> None:
    """All of its modules, and all of the server's that they import."""
    blocked = "mlx,mlx_lm,starlette,hypercorn,uvloop,structlog,transformers,torch"
    assert int(python(BLOCKED_IMPORTS, "replay", blocked)) == len(modules("replay")) - 1


def test_the_state_machine_can_be_imported_without_its_neighbours() -> None:
    blocked = "kernel,server,replay,mlx,mlx_lm,starlette,random,socket,asyncio,tempfile"
    assert int(python(BLOCKED_IMPORTS, "statemachine", blocked)) == len(modules("statemachine")) - 1


SEALED = """
import builtins, importlib, os, pkgutil, random, socket, sys, time
import statemachine
for module in pkgutil.iter_modules(statemachine.__path__, "statemachine."):
    importlib.import_module(module.name)
from statemachine.script import check
texts = [open(name, encoding="utf-8").read().split("\\n") for name in sys.argv[1:]]

def seal(name):
    def sealed(*arguments, **named):
        raise SystemExit(f"{name} was called")
    return sealed

for module in (time, random, socket):
    for name in dir(module):
        if not name.startswith("_") and callable(getattr(module, name)):
            if not isinstance(getattr(module, name), type) or module is socket:
                setattr(module, name, seal(f"{module.__name__}.{name}"))
for name in ("open", "urandom", "getenv", "stat", "listdir", "getpid"):
    setattr(os, name, seal(f"os.{name}"))
os.environ.__class__.__getitem__ = seal("os.environ")
builtins.open = seal("open")
builtins.input = seal("input")
print(sum(check(text) for text in texts))
"""


def test_the_state_machine_runs_with_clock_chance_files_and_environment_sealed() -> None:
    """All of the scripts but the two longest, in an interpreter where these raise when called."""
    names = [str(path) for path in sorted((ROOT / "tests/scripts").glob("*.jsonl"))]
    names = [name for name in names if "p38" not in name]
    assert int(python(SEALED, *names)) > 400


def test_the_seal_itself_holds() -> None:
    """So that the test above can fail."""
    broken = SEALED.replace("print(sum", "time.monotonic()\nprint(sum")
    with pytest.raises(AssertionError, match=r"time\.monotonic was called"):
        python(broken)


def test_all_four_packages_come_from_one_folder() -> None:
    """Another distribution installs a top-level `statemachine`: it would shadow ours."""
    origins = set()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        origins.add(Path(spec.origin).resolve().parent.parent)
    assert origins == {ROOT}
