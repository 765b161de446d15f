"""Build: from settings to a running engine over a real model.

Owns the order of a start (tape, BLAS, model, pool, header) and the size of the pool. Everything
that touches MLX happens in `make`, which the engine calls on its own thread. Importing this module
does not import MLX.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kernel.blas import load_blas
from kernel.tokenizer import Detokenizer, Tokenizer
from statemachine.geometry import Geometry
from statemachine.records import FORMAT, AdapterUsed, Header

from .adapters import Shelf, named_path
from .admission import check_pool
from .capture import CaptureWriter
from .draft_build import draft_parts, load_draft
from .engine import Engine
from .kept import KeptBlocks, check_storable
from .kept_file import StoreError
from .parts import Parts
from .policy import Policy
from .prefix_store import PrefixStore
from .redaction.live import LiveRedactor
from .settings import Settings, SettingsError

if TYPE_CHECKING:
    from kernel.adapters import Adapters
    from kernel.batch import Kernel
    from kernel.families import Family
    from kernel.grammar import Grammars
    from kernel.layout import Layout
    from kernel.weights import LoadedModel

OFF = "off"
"""The sanitizer's mode where there are no pages to look at."""

Progress = Callable[[str], None]
Flags = dict[str, bool | int | str]


def build_engine(settings: Settings, progress: Progress | None = None) -> tuple[Engine, Tokenizer]:
    """Load the model, make the pool, start the engine's thread; `progress` is told what for.

    Raises ModelError or BlasError (KernelError), CaptureError, SettingsError; one sentence each.
    """
    capture = _capture(settings)
    tokenizers: list[Tokenizer] = []

    def make() -> Parts:
        parts, tokenizer = _make(settings, capture, progress)
        tokenizers.append(tokenizer)
        return parts

    engine = Engine(make, waiting_max=settings.max_waiting, keep_thread=True)
    try:
        engine.start()
    except BaseException:
        if capture is not None:
            capture.close()
        raise
    return engine, tokenizers[0]


def _capture(settings: Settings) -> CaptureWriter | None:
    """The tape's writer. Raises CaptureError, SettingsError."""
    if settings.capture is None:
        if settings.capture_redact:
            raise SettingsError("capture_redact needs a tape: say with capture where to write it")
        return None
    if not settings.capture_redact:
        return CaptureWriter(settings.capture)
    if settings.draft_model is not None:
        raise SettingsError(
            "what a draft model guesses cannot be redacted: leave draft_model or capture_redact out"
        )
    return CaptureWriter(settings.capture, redact=LiveRedactor().feed)


def _make(
    settings: Settings, capture: CaptureWriter | None, progress: Progress | None
) -> tuple[Parts, Tokenizer]:
    """Everything that the engine's thread must make itself."""
    blas = load_blas()  # before the first import of mlx
    import mlx.core as mx

    from kernel.adapters import Adapters
    from kernel.families import family_of
    from kernel.grammar import Grammars
    from kernel.split import hidden_size
    from kernel.weights import load_model

    loaded = load_model(settings.model, progress=progress)
    tell = progress or (lambda _: None)
    masks = Grammars(loaded.tokenizer)
    masks.load()
    adapters = Adapters(loaded.model, loaded.turned_head_dim)
    family = family_of(loaded.model)
    drafter = load_draft(settings, loaded, family, tell)
    beside = 0 if drafter is None else drafter.block_bytes(settings.block_size)
    pool, make = _kernel_of(settings, loaded, family, adapters, masks, tell, beside)
    flags = family.flags
    policy = suited(settings.policy(loaded.context_tokens), flags)
    try:
        check_pool(pool, policy)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    kernel = make()
    draft = None
    if drafter is not None:
        draft = draft_parts(settings, drafter, loaded, pool, policy)
    flags = flags | _computing(kernel, tell)
    shelf = Shelf(adapters)
    for text in settings.adapter:
        adapter, folder = named_path(text)
        tell(f"loading adapter {adapter}")
        shelf.load(adapter, folder)
    tokenizer = loaded.tokenizer
    name = mx.device_info().get("device_name", platform.machine())
    device = f"{mx.default_device().type.name}: {name}"
    header = _header(settings, loaded, shelf, kernel.geometry, policy, flags, device, blas)
    if draft is not None:
        header = structs.replace(header, draft=draft.model)
    parts = Parts(
        kernel=kernel,
        policy=policy,
        capture=capture,
        header=header,
        decoder=lambda: Detokenizer(tokenizer),
        vocab_size=loaded.vocab_size,
        on_divergence=settings.on_divergence,
        shelf=shelf,
        kept=_kept(settings, kernel, header),
        draft=draft,
        prepare=masks.prepare,
        embedding_size=0 if "embed" in kernel.cannot else hidden_size(loaded.model),
    )
    return parts, tokenizer


def _computing(kernel: Kernel, tell: Progress) -> Flags:
    """For the tape's header: how pages are attended to, and by what is multiplied, where this
    device has more than one way.
    """
    from kernel.model_kernel import ModelKernel
    from kernel.model_owned import ModelOwnedKernel

    if not isinstance(kernel, (ModelKernel, ModelOwnedKernel)):
        return {}
    flags: Flags = dict(kernel.computing)
    if "attention" in flags:
        tell(f"attention over pages by {flags['attention']}")
    if isinstance(kernel, ModelOwnedKernel) and kernel.left_out:
        tell(f"products by MLX's operations: {kernel.left_out}")
    return flags


