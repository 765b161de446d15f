"""Tokenizers with added tokens, as folders bring them, against the library that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from kernel.errors import TokenizerError
from kernel.grammar import TOKEN_BYTES_MAX, Grammars, lark_term
from kernel.hf import read_tokenizer
from kernel.tokenizer import Tokenizer
from statemachine.records import Parameters

LINES = [
    "The quick brown fox jumps over the lazy dog, and again: the fox jumps.",
    'def f(x): return {"name": "é", "n": [1, 2, 3]}  # 日本語 😀',
    "One tool is called, two tools are called; a call calls a tool.",
]
ADDED = [
    AddedToken("<|call|>", special=True),
    AddedToken("<pad>", special=True, lstrip=True, rstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("[city]", special=False, normalized=False, lstrip=True),
    AddedToken("    ", special=False, normalized=False),
    AddedToken("tool", special=False, normalized=False, single_word=True),
    AddedToken("fox jumps", special=False, normalized=True),
]
SPECIAL = {"<s>", "</s>", *(str(it) for it in ADDED if it.special)}


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(LINES, trainer)
    core.add_tokens(ADDED)
    return core


def spaced() -> tokenizers.Tokenizer:
    """In SentencePiece's manner: spaces are marks, one is put first, unknown text is bytes."""
    core = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False,
        special_tokens=["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )  # fmt: skip
    core.train_from_iterator(LINES, trainer)
    # What was trained as a special token is a byte of the vocabulary here, and no added token.
    state = json.loads(core.to_str())
    state["added_tokens"] = [it for it in state["added_tokens"] if "<0x" not in it["content"]]
    core = tokenizers.Tokenizer.from_str(json.dumps(state))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_tokens(ADDED)
    return core


CORES = {"byte level": byte_level(), "spaced": spaced()}


@pytest.fixture(scope="module", params=CORES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """The library's tokenizer and ours, read from the folder that the first was saved in."""
    folder = tmp_path_factory.mktemp("folder")
    core = CORES[request.param]
    core.save(str(folder / "tokenizer.json"))
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(json.dumps({"eos_token": "</s>"}))
    found, _ = read_tokenizer(folder)
    return core, found


PARTS = st.sampled_from(
    [*map(str, ADDED), "<s>", "</s>", " ", "  ", "\n", "fox", " jumps", "tools", "a", "é", "😀",
     "日本", "\t", "<|call", "|>", "0x41", "\u0301"]
)  # fmt: skip
TEXTS = st.lists(PARTS, max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
@example(text="a [city] the tool's tools<pad> fox jumps    over<|call|>\n<think>é😀")
@example(text=" tool [city]")
def test_texts_with_added_tokens_become_the_librarys_ids_and_its_text_again(
    pair: tuple[tokenizers.Tokenizer, Tokenizer], text: str
) -> None:
    core, ours = pair
    ids = core.encode(text).ids
    assert ours.encode(text) == ids
    # The library skips all special tokens, and we none that an answer's parts are marked by.
    assert ours.special_tokens == {core.token_to_id(name) for name in SPECIAL}
    assert ours.decode(ids) == core.decode(ids)


def test_added_tokens_are_one_id_each_wherever_they_stand(
    pair: tuple[tokenizers.Tokenizer, Tokenizer],
) -> None:
    core, ours = pair
    for added in ADDED:
        token = id_of(core, str(added))
        assert ours.added_token(str(added)) == token
        word = added.single_word or added.normalized
        assert ours.encode(f"a {added}." if word else f"a{added}b").count(token) == 1
        assert ours.written_bytes(token).decode().strip() == str(added).strip()
        assert bool(ours.token_bytes(token)) == (not added.special)
    assert ours.encode("tools").count(id_of(core, "tool")) == 0
    assert ours.vocab_size == core.get_vocab_size()
    assert ours.end_tokens == tuple(sorted(id_of(core, name) for name in ("</s>", "<|call|>")))


def id_of(core: tokenizers.Tokenizer, text: str) -> int:
    token: int | None = core.token_to_id(text)
    assert token is not None
    return token


def grammar_over(core: tokenizers.Tokenizer, grammar: dict[str, str], answer: str) -> set[str]:
    """The tokens that may follow an answer."""
    ours = Tokenizer(core, end_tokens=[id_of(core, "</s>")])
    width = -(-ours.vocab_size // 32)
    parameters = Parameters(9, grammar=json.dumps(grammar), end_tokens=ours.end_tokens)
    ids = tuple(ours.encode(answer))
    words = Grammars(ours).allowed(0, parameters, ids, len(ids), width)
    assert words is not None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {str(core.id_to_token(token)) for token in np.flatnonzero(bits).tolist()}


@pytest.mark.parametrize("extra", [0, 1])
def test_a_token_longer_than_llguidance_takes_is_never_allowed_and_shorter_ones_are(
    extra: int,
) -> None:
    long = "x" * (TOKEN_BYTES_MAX + extra)
    core = byte_level()
    core.add_tokens([AddedToken(long, special=False, normalized=False)])
    core.add_tokens([AddedToken(f"{long[1:]}!", special=True)])
    found = grammar_over(core, {"regex": "x+y"}, "")
    assert found == ({"x", long} if extra == 0 else {"x"})
    assert grammar_over(core, {"regex": "x+y"}, "xx") == found | {"y"}


@pytest.mark.parametrize("extra", [0, 1])
def test_a_special_token_longer_than_llguidance_takes_can_still_be_named(extra: int) -> None:
    marker = f"<{'x' * (TOKEN_BYTES_MAX - 2 + extra)}>"
    core = byte_level()
    core.add_tokens([AddedToken(marker, special=True)])
    term = lark_term(Tokenizer(core), marker)
    assert grammar_over(core, {"lark": f'start: "a" {term}'}, "a") == {marker}


def listed(text: str, special: bool, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json lists it."""
    names = ("lstrip", "rstrip", "single_word", "normalized")
    return {"content": text, "special": special, **dict.fromkeys(names, False), **flags}


def folder_of(path: Path, core: tokenizers.Tokenizer, **settings: Any) -> Path:
    core.save(str(path / "tokenizer.json"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


TURNS = "<s>user<turn>the tool  <new> tools<|done|>x <think>[city]!</s>"


def test_tokens_that_only_the_settings_list_have_the_ids_that_transformers_gives(
    tmp_path: Path,
) -> None:
    core = byte_level()
    size, think = core.get_vocab_size(), id_of(core, "<think>")
    tokens = {
        size + 1: listed("<new>", False, lstrip=True),
        size: listed("<|done|>", True),
        think: listed("<think>", True),
    }
    folder = folder_of(
        tmp_path, core, eos_token="<|done|>", pad_token="!",
        added_tokens_decoder={str(number): it for number, it in tokens.items()},
    )  # fmt: skip
    ours, _ = read_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode(TURNS) == theirs.encode(TURNS)
    assert ours.vocab_size == len(theirs) == size + 2
    assert ours.end_tokens == (1, id_of(core, "<|call|>"), size)
    assert think in ours.special_tokens
    assert ours.decode(ours.encode("a!")) == "a!"
    assert ours.decode(ours.encode(TURNS)) == "user<turn>the tool<new> toolsx <think>[city]!"


def test_a_named_end_of_turn_that_is_an_ordinary_word_is_special_as_with_transformers(
    tmp_path: Path,
) -> None:
    core, word = byte_level(), "cal"
    folder = folder_of(tmp_path, core, eos_token=word)
    ours, _ = read_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "recall a callcal"
    assert ours.encode(text) == theirs.encode(text) != core.encode(text).ids
    assert id_of(core, word) in ours.end_tokens
    assert ours.decode(ours.encode(text)) == "rel a l"


def test_a_listed_token_that_would_get_another_id_is_refused(tmp_path: Path) -> None:
    core = byte_level()
    size = core.get_vocab_size()
    tokens = {str(size + 5): listed("<new>", False)}
    with pytest.raises(TokenizerError) as caught:
        read_tokenizer(folder_of(tmp_path, core, added_tokens_decoder=tokens))
    assert str(caught.value) == (
        f"{tmp_path / 'tokenizer_config.json'} lists <new> as token {size + 5}, which is token "
        f"{size} behind those of tokenizer.json: fetch both again from where the model came from"
    )


@pytest.mark.parametrize(
    "tokens",
    [{"x": listed("a", True)}, {"1": {"special": True}}, ["a"], {"1": "a"}, {"1": {"content": 1}}],
    ids=str,
)
def test_listed_tokens_of_another_form_are_one_sentence(tokens: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level(), added_tokens_decoder=tokens)
    with pytest.raises(TokenizerError) as caught:
        read_tokenizer(folder)
    assert str(caught.value) == (
        f"{tmp_path / 'tokenizer_config.json'}: added_tokens_decoder is no table of tokens by "
        "their ids: fetch it again"
    )
