"""Real models under loads: tiny random ones in folders of their own, and the bundled SmolLM2.

A kernel's name is TINY (a llama), SMOLLM2, or an architecture of tiny_families. All but those of
PAGED run over caches of their own here, whether pages and slots would hold them or not.

Owns what has to be loaded once, and the header that lets replay load the same model. Imports MLX
when a model is asked for, behind its BLAS.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from msgspec import structs

from server.capture import CaptureWriter
from server.loop import Parts
from statemachine.geometry import Geometry
from statemachine.records import FORMAT, AdapterUsed, Header

from .adapters import write
from .loads import FAKE, PAGED, SMOLLM2, TINY, Load

if TYPE_CHECKING:
    from kernel.adapters import Adapters
    from kernel.families import Family
    from kernel.weights import LoadedModel

BUNDLED = "smollm2-135m"


@functools.cache
def path_of(kernel: str) -> str:
    """What names a model on the command line."""
    if kernel == SMOLLM2:
        return BUNDLED
    _blas()
    from ..tiny_families import family_folder
    from ..tiny_models import tiny_config, tiny_weights, write_folder

    folder = tempfile.mkdtemp(prefix=f"tiny-{kernel}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if kernel != TINY:
        return str(family_folder(Path(folder), kernel))
    config = tiny_config(max_position_embeddings=256)
    return str(write_folder(Path(folder), config, tiny_weights(config)))


def _blas() -> str:
    from kernel.blas import load_blas

    return load_blas()


def model(kernel: str) -> LoadedModel:
    """A loaded model; the same one for all loads."""
    return _loaded(kernel)[0]


@functools.cache
def _loaded(kernel: str) -> tuple[LoadedModel, Family]:
    """A model and how it is served: found before any fault is put in."""
    _blas()
    from kernel.families import Family, family_of
    from kernel.weights import load_model

    held = load_model(path_of(kernel))
    if kernel not in PAGED:
        return held, Family(None, "over caches of its own")
    return held, family_of(held.model)


def family(kernel: str) -> Family:
    """How the model of a load is served."""
    return _loaded(kernel)[1]


def geometry(load: Load) -> Geometry:
    """The pool of a load, with the model's identity and groups."""
    held = model(load.kernel)
    blocks = load.geometry.groups[0].num_blocks
    return structs.replace(
        load.geometry,
        groups=family(load.kernel).groups(blocks),
        identity=held.digests["weights"],
    )


@functools.cache
def adapter_path(name: str) -> str:
    """The folder of an adapter that requests of a load have."""
    folder = tempfile.mkdtemp(prefix=f"adapter-{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(write(Path(folder), name))


@functools.cache
def _adapters(kernel: str) -> Adapters:
    from kernel.adapters import Adapters

    return Adapters(model(kernel).model)


def adapters(load: Load) -> Adapters:
    """Those that a load's requests have; a model has one object for all of them."""
    held = _adapters(load.kernel)
    for name in sorted({it.namespace.adapter for it in load.requests} - {""}):
        held.load(name, adapter_path(name))
    return held


def header(load: Load, pool: Geometry) -> Header:
    """A header that replay takes for this model, device and BLAS."""
    from replay.models import device_name

    held = model(load.kernel)
    return Header(
        format=FORMAT,
        software="mlxtape test",
        created_ns=0,
        model=path_of(load.kernel),
        digests=held.digests,
        geometry=pool,
        policy=structs.asdict(load.policy),
        capabilities=family(load.kernel).flags,
        device=device_name(),
        blas=_blas(),
        sanitize=load.sanitize if pool.groups[0].paged else "off",
        context_tokens=load.policy.context_tokens,
        layers=held.layers,
        adapters=tuple(AdapterUsed(it.name, it.digest, it.path) for it in adapters(load).held),
    )


@contextmanager
def attending(load: Load) -> Iterator[None]:
    """Kernels made inside of the block attend, and multiply, as a load's model does."""
    if load.kernel == FAKE or load.tables:
        yield
        return
    _blas()
    from kernel import narrow_layers, paged_choice
    from kernel.extension import Extension

    def none() -> Extension:
        return Extension(None)

    with (
        mock.patch.object(paged_choice, "extension", none),
        mock.patch.object(narrow_layers, "extension", none),
    ):
        yield


def parts(load: Load) -> Callable[[CaptureWriter], Parts]:
    """What makes the engine's parts over a real model."""

    def make(capture: CaptureWriter) -> Parts:
        held, pool = model(load.kernel), geometry(load)
        from kernel.model_kernel import ModelKernel
        from kernel.model_owned import ModelOwnedKernel

        # Loads are many, and the model was probed where its kernel is tested.
        kernel: ModelKernel | ModelOwnedKernel
        if pool.groups[0].paged:
            layout = family(load.kernel).layout
            kernel = ModelKernel(
                held.model, pool, sanitize=load.sanitize, layout=layout, adapters=adapters(load)
            )
        else:
            kernel = ModelOwnedKernel(held.model, pool, check=False)
        head = header(load, pool)
        head = structs.replace(head, capabilities={**head.capabilities, **kernel.computing})
        return Parts(kernel, load.policy, capture, head, vocab_size=held.vocab_size)

    return make
