"""Models: what the depths that run the real model need of the kernel, loaded late.

Owns the check that a model is the tape's, and the rule of when results must be equal bit for bit.
Nothing here is imported before a depth asks for it; BLAS is loaded before MLX.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from attrs import frozen

from statemachine.geometry import OPAQUE
from statemachine.records import Header, RequestArrived

from .errors import Unusable

if TYPE_CHECKING:
    from kernel.adapters import Adapters
    from kernel.batch import Kernel
    from kernel.layout import Layout
    from kernel.weights import LoadedModel

    from .run import Options

KERNELS = {"attention": "attention", "native": "products"}
"""What a header's entries are about."""
CPU_MARGIN = 0.05
"""Scores of float32 arithmetic in another order differ by some 1e-4; this is far above."""
GPU_MARGIN = 0.5
"""Scores of 16-bit arithmetic differ by some tenths."""


@frozen
class Loaded:
    """A tape's model. exact: device and BLAS are the recorded ones, so results must be equal, if
    the kernels are, too (other_kernels).

    adapters: the model's; none before `add_adapters`, which goes by `given`.
    """

    model: LoadedModel
    exact: bool
    margin: float
    note: str
    adapters: Adapters | None = None
    given: tuple[tuple[str, str], ...] = ()

    def add_adapters(self, header: Header) -> None:
        """Load those that the tape names, and those that were given. Raises Unusable.

        After the kernel was made, which may lay the model's weights out anew.
        """
        from kernel.errors import KernelError

        if self.adapters is None:
            return
        named = {name for name, _ in self.given}
        asked = [(it.name, it.path) for it in header.adapters if it.name not in named]
        for name, path in (*self.given, *asked):
            try:
                self.adapters.load(name, path)
            except KernelError as error:
                raise Unusable(
                    f"adapter {name} cannot be loaded (--adapter {name}=PATH gives a path): {error}"
                ) from error
        found = {(it.name, it.digest) for it in self.adapters.held}
        for it in header.adapters:
            if (it.name, it.digest) not in found:
                raise Unusable(
                    f"adapter {it.name} is not that of the tape: its digest is not {it.digest}; "
                    f"give the right one with --adapter {it.name}=PATH"
                )

    def serving(self, arrived: RequestArrived) -> AbstractContextManager[None]:
        """Calls of the model for a request's rows alone. Raises Unusable without its adapter."""
        self.require(arrived)
        if self.adapters is None:
            return nullcontext()
        return self.adapters.serving_alone(arrived.namespace).rows()

    def require(self, arrived: RequestArrived) -> None:
        """Raises Unusable where a request has an adapter that is not loaded."""
        space = arrived.namespace
        if self.adapters is None or not space.adapter:
            return
        if (space.adapter, space.version) not in {it.key for it in self.adapters.held}:
            raise Unusable(
                f"request {arrived.request} had adapter {space.adapter} in version "
                f"{space.version:016x}, which was loaded after the tape's header was written: give "
                f"its folder with --adapter {space.adapter}=PATH"
            )


def load(header: Header, options: Options) -> Loaded:
    """Load the tape's model. Raises Unusable where it is missing, or another one."""
    from kernel.blas import load_blas
    from kernel.errors import KernelError

    if header.redacted:
        raise Unusable(f"the tape is redacted, so --depth {options.depth} has no tokens to run")
    path = options.model or header.model
    try:
        blas = load_blas()
        from kernel.adapters import Adapters
        from kernel.machine import on_cpu
        from kernel.weights import load_model

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
    margin = default if options.margin is None else options.margin
    adapters = Adapters(model.model, model.turned_head_dim)
    return Loaded(model, exact, margin, note, adapters, options.adapters)


def device_name() -> str:
    """What computes here, as the server writes it into headers."""
    import mlx.core as mx

    name = mx.device_info().get("device_name", platform.machine())
    return f"{mx.default_device().type.name}: {name}"


def kernel_for(header: Header, loaded: Loaded) -> Kernel:
    """The kernel that the tape was recorded with, its adapters loaded. Raises Unusable."""
    from kernel.errors import KernelError
    from kernel.grammar import Grammars
    from kernel.model_kernel import ModelKernel
    from kernel.model_owned import ModelOwnedKernel

    masks = Grammars(loaded.model.tokenizer)
    model, geometry, adapters = loaded.model.model, header.geometry, loaded.adapters
    kernel: Kernel
    try:
        if any(group.kind == OPAQUE for group in geometry.groups):
            kernel = ModelOwnedKernel(model, geometry, masks=masks, adapters=adapters)
        else:
            kernel = ModelKernel(
                model,
                geometry,
                sanitize=header.sanitize,
                masks=masks,
                layout=_layout(model, header),
                adapters=adapters,
            )
    except KernelError as error:
        raise Unusable(f"the tape's model cannot be run: {error}") from error
    loaded.add_adapters(header)
    return kernel


def other_kernels(header: Header, kernel: Kernel) -> str:
    """In what the kernels that compute are not the tape's; empty where they are."""
    from kernel.batch import GATHER

    here, tape = getattr(kernel, "computing", {}), header.capabilities
    for name, none in (("attention", GATHER), ("native", "MLX's operations")):
        # What stands behind it says what is left out, and why.
        ways = [re.split("[:;]", str(it.get(name, none)))[0] for it in (here, tape)]
        if ways[0] != ways[1]:
            return f"{KERNELS[name]} here by {ways[0]}; the tape's by {ways[1]}"
    return ""


def _layout(model: Any, header: Header) -> Layout:
    """How the tape's pages are laid out. Raises ModelError."""
    from kernel.families import layout_of
    from kernel.quantised import quantised

    layout = layout_of(model, header.capabilities)
    return quantised(layout, header.kv_bits) if header.kv_bits else layout


def caches_of(model: Any, header: Header) -> Callable[[], list[Any]]:
    """What makes mlx-lm's own caches for a request, of as many bits a number as the tape's pages.

    Raises Unusable where mlx-lm has none.
    """
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    def plain() -> list[Any]:
        return make_prompt_cache(model)

    if not header.kv_bits:
        return plain
    groups = [it.codes[0].group for it in _layout(model, header).shapes if it.codes]
    if len(plain()) != len(groups) or any(type(cache) is not KVCache for cache in plain()):
        raise Unusable(
            "mlx-lm has no quantised caches of this model's kind, so --depth reference has nothing "
            "to compare with: use --depth forward"
        )
    return lambda: [
        cache.to_quantized(group, header.kv_bits)
        for cache, group in zip(plain(), groups, strict=True)
    ]
