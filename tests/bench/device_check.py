"""Checks on a GPU: logits over pages against mlx-lm's caches, and answers ahead and with drafts."""

from __future__ import annotations

from typing import Any

from kernel.families import groups_for
from kernel.forward import Forward
from kernel.layout import look
from kernel.model_kernel import ModelKernel
from kernel.paged_attention import Dialect
from kernel.paged_choice import choose
from kernel.tiny import tiny_llama
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry
from statemachine.records import Parameters
from tests.paged import Runner, dense_logits, random_tokens


def device_dialect(model: Any) -> tuple[Dialect | None, str]:
    """What reads block tables here, and why nothing does."""
    return choose(model, look(model), 16)


class _Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens


def check() -> None:
    """Tiny models on this device: mlx-lm's own caches against pages, by gather and by tables."""
    for tied in (True, False):
        model = tiny_llama(3, tied=tied)
        dialect, reason = device_dialect(model)
        print(f"tables: {'in use' if dialect else 'not in use'} {reason}")
        prompts = [random_tokens(seed, count) for seed, count in ((1, 21), (2, 40), (3, 15))]
        wanted = [dense_logits(model, tokens, len(tokens) - 6) for tokens in prompts]
        for name, kernels in (("gather", None), ("tables", dialect)):
            if name == "tables" and kernels is None:
                continue
            runner = Runner(model, num_blocks=32, block_size=16)
            runner.forward = Forward(model, look(model), dialect=kernels)
            worst = _apart(runner, prompts, wanted)
            kind = "tied" if tied else "untied"
            print(f"tiny llama, {kind}, {name}: off by {worst:.1e} of the largest logit")


def _apart(runner: Runner, prompts: list[list[int]], wanted: list[Any]) -> float:
    """Prompts in pieces, then six tokens one by one, all sequences in each step."""
    worst = 0.0
    starts = [[], [], []]
    for seq, tokens in enumerate(prompts):
        starts[seq] = [tokens[:5], tokens[5:-6], *[[token] for token in tokens[-6:]]]
    for step in range(8):
        pieces = [runner.book.append(seq, parts[step]) for seq, parts in enumerate(starts)]
        logits = runner.run(*pieces)
        if step:
            for seq, rows in enumerate(logits):
                right = wanted[seq][step - 1]
                worst = max(worst, float(abs(rows - right).max() / abs(right).max()))
    return worst


def check_lookahead() -> None:
    """A step issued before the last one was read draws the same tokens."""
    model = tiny_llama(3)
    geometry = Geometry(block_size=16, groups=groups_for(model, 32))
    answers = []
    for policy in (
        Policy(),
        Policy(lookahead=True),
        Policy(draft_tokens=4, lookup_ngram=1),
        Policy(lookahead=True, draft_tokens=4, lookup_ngram=1),
    ):
        engine = Engine(lambda policy=policy: Parts(ModelKernel(model, geometry), policy))
        engine.open()
        sinks = [_Tokens() for _ in range(5)]
        for number, sink in enumerate(sinks):
            prompt = tuple((number + place % 3) % 50 for place in range(5 + 3 * number))
            engine.submit(Submission(prompt, Parameters(max_tokens=24)), sink)
        while engine.step():
            pass
        answers.append([sink.tokens for sink in sinks])
        engine.stop()
    same = [answer == answers[0] for answer in answers]
    print(f"lookahead, drafts, both: the same tokens as neither: {same[1:]}")
