"""A headless Chromium driven over its debugging pipe (file descriptors 3 and 4, JSON records that end in NUL): real pointer and keys.

Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Tab:
    """One page. `events` collects what the browser reports: exceptions, console and log entries, requests."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._id, self._session = write, read, b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser closed its pipe"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Load a file and wait until it has drawn itself; `events` start anew."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.frame()

    def frame(self) -> None:
        """Wait until the browser has laid out and painted twice."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def hover(self, selector: str) -> tuple[float, float]:
        """Move the pointer to the middle of the first element that matches; returns where that is."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        self.frame()
        x, y = self.evaluate(f"(({{ x, y, width, height }}) => [x + width / 2, y + height / 2])({found}.getClientRects()[0])")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.frame()
        return x, y

    def click(self, selector: str) -> None:
        """Press and release the pointer in the middle of the first element that matches."""
        x, y = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frame()

    def press(self, key: str) -> None:
        """Press and release a key by its name, such as `ArrowDown`."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])
        self.frame()

    def choose(self, select: str, value: str) -> None:
        """Choose an option as a person would: the value changes and the page is told."""
        self.evaluate(f"""(() => {{
            const chosen = document.querySelector({json.dumps(select)});
            chosen.value = {json.dumps(value)};
            chosen.dispatchEvent(new Event("change", {{ bubbles: true }}));
        }})()""")
        self.frame()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save a picture of the page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, console messages and log entries so far; a good page has none."""
        kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Tab]:
    """Start a browser with a fresh profile and yield its one tab."""
    (command_read, command_write), (answer_read, answer_write) = os.pipe(), os.pipe()

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    # The shell puts the pipes where the browser looks for them, so that this process, threads and all, need not run code in a fork.
    # Copies at 10 and above: a pipe end may itself sit on 3 or 4.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command_read, answer_write)]
    wired = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", executable, *options]
    process = subprocess.Popen(wired, stdout=quiet, stderr=quiet, pass_fds=ends)
    for end in (command_read, answer_write, *ends):
        os.close(end)
    try:
        yield Tab(command_write, answer_read)
    finally:
        os.close(command_write)
        os.close(answer_read)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
