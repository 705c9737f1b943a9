"""Why a run ended: one correct reason, the same at every party, with what to do next."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import chat
import pytest
from federation import PARTIES, Federation
from test_origin import FOREVER, begin, new_outcomes, outcomes

from cloister import errors
from cloister.deploy.approval.halting import halt
from cloister.errors import CloisterError

pytest.importorskip("nvflare")
chat.register()
SKEWED = "import time; real = time.time; time.time = lambda: real() + 1800; "


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("reasons"), timeout=20.0)
    made.agree()
    made.start(*PARTIES)
    try:
        yield made
    finally:
        made.close()


def agreed_on(federation, before, reason, origin, order=None):
    """Check that all parties name this reason and origin; returns the sentence that all have for what to do."""
    federation.wait_until(lambda: len(new_outcomes(federation, before, PARTIES)) == len(PARTIES), 60)
    ended = new_outcomes(federation, before, PARTIES)
    said = {p: (e.error["reason"], e.error["origin"]) for p, e in ended.items()}
    assert said == dict.fromkeys(PARTIES, (reason, origin)), {p: e.error for p, e in ended.items()}
    steps = {e.error["next"] for e in ended.values()}
    assert len(steps) == 1, steps
    if order is not None:
        assert (errors.reason_of(order), errors.origin_of(order, "hub")) == (reason, origin)
    return steps.pop()


@pytest.fixture
def full_disk(tmp_path):
    """A file system without room."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    place.chmod(0o700)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with open(place / "filler", "wb", buffering=0) as f:
        try:
            while f.write(bytes(4096)):
                pass
        except OSError:
            pass
    os.sync()


@pytest.mark.parametrize("victim", ["vienna", "hub"])
def test_a_full_disk(federation, full_disk, victim):
    federation.agree()
    file = federation.kits[victim] / "local" / "site.toml"
    text = file.read_text()
    file.write_text(text.replace('out = "results"', f'out = "{full_disk}"'))
    fill(full_disk)
    before = outcomes(federation)
    try:
        with pytest.raises(CloisterError) as e:
            federation.run()
    finally:
        file.write_text(text)
    others = [p for p in PARTIES if p != victim]
    federation.wait_until(lambda: len(new_outcomes(federation, before, others)) == len(others), 60)
    ended = new_outcomes(federation, before, others)
    said = {p: (e.error["reason"], e.error["origin"]) for p, e in ended.items()}
    assert said == dict.fromkeys(others, ("disk", victim)), {p: x.error for p, x in ended.items()}
    assert (errors.reason_of(e.value), errors.origin_of(e.value, "hub")) == ("disk", victim)
    assert "no space" in (federation.kits[victim] / "log.txt").read_text().lower()
    assert {x.error["next"] for x in ended.values()} == {errors.next_step("disk", victim)}


def test_a_halt(federation):
    federation.agree(parameters=FOREVER)
    before = outcomes(federation)
    thread, ends = begin(federation, "begun")
    halt(federation.kits["vienna"], "Dr. D. Vorlage")
    thread.join()
    assert "vienna" in agreed_on(federation, before, "halted", "vienna", ends[0])


def test_a_coordinator_that_is_stopped(federation):
    federation.agree(parameters=FOREVER)
    before = outcomes(federation)
    thread, _ = begin(federation, "begun")
    federation.stop("hub")
    thread.join()
    try:
        assert "hub" in agreed_on(federation, before, "stopped", "hub")
    finally:
        federation.start("hub")


def test_a_refusal(federation):
    federation.agree()
    halt(federation.kits["vienna"], "Dr. D. Vorlage")
    before = outcomes(federation)
    with pytest.raises(CloisterError) as e:
        federation.run()
    assert "approve" in agreed_on(federation, before, "refused", "vienna", e.value)


def test_a_clock_that_is_wrong(federation):
    federation.agree()
    federation.stop("vienna")
    federation.start("vienna", patch=SKEWED)
    before = outcomes(federation)
    try:
        with pytest.raises(CloisterError) as e:
            federation.run()
        assert "clock" in agreed_on(federation, before, "clock", "vienna", e.value)
    finally:
        federation.stop("vienna")
        federation.start("vienna")
