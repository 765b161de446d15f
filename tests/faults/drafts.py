"""Faults of speculation (S9): which drafts are taken, and what becomes of the other ones' rows."""

from __future__ import annotations

from typing import Any

import attrs
from msgspec import structs

from kernel.batch import Batch
from kernel.metadata import StepMetadata
from statemachine import commands
from statemachine.events import DRAFT, BlockPublished, Committed, Event, Rewound, Trimmed
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence
from statemachine.transitions import apply_all

from . import loads
from .ahead import Counted, not_rewound, resolve_fault
from .fault import DONE, FAILED, PLANNED, Catalogue, Witness
from .layers import Restarted

FAULTS = Catalogue()


@FAULTS.add(
    "S9",
    "k drafts are verified, a taken, and the offset goes on behind all k: too far by k - a",
    "kernel.metadata:build",
    loads.DRAFTS,
    "fold",
    "observation",
    "start",
)
def offset_behind_all(original: Any, witness: Witness) -> Any:
    return Counted(original, witness)


@FAULTS.add(
    "S9-pool-only",
    "drafts that were not taken leave the pool, and stay in the sequence",
    "statemachine.trimming:_cut",
    loads.DRAFTS,
    "fold",
    "fold",
    "is recorded at offset",
)
def rewound_in_pool(original: Any, witness: Witness) -> Any:
    def cut(draft: Any, old: Sequence, rows: int) -> Sequence:
        witness.note(-1, DONE)
        new: Sequence = original(draft, old, rows)
        return structs.replace(new, speculative=old.speculative)

    return cut


@resolve_fault(
    FAULTS,
    "S9-one-less",
    "one row less is taken back than drafts were refused",
    loads.DRAFTS,
    "Rewound",
)
def one_less(state: Any, found: Any, events: list[Event]) -> list[Event]:
    changed: list[Event] = []
    for event in events:
        if isinstance(event, Rewound):
            if event.rows > 1:
                changed.append(Rewound(event.seq, event.rows - 1))
        else:
            changed.append(event)
    return changed


@resolve_fault(
    FAULTS,
    "S9-one-more",
    "one row more is taken back than drafts were refused: one that was taken",
    loads.DRAFTS,
    "Rewound",
)
def one_more(state: Any, found: Any, events: list[Event]) -> list[Event]:
    return [Trimmed(it.seq, it.rows + 1) if isinstance(it, Rewound) else it for it in events]


@resolve_fault(
    FAULTS,
    "rewound-before-commit",
    "all drafts are taken back before those that hold are committed",
    loads.DRAFTS,
    "Committed",
)
def rewound_first(state: Any, found: Any, events: list[Event]) -> list[Event]:
    changed: list[Event] = []
    for event in events:
        if isinstance(event, Committed):
            rows = len(state.sequences[event.seq].speculative)
            changed += [Rewound(event.seq, rows - 1), Committed(event.seq, event.tokens[:1])]
        elif not isinstance(event, Rewound):
            changed.append(event)
    return changed


resolve_fault(
    FAULTS,
    "drafts-kept-at-end",
    "drafts behind the end of an answer are not rewound",
    loads.DRAFTS_ENDING,
    "Rewound",
)(not_rewound)


@FAULTS.add(
    "S9-bonus",
    "one draft too many is taken: the token that the target says itself counts as a draft",
    "server.speculation:accepted",
    loads.DRAFTS,
    "plan",
    "plan",
    "of StepDone",
)
def bonus_counted(original: Any, witness: Witness) -> Any:
    def accepted(drawn: Any, guessed: Any) -> int:
        guesses = tuple(guessed)
        count = int(original(drawn, guesses))
        if count < len(guesses):
            witness.note(-1, DONE)
            return count + 1
        return count

    return accepted


@FAULTS.add(
    "S9-after-end",
    "drafts behind an end token are kept, for they were taken",
    "server.closing:_outcome",
    loads.DRAFTS_ENDING,
    "plan",
    "plan",
    "of StepDone",
)
def kept_after_end(original: Any, witness: Witness) -> Any:
    def outcome(piece: Any, request: Any, tokens: Any, end: Any, capacity: int) -> Any:
        found = original(piece, request, tokens, end, capacity)
        if piece.purpose != DRAFT or found.reason != "stop" or found.rows >= len(tokens):
            return found
        witness.note(piece.seq, DONE)
        return structs.replace(found, rows=len(tokens), tokens=tokens)

    return outcome


