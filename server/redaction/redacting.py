"""Redacting: a tape's records, one by one, with pseudonyms in the place of all that users said.

Follows two states: the tape's own, and the one that the redacted events lead to. Keys and digests
of the second one stand in the place of those of the first, where these were right; where they were
wrong, theirs are wrong too. So what folds goes on to fold, and what diverges diverges there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from statemachine import events as ev
from statemachine import records as rec
from statemachine.codec import decode_state, encode_state
from statemachine.errors import CodecError, InvariantBroken
from statemachine.events import Event
from statemachine.records import Checkpoint, Header, Parameters, Record, RequestArrived
from statemachine.sequence import Sequence, pack
from statemachine.state import State, new_state
from statemachine.tags import PAD, UNWRITTEN, row_tag, sequence_tags
from statemachine.transitions import apply

from .pseudonyms import Pseudonyms, without_folders
from .redacted_state import end_of, entry_tags, key_of_block, last_row, redacted_state, row_at

Check = Callable[[State, int], None]


class NotRedactable(Exception):
    """What this version cannot redact; one sentence."""


def _trust(state: State, step: int) -> None:
    """The states of a run of our own."""


class _Piece(Struct, frozen=True):
    """A piece of a batch: its sequence, and the position behind its last row that is no pad."""

    seq: int
    end: int


class _Asked(Struct, frozen=True):
    """A live request: rows of its prompt, and its end tokens."""

    prompt_rows: int
    ends: frozenset[int]


class Redactor:
    """See the module. stopped: why no record can follow; "" while one can."""

    def __init__(self, names: Pseudonyms, check: Check = _trust) -> None:
        """check: raises what it likes about a checkpoint's state that nothing leads to."""
        self.stopped = ""
        self._names = names
        self._check = check
        self._state: State | None = None
        self._new: State | None = None
        self._fresh = True
        self._lost = False
        self._asked: dict[int, _Asked] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._found = False

    def feed(self, record: Record) -> Record:
        """The next record, redacted. Raises NotRedactable for what this version cannot redact."""
        handler = _RECORDS.get(type(record))
        if handler is None:
            raise NotRedactable(
                f"this version does not know how a {type(record).__name__} is redacted"
            )
        redacted: Record = handler(self, record)
        return redacted

    @property
    def _states(self) -> tuple[State, State]:
        if self._state is None or self._new is None:
            raise NotRedactable("the tape does not begin with a header and a state")
        return self._state, self._new

    def _header(self, record: Header) -> Header:
        if record.redacted:
            raise NotRedactable("the tape is redacted already")
        if record.draft is not None:
            raise NotRedactable(
                "the tape has a draft model's pool, whose guesses this version cannot redact: "
                "give away a tape of a server without --draft-model"
            )
        if self._state is None:
            try:
                self._state = self._new = new_state(record.geometry)
            except ValueError as error:
                raise NotRedactable(f"the tape's header makes no sense: {error}") from error
        return structs.replace(
            record,
            redacted=True,
            model=without_folders(record.model),
            device=without_folders(record.device),
            blas=without_folders(record.blas),
            adapters=tuple(
                rec.AdapterUsed(self._names.text("adapter", it.name), it.digest)
                for it in record.adapters
            ),
        )

    def _checkpoint(self, record: Checkpoint) -> Checkpoint:
        try:
            state = decode_state(record.state)
        except CodecError as error:
            raise NotRedactable(f"the checkpoint after step {record.step}: {error}") from error
        begin = self._fresh or self._lost
        if begin:
            self._check(state, record.step)
            self._asked = {it.arrived.request: _asked(it.arrived) for it in record.requests}
        new = self._states[1]
        if begin or state.digest != self._states[0].digest:
            new = redacted_state(state, self._names, self._is_end)
        if begin:
            self._state, self._new = state, new
            self._pieces.clear()
        self._fresh = self._lost = False
        return structs.replace(
            record,
            state=encode_state(new),
            requests=tuple(self._snapshot(it) for it in record.requests),
            digest=_as_wrong(new.digest, record.digest, state.digest),
        )

    def _snapshot(self, known: rec.RequestSnapshot) -> rec.RequestSnapshot:
        arrived = self._renamed(known.arrived)
        root = self._names.root(known.arrived.namespace)
        before = arrived.tokens[-1] if arrived.tokens else root
        output = self._names.rows(root, before, known.output)
        return structs.replace(known, arrived=arrived, output=output)

    def _gap(self, record: rec.Gap) -> rec.Gap:
        self._lost = True
        return record

    def _arrived(self, record: RequestArrived) -> RequestArrived:
        self._asked[record.request] = _asked(record)
        return self._renamed(record)

    def _renamed(self, record: RequestArrived) -> RequestArrived:
        root = self._names.root(record.namespace)
        return structs.replace(
            record,
            external_id=self._names.text("id", record.external_id),
            tokens=self._names.rows(root, root, record.tokens),
            parameters=self._parameters(record.parameters, root),
            namespace=self._names.namespace(record.namespace),
        )

    def _parameters(self, asked: Parameters, root: int) -> Parameters:
        names = self._names
        return structs.replace(
            asked,
            end_tokens=tuple(names.end(root, token) for token in asked.end_tokens),
            stop=tuple(names.text("stop", text) for text in asked.stop),
            logit_bias=tuple((names.number("bias", it), by) for it, by in asked.logit_bias),
            grammar=names.text("grammar", asked.grammar),
        )

    def _cancelled(self, record: rec.RequestCancelled) -> rec.RequestCancelled:
        if record.request not in self._states[0].sequences:
            self._asked.pop(record.request, None)
        return structs.replace(record, reason=self._names.reason(record.reason))

    def _reasoned(self, record: rec.Finished | rec.FlushRequested) -> Record:
        return structs.replace(record, reason=self._names.reason(record.reason))

    def _unchanged(self, record: Record) -> Record:
        return record

    def _planned(self, record: rec.StepPlanned) -> rec.StepPlanned:
        self._fresh = False
        pieces: list[_Piece] = []
        self._pieces[record.step] = pieces
        events = self._events(record.events, pieces)
        return structs.replace(record, events=events, digest=self._digest(record.digest))

    def _failed(self, record: rec.StepFailed) -> rec.StepFailed:
        self._pieces.pop(record.step, None)
        error = self._names.text("error", record.error)
        events = self._events(record.events)
        digest = self._digest(record.digest)
        return structs.replace(record, error=error, events=events, digest=digest)

    def _done(self, record: rec.StepDone) -> rec.StepDone:
        pieces = self._pieces.pop(record.step, [])
        tokens = self._samples(record, pieces)
        shadow = self._shadow(record.shadow)
        events = self._events(record.events)
        return structs.replace(
            record,
            shadow=shadow,
            tokens=tokens,
            logits=(0.0,) * len(record.logits),
            margins=(0.0,) * len(record.margins),
            scores=(0.0,) * len(record.scores),
            events=events,
            digest=self._digest(record.digest),
        )

    def _digest(self, recorded: int) -> int:
        state, new = self._states
        return _as_wrong(new.digest, recorded, state.digest)

    def _samples(self, record: rec.StepDone, pieces: list[_Piece]) -> tuple[int, ...]:
        """Sampled tokens: a piece's samples belong to its last rows."""
        left = {piece: record.sampled.count(piece) for piece in set(record.sampled)}
        found = []
        for place, token in enumerate(record.tokens):
            piece = record.sampled[place] if place < len(record.sampled) else -1
            row = None
            if 0 <= piece < len(pieces):
                row = pieces[piece].end - left[piece]
                left[piece] -= 1
            found.append(self._sample(pieces[piece].seq, row, token) if row is not None else
                         self._names.number("sample", token))  # fmt: skip
        return tuple(found)

    def _sample(self, seq: int, row: int, token: int) -> int:
        """What follows a row; nobody knows the row of a sequence that ended meanwhile."""
        state, new = self._states
        before = None if seq not in new.sequences else row_at(new.sequences[seq], row)
        if before is None:
            return self._names.number("sample", seq, row, token)
        root = self._names.root(state.sequences[seq].namespace)
        return self._names.row(root, before, token, self._is_end(seq, row + 1, token))

    def _is_end(self, seq: int, position: int, token: int) -> bool:
        asked = self._asked.get(seq)
        return asked is not None and position >= asked.prompt_rows and token in asked.ends

    def _shadow(self, shadow: rec.ShadowReport) -> rec.ShadowReport:
        if not shadow.findings:
            return shadow
        findings = tuple(
            structs.replace(it, expected=self._tag(it.expected), found=self._tag(it.found))
            for it in shadow.findings
        )
        self._found = True
        return structs.replace(shadow, findings=findings)

    def _tag(self, tag: int) -> int:
        """A row's tag: that of the same row, where somebody has it. Looked for once, for nothing
        behind the first divergence is looked at.
        """
        if tag in (UNWRITTEN, PAD):
            return tag
        state, new = self._states
        if self._found:
            return self._names.number("tag", tag)
        for seq in sorted(state.sequences):
            ours = sequence_tags(state.geometry, state.sequences[seq], 0, end_of(state, seq))
            if tag in ours:
                at = ours.index(tag)
                return sequence_tags(new.geometry, new.sequences[seq], at, at + 1)[0]
        for number in sorted(state.entries):
            ours, theirs = (entry_tags(it, number) for it in (state, new))
            if tag in ours:
                return theirs[ours.index(tag)]
        return self._names.number("tag", tag)

    def _events(
        self, events: tuple[Event, ...], pieces: list[_Piece] | None = None
    ) -> tuple[Event, ...]:
        """Events, each redacted where both states stand before it, and applied to both."""
        redacted = []
        for event in events:
            handler = _EVENTS.get(type(event))
            if handler is None:
                name = type(event).__name__
                raise NotRedactable(f"this version does not know how a {name} is redacted")
            renamed: Event = handler(self, event)
            redacted.append(renamed)
            if self.stopped:
                continue
            try:
                state, new = apply(self._states[0], event), apply(self._states[1], renamed)
            except InvariantBroken as error:
                self.stopped = f"{type(event).__name__} cannot be applied: {error}"
                continue
            self._state, self._new = state, new
            if pieces is not None:
                self._extend(pieces, event)
            if isinstance(event, ev.Closed):
                self._asked.pop(event.seq, None)
        return tuple(redacted)

    def _extend(self, pieces: list[_Piece], event: Event) -> None:
        """The batch of a step, by its appends."""
        if isinstance(event, ev.AppendedEach):
            pieces += [_Piece(seq, end_of(self._states[0], seq)) for seq in event.seqs]
        elif isinstance(event, ev.Appended) and event.purpose != ev.PAD:
            if pieces and pieces[-1].seq == event.seq:
                pieces.pop()
            pieces.append(_Piece(event.seq, end_of(self._states[0], event.seq)))

    def _opened(self, event: ev.Opened) -> ev.Opened:
        return structs.replace(event, namespace=self._names.namespace(event.namespace))

    def _with_tokens(self, event: ev.PrefixAdopted | ev.Appended) -> Event:
        """Rows behind all that the sequence has."""
        if event.tokens is None:
            return event
        return structs.replace(event, tokens=self._following(event.seq, event.tokens, False))

    def _committed(self, event: ev.Committed) -> ev.Committed:
        return structs.replace(event, tokens=self._following(event.seq, event.tokens, True))

    def _each(self, event: ev.AppendedEach | ev.CommittedEach) -> Event:
        if event.tokens is None:
            return event
        committed = isinstance(event, ev.CommittedEach)
        tokens = [
            self._following(event.seqs[at] if at < len(event.seqs) else -1, (token,), committed)[0]
            for at, token in enumerate(event.tokens)
        ]
        return structs.replace(event, tokens=tuple(tokens))

    def _following(self, seq: int, tokens: tuple[int, ...], committed: bool) -> tuple[int, ...]:
        """Rows behind those that a sequence has, or has committed."""
        state, new = self._states
        if seq not in new.sequences or seq not in state.sequences:
            return tuple(self._names.number("nobody", it) for it in tokens)
        sequence: Sequence = new.sequences[seq]
        end = sequence.committed + (0 if committed else len(sequence.speculative))
        root = self._names.root(state.sequences[seq].namespace)
        before = root if not end else row_at(sequence, end - 1)
        found = []
        for position, token in enumerate(tokens, start=end):
            is_end = self._is_end(seq, position, token)
            before = self._names.row(root, root if before is None else before, token, is_end)
            found.append(before)
        return tuple(found)

    def _published(self, event: ev.BlockPublished) -> ev.BlockPublished:
        ours, theirs = (
            it.sequences[event.seq].keys if event.seq in it.sequences else () for it in self._states
        )
        known = 0 <= event.index < len(ours) and ours[event.index] == event.key
        return structs.replace(
            event, key=theirs[event.index] if known else self._names.number("key", event.key)
        )

    def _loaded(self, event: ev.BlockLoaded) -> ev.BlockLoaded:
        """Rows behind those of the entry before, as in the prompt that they were loaded for."""
        state, new = self._states
        if event.seq not in state.sequences:
            return structs.replace(
                event,
                tokens=tuple(self._names.number("nobody", it) for it in event.tokens),
                key=self._names.number("key", event.key),
            )
        root = self._names.root(state.sequences[event.seq].namespace)
        ours, parent = state.entries.get(event.parent), new.entries.get(event.parent)
        before = root if parent is None else last_row(parent.tokens)
        tokens = self._names.rows(root, before, event.tokens)
        above, above_new = (
            it.sequences[event.seq].root if entry is None else entry.key
            for it, entry in ((state, ours), (new, parent))
        )
        right = event.key == row_tag(state.geometry, above, pack(event.tokens))
        key = row_tag(new.geometry, above_new, pack(tokens))
        return structs.replace(
            event, tokens=tokens, key=key if right else self._names.number("key", event.key)
        )

    def _keyed(self, event: ev.BlockEvicted | ev.BlockStored) -> Event:
        ours, theirs = (key_of_block(it, event.group, event.block) for it in self._states)
        key = theirs if ours == event.key else self._names.number("key", event.key)
        return structs.replace(event, key=key)

    def _closed(self, event: ev.Closed) -> ev.Closed:
        return structs.replace(event, reason=self._names.reason(event.reason))


