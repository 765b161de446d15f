"""P36: an empty prompt is refused, whatever it is sent as, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from server.submission import RequestRefused

from ..sim import Sim, answer_alone
from .serving import PLAIN, POLICY, ROOM, WAIT_S, Gate, over_fake, read, replays, settle

EMPTY: dict[str, Any] = {
    "a text": "",
    "no parts": [],
    "a part": [{"type": "text", "text": ""}],
    "parts": [{"type": "text", "text": ""}] * 3,
}


def test_p36_no_token_ids_are_refused_by_the_engine_and_a_neighbour_answers_as_alone(
    tmp_path: Path,
) -> None:
    """In the queue beside a good one, while that runs, and after it."""
    sim = Sim(ROOM, POLICY)
    good = sim.submit(range(9), 6)
    for _ in range(3):
        with pytest.raises(RequestRefused, match="the prompt is empty: send at least one token"):
            sim.submit(())
        sim.step()
    sim.run()
    assert good.tokens == answer_alone(range(9), 6, ROOM, POLICY)
    assert sim.submit([5], 1).reason is None
    sim.run()
    settle(sim, tmp_path)


def test_p36_an_empty_message_is_a_400_where_no_start_token_gives_it_a_length(
    tmp_path: Path,
) -> None:
    """While a good one runs, which is held in its second step."""
    gate = Gate(2)
    with over_fake(delay=gate) as served:
        good = served.post("a good one", max_tokens=6)
        assert gate.reached.wait(WAIT_S)
        for content in EMPTY.values():
            with pytest.raises(openai.BadRequestError, match="empty prompt") as refused:
                served.ask(content)
            assert refused.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match="messages is empty"):
            served.client.chat.completions.create(model="fake", messages=[])
        gate.open()
        beside = read(good)
        assert beside == read(served.post("a good one", max_tokens=6))
        assert beside.tokens == 6
        served.idle()
    replays(served.capture.records, tmp_path)


def test_p36_an_empty_message_is_a_prompt_of_one_token_where_the_template_begins_with_one() -> None:
    with over_fake(template="^" + PLAIN) as served:
        answers = [served.ask(content, max_tokens=4) for content in EMPTY.values()]
        assert [it.usage.prompt_tokens for it in answers] == [1] * len(EMPTY)
        assert [it.usage.completion_tokens for it in answers] == [4] * len(EMPTY)
        assert len({it.choices[0].message.content for it in answers}) == 1
        served.idle()