@FAULTS.add(
    "drafts-published",
    "blocks are published that drafts fill, before it is known which are taken",
    "server.closing:close_step",
    loads.DRAFTS,
    "plan",
    "plan",
    "of StepDone",
)
def drafts_published(original: Any, witness: Witness) -> Any:
    def close_step(view: Any, plan: Any, found: Any) -> tuple[Event, ...]:
        events: list[Event] = list(original(view, plan, found))
        for at, event in enumerate(events):
            before = events[at - 1]
            if not isinstance(event, Rewound) or not isinstance(before, Committed):
                continue
            state = apply_all(view.state, events[: at - 1])
            rows = state.sequences[event.seq].speculative
            state = apply_all(state, [Committed(event.seq, tuple(row.token for row in rows))])
            early = commands.publish(state, event.seq)
            if not early:
                continue
            witness.note(-1, DONE, plan.step)
            taken = Committed(event.seq, tuple(row.token for row in rows))
            rest = [
                it
                for it in events[at + 1 :]
                if not isinstance(it, BlockPublished) or it.seq != event.seq
            ]
            return (*events[: at - 1], taken, *early, Trimmed(event.seq, event.rows), *rest)
        return tuple(events)

    return close_step


@FAULTS.add(
    "samples-misread",
    "each piece's samples are looked for one place behind the last piece's first",
    "server.closing:drawn",
    loads.DRAFTS,
    "plan",
    "plan",
    "of StepDone",
)
def samples_misread(original: Any, witness: Witness) -> Any:
    def drawn(view: Any, plan: Any, tokens: tuple[int, ...]) -> Any:
        right = list(original(view, plan, tokens))
        at = 0
        shifted: tuple[int, ...] = ()
        for piece in plan.pieces:
            mine = tokens[at : at + piece.samples]
            shifted += mine
            at += min(piece.samples, 1)
        found = list(original(view, plan, shifted))
        taken = [len(mine) for piece, _, mine in right if piece.purpose == DRAFT]
        if taken != [len(mine) for piece, _, mine in found if piece.purpose == DRAFT]:
            witness.note(-1, DONE, plan.step)
        return iter(found if witness.first else right)

    return drawn


@FAULTS.add(
    "samples-committed",
    "what is committed is what was sampled, and not what was fed: one place further",
    "server.closing:_resolve",
    loads.DRAFTS,
    "plan",
    "plan",
    "raised at close",
    "was committed as",
)
def samples_committed(original: Any, witness: Witness) -> Any:
    def resolve(state: Any, plan: Any, found: Any) -> list[Event]:
        for outcome in found:
            rows = state.sequences[outcome.seq].speculative[: outcome.rows]
            if outcome.rows and tuple(row.token for row in rows) != outcome.tokens:
                witness.note(-1, FAILED, plan.step)
                commands.commit(state, outcome.seq, outcome.tokens)
        return list(original(state, plan, found))

    return resolve


@FAULTS.add(
    "answer-short",
    "of several tokens that a step drew only the first joins the answer",
    "server.closing:_continued",
    loads.DRAFTS,
    "plan",
    "plan",
)
def answer_short(original: Any, witness: Witness) -> Any:
    def continued(request: Any, tokens: tuple[int, ...], ngram: int) -> Any:
        if len(tokens) > 1:
            witness.note(-1, PLANNED, witness.step + 1)
        return original(request, tokens[:1], ngram)

    return continued


@FAULTS.add(
    "guess-shifted",
    "the draft begins one token behind what followed the last time",
    "server.speculation:propose",
    loads.DRAFTS,
    "plan",
    "plan",
    "of StepPlanned",
)
def guess_shifted(original: Any, witness: Witness) -> Any:
    def propose(stream: Any, ngrams: Any, ngram: int, most: int) -> tuple[int, ...]:
        right: tuple[int, ...] = original(stream, ngrams, ngram, most + 1)
        if right[1:] != right[:most]:
            witness.note()
        return right[1:]

    return propose


