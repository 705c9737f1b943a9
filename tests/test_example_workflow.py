"""examples/count_labels: a workflow of another package is found, run, explained and held to the same rules."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import cloister as cl
from cloister import protocols, workflows
from cloister.errors import UsageError
from cloister.mpc import Case, Party, check_lies, secure_sum
from cloister.rehearsal.check_disclosure import check_disclosure

FOLDER = Path(__file__).parents[1] / "examples" / "count_labels"
LABELS = ("B", "T", "rare")
HUB, SITES = Party("hub"), tuple(map(Party, ("basel", "lugano", "vienna")))


def install(folder, points):
    """What an installer leaves of the package beside its module."""
    info = folder / "cloister_count_labels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cloister-count-labels\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The package, installed in a folder of its own; the module."""
    (tmp_path / "count_labels.py").write_text((FOLDER / "count_labels.py").read_text(encoding="utf-8"))
    install(tmp_path, tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(cl.__file__).parents[1]}")
    monkeypatch.setattr(protocols, "_added", {})
    workflows.offered.cache_clear()
    yield importlib.import_module("count_labels")
    sys.modules.pop("count_labels")
    workflows.offered.cache_clear()


@pytest.fixture
def cells():
    from anndata import AnnData

    def site(b, t, rare):
        labels = ["B"] * b + ["T"] * t + ["rare"] * rare + ["other"] * 5
        return AnnData(np.ones((len(labels), 2), np.float32), obs={"type": labels})

    return {"basel": site(40, 20, 12), "lugano": site(30, 15, 4), "vienna": site(25, 50, 9)}


def test_it_has_sixty_lines():
    text = (FOLDER / "count_labels.py").read_text(encoding="utf-8")
    code = text.partition('"""\n\nfrom')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_it_is_rehearsed_like_those_of_cloister(example, cells, processes):
    run = cl.rehearse("count-labels", cells, label_key="type", labels=LABELS, processes=processes)
    expected = {"B": 95, "T": 85, "rare": 12}  # 12 at basel; 4 and 9 cells are fewer than min_cells
    assert run.results["hub" if "hub" in run.results else "coordinator"]["cells"] == expected
    for site in cells:
        assert run.data[site].uns["count_labels"] == expected
        assert run.receipts[site].reveals["count_labels"].startswith("coordinator, every site : cells per label")
        assert {e.protocol for e, _ in run.receipts[site].entries if e.kind == "contributed"} == {"count_labels"}


def test_its_contributions_are_of_enough_cells(example, cells):
    found = check_disclosure("count-labels", cells, "basel", label_key="type", labels=LABELS)
    assert found.contributions == 1
    assert found.cells >= 10


def test_under_one_malicious_site_all_honest_parties_learn_the_same(example):
    from cloister.disclosure import Rows

    params = example.Params(secure_sum.Params(SITES, HUB, 2, threshold=3, to_all=True))
    parts = {u: (Rows(60).grouped(np.repeat([0, 1], [30, 30]), 2),) for u in SITES}
    module = type("module", (), {"PROTOCOL": "count_labels", "__name__": "count_labels", "__doc__": example.__doc__})
    module.roles = staticmethod(lambda p: {HUB: example.aggregator} | dict.fromkeys(SITES, example.contributor))

    def right(lie, values):
        totals = [value.z for value in values.values()]
        assert all(np.array_equal(totals[0], z) for z in totals), f"{lie}: honest parties have different totals"

    found = check_lies(module, [Case(params, parts)], right=right, liars=[SITES[0]])
    assert found.aborted > 0


def test_the_command_line_knows_it(example):
    command = [sys.executable, "-c", "from cloister.cli.main import main; main()", "explain", "count-labels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cells per label over all sites" in done.stdout
    assert "label_key" in done.stdout or "label-key" in done.stdout


def test_names_of_cloister_cannot_be_taken(example, tmp_path):
    import dataclasses

    with pytest.raises(UsageError, match="'bin-values' is a workflow of Cloister"):
        workflows.register(dataclasses.replace(example.WORKFLOW, name="bin-values"))
    with pytest.raises(UsageError, match="'secure_sum' is a protocol of Cloister"):
        protocols.add("secure_sum", "count_labels")


def test_two_packages_with_one_name_are_named(example, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    install(other, {workflows.GROUP: {"count-labels": "elsewhere:WORKFLOW"}})
    (other / "cloister_count_labels-1.0.dist-info").rename(other / "elsewhere-1.0.dist-info")
    text = (other / "elsewhere-1.0.dist-info" / "METADATA").read_text()
    (other / "elsewhere-1.0.dist-info" / "METADATA").write_text(text.replace("cloister-count-labels", "elsewhere"))
    monkeypatch.syspath_prepend(other)
    workflows.offered.cache_clear()
    with pytest.raises(UsageError, match="two packages offer a workflow 'count-labels'"):
        workflows.get("count-labels")


def test_an_entry_point_that_is_no_workflow_is_refused(tmp_path, monkeypatch):
    install(tmp_path, {workflows.GROUP: {"no-workflow": "json:dumps"}})
    monkeypatch.syspath_prepend(tmp_path)
    workflows.offered.cache_clear()
    with pytest.raises(UsageError, match="json:dumps is not the workflow 'no-workflow'"):
        workflows.get("no-workflow")
    workflows.offered.cache_clear()
