"""The state machine against the naive model, driven by Hypothesis, and raw events at random."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from statemachine import commands
from statemachine import events as ev
from statemachine.digest import recompute
from statemachine.errors import InvariantBroken
from statemachine.events import Event, Namespace
from statemachine.geometry import Geometry, Group
from statemachine.tags import sequence_tags
from statemachine.transitions import apply, apply_all

from .model import Driver, ModelSequence, plain

FULL, WINDOW, OPAQUE, RECURRENT = "full", "window", "opaque", "recurrent"
LAYOUTS = (
    (Group(FULL, 6),),
    (Group(FULL, 7), Group(WINDOW, 5, window=4)),
    (Group(WINDOW, 6, window=3, sink=2),),
    (Group(WINDOW, 5, window=1),),
    (Group(WINDOW, 7, window=6, sink=7), Group(FULL, 5)),
    (Group(FULL, 4), Group(FULL, 9)),
    (Group(FULL, 6), Group(OPAQUE)),
    (Group(OPAQUE),),
    (Group(RECURRENT, 4),),
    (Group(FULL, 9), Group(RECURRENT, 6)),
    (Group(WINDOW, 6, window=3), Group(RECURRENT, 5)),
)
NAMESPACES = (Namespace(), Namespace("A"), Namespace("A", salt="x"))
STORY = (0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1)
PROMPT = st.one_of(
    st.integers(1, len(STORY)).map(lambda rows: STORY[:rows]),
    st.integers(1, len(STORY)).map(lambda rows: STORY[:rows]),
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple),
)
PURPOSE = st.sampled_from(ev.PURPOSES)
SMALL = st.integers(-1, 9)


def events_at_random(live: list[int], next_step: int, last: tuple[Event, ...]) -> Any:
    """Events of every type, with fields near to what could hold, and some far from it."""
    number = st.one_of(SMALL, st.sampled_from((-(2**63), 2**40, 2**63, 2**64, 2**80)))
    few = st.one_of(*[SMALL] * 7, number)
    seq = st.sampled_from([*live, *live, 0, 99, -1, 2**64]) if live else number
    step = st.sampled_from([next_step - 1, next_step, next_step, next_step + 1, 0, -1, 2**64])
    tokens = st.lists(st.one_of(st.integers(0, 1), st.integers(0, 1), few), max_size=9).map(tuple)
    table = st.lists(st.integers(-1, 6), max_size=4).map(tuple)
    tables = st.lists(table, min_size=1, max_size=2).map(tuple)
    maybe = st.one_of(st.none(), tokens)
    purpose = st.one_of(PURPOSE, PURPOSE, st.just("other"))
    name = st.builds(Namespace, st.sampled_from(("", "A", "\ud800")), few)
    made = [
        st.builds(ev.Opened, st.one_of(few, st.integers(10, 90)), name),
        st.builds(ev.PrefixAdopted, seq, tokens, few, tables),
        st.builds(ev.Appended, seq, step, few, maybe, tables, purpose),
        st.builds(ev.AppendedEach, step, st.lists(seq, max_size=3).map(tuple), maybe, purpose),
        st.builds(ev.StepWritten, step),
        st.builds(ev.Committed, seq, tokens),
        st.builds(ev.CommittedEach, st.lists(seq, max_size=3).map(tuple), tokens),
        st.builds(ev.Trimmed, seq, few),
        st.builds(ev.Rewound, seq, few),
        st.builds(ev.FrontTrimmed, seq, few, few),
        st.builds(ev.BlockCopied, seq, step, few, few, few, few, few),
        st.builds(ev.Forked, seq, st.one_of(few, st.integers(10, 90))),
        st.builds(ev.BlockPublished, seq, few, few, few, few),
        st.builds(ev.BlockEvicted, few, few, few),
        st.builds(ev.BlockStored, few, few, few),
        st.builds(ev.BlockLoaded, seq, step, few, few, few, tokens, few),
        st.builds(ev.Reset, seq),
        st.builds(ev.Preempted, seq),
        st.builds(ev.Closed, seq),
    ]
    if last:
        made += [_altered(event, few) for event in last] * 2
    return st.one_of(*made)


def _altered(event: Event, number: Any) -> Any:
    """An event that was emitted once, with one of its numbers changed (or none of them)."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    choices = [st.just(event)]
    for name, value in fields.items():
        if isinstance(value, int):
            choices.append(number.map(lambda new, name=name: type(event)(**{**fields, name: new})))
    return st.one_of(*choices)


