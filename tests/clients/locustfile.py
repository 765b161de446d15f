"""What each of locust's users does: chats, streamed to their end. MODEL is in the environment."""

from __future__ import annotations

import json
import os

from locust import HttpUser, task


class Chatter(HttpUser):
    """Asks again as soon as it is answered."""

    @task
    def chat(self) -> None:
        body = {
            "model": os.environ["MODEL"],
            "messages": [{"role": "user", "content": "abc" * 20}],
            "max_tokens": 16,
            "stream": True,
        }
        path = "/v1/chat/completions"
        with self.client.post(path, json=body, stream=True, catch_response=True) as response:
            lines = [line for line in response.iter_lines() if line]
            if response.status_code != 200 or lines[-1] != b"data: [DONE]":
                response.failure(f"{response.status_code}, {lines[-1:]}")
                return
            ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
            if ends[-1] not in ("stop", "length"):
                response.failure(f"it ended with {ends[-1]}")
