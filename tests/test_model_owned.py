"""A model over its own caches: right in pieces, empty at each start, and alone."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from msgspec import structs

from kernel.batch import Batch, BuildFailed, EvalFailed, Piece, StepResult
from kernel.errors import ModelError
from kernel.families import groups_for, owned_groups
from kernel.model_owned import ModelOwnedKernel
from kernel.tiny import tiny_llama
from statemachine.content import extend
from statemachine.events import BlockCopied, Namespace
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, ShadowReport
from statemachine.sequence import Sequence

from .paged import random_tokens
from .tiny_families import FAMILIES, family_model

GEOMETRY = Geometry(groups=owned_groups())
VOCAB = 259
TOKENS = random_tokens(1, 40, VOCAB)
OTHERS = random_tokens(2, 23, VOCAB)
PROMPT = 25
TOLERANCE = 1e-3
"""Of scores of 8 to 16; the worst seen is 2e-4."""


@cache
def model(name: str) -> Any:
    """One module for all tests of an architecture: they must leave nothing in it."""
    return family_model(name)


def kernel(name: str) -> ModelOwnedKernel:
    """A kernel as a new engine would make it; the one before it was let go."""
    return ModelOwnedKernel(model(name), GEOMETRY, check=False)


class Feeder:
    """Sequences by hand: what the scheduler would hand over."""

    def __init__(self, over: ModelOwnedKernel) -> None:
        self.kernel = over
        self._sequences: dict[int, Sequence] = {}
        self._step = 0

    def piece(self, seq: int, tokens: list[int], samples: int = 1, **wanted: Any) -> Piece:
        fresh = Sequence(seq, Namespace(), 0, tables=((),), starts=(0,))
        grown = extend(GEOMETRY, self._sequences.get(seq, fresh), tuple(tokens))
        self._sequences[seq] = grown
        parameters = Parameters(1, **wanted) if wanted else None
        return Piece(grown, tuple(tokens), samples=samples, parameters=parameters)

    def run(self, *pieces: Piece) -> StepResult:
        self._step += 1
        return self.kernel.collect(self.kernel.issue(Batch(self._step, pieces)))

    def feed(self, seq: int, tokens: list[int], samples: int = 1, **wanted: Any) -> StepResult:
        return self.run(self.piece(seq, tokens, samples, **wanted))

    def fresh(self, seq: int) -> None:
        """The sequence was reset or preempted: it begins again at 0."""
        del self._sequences[seq]

    def whole(self, seq: int, tokens: list[int], pieces: list[int]) -> list[StepResult]:
        """All tokens in pieces of these sizes, each sampled."""
        ends = np.cumsum(pieces).tolist()
        bounds = zip([0, *ends], ends, strict=False)
        return [self.feed(seq, tokens[begin:end]) for begin, end in bounds]


@cache
def full(name: str) -> np.ndarray:
    """Logits of TOKENS in one forward over fresh caches of mlx-lm's: [tokens, vocab]."""
    held = model(name)
    scores = held(mx.array([TOKENS]), cache=make_prompt_cache(held))[0]
    return np.array(scores.astype(mx.float32))


def assert_is_row(result: StepResult, row: np.ndarray) -> None:
    """A result's fingerprint is that of a row of scores."""
    second, first = np.sort(row)[-2:].tolist()
    (token,), (logit,), (margin,) = result.tokens, result.logits, result.margins
    assert first - row[token] <= TOLERANCE, f"{row.argmax()} is right, not {token}"
    assert logit == pytest.approx(first, abs=TOLERANCE)
    assert margin == pytest.approx(first - second, abs=2 * TOLERANCE)


