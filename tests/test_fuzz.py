"""Parsers of foreign bytes accept, or reject with their documented error: stored corpus, and changed copies of it."""

import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.cells import probe

FUZZ = Path(__file__).parents[1] / "fuzz"
TARGETS = runpy.run_path(str(FUZZ / "targets.py"))["TARGETS"]
CORPUS = {name: [path.read_bytes() for path in sorted((FUZZ / "corpus" / name).iterdir())] for name in TARGETS}
FAST = ("frame", "receipt", "journal", "study", "npz")


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 1.0)  # HDF5 hangs on one of the files; what ends it is the processor's time,
    monkeypatch.setattr(probe, "PATIENCE", 600.0)  # no clock
    assert CORPUS[name]
    for data in CORPUS[name]:
        TARGETS[name](data)


@st.composite
def changed(draw, name):
    """A stored input with a few bytes replaced, removed or repeated."""
    data = bytearray(draw(st.sampled_from(CORPUS[name])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        data[at:end] = draw(st.binary(max_size=8)) * draw(st.sampled_from((1, 1, 2, 50)))
    return bytes(data)


@pytest.mark.parametrize("name", FAST)
def test_changed_inputs(name):
    @settings(max_examples=150, deadline=None)
    @given(changed(name))
    def run(data):
        TARGETS[name](data)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_many_changed_inputs(name):
    @settings(max_examples=5000, deadline=None)
    @given(st.one_of(changed(name), st.binary(max_size=200)))
    def run(data):
        TARGETS[name](data)

    run()


def test_a_target_raises_on_anything_but_its_own_error(monkeypatch):
    """The targets can fail: an error of another kind is not swallowed."""
    module = sys.modules["cloister.mpc.net.wire"]
    monkeypatch.setattr(module, "check_structure", lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TARGETS["frame"](b"\x90")
