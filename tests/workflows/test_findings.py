"""Findings: sentences that state the results of a run, in the terminal, the report and `run.findings`."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

import cloister as cl
from cloister import workflows
from cloister.workflows import findings


@pytest.fixture(scope="module")
def runs():
    sites = cl.demo_sites()
    return {
        "shared-pca": cl.rehearse("shared-pca", data=sites, n_components=10, n_top_genes=200),
        "choose-genes": cl.rehearse("choose-genes", data=sites, n_top_genes=100),
        "find-markers": cl.rehearse("find-markers", data=sites, label_key="cell_type"),
    }


def test_sentences_state_the_results(runs):
    first = runs["shared-pca"].findings[0]
    told = runs["shared-pca"].results["basel"]
    assert first == (
        f"10 components of 200 genes hold {sum(told['variance_ratio']):.1%} of the variance of 1,349 cells".replace(
            "% of", " % of"
        )
    )
    chosen = runs["choose-genes"].results["basel"]
    assert runs["choose-genes"].findings[1] == "first: " + ", ".join(chosen["first"][:4])
    markers = runs["find-markers"].results["basel"]["markers"]
    label, genes = next((k, v) for k, v in markers.items() if v)
    assert runs["find-markers"].findings[0] == f"{label}: {', '.join(genes[:4])}"


def test_findings_come_before_figures_and_figures_before_messages(runs, tmp_path):
    page = runs["shared-pca"].report(tmp_path / "report.html").read_text()
    places = [page.index(f">{title}<") for title in ("What was found", "Figures", "What was agreed and approved")]
    assert places == sorted(places)
    assert "components of 200 genes hold" in page


@pytest.mark.parametrize(
    ("name", "results", "options", "expected"),
    [
        (
            "integrate",
            {"a": {"cells": 9, "own_site": {"before": 0.94, "after": 0.42, "if_mixed": 0.33}}},
            {},
            ["all 9 cells: own-site neighbours 0.94 → 0.42, 0.33 if fully mixed"],
        ),
        (
            "quality-control",
            {
                "hub": {"cells": {"a": 150}, "cutoffs": {"total_counts": [6.2694, 19119.5]}},
                "a": {
                    **{"cells": {"a": 150}, "cutoffs": {"total_counts": [6.2694, 19119.5]}},
                    **{"failed": 15, "predicted_doublets": 5, "dropped": 20},
                },
            },
            {},
            [
                "cells pass with total_counts 6.27 to 19,120",
                "a: 15 of 150 cells fail, 5 are predicted doublets; 20 are dropped",
            ],
        ),
        (
            "compare-groups",
            {
                "a": {
                    "tables": [{"of": "T", "contrasts": {"case vs control": {"differ": 74, "first": list("ABCDE")}}}],
                    "left_out": {"B": "few"},
                }
            },
            {"fdr": 0.05},
            ["case vs control, T: 74 genes at FDR 5 %: A, B, C, D, …", "not compared, too few donors: B"],
        ),
        (
            "compare-groups",
            {"a": {"tables": [{"of": "T", "contrasts": {"x": {"differ": 0, "first": []}}}], "left_out": {}}},
            {"fdr": 0.05},
            ["nothing differs at FDR 5 % in 1 table"],
        ),
        (
            "train-classifier",
            {
                "hub": {"labels": ["T", "B"], "cells": 90, "cells_per_label": {}, "accuracy": 0.987, "left_out": []},
                "a": {"unsure": 3, "too_rare_here": {"HSC": 3}},
            },
            {},
            [
                "a classifier of 2 labels from 90 cells; 98.7 % right on held-out cells",
                "a: 3 of its cells are called unknown",
                "a: left out, too few cells: 3 HSC",
            ],
        ),
        (
            "find-outliers",
            {"a": {"rows": 399, "flagged": 27, "flagged_alone": 20}, "hub": {"ranges": 5}},
            {},
            ["a: 27 of 399 rows stand out (20 if it looks at its own rows only)"],
        ),
    ],
)
def test_wording(name, results, options, expected):
    workflow = SimpleNamespace(name=name, findings=None)
    assert findings.sentences(workflow, results, SimpleNamespace(**options)) == expected


def test_every_function_belongs_to_a_workflow_and_bears_empty_results():
    for name, tell in findings.FINDINGS.items():
        assert workflows.get(name).name == name
        assert tell({"a": {}}, SimpleNamespace(fdr=0.05, model="cox")) == []


def test_a_workflow_of_another_package_states_its_own():
    workflow = SimpleNamespace(name="theirs", findings=lambda results, options: [f"{len(results)} parties"])
    assert findings.sentences(workflow, {"a": {}}, None) == ["1 parties"]
    assert findings.sentences(SimpleNamespace(name="silent", findings=None), {"a": {}}, None) == []


def test_results_of_another_version_leave_no_findings(runs):
    run = runs["shared-pca"]
    kept = run.outcomes["basel"].result.pop("genes")
    try:
        assert isinstance(run.findings, list)
    finally:
        run.outcomes["basel"].result["genes"] = kept


def test_terminal_prints_findings_before_the_cost(runs, capsys):
    from cloister.cli.console import show_cost

    show_cost(runs["shared-pca"])
    shown = capsys.readouterr().out
    assert re.search(r"components of 200 genes[\s\S]*party +role", shown)
