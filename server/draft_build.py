"""Draft build: from settings to a draft model's kernel, beside the one that is served.

Owns which model may guess for which, and the size of the draft model's pool: as many blocks as the
other's, so that whatever fits there fits here. Everything that touches MLX is on the engine's
thread. Importing this module does not import MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from statemachine.geometry import Geometry
from statemachine.records import DraftModel

from .admission import check_pool
from .drafting import DraftParts
from .policy import Policy
from .settings import Settings, SettingsError

if TYPE_CHECKING:
    from kernel.families import Family
    from kernel.layout import Layout
    from kernel.weights import LoadedModel

Tell = Callable[[str], None]


@frozen
class LoadedDraft:
    """A draft model in memory, and how its rows are laid out."""

    model: LoadedModel
    layout: Layout
    flags: dict[str, bool | int | str]

    def block_bytes(self, block_size: int) -> int:
        """Of one block of each of its groups."""
        from kernel.pages import block_bytes

        shapes = self.layout.shapes
        return sum(block_bytes(shapes, group, block_size) for group in {it.group for it in shapes})

    def geometry(self, block_size: int, blocks: int) -> Geometry:
        """Of its pool."""
        identity = self.model.digests["weights"]
        return Geometry(block_size, self.layout.groups(blocks), identity)


def load_draft(
    settings: Settings, served: LoadedModel, family: Family, tell: Tell
) -> LoadedDraft | None:
    """The draft model, if one is asked for. Raises SettingsError or ModelError where it cannot
    guess for the model that is served.
    """
    if settings.draft_model is None:
        return None
    from kernel.draft_vocabulary import require_same_vocabulary
    from kernel.families import family_of
    from kernel.weights import load_model

    flags = family.flags
    if not (flags["rewind"] or flags.get("snapshot")):
        why = flags.get("rewind_reason", "its rows cannot be taken back")
        raise SettingsError(f"{served.name} verifies no guesses: {why}; leave draft_model out")
    loaded = load_model(settings.draft_model, progress=tell)
    require_same_vocabulary(served, loaded)
    found = family_of(loaded.model)
    for name in ("batch", "rewind"):
        if found.layout is None or not found.flags[name]:
            why = found.flags.get(f"{name}_reason", found.reason)
            raise SettingsError(f"{loaded.name} cannot be a draft model: {why}; give another one")
    assert found.layout is not None
    return LoadedDraft(loaded, found.layout, found.flags)


def draft_parts(
    settings: Settings, draft: LoadedDraft, served: LoadedModel, pool: Geometry, policy: Policy
) -> DraftParts:
    """The draft model's kernel, with a pool beside that of the model that is served. Raises
    SettingsError.
    """
    from kernel.model_kernel import ModelKernel

    blocks = max(group.num_blocks for group in pool.groups)
    geometry = draft.geometry(settings.block_size, blocks)
    try:
        check_pool(geometry, policy)
    except ValueError as error:
        raise SettingsError(f"the draft model's pool: {error}") from None
    kernel = ModelKernel(
        draft.model.model, geometry, sanitize=settings.sanitize, layout=draft.layout
    )
    model = DraftModel(
        model=draft.model.name,
        digests=draft.model.digests,
        geometry=geometry,
        capabilities={**draft.flags, **kernel.computing},
        layers=draft.model.layers,
        vocab_size=min(served.vocab_size, draft.model.vocab_size),
    )
    return DraftParts(kernel, model)
