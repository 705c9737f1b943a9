"""The report in a headless Chromium, spoken to over its debugging pipe: no driver, no port, no further package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

from cloister.cells import demo as demo_data
from cloister.report.page import write_report
from cloister.run.rehearsal import Fault, rehearse

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

    def call(self, method, seconds=60, **params):
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

    def open(self, path, *, width=1100, height=900, dark=False):
        """Load a file and return the events until it is loaded and quiet."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read(deadline))
        self.eval("new Promise(r => setTimeout(r, 200))")
        return list(self.events)

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


@pytest.fixture(scope="module")
def chromium():
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine")
    made = Browser(path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    sites, cut = demo_data.demo_sites(), Fault("truncate", sender="basel", name="Keys")
    runs = [rehearse("bin-values", sites, mode=mode) for mode in ("hardened", "published")]
    runs.append(rehearse("bin-values", sites, faults=[cut], check=False))
    table = [("mode", "federated", "what an attack finds"), ("hardened", "100 %", "x" * 200)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(path, runs, title="Three hospitals", table=table)


def problems(events):
    kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")
    return [e for e in events if e.get("method") in kinds]


def requests(events):
    asked = [e["params"]["request"]["url"] for e in events if e.get("method") == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith("data:")]


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (360, False), (360, True)])
def test_loads_in_a_browser(chromium, page, width, dark):
    events = chromium.open(page, width=width, dark=dark)
    assert problems(events) == []
    assert requests(events) == [page.as_uri()]
    assert chromium.eval("[...document.images].map(i => i.complete && i.naturalWidth > 100)") == [True] * 4
    chromium.eval("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.eval("document.documentElement.scrollWidth <= innerWidth")
    tall = "[...document.querySelectorAll('svg[role=img]')].every(s => s.getBoundingClientRect().height > 50)"
    assert chromium.eval(tall)
    ground = chromium.eval("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 24, 27)") == dark


def test_the_policy_stops_requests_and_scripts(chromium, page, tmp_path):
    """Were something to slip through escaping, the browser would still not run or fetch it."""
    leaky = tmp_path / "leaky.html"
    evil = "<script>document.title='evil'</script><img src='http://127.0.0.1:9/x.png'>"
    evil += "<img src=x onerror=\"document.title='evil'\">"
    leaky.write_text(page.read_text().replace("</main>", f"{evil}</main>"))
    events = chromium.open(leaky)
    assert chromium.eval("document.title") == "Three hospitals"
    sent = [e for e in events if e.get("method") == "Network.responseReceived"]
    assert [e["params"]["response"]["url"] for e in sent if not e["params"]["response"]["url"].startswith("data:")] == [
        leaky.as_uri()
    ]
    assert problems(events)  # and the test above would have seen it


def test_keyboard(chromium, page):
    chromium.open(page)
    for key in ("Tab", "Enter"):
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            extra = {"text": "\r"} if kind == "char" else {}
            chromium.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)
        if key == "Tab":
            assert chromium.eval("document.activeElement.textContent") == "Skip to the results"
            assert chromium.eval("document.activeElement.getBoundingClientRect().left") >= 0
    assert chromium.eval("location.hash") == "#main"


def test_print_unfolds_everything(chromium, page):
    chromium.open(page)
    hidden = "[...document.querySelectorAll('details table')].filter(t => !t.checkVisibility()).length"
    assert chromium.eval(hidden) > 10
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.eval(hidden) == 0
    chromium.call("Emulation.setEmulatedMedia", media="")