class CacheMachine(Driver, RuleBasedStateMachine):
    """Commands at random; after each event model, invariants and digest are compared."""

    @initialize(
        block_size=st.integers(1, 5),
        groups=st.sampled_from(LAYOUTS),
        hashing=st.sampled_from(("xxh3", "xxh3", "constant")),
    )
    def begin(self, block_size: int, groups: tuple[Group, ...], hashing: str) -> None:
        self.start_from(Geometry(block_size, groups, "m", hashing))
        self.hits: list[tuple[tuple[int, ...], commands.Hit]] = []

    def pick(self, data: Any) -> int:
        return int(data.draw(st.sampled_from([*self.seqs() * 8, 77])))

    @precondition(lambda self: len(self.seqs()) < 5)
    @rule(
        namespace=st.sampled_from((Namespace(), *NAMESPACES)),
        prompt=PROMPT,
        then=st.sampled_from(("", "", "written", "published", "published", "closed")),
    )
    def start(self, namespace: Namespace, prompt: tuple[int, ...], then: str) -> None:
        """Open, adopt and prefill, as a scheduler does; then go on as drawn."""
        seq = self.state.last_seq + 1
        opened = self.carry_out(commands.open_sequence, seq, namespace)
        assert opened == (ev.Opened(seq, namespace),)
        rows = self.adopt_checked(seq, prompt, None)
        left = prompt[rows or 0 :]
        self.carry_out(commands.append, seq, self.step, left, purpose="prompt")
        if then:
            self.carry_out(commands.step_written, self.state.issued_step)
        if then in ("published", "closed"):
            self.carry_out(commands.publish, seq)
        if then == "closed":
            self.carry_out(commands.close, seq)

    @precondition(lambda self: self.seqs())
    @rule(data=st.data(), rows=st.sampled_from((1, 1, 2, 3, 4, 0, -1)), purpose=PURPOSE)
    def append(self, data: Any, rows: int, purpose: str) -> None:
        seq = self.pick(data)
        bare = purpose in ("lookahead", "pad")
        tokens = None if bare else tuple(data.draw(st.integers(0, 1)) for _ in range(rows))
        needed = None
        if seq in self.model.sequences and rows > 0:
            needed = commands.blocks_needed(self.state, seq, rows)
        room = [self.room(group) for group in range(len(self.state.groups))]
        events = self.carry_out(
            commands.append, seq, self.step, tokens, rows if bare else None, purpose
        )
        if events is None:
            return
        assert needed is not None
        taken = [0] * len(needed)
        for event in events:
            if isinstance(event, ev.BlockCopied):
                taken[event.group] += 1
            elif isinstance(event, ev.Appended):
                taken = [a + len(b) for a, b in zip(taken, event.blocks, strict=True)]
        assert tuple(taken) == needed
        assert all(want <= have for want, have in zip(needed, room, strict=True))

    def room(self, group: int) -> int:
        return self.state.free_blocks(group) + self.state.cached_blocks(group)

    @precondition(lambda self: self.seqs())
    @rule(data=st.data(), purpose=st.sampled_from(("decode", "decode", "lookahead", "draft")))
    def append_each(self, data: Any, purpose: str) -> None:
        seqs = data.draw(st.permutations(self.seqs()))[: data.draw(st.integers(1, 5))]
        seqs += data.draw(st.sampled_from(([], [], [], [], [77], seqs[:1])))
        tokens = None if purpose == "lookahead" else tuple(place % 2 for place in range(len(seqs)))
        before = self.state
        events = self.carry_out(commands.append_each, self.step, seqs, tokens, purpose)
        if events is None:
            return
        assert len(set(seqs)) == len(seqs)
        singles = list(events)
        if isinstance(events[0], ev.AppendedEach):
            none = ((),) * len(self.state.groups)
            singles[:1] = [
                ev.Appended(seq, self.step, 1, tokens and (tokens[seqs.index(seq)],), none, purpose)
                for seq in events[0].seqs
            ]
        assert plain(apply_all(before, singles)) == plain(self.state)

    @precondition(lambda self: any(s.speculative for s in self.model.sequences.values()))
    @rule(data=st.data(), wrong=st.integers(0, 9))
    def commit_each(self, data: Any, wrong: int) -> None:
        """The first speculative row of several sequences, as single commits would."""
        ready = [seq for seq in self.seqs() if self.model.sequences[seq].speculative]
        seqs = data.draw(st.permutations(ready))[: data.draw(st.integers(1, 5))]
        seqs += data.draw(st.sampled_from(([], [], [], [], [77], seqs[:1])))
        rows = [self.model.sequences[seq].speculative[0] if seq != 77 else 0 for seq in seqs]
        tokens = tuple(place % 2 if row is None else row for place, row in enumerate(rows))
        if not wrong:
            tokens = (1 - tokens[0], *tokens[1:])
        legal = 77 not in seqs and len(set(seqs)) == len(seqs) and rows[0] in (None, tokens[0])
        before = self.state
        events = self.carry_out(commands.commit_each, seqs, tokens)
        assert (events is not None) == legal
        if legal:
            singles = [ev.Committed(seq, (t,)) for seq, t in zip(seqs, tokens, strict=True)]
            assert plain(apply_all(before, singles)) == plain(self.state)

    @rule(back=st.sampled_from((0, 0, 1, 2)))
    def step_written(self, back: int) -> None:
        """In order, with up to three steps in flight."""
        self.carry_out(commands.step_written, self.state.issued_step - back)

    @precondition(lambda self: self.step - self.state.written_step < 3)
    @rule()
    def next_step(self) -> None:
        self.step = max(self.step, self.state.issued_step + 1)

    @precondition(lambda self: any(s.speculative for s in self.model.sequences.values()))
    @rule(
        data=st.data(), kept=st.integers(0, 4), rewound=st.integers(-1, 4), wrong=st.integers(0, 9)
    )
    def settle(self, data: Any, kept: int, rewound: int, wrong: int) -> None:
        """Commit some speculative rows and rewind some others."""
        speculative = [seq for seq in self.seqs() if self.model.sequences[seq].speculative]
        seq = data.draw(st.sampled_from(speculative))
        mine = self.model.sequences[seq]
        rows = list(mine.speculative)
        tokens = tuple(token or 0 for token in [*rows, 1][:kept])
        if not wrong and tokens:
            tokens = (1 - tokens[0], *tokens[1:])
        legal = 1 <= len(tokens) <= len(rows)
        legal = legal and all(a in (None, b) for a, b in zip(rows, tokens, strict=False))
        assert (self.carry_out(commands.commit, seq, tokens) is not None) == legal
        legal = 1 <= rewound <= len(mine.speculative) and not mine.pads
        for group in self.model.recurrent():
            legal = legal and self.state_is_kept(mine, group, mine.offset - rewound)
        assert (self.carry_out(commands.rewind, seq, rewound) is not None) == legal

    @precondition(lambda self: self.seqs())
    @rule(data=st.data(), rows=st.sampled_from((1, 1, 2, 3, 4, 5, 6, 9, 0, -1)))
    def trim(self, data: Any, rows: int) -> None:
        seq = self.pick(data)
        mine = self.model.sequences.get(seq)
        legal = mine is not None and 1 <= rows <= mine.offset
        for group, spec in enumerate(self.state.geometry.groups):
            reach = self.model.reach(group)
            if legal and mine is not None and reach:
                needed = max(0, mine.offset - rows - reach + 1)
                legal = mine.starts[group] <= needed
            if legal and mine is not None and spec.kind == RECURRENT:
                legal = self.state_is_kept(mine, group, mine.offset - rows)
        assert (self.carry_out(commands.trim, seq, rows) is not None) == legal

    def state_is_kept(self, mine: ModelSequence, group: int, rows: int) -> bool:
        """A slot is at a held block's edge, or was not written since the newest step."""
        sure = max(self.state.written_step, self.state.issued_step - 1)
        size = self.state.geometry.block_size
        if self.model.refs(group)[mine.tables[group][-1]] > 1:
            sure = -1
        edge = rows % size == 0 and (not rows or mine.tables[group][rows // size - 1] != -1)
        return edge or rows == mine.written(sure)

    @precondition(
        lambda self: (
            self.seqs() and any(g.kind in (WINDOW, RECURRENT) for g in self.state.geometry.groups)
        )
    )
    @rule(data=st.data(), group=st.sampled_from((None, None, 0, 1, -1, 2)), rows=st.integers(0, 4))
    def front_trim(self, data: Any, group: int | None, rows: int) -> None:
        seq = self.pick(data)
        if group is not None:
            self.carry_out(commands.front_trim, seq, group, rows)
        elif self.carry_out(commands.front_trims, seq) is not None:
            assert commands.front_trims(self.state, seq) == ()

    @precondition(lambda self: 0 < len(self.seqs()) < 5)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        self.carry_out(commands.fork, self.pick(data), self.state.last_seq + 1)

    @precondition(lambda self: self.seqs())
    @rule(data=st.data())
    def publish(self, data: Any) -> None:
        seq = self.pick(data)
        if self.carry_out(commands.publish, seq) is not None:
            assert commands.publish(self.state, seq) == ()

    @precondition(lambda self: self.model.published)
    @rule(blocks=st.integers(0, 3), group=st.sampled_from((None, None, 0, 1, -1, 2)))
    def evict(self, blocks: int, group: int | None) -> None:
        cached = {number: len(self.model.cached(number)) for number in self.model.groups()}
        events = self.carry_out(commands.evict, blocks, group)
        assert (events is not None) == (blocks > 0 and group in (None, *cached))
        for number, have in cached.items():
            gone = have - len(self.model.cached(number))
            wanted = blocks if events is not None and group in (None, number) else 0
            assert gone == min(wanted, have)

    @precondition(lambda self: self.seqs())
    @rule(data=st.data(), prompt=PROMPT, first=st.sampled_from((0, 0, 0, 1, -1)))
    def load(self, data: Any, prompt: tuple[int, ...], first: int) -> None:
        """What is loaded can be found at once, by this namespace and no other."""
        seq = self.pick(data)
        size, end = self.state.geometry.block_size, len(prompt) // self.state.geometry.block_size
        full = all(group.kind == FULL for group in self.state.geometry.groups)
        known = self.model.sequences.get(seq)
        before = 0 if known is None else self.found(known.namespace, prompt)
        events = self.carry_out(commands.load, seq, self.step, prompt, first, end)
        assert (events is not None) == (known is not None and full and 0 <= first < end)
        if events is None or known is None:
            return
        kinds = {type(event) for event in events}
        assert kinds <= {ev.BlockLoaded, ev.BlockEvicted}
        after = self.found(known.namespace, prompt)
        assert after >= before, "a load evicted rows of its own prompt"
        if before < first * size:
            assert events == ()
        elif ev.BlockLoaded in kinds:
            assert after > before
        else:
            assert after == before

    def found(self, namespace: Namespace, prompt: tuple[int, ...]) -> int:
        return self.model.findable_rows(namespace, prompt, len(prompt))

    @precondition(lambda self: self.model.published)
    @rule(data=st.data())
    def store(self, data: Any) -> None:
        """Reading a published block changes nothing; no other can be stored."""
        group, block = data.draw(st.sampled_from([*sorted(self.model.published), (0, 99)]))
        before = plain(self.state)
        done = self.carry_out(commands.store, group, block)
        assert (done is not None) == (block != 99)
        assert plain(self.state) == before

    @precondition(lambda self: self.seqs())
    @rule(data=st.data(), command=st.sampled_from(("reset", "preempt", "close", "close", "close")))
    def empty(self, data: Any, command: str) -> None:
        seq = self.pick(data)
        known = seq in self.model.sequences
        assert (self.carry_out(getattr(commands, command), seq) is not None) == known

    @rule(what=st.sampled_from(("", "", "", "", "", "", "", "", "flush", "wind up", "pool reset")))
    def rarely(self, what: str) -> None:
        if what == "pool reset":
            self.carry_out(commands.pool_reset)
            assert not self.state.entries
            assert not self.state.pins
        elif what == "flush":
            self.carry_out(commands.flush)
            assert not any(self.state.cached_blocks(g) for g in range(len(self.state.groups)))
        elif what == "wind up":
            self.wind_up()

    @precondition(lambda self: self.seqs())
    @rule(namespace=st.sampled_from(NAMESPACES), prompt=PROMPT, data=st.data(), now=st.booleans())
    def look_up(self, namespace: Namespace, prompt: tuple[int, ...], data: Any, now: bool) -> None:
        """A look-up agrees with the model; an old one adopts no more than what is there now."""
        hit = commands.lookup(self.state, namespace, prompt)
        assert hit.rows == self.model.findable_rows(namespace, prompt, len(prompt))
        self.hits.append((prompt, hit))
        if not now:
            prompt, hit = data.draw(st.sampled_from(self.hits))
        self.adopt_checked(self.pick(data), prompt, hit)

    def adopt_checked(
        self, seq: int, prompt: tuple[int, ...], hit: commands.Hit | None
    ) -> int | None:
        mine = self.model.sequences.get(seq)
        empty = mine is not None and not mine.offset
        legal = mine is not None and empty and hit in (None, hit)
        if mine is not None and hit is not None:
            legal = legal and hit.namespace == mine.namespace
        limit = len(prompt) - 1 if hit is None else min(hit.rows, len(prompt) - 1)
        rows = 0 if mine is None else self.model.findable_rows(mine.namespace, prompt, limit)
        done = self.carry_out(commands.adopt, seq, prompt, hit)
        assert (done is not None) == legal
        if done is None:
            return None
        assert len(done) == (rows > 0)
        assert self.state.sequences[seq].adopted == rows
        return rows

    @rule(data=st.data())
    def raw_event(self, data: Any) -> None:
        """A raw event is refused as InvariantBroken, or keeps all that is checked."""
        event = data.draw(events_at_random(self.seqs(), self.step, self.last))
        before, frozen = self.state, plain(self.state)
        try:
            after = apply(before, event)
        except InvariantBroken:
            assert plain(before) == frozen, "a refused event changed the state"
            return
        assert plain(before) == frozen
        assert after.digest == recompute(after)
        if getattr(event, "seq", 0) < 2**40 and getattr(event, "rows", 0) < 100:
            self.take(event)
            self.last = (event,)

    @rule(data=st.data())
    def tags(self, data: Any) -> None:
        """Tags of any rows are those of the whole sequence, cut."""
        seq = self.pick(data)
        if seq not in self.model.sequences:
            return
        sequence = self.state.sequences[seq]
        everything = sequence_tags(self.state.geometry, sequence, 0, sequence.offset)
        assert len(everything) == sequence.offset
        first = data.draw(st.integers(0, sequence.offset))
        part = sequence_tags(self.state.geometry, sequence, first, sequence.offset)
        assert part == everything[first:]


CacheMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCache = CacheMachine.TestCase
