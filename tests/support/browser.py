"""A headless Chromium over its debugging pipe (Chrome DevTools Protocol): opens files, types, asks the page.

The pipe needs no library: messages of JSON, each ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36, " ": 32}


def found_browser() -> str | None:
    """Return the path of a Chromium; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless browser, which reports whatever it would write to its console or ask for."""

    def __init__(self, folder: Path) -> None:
        browser = found_browser()
        assert browser is not None, "no Chromium here; .ci/system-packages adds one"
        to_child, from_us = os.pipe()
        to_us, from_child = os.pipe()
        # Descriptors 3 and 4 are what Chromium reads and writes; a shell puts them there.
        script = f'exec 3<&{to_child} 4>&{from_child}; exec "$0" "$@"'
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        )
        profile = f"--user-data-dir={folder / 'profile'}"
        self._process = subprocess.Popen(
            ["bash", "-c", script, browser, *options, profile, "about:blank"],
            pass_fds=(to_child, from_child),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._write, self._read = from_us, to_us
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol. Raises AssertionError for an error."""
        return self._ask(method, parameters, session=self._session)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Load a file and wait until it is drawn: until two frames after its load nothing is left to do."""
        self.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.absolute().as_uri())
        # The event may still be that of the empty page before.
        while (
            self.value("document.readyState + ' ' + document.URL") != f"complete {page.absolute().as_uri()}"
        ):
            time.sleep(0.02)
        self.value(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
        )

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression, or the promise that it is, comes to."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after the other; a single character is typed."""
        for key in keys:
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            # Codes of signs are those of other keys.
            letter = ord(key.upper()) if len(key) == 1 and key.isalnum() else 0
            code = _KEYS.get(key, letter)
            pressed = {"key": key, "windowsVirtualKeyCode": code, **text}
            self.ask("Input.dispatchKeyEvent", type="keyDown", **pressed)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    @property
    def complaints(self) -> list[str]:
        """What the page wrote to the console as an error or a warning, and exceptions that nobody caught."""
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            if event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                found.append(json.dumps(parameters["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        """What was asked for since the page was opened, the page itself included."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]

    def _ask(self, method: str, parameters: dict[str, Any], *, session: str | None) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._read, 1 << 20)
            assert block, "the browser is gone"
            self._buffer += block
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
