"""A page in Chromium, driven over its debugging pipe: real time, real widths."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _PROGRAMS)), None)


def missing(reason: str) -> NoReturn:
    """Skip a test whose program is not here; on GitHub, which installs each program, the test fails."""
    if "GITHUB_ACTIONS" in os.environ:
        pytest.fail(reason)
    pytest.skip(reason)


class Page:
    """A page that is open; `read_fd` and `write_fd` are our ends of the pipes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._answers = os.fdopen(read_fd, "rb")
        self._commands = os.fdopen(write_fd, "wb")
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._number:
                return answer["result"]

    def open(self, url: str, width: int = 1100) -> None:
        """Go to an address, in a window of this width in pixels."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait_for(self, condition: str) -> str:
        """The page's HTML once an expression of JavaScript is true."""
        while not (html := self.evaluate(f"({condition}) && document.documentElement.outerHTML")):
            time.sleep(0.05)
        return str(html)

    def _read(self) -> bytes:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)


def contrast(colour: str, other: str) -> float:
    """The ratio of two colours by WCAG 2.2, from 1 to 21."""

    def luminance(code: str) -> float:
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(colour), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@contextmanager
def browser(directory: Path, *options: str) -> Iterator[Page]:
    """Chromium without a window; `directory` is for its profile."""
    if CHROMIUM is None:
        missing("needs Chromium")
    (command_out, command_in), (answer_out, answer_in) = os.pipe(), os.pipe()
    program = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
               f"--user-data-dir={directory}", *options]  # fmt: skip
    # The browser reads from descriptor 3 and writes to 4.
    shell = f'exec "$@" 3<&{command_out} 4>&{answer_in}'
    with (directory / "chromium.log").open("w") as log:
        words = ["bash", "-c", shell, "bash", *program]
        pipes = (command_out, answer_in)
        process = subprocess.Popen(words, pass_fds=pipes, stdout=log, stderr=log)
        os.close(command_out)
        os.close(answer_in)
        try:
            yield Page(answer_out, command_in)
        finally:
            process.kill()
            process.wait()
