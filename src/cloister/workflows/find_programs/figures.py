"""Table and figures of `find-programs`: the strongest genes of each program in each cell type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.report.figures import heatmap
from cloister.session import Outcome

if TYPE_CHECKING:
    from cloister.workflows.find_programs.common_programs import Programs

TOP, GENES, DRAWN = 8, 15, 3


@dataclass(frozen=True, slots=True)
class Loadings:
    """The table of loadings, as :class:`pandas.DataFrame`."""

    table: Any


def loadings(found: Programs, options: Any) -> Any:
    import pandas as pd

    kind, gene = np.divmod(found.columns, len(found.genes))
    rows = {"cell_type": [options.labels[t] for t in kind], "gene": [found.genes[g] for g in gene]}
    return pd.DataFrame(rows | {f"program_{k + 1}": v for k, v in enumerate(found.loadings.T)})


def summary(found: Programs, options: Any) -> dict[str, Any]:
    """Plain values for the report."""
    table = loadings(found, options)
    names = [f"program_{k + 1}" for k in range(found.loadings.shape[1])]
    strongest = {}
    for name in names:
        order = np.argsort(-np.abs(table[name].to_numpy()), kind="stable")[:TOP]
        strongest[name] = [f"{table['gene'].iloc[i]} in {table['cell_type'].iloc[i]}" for i in order]
    explained = {name: round(float(v), 4) for name, v in zip(names, found.explained, strict=True)}
    return {"donors": found.donors, "explained": explained, "strongest": strongest}


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """Loadings of the strongest genes of the first programs, by cell type."""
    tables = [o.adata.uns[options.key_added]["loadings"] for o in outcomes.values() if o.adata is not None]
    tables += [o.model.table for o in outcomes.values() if o.model]
    if not tables:
        return []
    table, made = tables[0], []
    for name in [c for c in table if c.startswith("program_")][:DRAWN]:
        wide = table.pivot_table(index="gene", columns="cell_type", values=name, fill_value=0.0)
        wide = wide.loc[wide.abs().max(axis=1).sort_values(ascending=False, kind="stable").index[:GENES]]
        strongest = ", ".join(map(str, wide.index[:5]))
        made.append(
            heatmap(
                wide.to_numpy(),
                list(wide.index),
                list(wide.columns),
                title=name.replace("_", " ").capitalize(),
                rows="gene",
                columns="cell type",
                alt=f"Loadings by cell type; strongest genes {strongest}.",
            )
        )
    return made
