"""Tokenizer: text to token ids, ids to text, messages to a prompt.

Owns the special and end tokens, the chat template and the bytes of each token. Knows nothing of
models or caches, and never reads a file.

Special tokens. `encode` and `apply_chat_template` parse the text of a special token (such as
`<|im_end|>`) as that token wherever it stands: in the template, which needs it, and in the text of
a message too. A message can thus end its own turn, as with other servers; who must not allow that
has to refuse such text before it comes here.

Text of tokens. Decoding joins the bytes of the tokens and reads them as UTF-8, which is the same
for one token at a time and for all at once. Special tokens have no text, but for those that mark
what an answer's parts are (SPOKEN_TOKEN_NAMES): who splits it must see them. Bytes that cannot be
UTF-8 become U+FFFD; an incomplete character at the end is left out.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import TemplateError, TokenizerError

END_TOKEN_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "</s>",
)
"""Special tokens that end an answer whatever the metadata says."""

SPOKEN_TOKEN_NAMES = (
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
)
"""Special tokens that have text: in some vocabularies these are special, in others not."""

CHANNEL = "<|channel|>"
MESSAGE_END = "<|end|>"
"""Where answers have channels, it ends one message of an answer, and is spoken; else the answer."""

SPM_SPACE = "\u2581"


class Tokenizer:
    """A vocabulary with its end tokens and chat template."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        end_tokens: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """`named`: template variables such as bos_token; `end_tokens`: ids that metadata names.

        Raises TokenizerError where the way from tokens to bytes is of a kind not understood.
        """
        # Some tokenizer.json files carry the settings of a training run, which would cut prompts.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._named = dict(named or {})
        self._template = chat_template
        decoder = core.get_added_tokens_decoder()
        self._added = {added.content: token for token, added in decoder.items()}
        self._special = frozenset(token for token, added in decoder.items() if added.special)
        ends, spoken = set(END_TOKEN_NAMES), set(SPOKEN_TOKEN_NAMES)
        if core.token_to_id(CHANNEL) is not None:
            ends.discard(MESSAGE_END)
            spoken.add(MESSAGE_END)
        self.end_tokens: tuple[int, ...] = tuple(sorted({*end_tokens, *self._special_ids(ends)}))
        self._silent = self._special - self._special_ids(spoken)
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self._bytes = _TokenBytes(core)

    def _special_ids(self, names: Iterable[str]) -> frozenset[int]:
        known = (self._core.token_to_id(name) for name in names)
        return frozenset(token for token in known if token in self._special)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The template's source; empty where there is none."""
        return self._template or ""

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""
        return self._core.get_vocab(with_added_tokens=True)

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens that templates call by a name, such as bos_token."""
        return self._named

    @property
    def special_tokens(self) -> frozenset[int]:
        """The ids of added tokens that no text is encoded to but their own."""
        return self._special

    @property
    def added_tokens(self) -> Collection[str]:
        """The texts of all added tokens, special ones and others."""
        return self._added.keys()

    def added_token(self, text: str) -> int | None:
        """The id of the added token (special or not) that is spelled `text`."""
        return self._added.get(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; a start token is put before it where the model's tokenizer does that.

        Halves of UTF-16 pairs, which JSON can carry, are joined, or become U+FFFD when alone.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # As a batch of one: only for these does the library let other threads run meanwhile, and
        # a long text takes seconds.
        (found,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`: what a Detokenizer yields for them one by one."""
        detokenizer = Detokenizer(self)
        return "".join(map(detokenizer.add, ids)) + detokenizer.finish()

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Text that `encode` makes `ids` of again: special tokens written out, without those that
        it puts before every text. No text may do so; whoever needs to know encodes it.
        """
        first = self.encode("")
        own = ids[len(first) :] if list(ids[: len(first)]) == first else ids
        data = b"".join(self._bytes[token] for token in own)
        if self.strips_first_space and own and own[0] not in self._special:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for silent ones (see above) and unknown ids."""
        return b"" if token in self._silent else self._bytes[token]

    def written_bytes(self, token: int) -> bytes:
        """The bytes of a token's own name: as `token_bytes`, but silent tokens have theirs too."""
        return self._bytes[token]

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space belongs to the encoding and is no part of the text."""
        return self._bytes.strips_first_space

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Ids of the prompt that the model's template makes of `messages`.

        `extra` are further template variables (tools, documents). Raises TemplateError: no
        template, a template that cannot be parsed, or one that refuses these messages.
        """
        text = self.render_chat(messages, add_generation_prompt, **extra)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt's text; see `apply_chat_template`."""
        variables = {
            **self._named,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }
        try:
            return self._compiled.render(variables)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: whatever it raises is its refusal
            reason = str(error) or type(error).__name__
            raise TemplateError(f"the chat template refuses these messages: {reason}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self._template is None:
            raise TemplateError(
                "this model has no chat template: use a chat (instruct) version of it, or put a "
                "chat_template.jinja into its folder"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self._template)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template cannot be parsed: {error}") from error


class Detokenizer:
    """Text of one answer, token by token. Belongs to one answer; never shared."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The tail: nothing, for an incomplete character at the end is left out."""
        self._decoder.reset()
        return ""


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token, worked out when first asked for."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._core = core
        self._added = {
            token: added.content for token, added in core.get_added_tokens_decoder().items()
        }
        decoder = json.loads(core.to_str())["decoder"]
        parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        kinds = {part["type"]: part for part in parts if part}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not {"ByteFallback", "Metaspace"} & set(kinds):
            raise TokenizerError(
                f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is not understood: only "
                "byte-level and SentencePiece vocabularies are"
            )
        metaspace = kinds.get("Metaspace", {}).get("prepend_scheme", "never")
        self.strips_first_space = not self._byte_level and (
            "Strip" in kinds or metaspace in ("always", "first")
        )

    def __missing__(self, token: int) -> bytes:
        data = self._find(token)
        self[token] = data
        return data

    def _find(self, token: int) -> bytes:
        text = self._core.id_to_token(token) if token >= 0 else None
        name = self._added.get(token)
        # One that is looked for in normalised text goes by that text, where spaces may be marks.
        if name is not None and (self._byte_level or text == name):
            return name.encode()
        if text is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPM_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: each byte has a visible character; those without one start at U+0100.

    Source: encoder.py of openai/gpt-2, bytes_to_unicode.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(visible)]
    alphabet = {chr(byte): bytes([byte]) for byte in visible}
    return alphabet | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


class _Generation(Extension):
    """The block {% generation %}, which marks an answer for training and here is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an attribute of instances

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which would put \\u003c into prompts.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
