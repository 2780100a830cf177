"""Drives headless Chromium over its debugging protocol, for scripts that test pages of flatout.

Needs Chromium (or Chrome) and the Python package `websockets`.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found():
    """The path of the program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page. `trouble` collects everything that the page logs or throws."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--hide-scrollbars",
                 f"--user-data-dir={self.profile.name}", "--no-first-run", "--disable-extensions", "about:blank"]
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        start_new_session=True)
        port_file = Path(self.profile.name, "DevToolsActivePort")
        port = wait(lambda: port_file.exists() and port_file.read_text().split("\n")[0], "the browser starts", 60)
        pages = wait(lambda: [p for p in self.targets(port) if p["type"] == "page"], "the browser has a page", 60)
        from websockets.sync.client import connect

        self.socket = connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
        self.number = 0
        self.trouble = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    @staticmethod
    def targets(port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            return json.load(answer)

    def call(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("method") == "Runtime.exceptionThrown":
                self.trouble.append(json.dumps(message["params"]["exceptionDetails"])[:600])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.trouble.append(message["params"]["entry"]["text"])
            elif message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def run(self, expression):
        """The value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url=url)
        wait(lambda: self.run("document.readyState") == "complete", "the page loads")

    def size(self, width, height, scale=1, phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)

    def scheme(self, name):
        """Sets the system's colour scheme, `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def key(self, name, code):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def picture(self, path=None):
        """A screenshot of the page as PNG."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        if path:
            Path(path).write_bytes(data)
        return data

    def close(self):
        self.socket.close()
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        self.process.wait(timeout=30)
        self.profile.cleanup()


def wait(check, what, seconds=60):
    """Polls `check` until its value is true and returns it; an error after a timeout."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := check():
                return value
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    raise TimeoutError(f"not within {seconds} s: {what}")
