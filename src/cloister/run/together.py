"""Whether the cells of several sites fit together, where one person has the files of all: what `cloister check` asks.

In a run nobody has them all; there the protocols ask the same of names and of single numbers (`common_genes`,
`common_labels`, `mapping_terms`, `point_roster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import names, tables
from cloister.errors import DataError, UsageError
from cloister.protocols.knn.mapping_terms import APART
from cloister.workflows import Workflow

if TYPE_CHECKING:
    from anndata import AnnData


def check_together(
    cells: Mapping[str, AnnData], workflow: Workflow | None = None, options: Any = None
) -> dict[str, int]:
    """Raise `DataError` if these files are not of one study; returns how much they have in common."""
    read = workflow.reads(options, "") if workflow is not None else ()
    key = getattr(options, "use_rep", None) if "use_rep" in read else None
    genes = {file: _genes(adata, getattr(options, "names", "index")) for file, adata in cells.items()}
    if key not in (None, "X"):  # then genes may be whatever they are
        check_norms({file: tables.embedding(adata, key) for file, adata in cells.items()})
        common = {"genes_in_common": len(set.intersection(*map(set, genes.values())))}
    else:
        layer = getattr(options, "layer", None)
        kinds = {file: tables.expression_kind(adata, layer) for file, adata in cells.items()}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{file}: {kind}" for file, kind in kinds.items())
            raise UsageError(f"all sites must hold the same kind of values, found {listed}")
        common = {"genes_in_common": len(tables.genes_in_common(genes))}
    label_key, agreed = getattr(options, "label_key", None), _vocabulary(options)
    if label_key and agreed == ():
        labels = {
            file: _labels(adata, label_key)
            for file, adata in cells.items()
            if Path(file).stem != getattr(options, "query", "")  # who asks offers no labels
        }
        if (found := names.unfit(labels)) is not None:
            raise DataError(found.why)
        if labelled := [own for own in labels.values() if own]:
            common["labels_in_common"] = len(set.intersection(*labelled))
    return common


def check_norms(rows: Mapping[str, Any]) -> None:
    """Raise `DataError` if the farthest cells of two files are more than `APART` times as far from the origin."""
    norms = {file: float(np.sqrt((x**2).sum(1).max())) for file, x in rows.items()}
    near, far = min(norms, key=lambda f: norms[f]), max(norms, key=lambda f: norms[f])
    if norms[near] * APART < norms[far]:
        raise DataError(
            f"the farthest cell of {far} is more than {APART:g} times as far from the origin as that of {near};"
            " both need one embedding, made in the same way"
        )


def _genes(adata: AnnData, kind: str) -> list[str]:
    return list(adata.var_names) if kind == "index" else tables.gene_names(adata.var, kind)  # type: ignore[arg-type]


def _vocabulary(options: Any) -> tuple[str, ...] | None:
    """The labels that the study lists, none if the sites' own are taken; None where labels do not matter."""
    found: tuple[str, ...] | None = getattr(options, "labels", getattr(options, "classes", None))
    return found


def _labels(adata: AnnData, key: str) -> set[str]:
    return {str(name) for name in adata.obs[key].dropna().unique()} if key in adata.obs else set()
