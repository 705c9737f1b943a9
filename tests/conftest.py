"""Puts what several folders of tests share on the path, and a browser at their disposal."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, find


@pytest.fixture(scope="module")
def chromium():
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine")
    made = Browser(path)
    yield made
    made.close()
