"""Models: what the depths that run the real model need of the kernel, loaded late.

Owns the check that a model is the tape's, and the rule of when results must be equal bit for bit.
Nothing here is imported before a depth asks for it; BLAS is loaded before MLX.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from attrs import frozen

from statemachine.geometry import OPAQUE
from statemachine.records import Header

from .errors import Unusable

if TYPE_CHECKING:
    from kernel.batch import Kernel
    from kernel.weights import LoadedModel

    from .run import Options

CPU_MARGIN = 0.05
"""Scores of float32 arithmetic in another order differ by some 1e-4; this is far above."""
GPU_MARGIN = 0.5
"""Scores of 16-bit arithmetic differ by some tenths."""


@frozen
class Loaded:
    """A tape's model. exact: device and BLAS are the recorded ones, so results must be equal."""

    model: LoadedModel
    exact: bool
    margin: float
    note: str


def load(header: Header, options: Options) -> Loaded:
    """Load the tape's model. Raises Unusable where it is missing, or another one."""
    from kernel.blas import load_blas
    from kernel.errors import KernelError

    if header.redacted:
        raise Unusable(f"the tape is redacted, so --depth {options.depth} has no tokens to run")
    path = options.model or header.model
    try:
        blas = load_blas()
        from kernel.weights import load_model, on_cpu

        model = load_model(path, progress=options.tell)
    except KernelError as error:
        raise Unusable(
            f"the tape's model cannot be loaded (--model gives a path): {error}"
        ) from error
    other = [name for name, digest in header.digests.items() if model.digests.get(name) != digest]
    if other:
        raise Unusable(
            f"{path} is not the model of the tape ({header.model}): {', '.join(sorted(other))} "
            "differ; give the right one with --model"
        )
    device = device_name()
    exact = (device, blas) == (header.device, header.blas)
    note = "" if exact else f"here {device}, {blas}; the tape {header.device}, {header.blas}"
    default = CPU_MARGIN if on_cpu() else GPU_MARGIN
    return Loaded(model, exact, default if options.margin is None else options.margin, note)


def device_name() -> str:
    """What computes here, as the server writes it into headers."""
    import mlx.core as mx

    name = mx.device_info().get("device_name", platform.machine())
    return f"{mx.default_device().type.name}: {name}"


def kernel_for(header: Header, loaded: Loaded) -> Kernel:
    """The kernel that the tape was recorded with. Raises Unusable."""
    from kernel.errors import KernelError
    from kernel.grammar import Grammars
    from kernel.model_kernel import ModelKernel
    from kernel.model_owned import ModelOwnedKernel

    masks = Grammars(loaded.model.tokenizer)
    try:
        if any(group.kind == OPAQUE for group in header.geometry.groups):
            return ModelOwnedKernel(loaded.model.model, header.geometry, masks=masks)
        return ModelKernel(
            loaded.model.model, header.geometry, sanitize=header.sanitize, masks=masks
        )
    except KernelError as error:
        raise Unusable(f"the tape's model cannot be run: {error}") from error
