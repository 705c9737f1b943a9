"""Puts what several folders of tests share on the path, and a browser at their disposal; draws the same examples."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "support"))
from browser import Browser, find

settings.register_profile("house", derandomize=True, deadline=None)  # a change is judged by the same examples each time
settings.load_profile("house")


HERE = Path(__file__).parent
FEDERATED = (
    "detached",
    "flare",
    "plain_flare",
    "door",
    "origin",
    "proxy",
    "reasons",
)  # with services and FLARE
FLARE = tuple(f"deploy/test_{name}" for name in FEDERATED)
RUNS = ("mpc", "protocols", "attacks", "papers", "workflows", "rehearsal", "deploy", "walk")
NO_RUN = ("mpc/crypto", "workflows/test_modes")


def kind_of(path):
    """`flare`, `protocol` or `unit`, by where a file of tests lies."""
    name = path.relative_to(HERE).as_posix()
    if name.startswith(FLARE):
        return "flare"
    return "protocol" if name.startswith(tuple(f"{r}/" for r in RUNS)) and not name.startswith(NO_RUN) else "unit"


def pytest_itemcollected(item):
    item.add_marker(kind_of(item.path))


@pytest.fixture(scope="module")
def chromium():
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine")
    made = Browser(path)
    yield made
    made.close()
