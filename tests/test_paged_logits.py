"""Logits over pages against mlx-lm's own dense caches, in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from kernel import attention, fastmath
from kernel.batch import Batch
from kernel.context import StepContext
from kernel.errors import ModelError
from kernel.families import family_of
from kernel.layout import look
from kernel.metadata import build
from kernel.pages import LayerShape, Pages
from kernel.probe import probe
from kernel.tiny import tiny_llama
from kernel.weights import load_model
from statemachine.geometry import Geometry, Group

from .paged import Book, Runner, dense_logits, random_tokens

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "one K/V head": {"kv_heads": 1},
    "as many K/V heads as heads": {"kv_heads": 4},
    "llama3 rope": {"rope_scaling": LLAMA3},
}


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()
    fastmath.install()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunks", [(21,), (1, 4, 16), (8, 13), (16, 5)])
def test_prefill_in_any_chunks_and_decode_equal_dense(kind: str, chunks: tuple[int, ...]) -> None:
    model = tiny_llama(3, **MODELS[kind])
    tokens = random_tokens(1, 30)
    wanted = dense_logits(model, tokens, 21)
    runner = Runner(model)
    done, got = 0, []
    for rows in (*chunks, *[1] * 9):
        got.append(runner.run(runner.book.append(0, tokens[done : done + rows]))[0])
        done += rows
    np.testing.assert_allclose(np.stack(got[len(chunks) - 1 :]), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_of_unlike_neighbours_equals_each_alone(kind: str) -> None:
    model = tiny_llama(4, **MODELS[kind])
    prompts = [random_tokens(10 + i, rows + 6) for i, rows in enumerate((1, 3, 4, 9, 40, 150))]
    wanted = [dense_logits(model, tokens, len(tokens) - 6) for tokens in prompts]
    runner = Runner(model, num_blocks=128)
    # Each step: the next prompt is prefilled among all earlier ones, which decode by then.
    done: list[int] = []
    got: list[list[np.ndarray]] = []
    for step in range(len(prompts) + 6):
        pieces, who = [], []
        if step < len(prompts):
            done.append(0)
            got.append([])
        for seq in reversed(range(len(done))):
            rows = len(prompts[seq]) - 6 if done[seq] == 0 else 1
            chunk = prompts[seq][done[seq] : done[seq] + rows]
            if chunk:
                pieces.append(runner.book.append(seq, chunk))
                who.append(seq)
                done[seq] += rows
        for seq, logits in zip(who, runner.run(*pieces), strict=True):
            got[seq].append(logits)
    for seq, logits in enumerate(wanted):
        np.testing.assert_allclose(np.stack(got[seq]), logits, rtol=0, atol=TOLERANCE)


def test_pieces_of_a_few_rows_share_a_bucket_and_equal_dense() -> None:
    model = tiny_llama(5)
    prompts = [random_tokens(i, 9 + i) for i in range(4)]
    runner = Runner(model)
    runner.run(*[runner.book.append(i, p[:-3], sample=False) for i, p in enumerate(prompts)])
    got = runner.run(*[runner.book.append(i, p[-3:]) for i, p in enumerate(prompts)])
    wanted = [dense_logits(model, p, len(p))[0] for p in prompts]
    np.testing.assert_allclose(got, np.stack(wanted), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_that_sequences_share_are_scored_once_and_equal_dense(kind: str) -> None:
    """Three over one beginning, in pieces of three rows and of one, beside one that shares none."""
    model = tiny_llama(6, **MODELS[kind])
    beginning, tails = random_tokens(1, 160), [random_tokens(20 + i, 8) for i in range(3)]
    texts = [beginning + tail for tail in tails] + [random_tokens(40, 168)]
    runner = Runner(model, num_blocks=256)
    book = runner.book
    runner.run(book.append(9, beginning, sample=False), book.append(3, texts[3][:160]))
    for seq in range(3):
        book.share(9, seq, 160)
    got: list[np.ndarray] = []
    done = 160
    for rows in (3, 1, 1, 3):
        pieces = [book.append(i, text[done : done + rows]) for i, text in enumerate(texts)]
        metadata = build(Batch(9, tuple(pieces)), runner.geometry)
        shared = {
            tuple(it.pieces(metadata).tolist()): it.views[0].common
            for it in StepContext(metadata).buckets
        }
        assert shared == {(0, 1, 2): 160, (3,): 0}
        got.append(runner.run(*pieces))
        done += rows
    for seq, text in enumerate(texts):
        wanted = dense_logits(model, text, 163)
        mine = np.stack([logits[seq] for logits in got])
        np.testing.assert_allclose(mine, wanted[[0, 1, 2, 5]], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_keys_scored_apart_weigh_as_much_as_together(sinks: bool) -> None:
    def random(key: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(key))

    queries = random(1, 3, 2, 2, 2, 8)
    shared = random(2, 1, 2, 5, 8) * 50, random(3, 1, 2, 5, 8)
    keys, values = random(4, 3, 2, 7, 8) * 50, random(5, 3, 2, 7, 8)
    bias = mx.where(random(6, 3, 2, 7) > 0.5, -1e30, 0.0)
    asked = random(7, 4) * 300 if sinks else None
    whole = [
        mx.concatenate([mx.broadcast_to(first, (3, 2, 5, 8)), own], axis=2)
        for first, own in zip(shared, (keys, values), strict=True)
    ]
    together = attention._rows(
        queries, *whole, mx.concatenate([mx.zeros((3, 2, 5)), bias], axis=-1), asked
    )
    apart = attention._rows(queries, keys, values, bias, asked, shared)
    np.testing.assert_allclose(np.array(apart), np.array(together), rtol=0, atol=1e-6)


def test_pads_after_a_prompt_change_no_logit_of_it_or_of_what_follows() -> None:
    model = tiny_llama(6)
    tokens = random_tokens(7, 20)
    wanted = dense_logits(model, tokens, 17)
    runner = Runner(model)
    got = [runner.run(runner.book.append(0, tokens[:17], pads=15))[0]]
    assert runner.seen.rows == (32,)
    runner.book.trim_pads(0)
    got += [runner.run(runner.book.append(0, [token]))[0] for token in tokens[17:]]
    np.testing.assert_allclose(np.stack(got), wanted, rtol=0, atol=TOLERANCE)
    assert runner.seen.starts == (19,)
    assert runner.seen.visible == ((20,),)


@pytest.mark.parametrize("window", [5, 8])
@pytest.mark.parametrize("chunks", [(30,), (13, 17), (7, 7, 16)])
def test_window_groups_equal_rotating_caches(window: int, chunks: tuple[int, ...]) -> None:
    model = tiny_llama(8, layers=4, sliding_window=window, sliding_layers=(1, 3))
    tokens = random_tokens(9, 45)
    runner = Runner(model)
    assert [group.window for group in runner.geometry.groups] == [0, window]
    done, got = 0, []
    for rows in (*chunks, *[1] * 15):
        got.append(runner.run(runner.book.append(0, tokens[done : done + rows]))[0])
        runner.book.front_trim(0)
        done += rows
    wanted = dense_logits(model, tokens, 30)
    np.testing.assert_allclose(np.stack(got[len(chunks) - 1 :]), wanted, rtol=0, atol=TOLERANCE)
    assert runner.seen.visible == ((45, window),)


def test_a_window_with_sinks_reads_the_first_rows_and_the_last() -> None:
    """Against attention with the mask written down, over one layer's random rows."""
    window, sink, rows = 6, 2, 21
    geometry = Geometry(block_size=4, groups=(Group("window", 16, window, sink),))
    got = _attention_output(geometry, rows)
    query, key = np.arange(rows)[:, None], np.arange(rows)[None, :]
    mask = (key <= query) & ((key > query - window) | (key < sink))
    np.testing.assert_allclose(got, _masked_attention(rows, mask), rtol=0, atol=1e-5)


