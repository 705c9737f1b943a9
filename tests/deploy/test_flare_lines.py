"""Lines that break while a run goes on, with default settings: up to half a minute is survived."""

from __future__ import annotations

import threading
import time

import chat
import psutil
import pytest
from federation import PARTIES, Federation
from proxies import line

from cloister.errors import CloisterError

pytest.importorskip("nvflare")
chat.register()
pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Services with the study's usual timeout, all of whose sites reach the coordinator over one line."""
    made = Federation(tmp_path_factory.mktemp("lines"), timeout=60.0)
    inner = made.behind(line)
    made.agree(parameters={"rounds": 200, "pause": 0.05})
    made.start(*PARTIES)
    try:
        yield made, inner
    finally:
        made.close()


def run_with(federation, blow):
    federation.clear_marks()
    ends = []

    def go():
        try:
            ends.append(federation.run(limit=240.0))
        except CloisterError as e:
            ends.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    federation.wait_for_mark("basel", ends)
    began = time.monotonic()
    blow()
    thread.join()
    print(f"ended {time.monotonic() - began:.1f} s after the line broke")
    return ends[0]


@pytest.mark.parametrize(("how", "seconds"), [("cut", 8.0), ("cut", 30.0), ("hang", 30.0)])
def test_a_run_survives_a_line_that_is_down(broken, how, seconds):
    federation, line = broken

    def blow():
        getattr(line, how)()
        time.sleep(seconds)
        line.heal()

    ended = run_with(federation, blow)
    assert not isinstance(ended, CloisterError), ended
    assert ended.status == "done"


def test_a_line_is_made_anew_within_seconds(broken):
    federation, line = broken
    healed = []

    def blow():
        line.cut()
        time.sleep(12.0)
        line.heal()
        healed.append(time.time())
        log = federation.kits["hub"] / "log.txt"
        size = log.stat().st_size

        def back():
            with log.open() as f:
                f.seek(size)
                new = f.read()
            return all(f"{p} is connected" in new for p in PARTIES if p != "hub")

        federation.wait_until(back, 10.0)
        healed.append(time.time())

    ended = run_with(federation, blow)
    assert not isinstance(ended, CloisterError), ended
    assert healed[1] - healed[0] < 6.0, healed  # 2 s, and TLS
    print(f"all connected again {healed[1] - healed[0]:.1f} s after the line was there")


@pytest.mark.parametrize("party", ["basel", "hub"])
def test_a_run_survives_the_death_of_a_carrier(broken, party):
    federation, _ = broken

    def blow():
        service = psutil.Process(federation.services[party].pid)
        (carrier,) = [p for p in service.children() if "cloister.deploy.carrier" in p.cmdline()]
        carrier.kill()

    ended = run_with(federation, blow)
    assert not isinstance(ended, CloisterError), ended
    assert ended.status == "done"
