"""Masks: which tokens may come next, as packed bits; what a grammar says of an answer. No MLX."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from statemachine.records import Parameters

Words = npt.NDArray[np.uint32]

WORD_BITS = 32


class GrammarFailed(Exception):
    """An answer cannot go on under its grammar; the text is one sentence."""


class Masks(Protocol):
    """Who knows which tokens a grammar allows next (grammar.Grammars)."""

    def allowed(
        self, seq: int, parameters: Parameters, answer: tuple[int, ...], certain: int, width: int
    ) -> Words | None:
        """Packed bits of the tokens that may follow an answer, lowest bit first: [width] words.

        None where the answer breaks the grammar behind its first `certain` tokens. Raises
        GrammarFailed.
        """
