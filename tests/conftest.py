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


@pytest.fixture(scope="module")
def chromium():
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine")
    made = Browser(path)
    yield made
    made.close()
