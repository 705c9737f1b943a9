"""Every test is of one kind, by its path: `pytest -m unit`, `-m protocol`, `-m flare`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("test_study.py", "unit"),
        ("cells/test_files.py", "unit"),
        ("mpc/crypto/test_prg.py", "unit"),
        ("mpc/sums/test_secure_sum.py", "protocol"),
        ("workflows/map_labels/test_verified_knn.py", "protocol"),
        ("deploy/test_kit.py", "protocol"),
        ("deploy/test_flare_mapping.py", "flare"),
    ],
)
def test_the_path_says_the_kind(path, kind, request):
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "kind_of"))
    assert conftest.kind_of(HERE / path) == kind


def test_a_test_has_its_mark(request):
    assert request.node.get_closest_marker("unit")
    assert not request.node.get_closest_marker("protocol")


def test_whatever_uses_a_federation_is_of_flare(request):
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "kind_of"))
    found = [p for p in (HERE / "deploy").rglob("test_*.py") if "= Federation(" in p.read_text(encoding="utf-8")]
    assert len(found) > 3
    assert {conftest.kind_of(path) for path in found} == {"flare"}
