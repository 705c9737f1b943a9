"""Figures of results: of a run, of `run.data`, of one AnnData, or of the files that a run wrote.

    import cloister as cl

    cl.pl.embedding(run, color="cell_type", save="cells.svg")
    cl.pl.composition("results", "cluster", by="donor")
    cl.pl.volcano("results/basel.expression.csv")

Each function returns a `matplotlib.figure.Figure`, and writes it with `save=` as PNG, SVG or PDF. A label has one
colour at all sites: labels are sorted, and the first ten have the ten colours of the reports. For the same colours in
figures of different cells, pass all labels of the study as `labels=`.

Nothing here is sent. A rehearsal has all sites' cells; a hospital has its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells.files import read_cells
from cloister.cells.tables import chunks
from cloister.cells.values import listed
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.results import load_cells
from cloister.rehearsal.run import Run, Series
from cloister.report.figures import (
    MOST_LABELS,
    MOST_POINTS,
    QUIET,
    Canvas,
    canvas,
    draw_heatmap,
    draw_points,
    draw_violins,
    heatmap_size,
    legend_beside,
    shown,
    some_points,
    tone,
)
from cloister.workflows.compare_groups.figures import draw_volcano
from cloister.workflows.find_markers.figures import best_genes, dots_size, draw_dots
from cloister.workflows.quality_control.figures import draw_quality, measures_in

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.figure import Figure
    from pandas import DataFrame

Source = Any  # a Run or Series, an AnnData, a dict of these by site, or the path of a file or of a results folder
NONE = "(none)"  # cells without a label
TALL, MOST_ROWS = 14, 40  # entries of one column of a legend; labels of a dot plot
BASES = ("X_shared_map", "X_umap", "X_integrated", "X_shared_pca", "X_pca")  # what is drawn first
KINDS = (".png", ".svg", ".pdf")
COUNTED = {"total_counts": "counts per cell", "n_genes_by_counts": "genes per cell"}  # scanpy's names
HATCHES = ("", "///", "...", "xxx")
SITE = "site"


# ---- cells by label --------------------------------------------------------------------------------------------------


def palette(source: Source, key: str, *, labels: Sequence[str] = ()) -> dict[str, str]:
    """The colour of every label of `obs[key]`, in the order of the legends."""
    found = _cells(source)
    return {label: tone(i)[0] for i, label in enumerate(_order(_column(found, key), labels, found, key))}


def embedding(
    source: Source,
    basis: str | None = None,
    *,
    color: str = SITE,
    components: tuple[int, int] = (1, 2),
    by_site: bool = False,
    labels: Sequence[str] = (),
    save: str | Path | None = None,
) -> Figure:
    """Draw cells in two dimensions of an embedding that all sites share; 5000 cells at most.

    Parameters
    ----------
    source
        A `Run`, a dict of AnnData by site, an AnnData, or the path of a file of cells or of a results folder.
    basis
        Key of obsm; by default the first of `X_shared_map`, `X_umap`, `X_integrated`, `X_shared_pca`, `X_pca` that
        every site has.
    color
        Column of obs; numbers are drawn as shades. `"site"` is the site.
    components
        The two dimensions to draw, from 1.
    by_site
        One panel for each site, with the other sites' cells in grey.
    labels
        All labels of the study, in the order of their colours.
    save
        File to write: `.png`, `.svg` or `.pdf`.
    """
    cells = _cells(source)
    basis = _basis(cells, basis)
    at = [k - 1 for k in components]
    width = min(a.obsm[basis].shape[1] for a in cells.values())
    if len(at) != 2 or not all(0 <= k < width for k in at):
        raise ParameterError(f"components must be two numbers from 1 to {width}, found {components}")
    points = np.concatenate([np.asarray(a.obsm[basis], dtype=float)[:, at] for a in cells.values()])
    site = np.concatenate([np.full(a.n_obs, name) for name, a in cells.items()])
    values = _numbers(cells, color)
    names = None if values is not None else _joined(_column(cells, color))
    order = [] if names is None else _order(_column(cells, color), labels, cells, color)
    places = {label: -1 if label == NONE else i for i, label in enumerate(order)}
    keep = some_points(len(points))
    panels = list(cells) if by_site else [""]
    with canvas(len(panels), 3.4 * len(panels) + 2.2 + 1.2 * (len(order) > TALL), 3.8) as c:
        for axis, panel in zip(c.axes, panels, strict=True):
            here = keep[site[keep] == panel] if panel else keep
            if panel:
                rest = keep[site[keep] != panel]
                axis.scatter(*points[rest].T, s=4, c="#d9dddc", lw=0)
                axis.set_title(shown(panel))
            if values is not None:
                span = {"vmin": np.nanmin(values), "vmax": np.nanmax(values)}
                drawn = axis.scatter(*points[here].T, s=7, c=values[here], cmap="viridis", lw=0, **span)
                axis.set(xticks=[], yticks=[])
                axis.grid(visible=False)
            else:
                assert names is not None
                draw_points(axis, points[here], names[here], places)
            axis.set(**_names_of_axes(basis, components), xlim=_span(points[:, 0]), ylim=_span(points[:, 1]))
        if values is not None:
            c.paper.colorbar(drawn, ax=c.axes, shrink=0.8, label=shown(color))
        else:
            _legend(c.axes[-1], color, len(order), markerscale=2.5)
        return _done(c, save)


def composition(
    source: Source, key: str, *, by: str = SITE, labels: Sequence[str] = (), save: str | Path | None = None
) -> Figure:
    """Draw the shares of the labels of `obs[key]` as one bar for each value of `by`.

    `by` is a column of obs, such as donors or groups, or `"site"`. `labels` are all labels of the study, in the order
    of their colours.
    """
    cells = _cells(source)
    names, rows = _joined(_column(cells, key)), _joined(_column(cells, by))
    order, bars = _order(_column(cells, key), labels, cells, key), _sorted(rows)
    counts = _table(rows, names, bars, order)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    with canvas(
        width=7.0 + 1.2 * (len(order) > TALL), height=1.4 + max(0.26 * len(bars), 0.17 * min(len(order), TALL))
    ) as c:
        left = np.zeros(len(bars))
        for i, label in enumerate(order):
            colour, hatch = (QUIET if label == NONE else tone(i)[0]), HATCHES[(i // 10) % len(HATCHES)]
            name = shown(label) if i < MOST_LABELS else None
            bar = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            c.axis.barh(np.arange(len(bars)), shares[:, i], 0.8, left=left, label=name, **bar)
            left += shares[:, i]
        sizes = counts.sum(axis=1).astype(int)
        c.axis.set_yticks(range(len(bars)), [f"{shown(b)} ({n:,})" for b, n in zip(bars, sizes, strict=True)])
        c.axis.set(xlim=(0, 1), xlabel="share of the cells", ylabel=by)
        c.axis.invert_yaxis()
        c.axis.grid(visible=False, axis="y")
        _legend(c.axis, key, len(order))
        return _done(c, save)


def confusion(source: Source, truth: str, found: str, *, save: str | Path | None = None) -> Figure:
    """Draw how the cells of each label of `obs[truth]` are spread over the labels of `obs[found]`, as shares of rows.

    Rows and columns are the same labels in the same order if the two columns share any. Otherwise rows are sorted by
    the column that holds most of them.
    """
    cells = _cells(source)
    one, other = _joined(_column(cells, truth)), _joined(_column(cells, found))
    rows, columns = _sorted(one), _sorted(other)
    if {*rows} & {*columns} - {NONE}:
        rows = columns = _sorted(np.concatenate([one, other]))
    counts = _table(one, other, rows, columns)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    if rows is not columns:
        by_column = np.argsort(shares.argmax(axis=1), kind="stable")
        rows, shares = [rows[i] for i in by_column], shares[by_column]
    with canvas(1, *heatmap_size(*shares.shape)) as c:
        draw_heatmap(c, shares, rows, columns, rows=truth, columns=found, low=0.0, high=1.0, bar="share of the row")
        return _done(c, save)


def mixing(
    source: Source,
    basis: str | None = None,
    *,
    by: str = SITE,
    n_neighbors: int = 30,
    save: str | Path | None = None,
) -> Figure:
    """Draw how often the nearest neighbours of a site's cells are cells of each site, against chance.

    A value is the log2 of the share of neighbours of the column's site, divided by the share of this site's cells among
    all: 0 where sites are mixed, above 0 where cells lie among those of that site. At most 5000 cells are compared.
    `by` is another column of obs instead of the site, such as batches.
    """
    from scipy.spatial import cKDTree

    cells = _cells(source)
    basis = _basis(cells, basis)
    points = np.concatenate([np.asarray(a.obsm[basis], dtype=float) for a in cells.values()])
    every = _joined(_column(cells, by))
    keep = some_points(len(points), MOST_POINTS)
    points, groups = points[keep], every[keep]
    kinds = _sorted(groups)
    if len(kinds) < 2:
        raise DataError(f"mixing needs cells of two values of '{by}', and there is only {listed(kinds)}.")
    if not 1 <= n_neighbors < len(points):
        raise ParameterError(f"n_neighbors must be from 1 to {len(points) - 1}, found {n_neighbors}")
    near = cKDTree(points).query(points, n_neighbors + 1)[1]
    same = near == np.arange(len(points))[:, None]
    same[~same.any(axis=1), -1] = True  # a cell that is not its own first neighbour: others lie at the same point
    neighbours = near[~same].reshape(len(points), n_neighbors)
    code = np.searchsorted(np.array(sorted(kinds)), groups)
    place = np.array([kinds.index(k) for k in sorted(kinds)])
    own = place[code]
    counts = np.zeros((len(kinds), len(kinds)))
    np.add.at(counts, (np.repeat(own, n_neighbors), own[neighbours].ravel()), 1)
    share, chance = counts / counts.sum(axis=1, keepdims=True), np.bincount(own) / len(own)
    ratio = np.log2(np.maximum(share, 0.5 / counts.sum(axis=1, keepdims=True)) / chance)
    with canvas(1, *heatmap_size(*ratio.shape)) as c:
        bar = "log2 of share / chance"
        draw_heatmap(c, ratio, kinds, kinds, rows=f"cells of {by}", columns=f"neighbours of {by}", bar=bar)
        c.axis.set_title(f"{n_neighbors} nearest neighbours in {shown(basis)}")
        return _done(c, save)


def violin(
    source: Source,
    keys: Sequence[str] | str = tuple(COUNTED),
    *,
    by: str = SITE,
    log: bool | None = None,
    save: str | Path | None = None,
) -> Figure:
    """Draw the distribution of columns of obs at each site: counts and genes of a cell by default.

    `total_counts` and `n_genes_by_counts` are computed from X where obs lacks them. Axes of these two are logarithmic
    unless `log=False`. A line marks the median.
    """
    cells = _cells(source)
    keys = [keys] if isinstance(keys, str) else list(keys)
    groups = _joined(_column(cells, by))
    kinds = _sorted(groups)
    order = _order(_column(cells, by), (), cells, by)
    with canvas(len(keys), max(2.6, 1.0 + 0.6 * len(kinds)) * len(keys), 3.4) as c:
        for axis, key in zip(c.axes, keys, strict=True):
            values = _measured(cells, key)
            scaled = log if log is not None else key in COUNTED and bool((values > 0).any())
            usable = np.isfinite(values) & ((values > 0) if scaled else True)
            drawn = np.log10(values, where=usable, out=np.full(len(values), np.nan)) if scaled else values
            parts = {kind: drawn[(groups == kind) & usable] for kind in kinds}
            draw_violins(axis, parts, [order.index(kind) for kind in kinds], log=scaled)
            axis.set(ylabel=COUNTED.get(key, key))
        return _done(c, save)


def quality(source: Source, *, key: str = "quality_control", save: str | Path | None = None) -> Figure:
    """Draw what `quality-control` found: histograms of counts, genes, mitochondrial share and doublet scores by site.

    Dashed lines are the common cut-offs. `key` is the name of the result in uns, which every site has alike.
    """
    cells = _cells(source)
    found = next((a.uns[key] for a in cells.values() if key in a.uns), None)
    if found is None:
        there = listed(sorted({str(k) for a in cells.values() for k in a.uns} - {"cloister"}))
        raise DataError(f"adata.uns[{key!r}] is missing; there is {there}. The workflow quality-control writes it.")
    shown_there = measures_in(found)
    with canvas(len(shown_there), 3.1 * len(shown_there) + 1.0, 2.9) as c:
        draw_quality(c, found)
        return _done(c, save)


# ---- tables of results -----------------------------------------------------------------------------------------------


def dotplot(
    source: Source,
    *,
    key: str = "markers",
    n_genes: int = 3,
    labels: Sequence[str] = (),
    save: str | Path | None = None,
) -> Figure:
    """Draw the best markers of every label: size is the fraction of cells, colour the log fold change.

    Parameters
    ----------
    source
        What `embedding` takes, after `find-markers`; or its table, or a `.csv` file of it.
    key
        Name of the table in uns.
    n_genes
        Genes of each label.
    labels
        The labels to draw, in this order; by default all, at most forty.
    save
        File to write: `.png`, `.svg` or `.pdf`.
    """
    table = _result(source, key, ("label", "gene", "t", "log_fold_change", "fraction"), "find-markers")
    names = [*dict.fromkeys(table["label"].astype(str))]
    if missing := [x for x in labels if x not in names]:
        raise DataError(f"the table has no label {missing[0]!r}; there is {listed(names)}.")
    if n_genes < 1:
        raise ParameterError(f"n_genes must be at least 1, found {n_genes}")
    place = {label: i for i, label in enumerate([*labels] or _sorted(names))}
    table = table.assign(label=table["label"].astype(str), row=table["label"].astype(str).map(place))
    table = table[table["row"].notna()].sort_values("row", kind="stable")
    best = best_genes(table, n_genes, len(labels) or MOST_ROWS)
    if not any(best.values()):
        raise DataError("no label in the table has a gene that it expresses more than the others do.")
    with canvas(1, *dots_size(best)) as c:
        draw_dots(c, table, best)
        return _done(c, save)


def volcano(
    source: Source,
    *,
    cell_type: str | None = None,
    contrast: str | None = None,
    key: str = "groups",
    fdr: float = 0.05,
    save: str | Path | None = None,
) -> Figure:
    """Draw log fold change against p of every gene in one comparison of `compare-groups`.

    Parameters
    ----------
    source
        What `embedding` takes, after `compare-groups`; or its table, or the file `SITE.expression.csv`.
    cell_type, contrast
        The comparison; by default the one in which most genes differ.
    key
        Name of the result in uns.
    fdr
        False discovery rate below which a gene is coloured.
    save
        File to write: `.png`, `.svg` or `.pdf`.
    """
    needed = ("cell_type", "contrast", "gene", "log_fold_change", "p", "fdr")
    table = _result(source, key, needed, "compare-groups", within="expression")
    if not len(table):
        raise DataError("the table has no rows: no cell type was compared.")
    table = table.assign(cell_type=table["cell_type"].fillna("").astype(str), contrast=table["contrast"].astype(str))
    for column, value in (("cell_type", cell_type), ("contrast", contrast)):
        if value is not None:
            if value not in (there := [*dict.fromkeys(table[column])]):
                raise DataError(f"the table has no {column} {value!r}; there is {listed(there)}.")
            table = table[table[column] == value]
    parts = [*table.groupby(["cell_type", "contrast"], sort=True)]
    (label, pair), part = max(parts, key=lambda p: int((p[1]["fdr"] < fdr).sum()))
    with canvas(width=5.6, height=4.0) as c:
        draw_volcano(c.axis, part, pair, fdr)
        differ = int((part["fdr"] < fdr).sum())
        c.axis.set_title(f"{shown(label) if label else 'all cells'}: {differ:,} of {len(part):,} genes differ")
        return _done(c, save)


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def _cells(source: Source) -> dict[str, AnnData]:
    """Site → cells, whatever they are given as."""
    if isinstance(source, Run | Series):
        found = source.data
        if not found:
            raise DataError("this run holds no cells; draw the folder that it wrote, or the cells of its sites.")
        return found
    if isinstance(source, Mapping):
        if not source:
            raise DataError("there are no cells to draw: the dict of sites is empty.")
        return {str(site): _one(each) for site, each in source.items()}
    if isinstance(source, str | Path) and Path(source).is_dir() and Path(source).suffix != ".zarr":
        return load_cells(source)
    if isinstance(source, str | Path):
        return {Path(source).name.partition(".")[0]: _one(source)}
    return {"cells": _one(source)}


def _one(source: Any) -> AnnData:
    if isinstance(source, str | Path):
        return read_cells(source, backed=Path(source).suffix in (".h5ad", ".zarr"))
    if not (hasattr(source, "obs") and hasattr(source, "obsm")):
        raise DataError(
            f"expected a run, an AnnData, a dict of them by site, or a path, found {type(source).__name__}."
        )
    return source


def _result(source: Source, key: str, columns: Sequence[str], workflow: str, within: str = "") -> DataFrame:
    """A table of a result: itself, of a `.csv` file, or of `uns[key]` of the first site that has it."""
    import pandas as pd

    if isinstance(source, str | Path) and Path(source).suffix == ".csv":
        try:
            source = pd.read_csv(source, keep_default_na=False, na_values=[""])
        except (OSError, ValueError) as e:
            raise DataError(f"{source} cannot be read as a table ({type(e).__name__}).") from None
    if isinstance(source, pd.DataFrame):
        table = source
    else:
        cells = _cells(source)
        found = next((a.uns[key] for a in cells.values() if key in a.uns), None)
        if found is None:
            there = listed(sorted({str(k) for a in cells.values() for k in a.uns} - {"cloister"}))
            raise DataError(f"adata.uns[{key!r}] is missing; there is {there}. The workflow {workflow} writes it.")
        table = found[within] if within and isinstance(found, Mapping) and within in found else found
        if not isinstance(table, pd.DataFrame):
            raise DataError(f"adata.uns[{key!r}] is not a table of {workflow}; pass another key=.")
    if missing := [name for name in columns if name not in table]:
        raise DataError(f"the table has no column '{missing[0]}'; there is {listed(table.columns)}.")
    return table


def _column(cells: Mapping[str, AnnData], key: str) -> list[Any]:
    """The names in `obs[key]` of every site; `"site"` is the site itself where obs has no such column."""
    found = []
    for site, adata in cells.items():
        if key == SITE and SITE not in adata.obs:
            found.append(np.full(adata.n_obs, site, dtype=object))
            continue
        column = _obs(cells, site, key).astype(object)
        found.append(column.where(column.notna(), NONE).astype(str).to_numpy(dtype=object))
    return found


def _obs(cells: Mapping[str, AnnData], site: str, key: str) -> Any:
    if key not in cells[site].obs:
        where = f" of site '{site}'" if len(cells) > 1 else ""
        raise DataError(f"adata.obs[{key!r}]{where} is missing; there is {listed(cells[site].obs)}.")
    return cells[site].obs[key]


def _numbers(cells: Mapping[str, AnnData], key: str) -> Any:
    """The values of a column that holds numbers at every site; None of one with labels."""
    if key == SITE and all(SITE not in a.obs for a in cells.values()):
        return None
    columns = [_obs(cells, site, key) for site in cells]
    if any(c.dtype.kind not in "iuf" for c in columns):
        return None
    return np.concatenate([c.to_numpy(dtype=float) for c in columns])


def _measured(cells: Mapping[str, AnnData], key: str) -> Any:
    """Numbers of a column, or counts and genes of the cells in X."""
    found = []
    for site, adata in cells.items():
        if key in COUNTED and key not in adata.obs:
            parts = [part if key == "total_counts" else part != 0 for _, part in chunks(adata)]
            found.append(np.concatenate([np.asarray(part.sum(axis=1), dtype=float).ravel() for part in parts]))
            continue
        column = _obs(cells, site, key)
        if column.dtype.kind not in "iufb":
            raise DataError(f"adata.obs[{key!r}] holds no numbers; violins need a column of numbers.")
        found.append(column.to_numpy(dtype=float))
    return np.concatenate(found)


def _basis(cells: Mapping[str, AnnData], basis: str | None) -> str:
    """The embedding that every site has, or the one that was named."""
    common = [k for k in next(iter(cells.values())).obsm if all(k in a.obsm for a in cells.values())]
    if basis is None:
        basis = next((k for k in BASES if k in common), None) or next(iter(common), None)
        if basis is None:
            raise DataError("the sites have no embedding in obsm of one name; run shared-pca, or pass basis=.")
    for site, adata in cells.items():
        if basis not in adata.obsm:
            where = f" of site '{site}'" if len(cells) > 1 else ""
            raise DataError(f"adata.obsm[{basis!r}]{where} is missing; there is {listed(adata.obsm)}.")
    return basis


def _joined(columns: Sequence[Any]) -> Any:
    return np.concatenate(columns)


def _sorted(names: Any) -> list[str]:
    """Labels as people sort them: 2 before 10, b before C, cells without a label last."""

    def key(name: str) -> Any:
        parts = re.split(r"([0-9]+)", name.casefold())
        return name == NONE, [(0, int(p), "") if p[:1].isdecimal() else (1, 0, p) for p in parts if p], name

    return sorted(map(str, {*names}), key=key)


def _order(columns: Sequence[Any], labels: Sequence[str], cells: Mapping[str, AnnData], key: str) -> list[str]:
    """All labels, in the order of their colours: those named, then those that occur or that a column could hold."""
    there = {str(x) for column in columns for x in np.unique(column)}
    for adata in cells.values():
        if key in adata.obs and hasattr(adata.obs[key], "cat"):
            there |= {str(x) for x in adata.obs[key].cat.categories}
    return [*dict.fromkeys([*map(str, labels), *_sorted(there)])]


def _table(rows: Any, columns: Any, row_names: list[str], column_names: list[str]) -> Any:
    """How many cells have each pair of labels."""
    counts = np.zeros((len(row_names), len(column_names)))
    first, second = ({name: i for i, name in enumerate(names)} for names in (row_names, column_names))
    np.add.at(counts, ([first[x] for x in rows], [second[x] for x in columns]), 1)
    return counts


# ---- how it is drawn -------------------------------------------------------------------------------------------------


def _names_of_axes(basis: str, components: tuple[int, int]) -> dict[str, str]:
    name = basis.removeprefix("X_").replace("_", " ")
    return {"xlabel": f"{name} {components[0]}", "ylabel": f"{name} {components[1]}"}


def _span(values: Any) -> tuple[float, float]:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    edge = 0.04 * (high - low) or 1.0
    return low - edge, high + edge


def _legend(axis: Any, key: str, n: int, **how: Any) -> None:
    more = f" (first {MOST_LABELS} of {n})" if n > MOST_LABELS else ""
    legend_beside(axis, title=f"{shown(key)}{more}", ncols=1 + (n > TALL), **how)


def _done(c: Canvas, save: str | Path | None) -> Figure:
    """The figure, written if a file is named."""
    if save is not None:
        kind = Path(save).suffix.lower()
        if kind not in KINDS:
            raise ParameterError(f"save must end in {', '.join(KINDS)}, found '{Path(save).name}'")
        when = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[kind]
        try:
            c.paper.savefig(save, dpi=200, metadata=when)
        except OSError as e:
            raise DataError(f"{save} cannot be written ({e.strerror or type(e).__name__}).") from None
    return c.paper  # type: ignore[no-any-return]
