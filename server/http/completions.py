"""Completions: a completions body to an Ask. Never waits and never touches the engine."""

from __future__ import annotations

from kernel.tokenizer import Tokenizer
from statemachine.records import NO_LOGPROBS, NO_SCORES

from .asking import Ask
from .prompts import prompts_of
from .wire_completions import CompletionRequest
from .wire_grammar import grammar_of
from .wire_sampling import check_vocabulary

FIRST_SCORED = 1
"""Position of the first prompt token that something predicts."""


def ask_of_completion(request: CompletionRequest, tokenizer: Tokenizer, external_id: str) -> Ask:
    """What the engine is asked for by a checked body. Raises ApiError (400)."""
    check_vocabulary(request, tokenizer)
    told = request.logprobs is not None
    return Ask(
        prompts=prompts_of(request.prompt, tokenizer, "prompt"),
        parameters=request.parameters(
            logprobs=NO_LOGPROBS if request.logprobs is None else request.logprobs,
            grammar=grammar_of(request),
            score_from=FIRST_SCORED if told and request.echo else NO_SCORES,
        ),
        external_id=external_id,
        n=request.n or 1,
        namespace=request.namespace,
        prompt_param="prompt",
        ignore_eos=bool(request.ignore_eos),
        model=request.model,
    )
