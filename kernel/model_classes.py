"""Model classes: mlx-lm's module for a kind of model, whatever it does as it is imported.

Owns the import. Some modules only look whether a package of their makers' is installed, of which
they use nothing, and end the process where it is not: for these an empty module stands in.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

from mlx_lm.utils import _get_classes

from .errors import ModelError


def classes_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The classes of a config's model and of its arguments.

    Raises ModelError for an architecture that mlx-lm does not know, or that needs a package that
    is not installed.
    """
    kind = config.get("model_type")
    unknown = f"model_type {kind!r} is no architecture that mlx-lm has: choose another model"
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", kind):
        raise ModelError(unknown)
    missing = None
    try:
        return _imported(config)
    except (ValueError, ImportError, AttributeError) as error:
        raise ModelError(unknown) from error
    except SystemExit as left:
        if isinstance(left.__context__, ImportError):
            missing = left.__context__.name
    what = missing or "a package"
    needs = f"model_type {kind!r} needs {what}, which is not installed: install it"
    if missing is None:
        raise ModelError(needs)
    try:
        with _stand_in(missing):
            return _imported(config)
    except (ValueError, ImportError, AttributeError, SystemExit) as error:
        raise ModelError(needs) from error


def _imported(config: Mapping[str, Any]) -> tuple[Any, Any]:
    with redirect_stdout(io.StringIO()):
        found: tuple[Any, Any] = _get_classes(dict(config))
    return found


@contextmanager
def _stand_in(name: str) -> Iterator[None]:
    """An empty module under a name that nothing has, for as long as something is imported."""
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]
