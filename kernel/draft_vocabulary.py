"""Draft vocabulary: whether a model can guess tokens for another one. Loads nothing."""

from __future__ import annotations

from .errors import ModelError
from .weights import LoadedModel


def require_same_vocabulary(served: LoadedModel, draft: LoadedModel) -> None:
    """Raise ModelError, naming a token, where the two tokenizers do not have the same tokens under
    the same ids. The widths of the logits may differ: they are often padded.
    """
    mine, theirs = served.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if mine == theirs:
        return
    other = {text for text, _ in mine.items() ^ theirs.items()}
    text = min(other, key=lambda it: (min(mine.get(it, 1 << 31), theirs.get(it, 1 << 31)), it))
    raise ModelError(
        f"{draft.name} cannot guess for {served.name}, for their vocabularies differ: token "
        f"{text!r} has {_id(mine, text)} in {served.name} and {_id(theirs, text)} in {draft.name}; "
        "give a draft model with the same tokenizer"
    )


def _id(vocabulary: dict[str, int], text: str) -> str:
    return f"id {vocabulary[text]}" if text in vocabulary else "no id"
