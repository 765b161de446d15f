"""A folder's tokenizer: tokenizer.json, and what tokenizer_config.json adds to it.

Owns the reading of these files, as the transformers library reads them: tokens that the settings
list beside their ids are added, and so are flags of such as are there. Knows nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from .errors import ModelError, TokenizerError
from .tokenizer import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
TURN_TOKENS = ("bos_token", "eos_token")
"""Those that are special whatever their file says. A padding token may be any: `!` with some."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def tokenizer_of(path: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, list[Path]]:
    """The tokenizer of a folder whose config.json is given, and the files that it is made of.

    Raises TokenizerError, or ModelError for a file that is no JSON object.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{path} holds no tokenizer.json: fetch it from where the model came from, or save the "
            "tokenizer there with transformers"
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    settings_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    named = {name: _content(settings.get(name)) for name in NAMED_TOKENS}
    _add_listed(core, settings.get("added_tokens_decoder") or {}, settings_file)
    _mark_named(core, [named[name] for name in TURN_TOKENS])
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ends.append(core.token_to_id(named["eos_token"]) if named["eos_token"] else None)
    tokenizer = Tokenizer(
        core,
        named={name: text for name, text in named.items() if text is not None},
        end_tokens=[token for token in ends if token is not None],
        chat_template=_template(settings, template_file),
    )
    return tokenizer, [one for one in (file, settings_file, template_file) if one.is_file()]


def _add_listed(core: tokenizers.Tokenizer, listed: Mapping[str, Any], file: Path) -> None:
    """Add tokens that are not there, and give those that are the flags that they are listed with.

    Raises TokenizerError where one would get another id than it is listed with.
    """
    for number, token in _listed(listed, file):
        fresh = core.token_to_id(token.content) is None
        (core.add_special_tokens if token.special else core.add_tokens)([token])
        if fresh and core.token_to_id(token.content) != number:
            raise TokenizerError(
                f"{file} lists {token.content} as token {number}, which is token "
                f"{core.token_to_id(token.content)} behind those of tokenizer.json: fetch both "
                "again from where the model came from"
            )


def _listed(listed: Mapping[str, Any], file: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    try:
        found = {
            int(number): tokenizers.AddedToken(
                given["content"], **{flag: given[flag] for flag in FLAGS if flag in given}
            )
            for number, given in listed.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{file}: added_tokens_decoder is no table of tokens by their ids: fetch it again"
        ) from error
    return sorted(found.items())


def _mark_named(core: tokenizers.Tokenizer, texts: list[str | None]) -> None:
    added = {token.content for token in core.get_added_tokens_decoder().values()}
    core.add_special_tokens(
        [it for it in texts if it and it not in added and core.token_to_id(it) is not None]
    )


def _template(settings: Mapping[str, Any], file: Path) -> str | None:
    """The template of its own file, else of the settings; of several, the one named default."""
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template}
        return named.get("default")
    return template


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def read_json(file: Path) -> dict[str, Any]:
    """A file's object. Raises ModelError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is no JSON object: fetch the file again")
    return value
