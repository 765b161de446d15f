"""GGUF vocabularies: the tokenizer that a GGUF file's metadata describes.

Owns the token types and the pre-tokenizers by their GGUF names. Two kinds are understood: `gpt2`
(byte-level BPE with merges) and `llama` (SentencePiece BPE with scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .errors import TokenizerError
from .tokenizer import SPM_SPACE, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# The pattern of Llama 3's tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pattern of Qwen 2's and 3's tokenizer.json: the same, but for single digits.
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_NAMES = ("gpt-2", "gpt2", "default", "")
SMOLLM_NAMES = ("smollm",)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
QWEN2_NAMES = ("qwen2",)

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer; raises TokenizerError where it is missing or of another kind."""
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = fields.get("model"), fields.get("tokens")
    if not tokens:
        raise TokenizerError(
            "the GGUF file holds no tokenizer (tokenizer.ggml.tokens): convert it again with one"
        )
    _check_sizes(fields, len(tokens))
    if kind == "gpt2":
        core = _byte_level(fields, tokens)
    elif kind == "llama":
        core = _sentencepiece(fields, tokens)
    else:
        raise TokenizerError(
            f"the GGUF file's tokenizer is of kind {kind!r}, and only gpt2 and llama are "
            "understood: use the model's Hugging Face folder"
        )
    _add_special(core, fields, tokens)
    named = {
        name: tokens[fields[key]] for name, key in NAMED_KEYS.items() if fields.get(key) is not None
    }
    return Tokenizer(
        core,
        named=named,
        end_tokens=[fields[key] for key in END_KEYS if fields.get(key) is not None],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _check_sizes(fields: Mapping[str, Any], num_tokens: int) -> None:
    ids = (fields.get(key) for key in (*END_KEYS, *NAMED_KEYS.values()))
    columns = (fields.get(key) for key in ("token_type", "scores"))
    if any(id_ is not None and not 0 <= id_ < num_tokens for id_ in ids) or any(
        column is not None and len(column) != num_tokens for column in columns
    ):
        raise TokenizerError(
            f"the GGUF file's special ids, token types or scores do not fit its {num_tokens} "
            "tokens: convert it again"
        )


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", ())]
    name = str(fields.get("pre", ""))
    split, ignore_merges = _pre_tokenizer(name)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(
            f"the GGUF file's merges do not fit its tokens ({error}): convert it again"
        ) from error
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = split
    if name in QWEN2_NAMES:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _pre_tokenizer(name: str) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """How text is cut before merging, and whether a word that is a token needs no merges."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in GPT2_NAMES:
        return gpt2, False
    if name in SMOLLM_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2]), False
    if name in LLAMA3_NAMES:
        return _isolated(LLAMA3_PATTERN), True
    if name in QWEN2_NAMES:
        return _isolated(QWEN2_PATTERN), False
    raise TokenizerError(
        f"the GGUF file's pre-tokenizer {name!r} is not known, and guessing would give other "
        "tokens: use the model's Hugging Face folder"
    )


def _isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Bytes of what a pattern cuts out."""
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, plain])


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    types, scores = fields.get("token_type"), fields.get("scores")
    if types is None or scores is None:
        raise TokenizerError(
            "the GGUF file's tokenizer lacks tokenizer.ggml.scores or token_type: convert it again"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(fields.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPM_SPACE)
    core.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPM_SPACE), spaces]) if prefixed else spaces
    )
    parts = [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return core


def _merges(
    vocabulary: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges that do what SentencePiece's scores do: the pair whose result scores most goes first.

    Every way to make a piece of two others is a merge; equal scores keep the vocabulary's order.
    """
    mergeable = [t for t, index in vocabulary.items() if types[index] == NORMAL and len(t) > 1]
    mergeable.sort(key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
    return [
        (token[:cut], token[cut:])
        for token in mergeable
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _add_special(
    core: tokenizers.Tokenizer, fields: Mapping[str, Any], tokens: Sequence[str]
) -> None:
    """Control tokens are parsed whole and have no text; user-defined ones are parsed whole."""
    types = fields.get("token_type", ())
    control = [t for t, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    user = [t for t, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    start = fields.get("bos_token_id")
    # Without the field, SentencePiece models want their start token and BPE models do not.
    if fields.get("add_bos_token", fields["model"] == "llama") and start is not None:
        token = tokens[start]
        core.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, start)]
        )
