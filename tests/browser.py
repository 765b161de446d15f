"""Browser: headless Chromium, driven over its own protocol through two pipes.

Owns the one place that says how tests come by Chromium: it must be installed (Debian's package
`chromium`, any Chrome or Chromium elsewhere), or named by CHROMIUM. Waits on the browser's events,
never on a clock. Any request that leaves the page is kept, so that a test can say there was none.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = (
    "no Chromium was found, and these tests must see the page in one: install it (on Debian "
    "`apt-get install chromium`), or set CHROMIUM to the path of a Chrome or Chromium"
)
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)


def chromium() -> str:
    """The path of a Chromium. Raises RuntimeError, with what to do, where there is none."""
    named = os.environ.get("CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(MISSING)
    return found


class Browser:
    """One Chromium process with one page. `requests`: URLs asked for by the page so far."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, results = os.pipe(), os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; these may be taken by the pipes.
        ends = [fcntl.fcntl(it, fcntl.F_DUPFD_CLOEXEC, 10) for it in (commands[0], results[1])]
        self._process = subprocess.Popen(
            [chromium(), *FLAGS, f"--user-data-dir={self._folder.name}"],
            preexec_fn=lambda: (os.dup2(ends[0], 3), os.dup2(ends[1], 4)),
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        for end in (*ends, commands[0], results[1]):
            os.close(end)
        self._commands, self._results = os.fdopen(commands[1], "wb"), os.fdopen(results[0], "rb")
        self._numbers, self._pending = itertools.count(1), b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the process."""
        self._commands.close()
        self._process.terminate()
        self._process.wait()
        self._results.close()
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the page; its result."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = self._results.read1(1 << 16)  # type: ignore[attr-defined]
            if not data:
                raise RuntimeError("Chromium ended")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._keep(message)
        return message

    def _keep(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
        if method is not None:
            self.events.append(message)

    def show(
        self, page: Path | str, width: int = 1280, height: int = 800, dark: bool = False
    ) -> None:
        """Load a file, or a URL, in a window of that size, and wait until its script says it is
        done.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.errors.clear()
        self.events.clear()
        self.load(page)
        self.ask(
            "new Promise((done) => { const root = document.documentElement;"
            "const look = () => root.dataset.ready ? requestAnimationFrame(() => "
            "requestAnimationFrame(done)) : requestAnimationFrame(look); look(); })"
        )

    def load(self, page: Path | str) -> None:
        """Go to a file, or a URL, and wait until it is there."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not any(it.get("method") == "Page.loadEventFired" for it in self.events):
            self._read()

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, a promise's value where it is one."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def drawn(self) -> None:
        """Wait until what was asked for is drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def key(self, name: str, text: str = "") -> None:
        """Press and release a key, by its name ("ArrowRight", "+")."""
        given: dict[str, Any] = {"key": name}
        if text or len(name) == 1:
            given["text"] = text or name
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.drawn()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: "mouseMoved", "mousePressed", "mouseReleased", "mouseWheel"."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.drawn()

    def shot(self, path: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))