@FAULTS.add(
    "drafts-past-length",
    "a draft is as long as drafts may be, whatever is left of the answer",
    "server.decoding:_drafts",
    loads.DRAFTS,
    "plan",
    "plan",
    "of StepPlanned",
)
def drafts_past_length(original: Any, witness: Witness) -> Any:
    def drafts(draft: Any, seqs: list[int], *rest: Any) -> dict[int, tuple[int, ...]]:
        from server.decoding import ngrams_of
        from server.speculation import propose

        policy, right = draft.policy, original(draft, seqs, *rest)
        found = {}
        for seq in seqs:
            request = draft.request(seq)
            ngrams = ngrams_of(request, policy)
            guess = propose(request.stream, ngrams, policy.lookup_ngram, policy.draft_tokens)
            if guess:
                found[seq] = guess
        if found != right:
            witness.note()
        return found

    return drafts


@FAULTS.add(
    "drafts-and-lookahead",
    "a text that could be guessed gets a row ahead of its token, and so is never guessed",
    "server.decoding:_waits_for_token",
    loads.BOTH,
    "plan",
    "plan",
    "of StepPlanned",
)
def drafts_and_lookahead(original: Any, witness: Witness) -> Any:
    def waits(request: Any, policy: Any, capacity: int) -> bool:
        found = bool(original(request, structs.replace(policy, draft_tokens=0), capacity))
        if found != original(request, policy, capacity):
            witness.note(request.arrived.request)
        return found

    return waits


@FAULTS.add(
    "verified-against-before",
    "drafts are verified against the samples of the rows before those that they follow",
    "kernel.metadata:_sample_rows",
    loads.TINY_DRAFTS,
    "forward",
    "token",
)
def verified_before(original: Any, witness: Witness) -> Any:
    def sample_rows(pieces: Any, first: Any, sampled: Any) -> Any:
        found = original(pieces, first, sampled)
        for place, number in enumerate(sampled):
            if pieces[number].samples > 1 and found[place]:
                witness.note(pieces[number].sequence.id, DONE)
                found[place] -= 1
        return found

    return sample_rows


@FAULTS.add(
    "draft-position-shifted",
    "samples that verify drafts are drawn for the positions before theirs",
    "server.scheduler:batch",
    loads.TINY_DRAFTS_DRAWN,
    "forward",
    "token",
    "token",
)
def position_shifted(original: Any, witness: Witness) -> Any:
    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        pieces = list(made.pieces)
        for number, piece in enumerate(pieces):
            if piece.samples > 1:
                witness.note(piece.sequence.id, DONE)
                pieces[number] = Restarted(**structs.asdict(piece), back=1)
        return structs.replace(made, pieces=tuple(pieces))

    return batch


@FAULTS.add(
    "draft-sees-later",
    "the rows of a draft attend to the drafts behind them",
    "kernel.metadata:build",
    loads.TINY_DRAFTS,
    "forward",
    "token",
)
def draft_sees_later(original: Any, witness: Witness) -> Any:
    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = original(batch, geometry)
        until = metadata.until.copy()
        for number, piece in enumerate(batch.pieces):
            if piece.samples > 1:
                witness.note(piece.sequence.id, DONE)
                first = int(metadata.first[number])
                until[first : first + piece.rows] = until[first + piece.rows - 1]
        return attrs.evolve(metadata, until=until)

    return build


@FAULTS.add(
    "drafts-visible",
    "the mask still shows a draft that was taken back",
    "kernel.metadata:build",
    loads.DRAFTS,
    "fold",
    "observation",
    "visible rows",
)
def drafts_visible(original: Any, witness: Witness) -> Any:
    drafted: set[int] = set()

    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = original(batch, geometry)
        until = metadata.until.copy()
        for number, piece in enumerate(batch.pieces):
            seq = piece.sequence.id
            if seq in drafted and piece.sequence.offset % geometry.block_size:
                witness.note(seq)
                until[int(metadata.first[number]) + piece.rows - 1] += 1
            drafted.discard(seq)
            if piece.samples > 1:
                drafted.add(seq)
        return attrs.evolve(metadata, until=until)

    return build
