"""Chromium without a window, told what to do by its DevTools protocol over a pipe: pages as they look, in pictures.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--mute-audio")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
LIGHT, DARK = "light", "dark"
QUALITY = 85  # of WebP, in percent


class Browser:
    """One page of a browser, for a `with` block.

    Args:
        width: of the page, in CSS pixels.
        height: of what is seen of it at once.
        scale: pixels of a picture for each CSS pixel.
    """

    def __init__(self, width: int = 1000, height: int = 800, scale: float = 1) -> None:
        self._size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._calls = 0
        self._session: Mapping[str, str] = {}
        self._unread = b""

    def __enter__(self) -> Browser:
        if (found := next(filter(None, map(shutil.which, PROGRAMS)), None)) is None:
            raise SystemExit(f"found none of {', '.join(PROGRAMS)}; on Debian type: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory()
        asked, self._to = os.pipe()
        self._from, answered = os.pipe()
        command = [found, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        # the protocol is spoken over descriptors 3 and 4
        script = f'exec "$@" 3<&{asked} 4>&{answered}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command, "about:blank"],
            pass_fds=(asked, answered),
            stderr=subprocess.DEVNULL,
        )
        os.close(asked)
        os.close(answered)
        page = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Emulation.setDeviceMetricsOverride", **self._size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)  # it ends when nobody speaks to it
        self._process.wait(20)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result.

        Raises:
            RuntimeError: the browser has refused it, or has ended.
        """
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": arguments, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._calls:  # others are events
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not (read := os.read(self._from, 1 << 20)):
                raise RuntimeError("the browser has ended")
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def open(self, address: str, scheme: str = LIGHT, until: str = "true", timeout_seconds: float = 60) -> None:
        """Open a page in a light or dark scheme, and wait until it is loaded and a JavaScript expression is true.

        Raises:
            TimeoutError: it is not, after so long.
        """
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=address)
        end = time.monotonic() + timeout_seconds
        while not self.value(f"document.readyState === 'complete' && location.href !== 'about:blank' && ({until})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{address}: not so in {timeout_seconds} s: {until}")
            time.sleep(0.1)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page; None where it fails."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path, height: int | None = None) -> Path:
        """Write what the page shows, as WebP or as PNG, by the name's end.

        Args:
            height: of the part to show, in CSS pixels from the top; None for what is seen at once.
        """
        area = {"x": 0, "y": 0, "width": self._size["width"], "height": height or self._size["height"], "scale": 1}
        form = {"format": "webp", "quality": QUALITY} if path.suffix == ".webp" else {"format": "png"}
        shot = self.call("Page.captureScreenshot", clip=area, captureBeyondViewport=True, **form)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
