"""Requests: what arrived and what was sampled, against what a step issues and closes.

The plan depth runs the scheduler of this version: a bug that it has too would be repeated and agree
with itself. What is held here follows from the tape's inputs and samples alone: the rows of a
sequence are its request's tokens, in its request's namespace; a piece samples where its text ends;
a request ends where its end token, its length or a Finished input says, and only there.
"""

from __future__ import annotations

from typing import NoReturn

from server.policy import Policy
from server.view import PlannedPiece, StepPlan
from statemachine.events import DECODE, DRAFT, LOOKAHEAD, PROMPT, Closed
from statemachine.geometry import FULL, Geometry
from statemachine.records import Gap, Record, StepDone
from statemachine.sequence import Sequence, pack, unpack

from .answers import Answer, Answers
from .divergence import PLAN, Diverged, Divergence, Values
from .observed import Pieces

TOKEN_BYTES = 8
_ONE_ROW = (DECODE, LOOKAHEAD)


class Requests:
    """Follows a tape beside the scheduler, without asking it."""

    def __init__(self, geometry: Geometry, policy: Policy) -> None:
        self._size = geometry.block_size
        rows = [it.num_blocks * self._size for it in geometry.groups if it.kind == FULL]
        self._answers = Answers(min([policy.context_tokens, *rows]))

    def begin(self, record: Record) -> None:
        """Call before a record is followed."""
        if isinstance(record, Gap):
            self._answers.live.clear()
        self._answers.begin(record)

    def planned(self, plan: StepPlan) -> None:
        """Compare a step's rows with its requests. Raises Diverged."""
        live, sequences = self._answers.live, plan.state.sequences
        for piece in plan.pieces:
            seq = piece.seq
            answer = live.get(seq)
            if answer is None:
                self._differs(plan.step, seq, "gets rows, and has no live request")
            sequence: Sequence = sequences[seq]
            arrived, known = answer.arrived, answer.samples
            if sequence.namespace != arrived.namespace:
                self._other_namespace(plan.step, sequence, answer)
            if (
                known
                and piece.samples == 1
                and piece.purpose in _ONE_ROW
                and sequence.committed == len(arrived.tokens) + len(answer.before) + len(known)
                and _newest(sequence) == known[-1].token
            ):
                continue  # the row of an answer's newest token, sampled, as nearly every one is
            self._compare_tokens(plan.step, piece, sequence, answer)
            self._compare_samples(plan.step, piece, sequence, answer)

    def _other_namespace(self, step: int, sequence: Sequence, answer: Answer) -> NoReturn:
        what = "is in another namespace than its request"
        values = Values("namespace", str(sequence.namespace), str(answer.arrived.namespace))
        self._differs(step, sequence.id, what, values)

    def _compare_tokens(
        self, step: int, piece: PlannedPiece, sequence: Sequence, answer: Answer
    ) -> None:
        """Prompt rows with all before them; of an answer the newest row."""
        end = sequence.committed
        first = 0 if piece.purpose == PROMPT else end - 1
        index, row = divmod(first, self._size)
        held = (b"".join(sequence.packed[index:]) + sequence.tail)[row * TOKEN_BYTES :]
        wanted = answer.slice(first, end)
        if piece.purpose == DRAFT:
            held += pack((sequence.speculative[0].token,))
            wanted += answer.slice(end, end + 1)
        if held == pack(wanted):
            return
        tokens = unpack(held)
        pairs = enumerate(zip(tokens, wanted, strict=False))
        at = next((place for place, (has, due) in pairs if has != due), 0)
        what = "does not hold its request's token"
        values = (Values("tokens", tokens[at : at + 8], wanted[at : at + 8]),)
        self._differs(step, piece.seq, what, *values, position=first + at)

    def _compare_samples(
        self, step: int, piece: PlannedPiece, sequence: Sequence, answer: Answer
    ) -> None:
        """A piece is sampled where its rows reach the end of what is known, and then once, or once
        for each row that verifies drafts.
        """
        due = piece.rows if piece.purpose == DRAFT else int(sequence.committed == answer.length)
        if piece.samples != due:
            values = (Values("samples", piece.samples, due),)
            self._differs(step, piece.seq, "is not sampled where its text ends", *values)

    def done(self, record: StepDone, plan: StepPlan) -> None:
        """Compare who is closed with who came to an end. Raises Diverged."""
        live = self._answers.live
        seqs = [piece.seq for piece in plan.pieces]
        sequences, drafts = plan.state.sequences, plan.policy.draft_tokens
        guessed = [sequences[seq] for seq in seqs] if drafts else []
        over = self._answers.done(record, Pieces(seqs, [], guessed, {}, ()))
        closed = [event.seq for event in record.events if type(event) is Closed]
        if not over and not closed:
            return
        sampled = {seqs[piece] for piece in record.sampled} & live.keys()
        wrong = sampled & (set(over) ^ set(closed))
        for seq in seqs:
            if seq in wrong:
                what = "goes on, and came to its end"
                if seq in closed:
                    what = "is closed, and did not come to its end"
                self._differs(record.step, seq, what, record="StepDone")

    def ended(self, record: Record) -> None:
        """Call once a record was followed."""
        self._answers.ended(record)

    def _differs(
        self,
        step: int,
        seq: int,
        what: str,
        *values: Values,
        position: int = -1,
        record: str = "StepPlanned",
    ) -> NoReturn:
        where = f"position {position} of " if position >= 0 else ""
        summary = f"{where}sequence {seq} {what}"
        raise Diverged(Divergence(PLAN, step, summary, record, sequence=seq, values=values))


def _newest(sequence: Sequence) -> int:
    """The token of a sequence's last committed row; it has one."""
    block = sequence.tail or sequence.packed[-1]
    return int.from_bytes(block[-TOKEN_BYTES:], "little")
