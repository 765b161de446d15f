"""Faults under the lengths: a layer, page, mask or sample that is wrong while all numbers agree.

Only a real forward shows most of these, so their loads run a tiny random llama, and replay finds
them where it runs the model again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs

from kernel.batch import Batch, Piece

from . import loads
from .fault import DONE, Catalogue, Make, Witness

FAULTS = Catalogue()
ODD_LAYER = 1


@FAULTS.add(
    "rope-one-ahead",
    "one layer rotates its rows one position too far",
    "kernel.caches:PagedCache.offset",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def rope_ahead(original: Any, witness: Witness) -> Any:
    def offset(cache: Any) -> Any:
        found = original(cache)
        if not witness.on or cache.layer != ODD_LAYER or witness.step < 2:
            return found
        # A shift of all rows alike is no difference to RoPE: only the decode rows move.
        metadata = cache._context.metadata
        ahead = np.zeros(metadata.total_rows, np.int32)
        for number, rows in enumerate(metadata.rows.tolist()):
            if rows == 1:
                witness.note(-1, DONE)
                ahead[int(metadata.first[number])] = 1
        return found + _array(ahead)

    return offset


def _array(values: Any) -> Any:
    import mlx.core as mx

    return mx.array(values)


@FAULTS.add(
    "update-skipped",
    "one layer attends without having written its rows",
    "kernel.caches:PagedCache.update_and_fetch",
    loads.TINY_MIXED,
    "fold",
    "observation",
    "rows written",
)
def update_skipped(original: Any, witness: Witness) -> Any:
    from kernel.handles import KeyHandle, ValueHandle

    def update(cache: Any, keys: Any, values: Any) -> Any:
        if not witness.on or cache.layer != ODD_LAYER:
            return original(cache, keys, values)
        witness.note(-1, DONE)
        cache._use()
        cache._handles = (KeyHandle(cache, keys), ValueHandle(cache, values))
        return cache._handles

    return update


@FAULTS.add(
    "write-lost",
    "one layer's write is counted and never reaches the pages",
    "kernel.pages:PageStep.write",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def write_lost(original: Any, witness: Witness) -> Any:
    def write(step: Any, layer: int, where: Any, keys: Any, values: Any) -> None:
        if witness.on and layer == ODD_LAYER:
            witness.note(-1, DONE)
            return
        original(step, layer, where, keys, values)

    return write


@FAULTS.add(
    "write-misplaced",
    "K and V are written one row after the place that tables and tags agree on",
    "kernel.context:StepContext.write_index",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def write_misplaced(original: Any, witness: Witness) -> Any:
    def write_index(context: Any, group: int) -> Any:
        blocks, rows = original(context, group)
        if not witness.on:
            return blocks, rows
        witness.note(-1, DONE)
        return blocks, (rows + 1) % context.metadata.geometry.block_size

    return write_index


@FAULTS.add(
    "stale-pages",
    "one layer attends over its pages as they were before this step's writes",
    "kernel.caches:PagedCache.read",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def stale_pages(original: Any, witness: Witness) -> Any:
    before: dict[int, Any] = {}

    def read(cache: Any, *arguments: Any) -> Any:
        context, key_pages, value_pages = original(cache, *arguments)
        if not witness.on or cache.layer != ODD_LAYER:
            return context, key_pages, value_pages
        stale = before.get(cache.layer, (_zeros(key_pages), _zeros(value_pages)))
        before[cache.layer] = (key_pages, value_pages)
        witness.note(-1, DONE)
        return context, *stale

    return read


def _zeros(pages: Any) -> Any:
    import mlx.core as mx

    return mx.zeros(pages.shape, pages.dtype)


@FAULTS.add(
    "stale-metadata",
    "one layer keeps the metadata of the step before, where that has as many rows",
    "kernel.caches:PagedCache.bind",
    loads.TINY_MIXED,
    "fold",
    "observation",
    "another step's metadata",
)
def stale_metadata(original: Any, witness: Witness) -> Any:
    before: dict[int, Any] = {}

    def bind(cache: Any, context: Any, pages: Any) -> None:
        old = before.get(cache.layer)
        before[cache.layer] = context
        same = old is not None and old.metadata.total_rows == context.metadata.total_rows
        if witness.on and cache.layer == ODD_LAYER and same:
            witness.note(-1, DONE)
            context = old
        original(cache, context, pages)

    return bind


@FAULTS.add(
    "newest-row-masked",
    "the mask hides the newest row from its own query, wherever the query sees more than that",
    "kernel.buckets:_Seen.mask",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def newest_masked(original: Any, witness: Witness) -> Any:
    def mask(seen: Any, begin: int, end: int, keys: int) -> Any:
        found = original(seen, begin, end, keys)
        if not witness.on:
            return found
        witness.note(-1, DONE)
        until = seen.metadata.until[seen.rows[:, begin:end]][:, :, None]
        newest = seen.positions[:, None, :keys] == until - 1
        return found & ~(newest & (until > 1))

    return mask


@FAULTS.add(
    "future-row-seen",
    "a row of a prefill piece attends to the rows after it",
    "kernel.buckets:_Seen.mask",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def future_seen(original: Any, witness: Witness) -> Any:
    def mask(seen: Any, begin: int, end: int, keys: int) -> Any:
        found = original(seen, begin, end, keys)
        if not witness.on or end - begin == 1:
            return found
        witness.note(-1, DONE)
        return np.broadcast_to(seen.valid[:, None, :keys], found.shape).copy()

    return mask


@FAULTS.add(
    "bucket-mixed",
    "two decode rows that are attended together get each other's result",
    "kernel.buckets:output_order",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def bucket_mixed(original: Any, witness: Witness) -> Any:
    def order(buckets: Any) -> Any:
        found = original(buckets)
        if not witness.on or sum(bucket.rows.size for bucket in buckets) < 2:
            return found
        count = sum(bucket.rows.size for bucket in buckets)
        witness.note(-1, DONE)
        mixed = np.arange(count) if found is None else found.copy()
        mixed[[-1, -2]] = mixed[[-2, -1]]
        return mixed

    return order


@FAULTS.add(
    "copy-lost",
    "copy on write copies the tags of a block, and not its K and V",
    "kernel.pages:Pages.copy_blocks",
    loads.TINY_REPEATS,
    "forward",
    "token",
    "logit",
)
def copy_lost(original: Any, witness: Witness) -> Any:
    def copy_blocks(pages: Any, copies: Any) -> None:
        if not witness.on:
            original(pages, copies)
        elif copies:
            witness.note(copies[0].seq, DONE)

    return copy_blocks


class Restarted(Piece, frozen=True):
    """A piece that says that its samples take earlier positions than they do."""

    back: int = 0

    @property
    def sample_positions(self) -> range:
        right = super().sample_positions
        return range(right.start - self.back, right.stop - self.back)


@FAULTS.add(
    "sampling-restarts",
    "after a preemption the positions that are sampled at start again behind the prompt",
    "server.scheduler:batch",
    loads.TINY_TIGHT,
    "forward",
    "token",
    "token",
)
def sampling_restarts(original: Any, witness: Witness) -> Any:
    again: dict[int, int] = {}

    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        pieces = list(made.pieces)
        for number, piece in enumerate(pieces):
            seq = piece.sequence.id
            request = view.requests[seq]
            if piece.rows > 1 and request.output_tokens and piece.samples:
                again[seq] = request.output_tokens
            if seq in again and piece.samples:
                witness.note(seq, DONE)
                pieces[number] = Restarted(**structs.asdict(piece), back=again[seq])
        return structs.replace(made, pieces=tuple(pieces))

    return batch


@FAULTS.add(
    "seed-shared",
    "all rows of a batch are drawn with the first one's seed",
    "kernel.model_kernel:plan_samples",
    loads.TINY_TIGHT,
    "forward",
    "token",
    "token",
)
def seed_shared(original: Any, witness: Witness) -> Any:
    def plan_samples(asked: Any) -> Any:
        listed = list(asked)
        if witness.on and len({parameters.seed for parameters, _ in listed}) > 1:
            witness.note(-1, DONE)
            seed = listed[0][0].seed
            listed = [(structs.replace(given, seed=seed), at) for given, at in listed]
        return original(listed)

    return plan_samples


@FAULTS.add(
    "temperature-ignored",
    "every row is sampled greedily",
    "kernel.sampling:is_greedy",
    loads.TINY_TIGHT,
    "forward",
    "token",
    "token",
)
def temperature_ignored(original: Any, witness: Witness) -> Any:
    def is_greedy(parameters: Any) -> bool:
        if witness.on and not original(parameters):
            witness.note(-1, DONE)
        return True

    return is_greedy


@FAULTS.add(
    "logits-of-a-pad",
    "a padded piece is sampled at its last row, which is a pad",
    "kernel.metadata:_sample_rows",
    loads.TINY_PADDED,
    "forward",
    "token",
)
def logits_of_pad(original: Any, witness: Witness) -> Any:
    def sample_rows(pieces: Any, first: Any, sampled: Any) -> Any:
        found = original(pieces, first, sampled)
        for place, number in enumerate(sampled):
            if pieces[number].pads:
                witness.note(pieces[number].sequence.id, DONE)
                found[place] += pieces[number].pads
        return found

    return sample_rows


@FAULTS.add(
    "chunk-lost",
    "a chunk that samples nothing is not written: nobody asks for its scores in that step",
    "kernel.pages:PageStep.write",
    loads.TINY_CHUNKED,
    "forward",
    "token",
    "logit",
    late_steps=1,
)
def chunk_lost(original: Any, witness: Witness) -> Any:
    def write(step: Any, layer: int, where: Any, keys: Any, values: Any) -> None:
        if witness.step == 1 and layer == ODD_LAYER:
            witness.note(-1, DONE)
            return
        original(step, layer, where, keys, values)

    return write


@FAULTS.add(
    "copy-misplaced",
    "copy on write puts the rows into the block after the target",
    "kernel.pages:Pages.copy_blocks",
    loads.TINY_REPEATS,
    "forward",
    "token",
    "logit",
)
def copy_misplaced(original: Any, witness: Witness) -> Any:
    def copy_blocks(pages: Any, copies: Any) -> None:
        if witness.on and copies:
            witness.note(copies[0].seq, DONE)
            copies = tuple(structs.replace(it, target=it.target + 1) for it in copies)
        original(pages, copies)

    return copy_blocks


@FAULTS.add(
    "scale-rounded",
    "one layer's attention is scaled a millionth too much",
    "kernel.attention:attend",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def scale_rounded(original: Any, witness: Witness) -> Any:
    def attend(
        context: Any, group: int, queries: Any, keys: Any, values: Any, scale: float, *rest: Any
    ) -> Any:
        if witness.on:
            witness.note(-1, DONE)
            scale *= 1 + 1e-6
        return original(context, group, queries, keys, values, scale, *rest)

    return attend


def _in_the_code(name: str, make: Make, target: str, load: loads.Load = loads.TINY_MIXED) -> None:
    """The same bug where nobody knows of it: forward repeats it, the reference does not."""
    sentence = f"{name}, in the code that replays too: only mlx-lm's own caches are without it"
    add = FAULTS.add(f"{name}-in-code", sentence, target, load, "reference", "token", stays=True)
    add(make)


_in_the_code("rope-one-ahead", rope_ahead, "kernel.caches:PagedCache.offset", loads.SMOL)
_in_the_code("write-misplaced", write_misplaced, "kernel.context:StepContext.write_index")
_in_the_code("stale-pages", stale_pages, "kernel.caches:PagedCache.read")
_in_the_code("newest-row-masked", newest_masked, "kernel.buckets:_Seen.mask")
_in_the_code("future-row-seen", future_seen, "kernel.buckets:_Seen.mask")
_in_the_code("bucket-mixed", bucket_mixed, "kernel.buckets:output_order", loads.SMOL)
_in_the_code("copy-lost", copy_lost, "kernel.pages:Pages.copy_blocks", loads.TINY_REPEATS)
_in_the_code("logits-of-a-pad", logits_of_pad, "kernel.metadata:_sample_rows", loads.TINY_PADDED)
