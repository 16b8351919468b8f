"""A headless Chromium, driven over a pipe by its DevTools protocol: what a test needs of it, and no package.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-pipe",
]
# Chromium reads commands from file 3 and writes to file 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
WITHIN = 60.0  # seconds for any answer
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "PageUp": 33, "PageDown": 34, "Tab": 9}


def find() -> str:
    """Where Chromium or Chrome is; the test that asks is skipped without one, as pip has none to install."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    return path or pytest.skip("needs Chromium or Chrome on PATH; on Debian: apt-get install -y chromium")


class Page:
    """A tab. Every method returns when the browser has answered."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._rest, self._number, self._session = commands, answers, b"", 0, None
        self.home = "about:blank"  # the address of the page that tests open
        self.problems: list[str] = []  # what the page threw or wrote to its console as an error
        self.requests: list[str] = []  # every address that it asked for
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; raises what the browser says is wrong with it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WITHIN
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium has said nothing for {WITHIN} s")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        event = json.loads(text)
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.problems.append(event["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
        return event

    def open(self, address: str) -> None:
        """Opens an address anew, and waits until its script has run."""
        self.call("Page.navigate", url="about:blank")
        error = self.call("Page.navigate", url=address).get("errorText")
        if error:
            raise RuntimeError(f"{address}: {error}")
        self.wait("document.readyState === 'complete' && window.jpipe !== undefined")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + WITHIN
        while not self.get(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.02)

    def get(self, expression: str) -> Any:
        """The value of a JavaScript expression, through JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression[:200]}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key of the keyboard."""
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def write(self, text: str) -> None:
        """Types text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Clicks into the middle of an element."""
        at = self.get(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def appear(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and whether its user likes it dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def chromium(path: str) -> Iterator[Page]:
    """A browser with an empty profile and one tab; it ends with the block."""
    files = [*os.pipe(), *os.pipe()]
    ends = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 10) for file in files]  # off 3 and 4, which the child gives away
    for file in files:
        os.close(file)
    reads, writes, answers_from, answers_to = ends
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            sys.executable,
            "-c",
            LAUNCH,
            str(reads),
            str(answers_to),
            path,
            *FLAGS,
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            command, pass_fds=(reads, answers_to), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(answers_to)
        try:
            yield Page(writes, answers_from)
        finally:
            os.close(writes)  # Chromium ends when nobody can command it
            os.close(answers_from)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
