"""P21: clients that leave, over HTTP: what waits computes nothing, what runs stops at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from starlette.requests import ClientDisconnect

from server.http.stream import while_connected
from statemachine.events import Closed
from statemachine.geometry import Geometry, Group
from statemachine.records import RequestCancelled, StepDone, StepPlanned

from .serving import POLICY, WAIT_S, Gate, Served, over_fake, replays

BIG = Geometry(16, (Group(num_blocks=128),))
LONG = 2000
KILLED = 200
ROUNDS = 3


def cancelled(served: Served) -> set[int]:
    return {it.request for it in served.capture.records if isinstance(it, RequestCancelled)}


def steps_of(served: Served, request: int) -> list[int]:
    return [
        batch.step
        for batch in served.kernel.batches
        if any(piece.sequence.id == request for piece in batch.pieces)
    ]


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_p21_a_queued_request_whose_client_left_computes_nothing(
    stream: bool, lookahead: bool, tmp_path: Path
) -> None:
    """One slot, held in its third step while the client of the second of three goes."""
    gate = Gate(3)
    policy = structs.replace(POLICY, max_running=1, lookahead=lookahead)
    with over_fake(policy=policy, delay=gate) as served:
        with contextlib.ExitStack() as stack:

            def send(number: int) -> socket.socket:
                client = served.connect(f"request {number}", stream=stream, max_tokens=8)
                stack.callback(client.close)
                served.until(lambda: served.engine._next_request == number + 1)
                return client

            send(0)
            assert gate.reached.wait(WAIT_S)
            second, third = send(1), send(2)
            second.close()
            served.until(lambda: RequestCancelled(1) in served.engine._inbox)
            gate.open()
            seen = b""
            while b'"finish_reason":"length"' not in seen:
                piece = third.recv(65536)
                assert piece, f"closed after {seen!r}"
                seen += piece
        served.idle()
        assert cancelled(served) == {1}
        assert steps_of(served, 1) == []
        assert steps_of(served, 2)
    replays(served.capture.records, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_p21_a_running_request_stops_within_two_steps_of_its_clients_end(
    stream: bool, lookahead: bool, tmp_path: Path
) -> None:
    gate = Gate(6)
    policy = structs.replace(POLICY, context_tokens=LONG + 48, lookahead=lookahead)
    with over_fake(BIG, policy, delay=gate) as served:
        client = served.connect("all of it", stream=stream, max_tokens=LONG)
        assert gate.reached.wait(WAIT_S)
        client.close()
        served.until(lambda: RequestCancelled(0) in served.engine._inbox)
        gate.open()
        served.idle()
        assert cancelled(served) == {0}
        # Step 6 was being issued when the client left; with lookahead step 7 was not planned yet.
        assert max(steps_of(served, 0)) <= 6
        closed = [
            record.step
            for record in served.capture.records
            if isinstance(record, StepPlanned | StepDone)
            if Closed(0, "cancelled") in record.events
        ]
        assert len(closed) == 1
        assert closed[0] <= 8
    replays(served.capture.records, tmp_path)


def test_p21_two_hundred_clients_killed_at_once_three_times_leave_a_server_that_answers(
    tmp_path: Path,
) -> None:
    """Some run, most wait; half of them read a stream. None comes near its answer's end."""
    policy = structs.replace(POLICY, context_tokens=LONG + 48, lookahead=True)
    with over_fake(BIG, policy) as served:
        for killed in range(1, ROUNDS + 1):
            clients = [
                served.connect(f"client {number}", stream=bool(number % 2), max_tokens=LONG)
                for number in range(KILLED)
            ]
            served.until(lambda sent=killed * KILLED: served.engine._next_request == sent)
            for client in clients:
                # No farewell: the connection is reset.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
        probe = served.ask("is anybody there", max_tokens=5)
        assert probe.usage.completion_tokens == 5
        served.idle()
        assert cancelled(served) == set(range(KILLED * ROUNDS))
    replays(served.capture.records, tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_p21_a_client_that_leaves_as_its_first_token_comes_is_heard_all_the_same(
    fails: bool,
) -> None:
    """In one turn of the loop. A disconnect is told once: unheard here, its request ran on."""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def work() -> str:
        if fails:
            raise ValueError("the engine failed")
        return "the first token"

    with pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(receive, work()))
