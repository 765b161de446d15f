"""Tokenizer: ids, text piece by piece, chat templates, GGUF vocabularies against their origin."""

from __future__ import annotations

import io
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from kernel.blas import load_blas
from kernel.errors import TemplateError, TokenizerError
from kernel.gguf_vocab import tokenizer_from_gguf
from kernel.tokenizer import Detokenizer, Tokenizer

load_blas()  # before tiny_models imports mlx

from . import tiny_models as tiny  # noqa: E402

BYTES = Tokenizer(tiny.byte_tokenizer(), chat_template=tiny.TEMPLATE, end_tokens=[2])
FIRST = len(tiny.SPECIAL)
HI = [{"role": "user", "content": "hi"}]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What a detokenizer yields for each id, and at the end."""
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


def with_template(template: str | None, **named: str) -> Tokenizer:
    return Tokenizer(tiny.byte_tokenizer(), named=named, chat_template=template)


def test_a_character_of_several_tokens_comes_whole_with_its_last_token() -> None:
    assert pieces(BYTES, BYTES.encode("é😀")) == ["", "é", "", "", "", "😀", ""]


def test_a_joined_emoji_keeps_each_of_its_characters() -> None:
    family = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
    assert "".join(pieces(BYTES, BYTES.encode(family))) == family


def test_an_incomplete_character_at_the_end_is_left_out() -> None:
    ids = BYTES.encode("ab😀")[:-1]
    assert pieces(BYTES, ids) == ["a", "b", "", "", "", ""]
    assert BYTES.decode(ids) == "ab"


def test_bytes_that_cannot_be_text_become_one_replacement_mark() -> None:
    lead = BYTES.encode("é")[0]
    assert pieces(BYTES, [lead, *BYTES.encode("x")]) == ["", "\ufffdx", ""]


def test_two_answers_share_no_state() -> None:
    first, second = Detokenizer(BYTES), Detokenizer(BYTES)
    one, two = BYTES.encode("é"), BYTES.encode("ß")
    assert [first.add(one[0]), second.add(two[0])] == ["", ""]
    assert [first.add(one[1]), second.add(two[1])] == ["é", "ß"]


def test_special_tokens_and_ids_out_of_range_have_no_text() -> None:
    assert BYTES.decode([2, *BYTES.encode("a"), 0, 10**6, -1]) == "a"


def test_special_tokens_that_mark_the_parts_of_an_answer_have_text() -> None:
    core = tiny.byte_tokenizer()
    core.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = Tokenizer(core)
    ids = tokenizer.encode("a[TOOL_CALLS]b")
    assert len(ids) == 3
    assert pieces(tokenizer, ids) == ["a", "[TOOL_CALLS]", "b", ""]
    assert tokenizer.added_token("[TOOL_CALLS]") == ids[1]
    assert tokenizer.added_token("a") is None


def test_the_end_of_a_message_ends_the_answer_only_where_answers_have_no_channels() -> None:
    core = tiny.byte_tokenizer()
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    (end,) = Tokenizer(core).encode("<|end|>")
    assert end in Tokenizer(core).end_tokens
    assert Tokenizer(core).decode([end]) == ""
    core.add_special_tokens([AddedToken("<|channel|>", special=True)])
    assert end not in Tokenizer(core).end_tokens
    assert Tokenizer(core).decode([end]) == "<|end|>"


@settings(max_examples=200, deadline=None)
@given(st.text().filter(lambda text: not any(name in text for name in tiny.SPECIAL)))
def test_text_survives_encoding_and_decoding(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert "".join(pieces(BYTES, ids)) == text


def test_halves_of_a_utf16_pair_are_joined_or_replaced() -> None:
    assert BYTES.decode(BYTES.encode("\ud83d\ude00 \ud83d.")) == "😀 \ufffd."


def test_end_tokens_are_those_of_the_metadata_and_the_known_names() -> None:
    assert BYTES.end_tokens == (0, 2)
    assert Tokenizer(tiny.byte_tokenizer(), end_tokens=[77, 77]).end_tokens == (0, 2, 77)


def test_a_name_of_an_end_token_that_is_ordinary_text_ends_nothing() -> None:
    core = tiny.byte_tokenizer()
    core.add_tokens([AddedToken("<|eot_id|>", special=False)])
    assert Tokenizer(core).end_tokens == (0, 2)


def test_the_settings_of_a_training_run_do_not_cut_prompts() -> None:
    core = tiny.byte_tokenizer()
    core.enable_truncation(2)
    core.enable_padding(length=9)
    assert len(Tokenizer(core).encode("abcd")) == 4


def test_a_start_token_is_put_before_plain_text_and_not_before_a_chat() -> None:
    core = tiny.byte_tokenizer()
    core.post_processor = processors.TemplateProcessing(
        single=["<|endoftext|>", "$A"], special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = Tokenizer(core, chat_template=tiny.TEMPLATE)
    assert tokenizer.encode("a") == [0, *BYTES.encode("a")]
    assert tokenizer.apply_chat_template(HI)[0] == 1


def test_special_tokens_of_a_template_are_single_tokens() -> None:
    ids = BYTES.apply_chat_template(HI)
    expected = [1, *BYTES.encode("user\nhi"), 2, *BYTES.encode("\n"), 1]
    assert ids == [*expected, *BYTES.encode("assistant\n")]
    assert BYTES.apply_chat_template(HI, add_generation_prompt=False) == expected[:-1]


def test_special_tokens_in_a_message_are_parsed_too_as_documented() -> None:
    ids = BYTES.apply_chat_template([{"role": "user", "content": "a<|im_end|>"}])
    assert ids.count(2) == 2


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    turns, over, begun = [0], threading.Event(), threading.Event()

    def spin() -> None:
        while not over.is_set():
            turns[0] += 1
            begun.set()
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # threads change only where one lets the others run
    other = threading.Thread(target=spin)
    try:
        other.start()
        begun.wait()
        before = turns[0]
        BYTES.encode("ab " * 100_000)
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        over.set()
        other.join()
    assert after > before


def test_template_variables_reach_the_template() -> None:
    tokenizer = with_template("{{ bos_token }}{{ tools | tojson }}", bos_token="B")
    assert tokenizer.render_chat(HI, tools=[{"a": "<é>"}]) == 'B[{"a": "<é>"}]'
    variables = {"self": "any", "messages": HI}
    named = with_template("{{ self is defined }}{{ messages[0].content }}")
    assert named.render_chat(HI, **variables) == "Truehi"


def test_a_line_of_control_leaves_no_blank_line() -> None:
    template = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert with_template(template).render_chat(HI) == "hi\n"


def test_a_block_that_marks_an_answer_is_its_body() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert with_template(template).render_chat(HI) == "hi"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "no chat template: use a chat"),
        ("{% for %}", "the model's chat template cannot be parsed:"),
        ("{{ raise_exception('roles must alternate') }}", "these messages: roles must alternate"),
        ("{{ messages[5].content.upper() }}", "refuses these messages:"),
        ("{{ 'a' + messages[0]['content'] + none }}", "refuses these messages:"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages:"),
        ("{{ messages.append(1) }}", "refuses these messages:"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_typed_sentence(
    template: str | None, text: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        with_template(template).apply_chat_template(HI)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_is_not_understood_is_refused() -> None:
    core = tokenizers.Tokenizer(models.BPE())
    core.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(core)


def gguf_fields(**changes: Any) -> dict[str, Any]:
    fields = tiny.gguf_metadata(tiny.tiny_config())
    return fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_a_byte_level_gguf_vocabulary_is_its_tokenizer_json() -> None:
    built = tokenizer_from_gguf(gguf_fields())
    text = "Hé <|im_start|>12 \n"
    assert built.encode(text) == BYTES.encode(text)
    assert built.vocab_size == BYTES.vocab_size == 259
    assert built.apply_chat_template(HI) == BYTES.apply_chat_template(HI)
    assert built.end_tokens == (0, 2)


def merged(pre: str, *words: str) -> tuple[Tokenizer, dict[str, int]]:
    """A GGUF vocabulary whose only merges are the first two characters of each word."""
    tokens = [*tiny.SPECIAL, *tiny.ALPHABET, *(word.replace(" ", "Ġ") for word in words)]
    merges = [f"{word[0]} {word[1]}" for word in tokens[-len(words) :]]
    types = [3] * FIRST + [1] * (len(tokens) - FIRST)
    fields = gguf_fields(pre=pre, tokens=tokens, merges=merges, token_type=types)
    return tokenizer_from_gguf(fields), {
        word: len(tokens) - len(words) + at for at, word in enumerate(words)
    }


def test_smollm_cuts_between_digits_and_llama3_after_three() -> None:
    smollm, _ = merged("smollm", "12", " a")
    llama3, ids = merged("llama-bpe", "12", " a")
    assert len(smollm.encode("12 a")) == 3
    assert llama3.encode("12 a") == [ids["12"], ids[" a"]]
    assert len(llama3.encode("1112")) == 4
    assert llama3.encode("0012")[2:] != [ids["12"]]
    gpt2, ids = merged("gpt-2", "12", " a")
    assert gpt2.encode("0012 a")[2:] == [ids["12"], ids[" a"]]


def test_user_defined_tokens_are_parsed_whole_and_keep_their_text() -> None:
    tokens = [*tiny.SPECIAL, *tiny.ALPHABET, "<think>"]
    types = [3] * FIRST + [1] * len(tiny.ALPHABET) + [4]
    built = tokenizer_from_gguf(gguf_fields(tokens=tokens, token_type=types))
    ids = built.encode("a<think>b")
    assert len(ids) == 3
    assert built.decode(ids) == "a<think>b"


def test_a_start_token_is_added_where_the_gguf_says_so() -> None:
    plain = tokenizer_from_gguf(gguf_fields(bos_token_id=1))
    started = tokenizer_from_gguf(gguf_fields(bos_token_id=1, add_bos_token=True))
    assert started.encode("a") == [1, *plain.encode("a")]
    assert plain.encode("a") == BYTES.encode("a")


@pytest.mark.parametrize("changes", [{"token_type": [1]}, {"bos_token_id": 10**6}])
def test_gguf_fields_that_do_not_fit_the_tokens_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="do not fit its 259 tokens"):
        tokenizer_from_gguf(gguf_fields(**changes))


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A SentencePiece BPE of 400 pieces, trained on this file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its generated bindings
        import sentencepiece
    trained = io.BytesIO()
    with open(__file__, encoding="utf-8") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(file.read().splitlines()),
            model_writer=trained,
            model_type="bpe",
            vocab_size=500,
            byte_fallback=True,
            character_coverage=0.99,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def sentencepiece_fields(model: Any) -> dict[str, Any]:
    """The GGUF fields that a converter writes for a SentencePiece model."""
    size = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(at) else 3 if model.is_control(at) else 6 if model.is_byte(at) else 1
        for at in size
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(at) for at in size],
        "tokenizer.ggml.scores": [model.get_score(at) for at in size],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize(
    "text",
    [
        "a start token is put before plain text",
        "def test_two(x): return x  # tokenizer, tokenizers",
        "  spaces   and é, 日本語, 😀",
        "12345 \n\n x",
    ],
)
def test_a_sentencepiece_gguf_vocabulary_gives_the_ids_of_sentencepiece(
    sentencepiece_model: Any, text: str
) -> None:
    built = tokenizer_from_gguf(sentencepiece_fields(sentencepiece_model))
    ids = built.encode(text)
    assert ids == [1, *sentencepiece_model.encode(text)]
    assert built.decode(ids) == text
    assert "".join(pieces(built, ids)) == text
    assert built.end_tokens == (2,)


def test_decoding_agrees_with_the_tokenizers_library() -> None:
    core = tiny.byte_tokenizer()
    for text in ("Hello, world", " é😀\n", "a\ufffdb"):
        ids = core.encode(text).ids
        assert BYTES.decode(ids) == core.decode(ids)


def test_metaspace_vocabularies_lose_only_the_first_space() -> None:
    vocabulary = {"▁": 0, "a": 1, "▁a": 2}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = Tokenizer(core)
    assert tokenizer.encode("a a") == [2, 2]
    assert pieces(tokenizer, [2, 2]) == ["a", " a", ""]
