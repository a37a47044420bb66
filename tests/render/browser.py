"""A real headless browser, driven over two pipes (the Chrome DevTools Protocol): enough to open a page,
inspect it and record its events.

Only the browser itself is needed. Source: https://chromedevtools.github.io/devtools-protocol/, and
``--remote-debugging-pipe``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

from limits import hang_s

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
    "chrome",
)


def find_browser():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. ``events`` holds the events that arrived while commands were answered."""

    def __init__(self, to_browser, from_browser):
        self.to_browser, self.from_browser = to_browser, from_browser
        self.events: list[dict[str, Any]] = []
        self.number = 0
        self.rest = b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    session = ""

    def ask(self, method, **params):
        """The answer to one command. Raises RuntimeError with the browser's own message."""
        self.number += 1
        message = {
            "id": self.number,
            "method": method,
            "params": params,
            **({"sessionId": self.session} if self.session else {}),
        }
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            observed = self._observe()
            if observed.get("id") == self.number:
                if "error" in observed:
                    raise RuntimeError(f"{method}: {observed['error']['message']}")
                return observed["result"]
            self.events.append(observed)

    def _observe(self):
        while b"\0" not in self.rest:
            more = os.read(self.from_browser, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self.rest += more
        first, self.rest = self.rest.split(b"\0", 1)
        return json.loads(first)

    def open(self, path, width, dark):
        """Show a file in a window of this width and wait until it is laid out."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._observe())

    def value(self, expression):
        """The value of a JavaScript expression on the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def complaints(self):
        """Errors and warnings of the console, exceptions, blocks by the security policy."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.exceptionThrown" or (
                event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error"
            ):
                said.append(json.dumps(params)[:400])
        return said

    def requests(self):
        """Every address that the page requested, including its own."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, path):
        """The whole page, however long."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path


@contextlib.contextmanager
def browser(program):
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    home = tempfile.mkdtemp(prefix="flatout-browser-")
    # The browser reads commands from descriptor 3 and answers on 4; bash moves them there whatever their
    # numbers are.
    words = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        f"--user-data-dir={home}",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--hide-scrollbars",
    ]
    process = subprocess.Popen(
        ["bash", "-c", f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"', "-", *words],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        process.terminate()
        process.wait(timeout=hang_s(20))
        os.close(ours_in)
        shutil.rmtree(home, ignore_errors=True)