PIECES = {
    "one by one": [1] * 40,
    "a prompt, then one by one": [PROMPT] + [1] * 15,
    "uneven": [7, 13, 1, 9, 10],
    "around a window": [8, 8, 1, 8, 15],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_give_the_scores_of_one_full_forward_and_each_is_seen_where_it_is(
    name: str, pieces: list[int]
) -> None:
    results = Feeder(kernel(name)).whole(7, TOKENS, pieces)
    start = 0
    for result, rows in zip(results, pieces, strict=True):
        assert_is_row(result, full(name)[start + rows - 1])
        seen = result.observation
        assert (seen.starts, seen.rows) == ((start,), (rows,))
        assert (seen.visible, seen.tables) == (((start + rows,),), ((0,),))
        assert seen.rows_updated == (rows, rows)
        assert result.shadow == ShadowReport()
        start += rows


@pytest.mark.parametrize("name", FAMILIES)
def test_two_runs_in_a_row_equal_two_fresh_ones_bit_for_bit(name: str) -> None:
    cuts = [9, 1, 10, *[1] * 3]
    fresh = [
        Feeder(kernel(name)).whole(number, tokens, cuts)
        for number, tokens in enumerate((TOKENS[:23], OTHERS))
    ]
    one = Feeder(kernel(name))
    assert [one.whole(0, TOKENS[:23], cuts), one.whole(1, OTHERS, cuts)] == fresh


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_cancelled_sequence_left_is_gone_for_the_next_one(name: str) -> None:
    alone = Feeder(kernel(name)).whole(2, OTHERS, [20, 1, 1, 1])
    after = Feeder(kernel(name))
    after.feed(1, TOKENS[:11])
    after.feed(1, TOKENS[11:17], samples=0)
    assert after.whole(2, OTHERS, [20, 1, 1, 1]) == alone


@pytest.mark.parametrize("name", ["exaone4", "mamba", "longcat_flash_ngram"])
def test_a_sequence_that_starts_over_finds_nothing_of_its_own(name: str) -> None:
    one = Feeder(kernel(name))
    first = one.whole(3, OTHERS, [20, 1, 1])
    one.fresh(3)
    assert one.whole(3, OTHERS, [20, 1, 1]) == first


def test_a_piece_that_samples_nothing_moves_the_caches_all_the_same() -> None:
    for name in FAMILIES:
        one = Feeder(kernel(name))
        quiet = one.feed(0, TOKENS[:12], samples=0)
        assert (quiet.sampled, quiet.tokens, quiet.logits, quiet.margins) == ((), (), (), ())
        assert quiet.observation.visible == ((12,),)
        assert_is_row(one.feed(0, TOKENS[12:PROMPT]), full(name)[PROMPT - 1])


def test_a_sample_is_drawn_by_seed_and_position_whatever_the_pieces_were() -> None:
    wanted = {"temperature": 1.0, "seed": 5}
    one, tokens = Feeder(kernel("exaone4")), []
    for seq, cut in enumerate((5, 10, 24)):
        one.feed(seq, TOKENS[:cut], samples=0)
        tokens.append(one.feed(seq, TOKENS[cut:PROMPT], **wanted).tokens)
    assert tokens[0] == tokens[1] == tokens[2]
    seeds = [wanted | {"seed": seed} for seed in range(8)]
    drawn = {one.feed(9 + n, TOKENS[:PROMPT], **it).tokens for n, it in enumerate(seeds)}
    assert len(drawn) > 1


REFUSED: dict[str, tuple[Any, str]] = {
    "pads": (lambda piece: structs.replace(piece, pads=7), "7 pad rows could not be taken back"),
    "lookahead": (lambda piece: structs.replace(piece, pending=1), "turn lookahead off"),
    "drafts": (lambda piece: structs.replace(piece, samples=2), "set draft_tokens to 0"),
    "no rows": (lambda piece: structs.replace(piece, tokens=()), "no rows to feed"),
    "token": (lambda piece: structs.replace(piece, tokens=(259,)), "not in the vocabulary of 259"),
    "negative": (lambda piece: structs.replace(piece, tokens=(-1,)), "not in the vocabulary"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_its_caches_cannot_take_is_refused_in_a_sentence_and_moves_nothing(kind: str) -> None:
    change, said = REFUSED[kind]
    one = Feeder(kernel("ministral3"))
    one.feed(4, TOKENS[:20])
    piece = one.piece(4, TOKENS[20:21])
    with pytest.raises(BuildFailed, match=said) as caught:
        one.run(change(piece))
    assert caught.value.seq == 4
    # The next piece goes on where the caches were.
    assert_is_row(one.run(piece), full("ministral3")[20])


def test_two_sequences_in_a_step_are_refused_and_so_are_copies_of_blocks() -> None:
    one = Feeder(kernel("exaone4"))
    pieces = (one.piece(0, [1, 2]), one.piece(1, [3]))
    with pytest.raises(
        BuildFailed, match=r"2 pieces.*one sequence at a time: set max_running to 1"
    ):
        one.run(*pieces)
    copied = BlockCopied(0, 1, 0, 0, 0, 1, 4)
    with pytest.raises(BuildFailed, match="no blocks to copy"):
        one.kernel.issue(Batch(1, (one.piece(5, [3]),), (copied,)))


def test_a_sequence_that_goes_on_in_the_caches_of_another_is_refused() -> None:
    one = Feeder(kernel("exaone4"))
    one.feed(0, TOKENS[:5])
    one.feed(1, TOKENS[:5])
    with pytest.raises(BuildFailed, match=r"sequence 0 goes on at position 5, but .* sequence 1"):
        one.feed(0, TOKENS[5:6])
    one.kernel.reset_pages()
    with pytest.raises(BuildFailed, match=r"sequence 1 goes on at position 5, but .* of nobody"):
        one.feed(1, TOKENS[5:6])


def test_a_rewind_that_the_caches_did_not_follow_is_seen() -> None:
    one = Feeder(kernel("exaone4"))
    one.feed(0, TOKENS[:20])
    shorter = extend(GEOMETRY, Sequence(0, Namespace(), 0, tables=((),), starts=(0,)),
                     tuple(TOKENS[:16]))  # fmt: skip
    seen = one.run(Piece(shorter, (TOKENS[15],), samples=1)).observation
    assert (seen.starts, seen.rows, seen.visible) == ((20,), (1,), ((21,),))


def test_a_layer_whose_cache_stands_elsewhere_is_the_one_that_is_reported() -> None:
    one = Feeder(kernel("qwen3"))
    one.feed(0, TOKENS[:6])
    held = one.kernel._held
    assert held is not None
    held._leaves[1].trim(2)
    seen = one.feed(0, TOKENS[6:9]).observation
    assert (seen.starts, seen.rows, seen.visible) == ((4,), (3,), ((7,),))


def test_a_layer_that_takes_other_rows_is_the_one_that_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Feeder(kernel("exaone4"))
    original = KVCache.update_and_fetch

    def forgets(held: KVCache, keys: mx.array, values: mx.array) -> Any:
        found = original(held, keys, values)
        held.offset -= 1
        return found

    monkeypatch.setattr(KVCache, "update_and_fetch", forgets)
    seen = one.feed(0, TOKENS[:6]).observation
    assert (seen.rows, seen.rows_updated, seen.visible) == ((5,), (5, 6), ((5,),))


def test_logits_are_made_for_one_row_only_where_the_head_alone_says_what_the_model_says() -> None:
    cut = {name for name in FAMILIES if kernel(name)._body is not model(name)}
    # Caps and scales of scores are the model's own code, and stay in what the head is.
    assert set(FAMILIES) - cut == set()


def test_a_slot_that_is_never_written_says_nothing_and_all_others_do() -> None:
    one = kernel("nemotron-nas")
    assert one._counted == (1, 2)
    assert kernel("longcat_flash_ngram")._counted == (1, 2, 3, 4)
    assert kernel("qwen3_next")._counted == (1, 3)
    assert kernel("mamba")._counted == ()


def test_rows_are_counted_by_calls_where_no_cache_has_an_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Feeder(kernel("mamba2"))
    one.feed(0, TOKENS[:6])
    # Whoever forgets to make them anew goes on counting.
    monkeypatch.setattr(
        ModelOwnedKernel, "_open", lambda owned, seq: setattr(owned._held, "seq", seq)
    )
    seen = one.feed(1, TOKENS[:4]).observation
    assert (seen.starts, seen.rows, seen.visible) == ((6,), (4,), ((10,),))


class Breaking:
    """A model whose calls can be made to raise, while the graph is built or when it is computed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fails = ""
        self.layers = inner.layers

    def make_cache(self) -> Any:
        return make_prompt_cache(self.inner)

    def named_modules(self) -> Any:
        return self.inner.named_modules()

    def parameters(self) -> Any:
        return self.inner.parameters()

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits = self.inner(tokens, cache=cache)
        if self.fails == "build":
            return logits @ mx.zeros((2, 3))
        if self.fails == "eval":
            return logits + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]
        return logits


def breaking() -> tuple[Breaking, Feeder]:
    made = Breaking(model("gpt_oss"))
    return made, Feeder(ModelOwnedKernel(made, GEOMETRY))


def test_a_forward_that_raises_while_it_is_built_drops_the_caches_that_it_half_moved() -> None:
    made, one = breaking()
    one.feed(0, TOKENS[:9])
    made.fails = "build"
    with pytest.raises(BuildFailed, match=r"step 2: ValueError: .*matmul") as caught:
        one.feed(0, TOKENS[9:12])
    assert caught.value.seq == 0
    made.fails = ""
    with pytest.raises(BuildFailed, match="caches are those of nobody"):
        one.feed(0, TOKENS[12:13])
    assert_is_row(one.feed(1, TOKENS[:PROMPT]), full("gpt_oss")[PROMPT - 1])


@pytest.mark.parametrize("samples", [0, 1])
def test_an_error_at_eval_is_an_eval_failure_and_the_next_start_is_clean(samples: int) -> None:
    made, one = breaking()
    one.feed(0, TOKENS[:9])
    made.fails = "eval"
    if samples:
        with pytest.raises(EvalFailed, match="Inverse"):
            one.feed(0, TOKENS[9:12])
    else:
        # Nobody reads these logits, so nothing computes them.
        one.feed(0, TOKENS[9:12], samples=0)
    made.fails = ""
    one.kernel.reset_pages()
    one.fresh(0)
    assert_is_row(one.feed(0, TOKENS[:PROMPT]), full("gpt_oss")[PROMPT - 1])


def test_a_second_kernel_over_a_model_in_use_is_refused_until_the_first_is_let_go() -> None:
    first = kernel("exaone4")
    with pytest.raises(ModelError, match="another kernel runs it already: load it a second time"):
        ModelOwnedKernel(model("exaone4"), GEOMETRY)
    assert_is_row(Feeder(first).feed(0, TOKENS[:PROMPT]), full("exaone4")[PROMPT - 1])
    del first
    gc.collect()
    second = ModelOwnedKernel(model("exaone4"), GEOMETRY)
    assert_is_row(Feeder(second).feed(0, TOKENS[:PROMPT]), full("exaone4")[PROMPT - 1])


def test_another_object_of_the_same_weights_is_another_model() -> None:
    first, second = kernel("exaone4"), ModelOwnedKernel(family_model("exaone4"), GEOMETRY)
    a, b = Feeder(first), Feeder(second)
    for at in range(10):
        assert a.feed(0, [TOKENS[at]]).tokens == (int(full("exaone4")[at].argmax()),)
        assert b.feed(0, [OTHERS[at]]).observation.starts == (at,)


def test_a_model_that_gives_other_scores_in_pieces_is_refused_at_its_load() -> None:
    made = Breaking(model("qwen3"))

    class Forgets(KVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            super().update_and_fetch(keys, values)
            return keys, values

    made.make_cache = lambda: [Forgets() for _ in made.layers]  # type: ignore[method-assign]
    with pytest.raises(
        ModelError, match=r"other logits in pieces than at once, by .*of the largest"
    ):
        ModelOwnedKernel(made, GEOMETRY)


def test_a_model_that_cannot_run_is_refused_at_its_load_in_one_sentence() -> None:
    made = Breaking(model("gpt_oss"))
    made.fails = "build"
    with pytest.raises(
        ModelError, match=r"cannot be run over its own caches: ValueError: .*matmul"
    ):
        ModelOwnedKernel(made, GEOMETRY)


def test_a_geometry_with_pages_is_refused() -> None:
    llama = tiny_llama()
    for groups in (groups_for(llama, 4), (*owned_groups(), Group(num_blocks=4))):
        with pytest.raises(ModelError, match="takes one opaque group, and the geometry has"):
            ModelOwnedKernel(llama, Geometry(groups=groups))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_the_check_at_load(name: str) -> None:
    ModelOwnedKernel(model(name), GEOMETRY, check=True)


def test_a_llama_over_its_own_caches_gives_what_it_gives_over_pages() -> None:
    llama = tiny_llama(vocab=VOCAB)
    scores = np.array(llama(mx.array([TOKENS]))[0])
    for at, result in enumerate(
        Feeder(ModelOwnedKernel(llama, GEOMETRY)).whole(0, TOKENS, [1] * 40)
    ):
        assert_is_row(result, scores[at])
