"""CONTRIBUTING.md's walk-through of adding a protocol, followed to the letter in a folder of its own."""

import importlib.util
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

import cloister.mpc.sums
from cloister.testing import check_vectors

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def walked(tmp_path, monkeypatch):
    """The protocol and its tests, as the page has them."""
    part = PAGE.partition("## Adding a protocol, step by step")[2]
    protocol, tests = (
        textwrap.dedent(b) for b in re.findall(r"^ *```python\n(.*?)^ *```", part, re.DOTALL | re.MULTILINE)
    )
    (tmp_path / "protocols" / "sums").mkdir(parents=True)
    (tmp_path / "vectors").mkdir()
    (tmp_path / "protocols" / "sums" / "pooled_mean.py").write_text(protocol, encoding="utf-8")
    (tmp_path / "protocols" / "sums" / "test_pooled_mean.py").write_text(tests, encoding="utf-8")
    module = load("cloister.mpc.sums.pooled_mean", tmp_path / "protocols" / "sums" / "pooled_mean.py")
    monkeypatch.setattr(cloister.mpc.sums, "pooled_mean", module, raising=False)
    yield module, load("walked_test_pooled_mean", tmp_path / "protocols" / "sums" / "test_pooled_mean.py")
    for name in ("cloister.mpc.sums.pooled_mean", "walked_test_pooled_mean"):
        sys.modules.pop(name)


def test_the_walk_through_works(walked):
    module, tests = walked
    assert "mean over the sites" in cloister.protocols.cut_section(inspect.getdoc(module), "Reveals")
    check_vectors(module, tests.case(1.0, 2.0, 3.0), tests.VECTORS, write=True)
    names = [name for name, f in vars(tests).items() if name.startswith("test_") and inspect.isfunction(f)]
    assert names == ["test_ideal", "test_vectors", "test_view", "test_abort", "test_cost"]
    for name in names:
        getattr(tests, name)()
