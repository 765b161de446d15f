"""Parallel: the segments of a capture folder replayed side by side, each in a process of its own.

Each segment begins with a checkpoint, and the pass over one goes on into the checkpoint of the
next: what it leads to must be what that one starts from. So together the passes find what one pass
over all would find first; of what happened before that they tell less, since a pass knows nothing
of the segments before its own.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from attrs import evolve

from .errors import Unusable
from .progress import progress_bar
from .reader import Segment, Tape, segments_of, stored_bytes
from .run import Options, Outcome, Pass, few_collections, one_pass, outcome_of, replay


def replay_segments(path: str, options: Options, jobs: int) -> Outcome:
    """As run.replay, by so many processes; for depths that need no model. Raises Unusable."""
    notes: list[str] = []
    segments = segments_of(path, notes)
    if len(segments) == 1:
        outcome = replay(path, options)
        outcome.notes.append("it has one segment: there was nothing to share among processes")
        return outcome
    passes: list[Pass] = []
    ends = list(itertools.accumulate(sum(map(stored_bytes, it.sources)) for it in segments))
    with progress_bar(f"replay, {options.depth}", ends[-1]) as tell:
        for done, one in zip(ends, _passes(path, segments, options, jobs), strict=True):
            passes.append(one)
            tell(done, sum(it.counts.steps for it in passes))
            if one.divergence is not None:
                break
    outcome = outcome_of(path, options, passes)
    outcome.notes[:0] = notes
    return outcome


def _passes(path: str, segments: list[Segment], options: Options, jobs: int) -> Iterator[Pass]:
    """The pass over each segment, in order."""
    told = evolve(options, progress=False)
    with _pool(min(jobs, len(segments))) as pool:
        under_way = [pool.submit(_pass_over, path, segment, told) for segment in segments]
        for segment, future in zip(segments, under_way, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                raise Unusable(
                    f"the process for {segment.sources[0]} was killed (out of memory?): replay "
                    "with fewer --jobs"
                ) from error


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the block, whatever they are at."""
    before = set(active_children())
    # Made anew, not forked: a process that is forked may find locks that no thread will open.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _die_quietly)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - before:
            process.terminate()


def _die_quietly() -> None:
    """Of a Ctrl-C, which goes to all, the process that was asked tells."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _pass_over(path: str, segment: Segment, options: Options) -> Pass:
    """In a process of its own."""
    with few_collections():
        return one_pass(Tape(path, segment=segment), options, last=segment.last)
