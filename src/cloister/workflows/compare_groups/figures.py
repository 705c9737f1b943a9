"""Tables and figures of `compare-groups`: volcano plots, shares of cell types, what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells.genes import for_people, readable, with_symbols
from cloister.report.figures import COLOURS, QUIET, canvas, shown
from cloister.session import Outcome
from cloister.workflows.compare_groups.pooled_contrasts import Compared

if TYPE_CHECKING:
    from cloister.workflows.compare_groups.contrast_terms import Result
    from cloister.workflows.compare_groups.options import Options

EXPRESSION = ("cell_type", "contrast", "gene", "log_fold_change", "average", "error", "t", "p", "fdr")
COMPOSITION = ("contrast", "cell_type", "effect", "share", "share_before", "error", "t", "p", "fdr")
NAMED, VOLCANOES, TOP = 12, 4, 10


@dataclass(frozen=True, slots=True)
class Comparison:
    """The two tables, as :class:`pandas.DataFrame`; without rows where nothing was compared."""

    expression: Any
    composition: Any


def tables(found: Compared, options: Options) -> dict[str, Any]:
    """The rows of all results, sorted by p within a contrast and cell type."""
    import pandas as pd

    rows: dict[bool, list[Any]] = {False: [], True: []}
    for result in found.results:
        for name, pair, tested in zip(options.contrast_names(), options.pairs(), result.tested, strict=True):
            order = np.argsort(tested.p, kind="stable")
            names = np.array(result.names, dtype=object)[order]
            numbers = {k: getattr(tested, k)[order] for k in ("error", "t", "p", "fdr")}
            if result.composition:
                assert result.shares is not None
                own = {"contrast": name, "cell_type": names, "effect": tested.effect[order]}
                own |= {"share": result.shares[pair[0]][order], "share_before": result.shares[pair[1]][order]}
            else:
                own = {"cell_type": result.label, "contrast": name, "gene": names}
                own |= {"log_fold_change": tested.effect[order], "average": result.average[order]}
            rows[result.composition].append(pd.DataFrame({**own, **numbers}))
    made = {"expression": (rows[False], EXPRESSION), "composition": (rows[True], COMPOSITION)}
    told = {
        name: pd.concat(parts, ignore_index=True)[list(columns)]
        if parts
        else pd.DataFrame(columns=list(columns), dtype=float)
        for name, (parts, columns) in made.items()
    }
    return told | {"expression": with_symbols(told["expression"])}


def summary(found: Compared, options: Options) -> dict[str, Any]:
    """Plain values for the report: per table the donors, and what differs."""
    return {
        "tables": [_told(result, options) for result in found.results],
        "left_out": found.left_out,
        "openings": found.openings,
    }


def _told(result: Result, options: Options) -> dict[str, Any]:
    differ, names = {}, result.names if result.composition else readable(result.names)
    for name, tested in zip(options.contrast_names(), result.tested, strict=True):
        best = np.argsort(tested.p, kind="stable")[:TOP]
        top = [names[i] for i in best if tested.fdr[i] < options.fdr]
        differ[name] = {"differ": int((tested.fdr < options.fdr).sum()), "first": top}
    return {
        "of": "composition" if result.composition else result.label or "all cells",
        "donors": dict(zip(options.groups, result.donors, strict=True)),
        "compared": len(result.names),
        "contrasts": differ,
        "df": result.df,
        "prior_df": result.prior.df if np.isfinite(result.prior.df) else "infinite",
        "notes": list(result.notes),
    }


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """A volcano for each of the tables in which most differs; mean shares of cell types."""
    here = [o.adata.uns[options.key_added] for o in outcomes.values() if o.adata is not None]
    here += [
        {"expression": o.model.expression, "composition": o.model.composition} for o in outcomes.values() if o.model
    ]
    if not here:
        return []
    made = []
    expression, composition = here[0]["expression"], here[0]["composition"]
    parts = (
        [(*key, part) for key, part in expression.groupby(["cell_type", "contrast"], sort=True)]
        if len(expression)
        else []
    )
    parts.sort(key=lambda p: -int((p[2]["fdr"] < options.fdr).sum()))
    made += [volcano(part, label, contrast, options.fdr) for label, contrast, part in parts[:VOLCANOES]]
    if len(composition):
        made += [shares(part, str(name), options.fdr) for name, part in composition.groupby("contrast", sort=True)]
    return made


def volcano(part: Any, label: str, contrast: str, level: float) -> Any:
    """Effect against p, one point per gene; the clearest are named."""
    part, differs = for_people(part), part["fdr"].to_numpy(dtype=float) < level
    with canvas(width=5.6, height=4.0) as c:
        draw_volcano(c.axis, part, contrast, level)
        first = ", ".join(map(str, part["gene"][differs].iloc[:5]))
        told = f"{len(part):,} genes; {int(differs.sum()):,} differ at a false discovery rate of {level:g}"
        return c.done(f"{label or 'All cells'}: {contrast}", f"{told}{': ' + first if first else ''}.")


def draw_volcano(axis: Any, part: Any, contrast: str, level: float) -> None:
    part = for_people(part)
    effect, p, fdr = (part[k].to_numpy(dtype=float) for k in ("log_fold_change", "p", "fdr"))
    height, differs = -np.log10(np.maximum(p, 1e-300)), fdr < level
    axis.scatter(effect[~differs], height[~differs], s=8, c=QUIET, lw=0)
    for way, colour in ((effect > 0, COLOURS[1]), (effect < 0, COLOURS[0])):
        axis.scatter(effect[differs & way], height[differs & way], s=12, c=colour, lw=0)
    for i in np.argsort(p, kind="stable")[:NAMED]:
        if differs[i]:
            name, up = shown(part["gene"].iloc[i], 16), effect[i] > 0
            where = {"xytext": (4 if up else -4, 0), "textcoords": "offset points", "ha": "left" if up else "right"}
            axis.annotate(name, (effect[i], height[i]), fontsize=7, va="center", **where)
    axis.margins(x=0.12)  # for the names
    axis.set(xlabel=f"log2 fold change, {contrast}", ylabel="-log10 p")


def shares(part: Any, contrast: str, level: float) -> Any:
    """Mean share of each cell type in the two groups, side by side."""
    part = part.sort_values("share_before", ascending=False)
    at, one, other = np.arange(len(part)), *contrast.split(" vs ")[:2]
    with canvas(width=5.6, height=1.6 + 0.32 * len(part)) as c:
        c.axis.barh(at - 0.2, part["share_before"], 0.38, color=QUIET, label=shown(other))
        c.axis.barh(at + 0.2, part["share"], 0.38, color=COLOURS[0], label=shown(one))
        marks = ["*" if v < level else "" for v in part["fdr"]]
        c.axis.set_yticks(at, [f"{shown(n, 22)} {m}".strip() for n, m in zip(part["cell_type"], marks, strict=True)])
        c.axis.invert_yaxis()
        c.axis.set(xlabel="mean share of a donor's cells")
        c.axis.legend(loc="lower right")
        differ = [str(n) for n, m in zip(part["cell_type"], marks, strict=True) if m]
        told = (
            f"{len(differ)} of {len(part)} cell types differ: {', '.join(differ)}" if differ else "No cell type differs"
        )
        return c.done(f"Shares of cell types: {contrast}", f"{told} (false discovery rate {level:g}).")