def _kept(settings: Settings, kernel: Kernel, header: Header) -> KeptBlocks | None:
    """The prefix store, where one was asked for. Raises SettingsError."""
    from kernel.model_kernel import ModelKernel

    if settings.prefix_store is None:
        return None
    try:
        check_storable(kernel.geometry)
        assert isinstance(kernel, ModelKernel), "others have no pages"
        digests = [f"{name}={digest}" for name, digest in sorted(header.digests.items())]
        made_by = (header.software, header.device.partition(":")[0], *digests)
        store = PrefixStore(
            Path(settings.prefix_store),
            settings.prefix_store_bytes,
            kernel.geometry,
            kernel.block_spec,
            made_by,
        )
    except StoreError as error:
        raise SettingsError(str(error)) from None
    return KeptBlocks(store, kernel, kernel.geometry)


def _kernel_of(
    settings: Settings,
    loaded: LoadedModel,
    family: Family,
    adapters: Adapters,
    masks: Grammars,
    tell: Progress,
    beside: int,
) -> tuple[Geometry, Callable[[], Kernel]]:
    """What serves a model: its geometry, and what makes its kernel once the settings suit it.

    beside: bytes that another model's pool takes for each block.
    """
    from kernel.quantised import identity_of, quantised

    layout, bits = family.layout, settings.kv_bits or 0
    identity = identity_of(loaded.digests["weights"], bits)
    if layout is not None:
        layout = quantised(layout, bits) if bits else layout
        return _over_pages(settings, loaded, layout, identity, adapters, masks, tell, beside)
    given = (settings.num_blocks, settings.num_slots, settings.kv_memory, settings.kv_bits)
    if any(it is not None for it in given):
        raise SettingsError(
            f"{family.reason}: there is no pool, so leave num_blocks, num_slots, kv_memory and "
            "kv_bits out"
        )
    return _over_its_own_caches(settings, loaded, family, identity, adapters, masks, tell)


def _over_pages(
    settings: Settings,
    loaded: LoadedModel,
    layout: Layout,
    identity: str,
    adapters: Adapters,
    masks: Grammars,
    tell: Progress,
    beside: int,
) -> tuple[Geometry, Callable[[], Kernel]]:
    from kernel.model_kernel import ModelKernel

    from .pool_size import pool_blocks, pool_slots

    size = settings.block_size
    blocks, each = pool_blocks(settings, layout, beside)
    slots = pool_slots(settings, layout)
    pool = Geometry(size, layout.groups(blocks, slots), identity)

    def make() -> Kernel:
        if blocks:
            kib = each / 1024
            tell(f"making a pool of {blocks} blocks of {size} tokens, {kib:.4g} KiB each")
        if slots:
            kib = layout.slot_bytes / 1024
            tell(f"making {slots} slots of one state, {kib:.4g} KiB each")
        return ModelKernel(
            loaded.model,
            pool,
            sanitize=settings.sanitize,
            masks=masks,
            layout=layout,
            adapters=adapters,
        )

    return pool, make


def _over_its_own_caches(
    settings: Settings,
    loaded: LoadedModel,
    family: Family,
    identity: str,
    adapters: Adapters,
    masks: Grammars,
    tell: Progress,
) -> tuple[Geometry, Callable[[], Kernel]]:
    from kernel.model_owned import ModelOwnedKernel

    pool = Geometry(settings.block_size, family.groups(), identity)

    def make() -> Kernel:
        tell(f"{family.reason}: requests run one after the other, and share no prefixes")
        return ModelOwnedKernel(loaded.model, pool, masks=masks, adapters=adapters)

    return pool, make


def suited(policy: Policy, flags: Flags) -> Policy:
    """The policy as far as a model's capabilities allow it.

    What would only be slower is turned down; padding, which somebody asked for, raises
    SettingsError. Nothing else decides: not the device, and not the architecture's name.
    """
    if not flags["pad"] and (policy.prefill_tile > 1 or policy.prefill_cohort):
        reason = flags.get("pad_reason", "this model cannot take pad rows back")
        raise SettingsError(f"{reason}: leave prefill_tile at 1 and prefill_cohort off")
    changes: dict[str, Any] = {}
    if not flags["share"]:
        changes["prefix_cache"] = False
    if not flags["batch"]:
        changes["max_running"] = 1
    if not flags["rewind"]:
        changes["lookahead"] = False
        if not flags.get("snapshot"):
            changes["draft_tokens"] = 0
    return structs.replace(policy, **changes)


def _header(
    settings: Settings,
    loaded: LoadedModel,
    shelf: Shelf,
    geometry: Geometry,
    policy: Policy,
    flags: Flags,
    device: str,
    blas: str,
) -> Header:
    return Header(
        format=FORMAT,
        software=f"mlxtape {metadata.version('mlxtape')}",
        created_ns=time.time_ns(),
        model=loaded.name,
        digests=loaded.digests,
        geometry=geometry,
        policy=structs.asdict(policy),
        capabilities=flags,
        device=device,
        blas=blas,
        sanitize=settings.sanitize if any(it.paged for it in geometry.groups) else OFF,
        context_tokens=policy.context_tokens,
        layers=loaded.layers,
        kv_bits=settings.kv_bits or 0,
        adapters=tuple(AdapterUsed(it.name, it.digest, it.path) for it in shelf.offered.values()),
    )
