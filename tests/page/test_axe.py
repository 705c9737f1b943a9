"""Faults of accessibility that axe-core finds in the page of a party and in a report; `make axe` runs it."""

import os
from pathlib import Path

import pytest

from cloister.deploy.logs import Teller
from cloister.mpc.net.events import Event
from cloister.study import Party

RUN = "20260131T120000Z-3f2a9c1e"
AXE = Path(os.environ.get("AXE", "nowhere"))
FOUND = "axe.run().then(found => found.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html)]))"

pytestmark = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here; make axe brings it")


def faults(chromium):
    chromium.eval(AXE.read_text(encoding="utf-8") + ";0")
    return [fault for fault in chromium.eval(FOUND) if fault[0] in ("serious", "critical")]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_no_serious_fault(chromium, page, width, dark):
    at = f"http://Ann:{page.served.token}@127.0.0.1:{page.port}"
    run = bytes.fromhex("77" * 16)
    page.service.runs[run] = None
    tell = Teller(page.kit, run.hex())
    tell(Event(Party("basel"), "step", "pooled_quantiles", "L2", "Cut", "hub", 10, 1_200_000, 7, 4, 10))
    try:
        for path in ("", "?done=approved", f"runs/{RUN}", f"runs/{RUN}/report", "nothing"):
            chromium.open(f"{at}/{path}", width=width, dark=dark)
            assert faults(chromium) == []
    finally:
        tell.end()
        del page.service.runs[run]


def test_it_would_find_one(chromium, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><title>x</title><img src=x><input>")
    chromium.open(path)
    assert {fault[1] for fault in faults(chromium)} >= {"image-alt", "label"}
