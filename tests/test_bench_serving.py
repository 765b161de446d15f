"""The serving benchmark, run small: what it asks, what it counts, what it says where it cannot."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel.fake import FakeKernel
from server.engine import Engine
from server.http.app import create_app
from server.parts import Parts
from server.policy import Policy
from server.settings import Settings
from statemachine.geometry import Geometry, Group
from tests.bench.__main__ import asked_for
from tests.bench.asking import Answer
from tests.bench.figures import Figures, figures, median, quantile
from tests.bench.loads import ASKED, LOADS, Load, beside, burst, chats, poisson, said, shared, told
from tests.bench.peers import Peer
from tests.bench.serving import Bench, Measured, as_text, once, rows_of, seed_of

from .fake_engine import FakeEngine, byte_tokenizer
from .http_server import live_server

WAIT_S = 60.0
MODEL = "fake"
SETTINGS = Settings(grace_s=0.0)
BLOCK = 16
AROUND = len("<user>\n<assistant>")


@contextmanager
def fake_server() -> Iterator[str]:
    """This server over the fake kernel, whose answers are the alphabet: a byte a token."""
    geometry = Geometry(block_size=BLOCK, groups=(Group(num_blocks=2048),))
    policy = Policy(max_batch_tokens=512, prefill_chunk=256, context_tokens=8192, prefix_aware=True)
    kernel = FakeKernel(
        geometry, vocab_size=256, sanitize="edges", script=lambda _, at: ord("a") + at % 26
    )
    engine = Engine(lambda: Parts(kernel, policy))
    engine.start()
    try:
        with live_server(create_app(engine, byte_tokenizer(), MODEL, SETTINGS)) as server:
            yield server.url
    finally:
        engine.stop(WAIT_S)


def run(load: Load, number: int = 1) -> Measured:
    with fake_server() as address:
        measured = asyncio.run(once(address, MODEL, load, number, WAIT_S))
    assert not measured.cut
    assert not [it.failure for each in measured.phases.values() for it in each if it.failure]
    return measured


def counts(answers: list[Answer]) -> tuple[int, int, int, int]:
    """Of prompt, of cached, of output by usage, of pieces."""
    found = figures(answers)
    assert found is not None
    assert found.answered == found.asked == len(answers)
    return found.prompt_tokens, found.cached_tokens, found.output_tokens, found.pieces


def test_a_burst_asks_each_client_once_and_every_token_is_a_piece() -> None:
    load = burst(3, words=5, tokens=7)
    (answers,) = run(load).phases.values()
    drawn = random.Random(seed_of(load, 1))
    texts = [told(drawn, 5, place) for place in range(3)]
    assert len(set(texts)) == 3
    assert counts(answers) == (sum(len(text) + AROUND for text in texts), 0, 21, 21)
    starts = [(len(text) + AROUND) % 26 for text in texts]
    alphabet = "abcdefghijklmnopqrstuvwxyz" * 2
    assert [answer.text for answer in answers] == [alphabet[at : at + 7] for at in starts]


def test_a_shared_beginning_is_computed_once_cold_and_found_by_all_when_warm() -> None:
    load = shared(3, words=12, tail=4, tokens=2)
    phases = run(load).phases
    drawn = random.Random(seed_of(load, 1))
    beginning = len(f"{ASKED} {said(drawn, 12)}. ")
    tails = [[len(f"0. {said(drawn, 4)}.") for _ in range(3)] for _ in phases]
    whole = (len("<user>") + beginning) // BLOCK * BLOCK
    prompts = [sum(beginning + tail + AROUND for tail in each) for each in tails]
    assert list(phases) == ["cold", "warm"]
    assert counts(phases["cold"]) == (prompts[0], 2 * whole, 6, 6)
    assert counts(phases["warm"]) == (prompts[1], 3 * whole, 6, 6)


def test_a_long_prompt_comes_once_all_others_have_begun_to_read() -> None:
    phases = run(beside(words=300, decoders=2, tokens=40)).phases
    reading, (long_one,) = phases["those that decode"], phases["the long one"]
    assert [(it.tokens, len(it.pieces_s)) for it in reading] == [(40, 40)] * 2
    assert long_one.tokens == len(long_one.pieces_s) == 16
    assert max(it.pieces_s[0] for it in reading) <= long_one.sent_s


def test_a_chat_s_turn_says_again_all_that_was_said() -> None:
    load = chats(clients=1, turns=3, words=4, tokens=5)
    (answers,) = run(load).phases.values()
    drawn = random.Random(f"{seed_of(load, 1)} 0")
    text, expected = "", []
    for answer in answers:
        text += f"<user>{told(drawn, 4, 0)}\n"
        expected.append(len(text + "<assistant>"))
        text += f"<assistant>{answer.text}\n"
    assert [answer.prompt_tokens for answer in answers] == expected
    assert [answer.tokens for answer in answers] == [5, 5, 5]


def test_no_load_and_no_repetition_says_what_another_one_said() -> None:
    seeds = {seed_of(load, number) for load in LOADS.values() for number in (1, 2)}
    assert len(seeds) == 2 * len(LOADS)
    first_words = {told(random.Random(seed), 100, 0)[:40] for seed in seeds}
    assert len(first_words) == len(seeds)


def test_requests_that_come_at_random_do_not_wait_for_each_other() -> None:
    (answers,) = run(poisson(6, rate=500.0, words=3, tokens=20)).phases.values()
    assert len(answers) == 6
    assert counts(answers)[2:] == (120, 120)
    sent = [answer.sent_s for answer in answers]
    assert sent == sorted(sent)


def test_a_load_that_takes_too_long_is_given_up_and_its_row_says_so() -> None:
    engine = FakeEngine(byte_tokenizer())
    load = burst(2, words=3, tokens=4)
    with engine, live_server(create_app(engine, engine.tokenizer, MODEL, SETTINGS)) as server:
        measured = asyncio.run(once(server.url, MODEL, load, 1, 0.2))
    assert measured.cut
    assert [it.pieces_s for it in measured.phases[""]] == [[], []]
    (row,) = rows_of(load, "slow", [measured], "", 0.2)
    assert row.figures is None
    assert row.why == "no token came within 0 s"
    assert row.notes == ["given up after 0 s: figures are of what had come"]


def test_an_answer_that_ends_without_a_token_says_how_long_its_prompt_took() -> None:
    empty = Answer(10.0, ended_s=66.4, prompt_tokens=5944)
    (row,) = rows_of(burst(1), "quick to end", [Measured({"": [empty]}, 0.0, cut=False)], "", 330.0)
    assert row.figures is None
    assert row.why == "5944 prompt tokens in 56.4 s, and an empty answer"


def test_a_server_that_refuses_is_a_row_with_its_words() -> None:
    with fake_server() as address:
        measured = asyncio.run(once(address, MODEL, burst(1, words=9000, tokens=4), 1, WAIT_S))
    (row,) = rows_of(burst(1), "short", [measured], "", WAIT_S)
    assert row.figures is None
    assert row.why.startswith("status 400: ")


def test_a_server_that_does_not_start_is_a_row_with_its_last_words() -> None:
    here = Path(sys.executable)

    def command(python: Path, _port: int, _long: bool) -> list[str]:
        return [str(python), "-c", "import sys; sys.exit('no luck today')"]

    bench = Bench(repeats=1, cut_s=WAIT_S)
    with bench:
        bench.start(Peer("lame", lambda: here, command, ("httpx",), MODEL))
        (row,) = bench.measure(burst(1))
    assert row.why == "it did not start: no luck today"
    assert as_text([row]) == "  lame: no figures: it did not start: no luck today"


def test_figures_are_those_of_the_times_and_counts() -> None:
    first = Answer(10.0, ended_s=13.0, pieces_s=[11.0, 12.0, 12.5], prompt_tokens=30)
    other = Answer(10.5, ended_s=14.0, pieces_s=[11.5, 12.0, 14.0], prompt_tokens=45)
    first.output_tokens, other.output_tokens, other.cached_tokens = 3, 6, 16
    late = Answer(13.0, ended_s=13.1, failure="refused")
    assert figures([first, other, late]) == Figures(
        asked=3,
        answered=2,
        prompt_tokens=75,
        cached_tokens=16,
        output_tokens=9,
        pieces=6,
        seconds=4.0,
        output_rate=2.25,
        decode_rate=4.0,
        prompt_rate=50.0,
        first_ms=1000.0,
        first_p95_ms=1000.0,
        between_ms=750.0,
        between_p95_ms=2000.0,
        between_most_ms=2000.0,
    )
    assert figures([late]) is None


def test_repeated_runs_are_told_by_each_figure_s_median() -> None:
    runs = []
    for rate in (1.0, 8.0, 2.0):
        answer = Answer(0.0, ended_s=9.0, pieces_s=[1.0, 1.0 + 1.0 / rate], output_tokens=2)
        found = figures([answer])
        assert found is not None
        runs.append(found)
    assert median(runs).between_ms == 500.0
    assert median(runs).output_rate == pytest.approx(2 / 1.5)


def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 21)]
    assert [quantile(values, share) for share in (0.05, 0.5, 0.95, 1.0)] == [1.0, 10.0, 19.0, 20.0]


def test_make_bench_measures_all_but_the_slow_growth_where_no_section_is_named() -> None:
    assert asked_for([]).sections == ["machine", "replay", "kernels", "model", "http"]
    assert asked_for(["growth", "--rows", "1e7"]).sections == ["growth"]
