"""Whether the cells of several sites fit together, where one person has the files of all: what `cloister check` asks.

`look_together` collects everything that it finds; `check_together` raises the first problem. In a run nobody has all
files; there the protocols ask the same of names and of single numbers (`common_genes`, `common_labels`,
`mapping_terms`, `point_roster`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import names, tables
from cloister.cells.vocabulary import Comparison, compare_labels
from cloister.errors import CloisterError, DataError, UsageError
from cloister.workflows import Workflow
from cloister.workflows.map_labels.mapping_terms import APART

if TYPE_CHECKING:
    from anndata import AnnData

LABEL_COLUMNS = ("cell_type", "celltype", "cell_types", "CellType", "annotation", "labels", "label", "cell_label")


@dataclass
class Together:
    """What several files have in common, and what stands in the way."""

    common: dict[str, int] = field(default_factory=dict)  # genes_in_common, labels_in_common
    labels: Comparison | None = None
    problems: list[CloisterError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_together(
    cells: Mapping[str, AnnData], workflow: Workflow | None = None, options: Any = None
) -> dict[str, int]:
    """Raise `DataError` if these files are not of one study; returns how much they have in common."""
    found = look_together(cells, workflow, options)
    if found.problems:
        raise found.problems[0]
    return found.common


def look_together(
    cells: Mapping[str, AnnData],
    workflow: Workflow | None = None,
    options: Any = None,
    *,
    label_key: str | None = None,
) -> Together:
    """Compare genes, kinds of values, embeddings and labels of several files.

    Without a workflow, labels are compared in `label_key`, or in the first usual column that all files have, and what
    is found there is a note.
    """
    found = Together()
    read = workflow.reads(options, "") if workflow is not None else ()
    key = getattr(options, "use_rep", None) if "use_rep" in read else None
    if key not in (None, "X"):  # then genes may be whatever they are
        _collect(found, lambda: check_norms({file: tables.embedding(adata, key) for file, adata in cells.items()}))
        _collect(found, lambda: _compare_genes(found, cells, options, needed=False))
    else:
        _collect(found, lambda: _check_kinds(cells, getattr(options, "layer", None)))
        _collect(found, lambda: _compare_genes(found, cells, options, needed=True))
    if workflow is None:
        column = label_key or next((c for c in LABEL_COLUMNS if all(c in a.obs for a in cells.values())), None)
        if column is not None:
            _compare_labels(found, cells, column)
            found.notes += [str(problem) for problem in _label_problems(found)]
    else:
        look_at_labels(found, cells, options)
    return found


def look_at_labels(found: Together, cells: Mapping[str, AnnData], options: Any) -> None:
    """Compare the labels that a workflow with these options collects from the sites, unless the study lists them."""
    key = getattr(options, "label_key", None)
    if key and _vocabulary(options) == ():
        query = getattr(options, "query", "")  # who asks offers no labels
        _compare_labels(found, {f: a for f, a in cells.items() if Path(f.partition("?")[0]).stem != query}, key)
        found.problems += _label_problems(found)


def check_norms(rows: Mapping[str, Any]) -> None:
    """Raise `DataError` if the farthest cells of two files are more than `APART` times as far from the origin."""
    norms = {file: float(np.sqrt((x**2).sum(1).max())) for file, x in rows.items()}
    near, far = min(norms, key=lambda f: norms[f]), max(norms, key=lambda f: norms[f])
    if norms[near] * APART < norms[far]:
        raise DataError(
            f"the farthest cell of {far} is more than {APART:g} times as far from the origin as that of {near};"
            " both need one embedding, made in the same way"
        )


def _collect(found: Together, check: Callable[[], None]) -> None:
    try:
        check()
    except CloisterError as e:
        found.problems.append(e)


def _check_kinds(cells: Mapping[str, AnnData], layer: str | None) -> None:
    kinds = {file: tables.expression_kind(adata, layer) for file, adata in cells.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{file}: {kind}" for file, kind in kinds.items())
        raise UsageError(f"all sites must hold the same kind of values, found {listed}")


def _compare_genes(found: Together, cells: Mapping[str, AnnData], options: Any, *, needed: bool) -> None:
    kind = getattr(options, "names", "index")
    genes = {file: _genes(adata, kind) for file, adata in cells.items()}
    if needed:
        found.common["genes_in_common"] = len(tables.genes_in_common(genes, notes=found.notes))
    else:
        found.common["genes_in_common"] = len(set.intersection(*map(set, genes.values())))


def _genes(adata: AnnData, kind: str) -> list[str]:
    return list(adata.var_names) if kind == "index" else tables.gene_names(adata.var, kind)  # type: ignore[arg-type]


def _vocabulary(options: Any) -> tuple[str, ...] | None:
    """The labels that the study lists, none if the sites' own are taken; None where labels do not matter."""
    listed: tuple[str, ...] | None = getattr(options, "labels", getattr(options, "classes", None))
    return listed


def _compare_labels(found: Together, cells: Mapping[str, AnnData], key: str) -> None:
    counts = {
        file: {str(name): int(n) for name, n in adata.obs[key].value_counts().items() if n} if key in adata.obs else {}
        for file, adata in cells.items()
    }
    found.labels = compare_labels(counts)
    if labelled := [set(own) for own in counts.values() if own]:
        found.common["labels_in_common"] = len(set.intersection(*labelled))
    for pair in found.labels.near:
        if not pair.sure:
            found.notes.append(f"'{pair.name}' and '{pair.usual}' may be one label: {pair.why}")
    for deep in found.labels.deeper:
        found.notes.append(
            f"'{deep.special}' is a kind of '{deep.general}' in the Cell Ontology; a model takes them for two types"
        )
    if single := found.labels.single:
        found.notes.append("at one site only: " + ", ".join(f"'{name}' ({site})" for name, site in single.items()))


def _label_problems(found: Together) -> list[CloisterError]:
    """Labels that are written in several ways, or a vocabulary that no other site has."""
    if found.labels is None:
        return []
    counts = found.labels.counts
    pairs = [pair for pair in found.labels.near if pair.sure]
    if pairs:
        listed = "; ".join(
            f"'{p.name}' at '{min(counts[p.name])}' and '{p.usual}' at '{min(counts[p.usual])}' {p.why}" for p in pairs
        )
        what = f"{len(pairs)} label{'s are' if len(pairs) > 1 else ' is'} written in several ways"
        fix = "map them under [labels], or list all names with labels="
        return [DataError(f"{what}, and a model would learn the site: {listed}; {fix}")]
    by_site: dict[str, list[str]] = {}
    for name, sites in counts.items():
        for site in sites:
            by_site.setdefault(site, []).append(name)
    unfit = names.unfit(by_site)
    return [] if unfit is None else [DataError(unfit.why)]
