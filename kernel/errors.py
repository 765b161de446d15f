"""Errors of the kernel that a person can act on: one sentence each, what is wrong and what to do.

Owns the types only. Failures of a step (BuildFailed, EvalFailed) live in `batch`.
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of the errors that a person can act on; its text is one sentence."""


class BlasError(KernelError):
    """No MLX backend is installed, or MLX was imported before its BLAS was chosen."""


class ModelError(KernelError):
    """A model cannot be found, read or served."""


class AdapterError(ModelError):
    """An adapter cannot be read, or is not for this model."""


class TokenizerError(ModelError):
    """A tokenizer is missing, or of a kind that is not understood."""


class TemplateError(KernelError):
    """A chat template is missing, broken, or refused the messages: the request's fault."""


def describe(error: Exception) -> str:
    """An error in a line, with nothing kept of its frames."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
