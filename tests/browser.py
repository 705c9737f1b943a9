"""A headless Chromium, spoken to over its debugging pipe: no driver, no port, no further package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")

# the pipe is 3 and 4 in the browser, whatever its ends are called here
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, path):
        self._profile = tempfile.mkdtemp(prefix="browser-")
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
        flags += f" --remote-debugging-pipe --user-data-dir={self._profile} about:blank"
        command = [sys.executable, "-c", START, str(to_child), str(from_child), path, *flags.split()]
        quiet = subprocess.DEVNULL
        self._child = subprocess.Popen(command, pass_fds=(to_child, from_child), stdout=quiet, stderr=quiet)
        os.close(to_child)
        os.close(from_child)
        self._buffer, self._id, self.events = b"", 0, []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    _session = None

    def _read(self, deadline):
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise EOFError("the browser has ended")
            self._buffer += chunk
        item, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(item)

    def call(self, method, seconds=300, **params):
        self._id += 1
        ask = {"id": self._id, "method": method, "params": params}
        if self._session:
            ask["sessionId"] = self._session
        os.write(self._out, json.dumps(ask).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            told = self._read(deadline)
            if told.get("id") == self._id:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self.events.append(told)

    def open(self, place, *, width=1100, height=900, dark=False):
        """Load a file or an address, and return the events until it is loaded and quiet."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        return self.loaded()

    def loaded(self):
        """Wait until a page that is being loaded is there and quiet; returns the events since it was asked for."""
        deadline = time.monotonic() + 300
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read(deadline))
        time.sleep(0.2)  # timers of the page stand still where it may run no script
        self.eval("0")
        return list(self.events)

    def press(self, key):
        """A key of the keyboard, by its name."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " ")}[key]
        for kind in ("rawKeyDown", *(["char"] if text else []), "keyUp"):
            extra = {"text": text} if kind == "char" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def eval(self, expression):
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["text"])
        return told["result"].get("value")

    def screenshot(self, path, *, top=0, height=None):
        box = self.eval("({w: document.documentElement.clientWidth, h: document.documentElement.scrollHeight})")
        clip = {"x": 0, "y": top, "width": box["w"], "height": min(height or box["h"], box["h"] - top), "scale": 1}
        told = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self):
        try:
            self._session = None
            self.call("Browser.close", seconds=10)
            self._child.wait(10)
        except (OSError, EOFError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()
        for end in (self._in, self._out):
            os.close(end)
        shutil.rmtree(self._profile, ignore_errors=True)


def problems(events):
    kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")
    return [e for e in events if e.get("method") in kinds]


def requests(events):
    asked = [e["params"]["request"]["url"] for e in events if e.get("method") == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith("data:")]