def _asked(record: RequestArrived) -> _Asked:
    return _Asked(len(record.tokens), frozenset(record.parameters.end_tokens))


def _as_wrong(new: int, recorded: int, derived: int) -> int:
    """A digest that differs from the new one as the recorded one does from what it should be."""
    return new ^ recorded ^ derived


_Handler = Callable[[Redactor, Any], Any]

_RECORDS: dict[type, _Handler] = {
    Header: Redactor._header,
    Checkpoint: Redactor._checkpoint,
    rec.Gap: Redactor._gap,
    RequestArrived: Redactor._arrived,
    rec.RequestCancelled: Redactor._cancelled,
    rec.Finished: Redactor._reasoned,
    rec.FlushRequested: Redactor._reasoned,
    rec.BlocksOffered: Redactor._unchanged,
    rec.StepPlanned: Redactor._planned,
    rec.StepDone: Redactor._done,
    rec.StepFailed: Redactor._failed,
    rec.StepTimed: Redactor._unchanged,
    rec.TapeEnded: Redactor._unchanged,
}
_EVENTS: dict[type, _Handler] = {
    ev.Opened: Redactor._opened,
    ev.PrefixAdopted: Redactor._with_tokens,
    ev.Appended: Redactor._with_tokens,
    ev.AppendedEach: Redactor._each,
    ev.Committed: Redactor._committed,
    ev.CommittedEach: Redactor._each,
    ev.BlockPublished: Redactor._published,
    ev.BlockEvicted: Redactor._keyed,
    ev.BlockStored: Redactor._keyed,
    ev.BlockLoaded: Redactor._loaded,
    ev.Closed: Redactor._closed,
    **dict.fromkeys(
        (
            ev.StepWritten, ev.Trimmed, ev.Rewound, ev.FrontTrimmed, ev.BlockCopied, ev.Forked,
            ev.Reset, ev.Preempted, ev.PoolReset,
        ),
        Redactor._unchanged,
    ),
}  # fmt: skip
