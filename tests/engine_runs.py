"""Engine runs: what the tests of the engine ask of a simulation, and its failures on order."""

from __future__ import annotations

from kernel.fake import Failure
from statemachine.geometry import Geometry, Group

from .sim import Sim, answer_alone, idle

WINDOWS = Geometry(4, (Group(num_blocks=40), Group("window", num_blocks=40, window=8, sink=2)))


def alone(given: list[tuple[int, ...]], max_tokens: int, **options: object) -> list[tuple]:
    """What each prompt answers when it is the only one."""
    return [answer_alone(prompt, max_tokens, **options) for prompt in given]


def clean(sim: Sim) -> None:
    """Nothing runs, waits or is held, and no row was ever another's."""
    assert sim.idle_counts() == idle(sim.kernel.geometry)
    assert sim.engine.status()["shadow_found"] == 0


def failing(stage: str, seq: int | None = None, *steps: int) -> dict[int, Failure]:
    """These steps fail; `seq` is whom the kernel names."""
    return {step: Failure(stage, seq) for step in steps}
