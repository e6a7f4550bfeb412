"""A headless Chromium that a program steers over pipes: pages, scripts, sizes and pictures.

It speaks the browser's own protocol (``--remote-debugging-pipe``: JSON with a NUL after each
message), so no driver and no library is needed.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Chromium:
    """One browser with one page, until it is closed."""

    def __init__(self) -> None:
        """Start the browser.

        Raises:
            FileNotFoundError: there is none.
        """
        if BROWSER is None:
            raise FileNotFoundError("no chromium: install Debian's package of this name")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, their_writes = os.pipe()
        their_reads, writes = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4.
        command = f'exec "$@" 3<&{their_reads} 4>&{their_writes}'
        profile = f"--user-data-dir={self._folder.name}"
        words = [BROWSER, *OPTIONS, "--remote-debugging-pipe", profile, "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", *words],
            pass_fds=(their_reads, their_writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_reads)
        os.close(their_writes)
        self._reads = os.fdopen(reads, "rb")
        self._writes = os.fdopen(writes, "wb")
        self._rest = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        self.send("Page.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writes.close()
        self._reads.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; return its result.

        Raises:
            RuntimeError: the browser refuses it, or has ended.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._writes.write(json.dumps(message).encode() + b"\0")
        self._writes.flush()
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._reads.fileno(), 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(message)
        self._loaded |= answer.get("method") == "Page.loadEventFired"
        return answer

    def open(self, url: str, width: int = 1300, height: int = 900) -> None:
        """Open a page in a window of a size in CSS pixels; return when it is loaded.

        Raises:
            RuntimeError: there is no such page.
        """
        self.resize(width, height)
        # Elsewhere first: a change of an address behind its # loads nothing.
        for address in ("about:blank", url):
            self._loaded = False
            answer = self.send("Page.navigate", url=address)
            if "errorText" in answer:
                raise RuntimeError(f"{address}: {answer['errorText']}")
            while not self._loaded:
                self._message()

    def resize(self, width: int, height: int) -> None:
        """Set the window's size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """Return the value of a script in the page, as JSON; a promise is awaited.

        Raises:
            RuntimeError: the script fails.
        """
        options = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", **options)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            said = details.get("exception", {}).get("description", details["text"])
            raise RuntimeError(f"in the page: {said}")
        return answer["result"].get("value")

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page as PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(answer["data"]))
