"""Findings: what a run found, in sentences about cells, genes and donors, for the terminal and the top of the report.

A function per workflow takes the results by party, as `run.results` has them, and the options of the run. A workflow
of another package passes its own as `Workflow(findings=...)`. Nothing here is computed anew: sentences state results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
SHOWN = 6  # labels, clusters or programs that get a sentence
NAMED = 4  # genes in a sentence


def sentences(workflow: Any, results: Results, options: Any) -> list[str]:
    """The findings of a run of `workflow`; none for workflows that state none, or where results are missing."""
    tell = workflow.findings or FINDINGS.get(workflow.name)
    return [] if tell is None or not results else tell(results, options)


def _share(x: float, digits: int = 1) -> str:
    return f"{x:.{digits}%}".replace("%", " %")


def _any(results: Results, key: str) -> Mapping[str, Any]:
    """What all parties have alike: the results of the first that has `key`."""
    return next((r for r in results.values() if key in r), {})


def _each(results: Results, key: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(party, r) for party, r in results.items() if key in r]


def _left_out(results: Results, key: str) -> list[str]:
    """What a site left out because it has too few cells of it."""
    found = []
    for party, r in results.items():
        if few := r.get(key):
            found.append(f"{party}: left out, too few cells: " + ", ".join(f"{n} {name}" for name, n in few.items()))
    return found


def shared_pca(results: Results, options: Any) -> list[str]:
    found = _any(results, "variance_ratio")
    if not found:
        return []
    ratio = found["variance_ratio"]
    return [
        f"{len(ratio)} components of {found['genes']:,} genes hold {_share(sum(ratio))} of the variance"
        f" of {found['cells']:,} cells"
    ]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def quality_control(results: Results, options: Any) -> list[str]:
    found = _any(results, "cutoffs")
    if not found:
        return []
    limits = [f"{name} {_number(low)} to {_number(high)}" for name, (low, high) in found["cutoffs"].items()]
    told = [f"cells pass with {', '.join(limits)}"]
    for party, r in _each(results, "failed"):
        doublets = f", {r['predicted_doublets']:,} are predicted doublets" if "predicted_doublets" in r else ""
        dropped = f"; {r['dropped']:,} are dropped" if "dropped" in r else ""
        told.append(f"{party}: {r['failed']:,} of {found['cells'][party]:,} cells fail{doublets}{dropped}")
    return told


def integrate(results: Results, options: Any) -> list[str]:
    def change(x: Mapping[str, float]) -> str:
        return f"own-site neighbours {x['before']:.2f} → {x['after']:.2f}, {x['if_mixed']:.2f} if fully mixed"

    found = _any(results, "own_site")
    together = [f"all {found['cells']:,} cells: {change(found['own_site'])}"] if found else []
    return together + [f"{p}: {change(r['own_site_here'])}" for p, r in _each(results, "own_site_here")]


def map_labels(results: Results, options: Any) -> list[str]:
    found = []
    for party, r in _each(results, "cells_per_label"):
        unknown = f", {r['unknown']:,} unknown" if "unknown" in r else ""
        agree = f"; {_share(r['accuracy'])} agree with this site's own labels" if "accuracy" in r else ""
        found.append(f"{party}: {r['cells']:,} cells labelled{unknown}{agree}")
        most = list(r["cells_per_label"].items())[:SHOWN]
        found.append(f"{party}: most are " + ", ".join(f"{name} ({n:,})" for name, n in most))
    return found


def propagate_labels(results: Results, options: Any) -> list[str]:
    found = []
    for party, r in _each(results, "propagated"):
        rest = f", {r['unreached']:,} stay without" if r.get("unreached") else ""
        found.append(f"{party}: {r['propagated']:,} of {r['cells']:,} cells got a label from {r['labelled']:,}{rest}")
    return found


def train_classifier(results: Results, options: Any) -> list[str]:
    found = _any(results, "cells_per_label")
    told = []
    if found:
        told.append(
            f"a classifier of {len(found['labels'])} labels from {found['cells']:,} cells;"
            f" {_share(found['accuracy'])} right on held-out cells"
        )
        if found.get("left_out"):
            told.append("labels left out everywhere: " + ", ".join(map(str, found["left_out"])))
    told += [
        f"{p}: {r['unsure']:,} of its cells are called unknown" for p, r in _each(results, "unsure") if r["unsure"]
    ]
    return told + _left_out(results, "too_rare_here")


def fine_tune(results: Results, options: Any) -> list[str]:
    found = _any(results, "history")
    if not found or not found["history"]:
        return []
    at = {row["round"]: row for row in found["history"]}
    best = at.get(found.get("best_round"), found["history"][-1])
    told = [f"{_share(best['accuracy'])} of held-out cells are right after round {best['round']}"]
    if privacy := found.get("privacy"):
        told.append(f"ε = {privacy['epsilon']:g} for {privacy['protects'].partition(',')[0]}")
    return told


def find_outliers(results: Results, options: Any) -> list[str]:
    found = []
    for party, r in _each(results, "flagged"):
        if "rows" in r:
            alone = f" ({r['flagged_alone']:,} if it looks at its own rows only)" if "flagged_alone" in r else ""
            found.append(f"{party}: {r['flagged']:,} of {r['rows']:,} rows stand out{alone}")
    return found


def compare_groups(results: Results, options: Any) -> list[str]:
    found = _any(results, "tables")
    told: list[str] = []
    what, level = {True: "cell types change in share", False: "genes"}, _share(options.fdr, 0)
    for row in found.get("tables", ()):
        for name, contrast in row["contrasts"].items():
            where, n = row["of"], contrast["differ"]
            if n:
                first = ", ".join(map(str, contrast["first"][:NAMED]))
                rest = ", …" if n > NAMED else ""
                told.append(f"{name}, {where}: {n:,} {what[where == 'composition']} at FDR {level}: {first}{rest}")
    if found and not told:
        compared = len(found["tables"])
        told.append(f"nothing differs at FDR {level} in {compared} table{'s' if compared != 1 else ''}")
    left = found.get("left_out") or {}
    return told + ([f"not compared, too few donors: {', '.join(left)}"] if left else [])


def find_markers(results: Results, options: Any) -> list[str]:
    found = _any(results, "markers")
    if not found:
        return []
    markers = [(name, genes) for name, genes in found["markers"].items() if genes]
    told = [f"{name}: {', '.join(map(str, genes[:NAMED]))}" for name, genes in markers[:SHOWN]]
    return told + ([f"and {len(markers) - SHOWN} more labels or clusters with markers"] if len(markers) > SHOWN else [])


def choose_genes(results: Results, options: Any) -> list[str]:
    found = _any(results, "chosen_by_batches")
    if not found:
        return []
    most = max(found["chosen_by_batches"], key=int, default="0")
    return [
        f"{found['chosen']:,} of {found['genes']:,} genes are highly variable,"
        f" {found['chosen_by_batches'].get(most, 0):,} of them in {most} of {found['batches']} batches",
        f"first: {', '.join(map(str, found['first'][:NAMED]))}",
    ]


def cluster_cells(results: Results, options: Any) -> list[str]:
    found = _any(results, "clusters")
    if not found:
        return []
    sizes = list(found["sizes"].values())
    return [
        f"{found['clusters']} clusters of {found['cells']:,} cells, with {min(sizes):,} to {max(sizes):,} cells each"
    ]


def find_programs(results: Results, options: Any) -> list[str]:
    found = _any(results, "explained")
    if not isinstance(found.get("explained"), Mapping):
        return []
    return [
        f"{name} explains {_share(share)} of the variance between donors: "
        + ", ".join(map(str, found["strongest"].get(name, [])[:NAMED]))
        for name, share in list(found["explained"].items())[:SHOWN]
    ]


def model_outcome(results: Results, options: Any) -> list[str]:
    found = _any(results, "donors")
    if not found:
        return []
    told = []
    for name, fit in list(found.get("regressions", {}).items())[:SHOWN]:
        what = "all terms" if name == "all" else name
        parts = [f"p = {fit['wald_p']:.2g}"] if "wald_p" in fit else []
        parts += [f"concordance {fit['concordance']:.2f}"] if "concordance" in fit else []
        parts += [f"{_share(fit['explained'])} of the variance explained"] if "explained" in fit else []
        told.append(f"{options.model} model of {found['donors']:,} donors, {what}: {', '.join(parts)}")
    if test := found.get("log_rank"):
        told.append(f"survival of {found['donors']:,} donors: log-rank p = {test['p']:.2g}")
    return told


def train_cellcnn(results: Results, options: Any) -> list[str]:
    found = []
    for party, r in _each(results, "donor_accuracy"):
        found.append(
            f"{party}: {_share(r['donor_accuracy'])} of its {r['donors']:,} donors are right, training ones included"
        )
        groups = r.get("selected_clusters") or []
        if groups and isinstance(groups[0], Mapping) and "markers" in groups[0]:
            found.append(f"{party}: the cells that decide most have {groups[0]['markers']}")
    return found


FINDINGS: Mapping[str, Callable[[Results, Any], list[str]]] = {
    "shared-pca": shared_pca,
    "quality-control": quality_control,
    "integrate": integrate,
    "map-labels": map_labels,
    "propagate-labels": propagate_labels,
    "train-classifier": train_classifier,
    "fine-tune": fine_tune,
    "find-outliers": find_outliers,
    "compare-groups": compare_groups,
    "find-markers": find_markers,
    "choose-genes": choose_genes,
    "cluster-cells": cluster_cells,
    "find-programs": find_programs,
    "model-outcome": model_outcome,
    "train-cellcnn": train_cellcnn,
}
