"""The server: a pure scheduler, the loop that carries its plans out, the tape's writer, and HTTP.

    cli.py -> build.py -> engine.py (the thread) -> loop.py (one step)
    a step: view.receive(inputs) -> scheduler.plan_step -> capture.write -> kernel.issue, collect
            -> closing.close_step -> closing.settle -> clients.py (news to whoever asked)
    http/: listen.py -> layers.py -> app.py -> route_*.py: wire_*.py (a body), chat.py, ... (an Ask
            of it) -> desk.py (admit: Answers) -> stream.py (their news) -> replies.py (a response)
    dialects/: how families of models write tool calls and reasoning, taken apart again
    each step is looked at by live_guard.py, and counted by counters.py, which http/metrics.py
    exposes; http/events.py feeds the page in http/page/
    scheduler.py (draft.py, decoding.py, speculation.py, admission.py, reuse.py, sharing.py),
    closing.py, failing.py, view.py, waiting.py, tokenlog.py and policy.py are pure: replay runs
    them again on a tape's inputs.

No file here touches a page array; only capture.py writes the tape.

`from server import Engine` is the way in for Python programs (api.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import Answer, Engine, Score
    from .http.wire import ApiError

__all__ = ["Answer", "ApiError", "Engine", "Score"]


def __getattr__(name: str) -> object:
    """The public names, imported when they are first asked for: replay runs without Starlette."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".http.wire" if name == "ApiError" else ".api", __name__), name)