def test_keys_that_a_tile_of_queries_sees_whole_are_scored_apart() -> None:
    """A prompt of six tiles, the last two with 512 and more such keys before them."""
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=44),))
    rows = 700
    piece = Book(geometry).append(0, [0] * rows)
    context = StepContext(build(Batch(1, (piece,)), geometry))
    tiles = context.buckets[0].views[0].tiles
    assert [(it.begin, it.end, it.keys, it.clear) for it in tiles] == [
        (0, 128, 128, 0),
        (128, 256, 256, 0),
        (256, 384, 384, 0),
        (384, 512, 512, 0),
        (512, 640, 640, 513),
        (640, 700, 700, 641),
    ]
    assert [it.bias.shape for it in tiles[3:]] == [(1, 128, 512), (1, 128, 127), (1, 60, 59)]
    wanted = _masked_attention(rows, np.tri(rows, dtype=bool))
    np.testing.assert_allclose(
        _attention_output(geometry, rows, (rows,)), wanted, rtol=0, atol=1e-5
    )


def _random_rows(rows: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries of 4 heads, keys and values of 2: [rows, heads, 1, 8]."""
    parts = [mx.random.normal((rows, n, 1, 8), key=mx.random.key(7 + n)) for n in (4, 2, 3)]
    return parts[0], parts[1], parts[2][:, :2]


def _attention_output(
    geometry: Geometry, rows: int, counts: tuple[int, ...] = (12, 1, 1, 5, 1, 1)
) -> np.ndarray:
    queries, keys, values = _random_rows(rows)
    pages = Pages(geometry, (LayerShape(0, 2, 8, 8, mx.float32),)).begin()
    book = Book(geometry)
    outs, done = [], 0
    for step, count in enumerate(counts):
        piece = book.append(0, [0] * count)
        context = StepContext(build(Batch(step, (piece,)), geometry))
        part = slice(done, done + count)
        pages.write(0, context.write_index(0), keys[part].squeeze(2), values[part].squeeze(2))
        outs.append(
            attention.attend(context, 0, queries[part], pages.keys[0], pages.values[0], 0.3)
        )
        book.front_trim(0)
        done += count
    return np.array(mx.concatenate(outs).squeeze(2))


def _masked_attention(rows: int, mask: np.ndarray) -> np.ndarray:
    queries, keys, values = (a.squeeze(2).swapaxes(0, 1)[None] for a in _random_rows(rows))
    out = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask=mx.array(mask)
    )
    return np.array(out[0].swapaxes(0, 1))


def test_a_block_of_another_sequence_in_a_table_is_seen_in_the_logits() -> None:
    """The control: these tests would notice a wrong table."""
    model = tiny_llama(3)
    tokens = random_tokens(1, 22)
    wanted = dense_logits(model, tokens, 21)
    runner = Runner(model)
    runner.run(runner.book.append(0, tokens[:21]), runner.book.append(1, random_tokens(2, 9)))
    sequence = runner.book.sequences[0]
    foreign = runner.book.sequences[1].tables[0][1]
    table = (sequence.tables[0][0], foreign, *sequence.tables[0][2:])
    runner.book.sequences[0] = structs.replace(sequence, tables=(table,))
    got = runner.run(runner.book.append(0, tokens[21:]))[0]
    assert np.abs(got - wanted[1]).max() > 0.01


def test_the_probe_refuses_a_model_that_differs_over_pages(monkeypatch: Any) -> None:
    model = tiny_llama(1)
    right = attention.attend

    def backwards(*args: Any) -> mx.array:
        return -right(*args)

    monkeypatch.setattr(attention, "attend", backwards)
    with pytest.raises(ModelError, match="differs from mlx-lm's own caches by"):
        probe(model, look(model))
    found = family_of(model)
    # Its own attention over what pages hold is another way, and not touched by this.
    assert found.way == "gathered"
    assert "not packed: over pages it differs from mlx-lm's own caches by" in found.reason
    monkeypatch.undo()
    assert family_of(model).reason == "served packed over pages"


@pytest.mark.model
def test_smollm2_over_pages_equals_dense() -> None:
    model = load_model("smollm2-135m").model
    vocab = model.args.vocab_size
    tokens = random_tokens(2, 150, vocab)
    others = [random_tokens(20 + i, 37 * i + 5, vocab) for i in range(3)]
    wanted = dense_logits(model, tokens, 140)
    runner = Runner(model, block_size=16)
    for seq, prompt in enumerate(others):
        runner.run(runner.book.append(seq, prompt))
    runner.run(runner.book.append(9, tokens[:100], sample=False))
    got = [runner.run(runner.book.append(9, tokens[100:140]))[0]]
    for token in tokens[140:]:
        neighbours = [runner.book.append(seq, [token]) for seq in range(3)]
        got.append(runner.run(*neighbours, runner.book.append(9, [token]))[-1])
    np.testing.assert_allclose(np.stack(got), wanted, rtol=0, atol=TOLERANCE)
