"""Draw the pictures of the workflow pages and of the atlas from rehearsals on the demo data: docs/figures/*.png.

    python scripts/figures.py                 all of them, some three minutes
    python scripts/figures.py map-labels      this one
    python scripts/figures.py atlas              or one of PLOTS

Every number in a picture is computed by the run that it shows, or by a baseline on the same cells.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cloister as cl
from cloister.cli.new import study_of
from cloister.report.figures import COLOURS, Canvas, Figure, canvas, log_scale, png_of
from cloister.study import parse_study

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
DPI, MOST = 100, 120_000  # dots per inch; bytes of a picture
GREY = "#9aa3a5"


def main() -> int:
    for name in sys.argv[1:] or [*PICTURES, *PLOTS]:
        began = time.perf_counter()
        figure = PICTURES[name]() if name in PICTURES else plot(name)
        if len(figure["png"]) > MOST:
            sys.exit(f"{name}: {len(figure['png'])} bytes; a picture may have {MOST}")
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.png").write_bytes(figure["png"])
        print(f"{name}: {time.perf_counter() - began:.1f} s, {len(figure['png'])} bytes. {figure['alt']}", flush=True)
    return 0


# ---- parts of pictures -----------------------------------------------------------------------------------------------


def bars(axis: Any, values: Mapping[str, float], *, title: str, form: str = "{:.3f}") -> None:
    """One horizontal bar per name, the first on top, with its number beside it."""
    names = [*values]
    colours = [COLOURS[0] if "cloister" in name else GREY for name in names]
    axis.barh(range(len(names)), [*values.values()], color=colours, height=0.6)
    for i, value in enumerate(values.values()):
        axis.text(value, i, " " + form.format(value), va="center", fontsize=9)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlim(0, 1.25 * max(values.values()) or 1)
    axis.set(title=title, xticks=[])
    axis.invert_yaxis()
    axis.grid(visible=False)


def points(axis: Any, xy: Any, labels: Any, names: Sequence[str], *, title: str) -> None:
    """Cells in two dimensions; those of other labels than `names` in grey."""
    labels = np.asarray(labels)
    others = ~np.isin(labels, names)
    axis.scatter(*np.asarray(xy)[others, :2].T, s=4, c="#d5d8d8", lw=0)
    for name, colour in zip(names, COLOURS, strict=False):
        axis.scatter(*np.asarray(xy)[labels == name, :2].T, s=8, c=colour, lw=0, label=name)
    axis.set(title=title, xticks=[], yticks=[])
    axis.grid(visible=False)


def legend(axis: Any) -> None:
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, markerscale=2.5)


def done(c: Canvas, title: str, alt: str) -> Figure:
    return c.done(title, alt, dpi=DPI)


def hidden_labels(share: float) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The demo's cells with a share of their labels in `known` taken off; all labels; which were taken off."""
    rng = np.random.default_rng(0)
    sites = cl.demo_sites()
    truth = {p: a.obs["cell_type"].astype(str).to_numpy() for p, a in sites.items()}
    held = {p: rng.random(a.n_obs) < share for p, a in sites.items()}
    for p, a in sites.items():
        a.obs["known"] = a.obs["cell_type"].astype(object).where(~held[p])
    return sites, truth, held


def linear_accuracy(x: Mapping[str, Any], truth: Any, held: Any) -> dict[str, float]:
    """Logistic regression on the same features, on hidden labels: trained on all sites' cells, and on each alone."""
    from cloister.papers.baselines.mapping import linear_label

    def right(seen_by: Callable[[str], list[str]]) -> float:
        hits = []
        for p in x:
            seen = seen_by(p)
            cells = np.concatenate([x[q][~held[q]] for q in seen])
            names = np.concatenate([truth[q][~held[q]] for q in seen])
            hits.append(linear_label(x[p][held[p]], cells, names) == truth[p][held[p]])
        return float(np.mean(np.concatenate(hits)))

    return {"pooled, logistic regression": right(lambda _: [*x]), "alone, logistic regression": right(lambda p: [p])}


def hit_rate(run: Any, truth: Any, held: Any) -> float:
    """How many of the hidden labels the run got right."""
    hits = [(run.data[p].obs["predicted"].astype(str).to_numpy() == truth[p])[held[p]] for p in truth]
    return float(np.mean(np.concatenate(hits)))


# ---- one picture per page --------------------------------------------------------------------------------------------


def bin_values() -> Figure:
    sites = cl.demo_sites()
    values = {p: np.asarray(a.X[a.X.nonzero()]).ravel() for p, a in sites.items()}
    levels = np.linspace(0, 1, 50)
    pooled = np.quantile(np.concatenate([*values.values()]), levels)

    def moved(edges: Callable[[str], Any]) -> float:
        other = [np.digitize(v, edges(p)) != np.digitize(v, pooled) for p, v in values.items()]
        return 100 * float(np.mean(np.concatenate(other)))

    runs = {m: cl.rehearse("bin-values", data=sites, mode=m) for m in ("hardened", "published")}
    edges = {m: np.asarray(run.data["basel"].uns["cloister"]["bin_edges"]) for m, run in runs.items()}
    shares = {
        "cloister, hardened": moved(lambda _: edges["hardened"]),
        "averaged quantiles (published)": moved(lambda _: edges["published"]),
        "each site's own edges": moved(lambda p: np.quantile(values[p], levels)),
    }
    with canvas(2, width=9.2, height=3.0) as c:
        c.axes[0].axhline(1, color=GREY, lw=6, label="all values in one place")
        c.axes[0].plot(edges["hardened"] / pooled, color=COLOURS[0], lw=1.5, label="hardened")
        c.axes[0].plot(edges["published"] / pooled, color=COLOURS[1], ls="--", label="published")
        c.axes[0].set(xlabel="edge", ylabel="edge / pooled quantile", title="The 50 bin edges of three sites")
        c.axes[0].legend()
        bars(c.axes[1], shares, title="Values in a wrong bin", form="{:.1f} %")
        told = ", ".join(f"{k} {v:.1f} %" for k, v in shares.items())
        return done(c, "bin-values", f"Bin edges by mode beside pooled quantiles; values in another bin: {told}.")


def shared_pca() -> Figure:
    sites = cl.demo_sites()
    run = cl.rehearse("shared-pca", data=sites, n_components=20, n_top_genes=300)
    kinds = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
    names = [str(name) for name in np.unique(kinds)[np.argsort(-np.unique(kinds, return_counts=True)[1])][:10]]
    with canvas(3, width=10.4, height=3.0) as c:
        for axis, (p, a) in zip(c.axes, run.data.items(), strict=True):
            points(
                axis,
                a.obsm["X_shared_pca"][:, [0, 2]],
                a.obs["cell_type"].astype(str),
                names,
                title=f"{p}, {a.n_obs} cells",
            )
        limits = [min(a.get_xlim()[0] for a in c.axes), max(a.get_xlim()[1] for a in c.axes)]
        heights = [min(a.get_ylim()[0] for a in c.axes), max(a.get_ylim()[1] for a in c.axes)]
        for axis in c.axes:
            axis.set(xlim=limits, ylim=heights)
        c.axes[0].set(xlabel="component 1", ylabel="component 3")
        legend(c.axes[-1])
        return done(c, "shared-pca", "Cells of three sites in one space; the same cell types lie in the same places.")


def integrate() -> Figure:
    from cloister.models.harmony import unit

    sites = cl.rehearse("shared-pca", data=cl.demo_sites(), n_components=20, n_top_genes=300).data
    run = cl.rehearse("integrate", data=sites)
    kinds = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
    names = [str(name) for name in np.unique(kinds)[np.argsort(-np.unique(kinds, return_counts=True)[1])][:8]]
    with canvas(3, width=10.4, height=3.0) as c:
        for axis, (p, a) in zip(c.axes, run.data.items(), strict=True):
            told = a.uns["X_integrated"]
            (w, h), seen = told["span"], np.ma.masked_equal(np.log1p(told["others"].T), 0)
            axis.imshow(seen, origin="lower", extent=(-w, w, -h, h), aspect="auto", cmap="Greys", alpha=0.7, zorder=0)
            xy, of = (unit(a.obsm["X_integrated"]) - told["center"]) @ told["axes"], a.obs["cell_type"].astype(str)
            for name, colour in zip(names, COLOURS, strict=False):
                axis.scatter(*xy[of == name].T, s=5, c=colour, lw=0, label=name)
            mixed = run.results[p]["own_site_here"]
            title = f"{p}: own {mixed['before']:.2f} → {mixed['after']:.2f} (mixed: {mixed['if_mixed']:.2f})"
            axis.set(title=title, xlim=(-w, w), ylim=(-h, h), xticks=[], yticks=[])
            axis.grid(visible=False)
        legend(c.axes[-1])
        shares = "; ".join(f"{p} {run.results[p]['own_site_here']['after']:.2f}" for p in run.data)
        return done(
            c, "integrate", f"Each site's cells among the density of the others; own cells in clusters: {shares}."
        )


def quality_control() -> Figure:
    from cloister.workflows.quality_control.figures import draw_quality, limits_in_words, measures_in

    run = cl.rehearse("quality-control", data=cl.demo_sites())
    found = run.data["basel"].uns["quality_control"]
    names = measures_in(found)
    with canvas(len(names), width=10.4, height=2.9) as c:
        draw_quality(c, found)
        told = limits_in_words(found, "total_counts")
        return done(c, "quality-control", f"Counts, genes and doublet scores of three sites; counts that pass: {told}.")


def choose_genes() -> Figure:
    sites = cl.demo_sites()
    run = cl.rehearse("choose-genes", data=sites, n_top_genes=300)
    said = run.results["coordinator"]
    logs = {p: np.log1p(1e4 * a.X.toarray() / np.asarray(a.X.sum(axis=1))) for p, a in sites.items()}
    every, picked = np.concatenate([*logs.values()]), run.data["basel"].var["highly_variable"].to_numpy()
    of = np.repeat(np.arange(len(logs)), [len(x) for x in logs.values()])
    between = np.stack([x.mean(axis=0) for x in logs.values()])
    share = np.bincount(of) @ np.square(between - every.mean(axis=0)) / len(every) / np.maximum(every.var(axis=0), 1e-9)
    pooled = np.zeros(len(picked), bool)
    pooled[np.argsort(-every.var(axis=0))[:300]] = True
    with canvas(2, width=9.2, height=3.0) as c:
        counts = {int(k): n for k, n in said["chosen_by_batches"].items()}
        c.axes[0].bar(list(counts), list(counts.values()), color=COLOURS[0])
        c.axes[0].set(xlabel="sites that rank the gene high", ylabel="chosen genes", title="300 chosen genes")
        c.axes[0].xaxis.get_major_locator().set_params(integer=True)
        ways = {"cloister, hardened": picked, "largest variance, pooled": pooled}
        means = {name: float(share[genes].mean()) for name, genes in ways.items()}
        bars(
            c.axes[1],
            {k: 100 * v for k, v in means.items()},
            title="Variance between sites, of the genes' own",
            form="{:.1f} %",
        )
        told = ", ".join(f"{k} {100 * v:.1f} %" for k, v in means.items())
        return done(c, "choose-genes", f"300 genes by the sites that rank them high. Variance between sites: {told}.")


def cluster_cells() -> Figure:
    from cloister.models.harmony import unit

    sites = cl.rehearse("shared-pca", data=cl.demo_sites(), n_components=20, n_top_genes=300).data
    moved = cl.rehearse("integrate", data=sites).data
    run = cl.rehearse("cluster-cells", data=moved)
    names = list(run.data["basel"].obs["cluster"].cat.categories)[:8]
    kinds = np.concatenate([a.obs["cell_type"].astype(str) for a in run.data.values()])
    codes = np.concatenate([a.obs["cluster"].astype(str) for a in run.data.values()])
    likely = {k: max(set(kinds), key=lambda t, k=k: np.sum((codes == k) & (kinds == t))) for k in names}
    with canvas(3, width=10.4, height=3.0) as c:
        for axis, (p, a) in zip(c.axes, run.data.items(), strict=True):
            told = a.uns["X_integrated"]
            xy = (unit(a.obsm["X_integrated"]) - told["center"]) @ told["axes"]
            here = a.obs["cluster"].astype(str).to_numpy()
            points(axis, xy, [f"{k} ({likely[k]})" if k in likely else k for k in here],
                   [f"{k} ({likely[k]})" for k in names], title=f"{p}, {a.n_obs} cells")  # fmt: skip
        legend(c.axes[-1])
        said = run.results["coordinator"]
        alt = f"Cells of three sites in {said['clusters']} common clusters, from {said['prototypes']} prototypes."
        return done(c, "cluster-cells", alt)


def shared_map() -> Figure:
    from cloister.models import umap_map
    from cloister.workflows.shared_map.figures import shade

    sites = cl.rehearse("shared-pca", data=cl.demo_sites(), n_components=20, n_top_genes=300).data
    moved = cl.rehearse("integrate", data=sites).data
    run = cl.rehearse("shared-map", data=moved)
    x = np.concatenate([a.obsm["X_integrated"] for a in moved.values()])
    ours = umap_map.recall(x, np.concatenate([run.data[p].obsm["X_shared_map"] for p in moved]), 50)
    pooled = umap_map.recall(x, umap_map.fitted(x, 15, 0.5, 0), 50)
    every = np.concatenate([a.obs["cell_type"].astype(str) for a in run.data.values()])
    kinds = sorted(sorted({*every}, key=lambda kind: -np.sum(every == kind))[: len(COLOURS)])
    with canvas(3, width=10.4, height=3.0) as c:
        for axis, (p, a) in zip(c.axes, run.data.items(), strict=True):
            points(axis, a.obsm["X_shared_map"], a.obs["cell_type"].astype(str), kinds, title=f"{p}, {a.n_obs} cells")
            shade(axis, a.uns["X_shared_map"])
            axis.set(xlabel="", ylabel="", xticks=[], yticks=[])
        legend(c.axes[-1])
        alt = f"Cells of three sites on one map. Neighbours kept of 50: {ours:.3f}; pooled UMAP {pooled:.3f}."
        return done(c, "shared-map", alt)


def find_markers() -> Figure:
    from cloister.demo.statistics import best_genes

    sites = cl.demo_sites()
    kinds = {p: a.obs["cell_type"].astype(str).to_numpy() for p, a in sites.items()}
    run = cl.rehearse("find-markers", data=sites, label_key="cell_type")
    table, genes = run.data["basel"].uns["markers"], sites["basel"].var_names.to_numpy()
    x = {p: np.log1p(1e4 * a.X.toarray() / np.maximum(np.asarray(a.X.sum(axis=1)), 1)) for p, a in sites.items()}
    cells = run.results["coordinator"]["cells"]
    labels = sorted(cells, key=lambda name: -cells[name])[:8]
    shared: dict[str, list[float]] = {"cloister, hardened": [], "each site alone": []}
    for name in labels:
        pooled = best_genes(np.concatenate([*x.values()]), np.concatenate([*kinds.values()]) == name, genes)
        shared["cloister, hardened"].append(len(pooled & {*table[table["label"] == name]["gene"][:50]}) / 50)
        for p, y in x.items():
            if (kinds[p] == name).sum() > 1:
                shared["each site alone"].append(len(pooled & best_genes(y, kinds[p] == name, genes)) / 50)
    drawn = table[table["label"].isin(labels)]
    top = list(dict.fromkeys(g for name in labels for g in drawn[drawn["label"] == name]["gene"][:3]))
    with canvas(2, width=10.4, height=3.6) as c:
        for i, name in enumerate(labels):
            rows = drawn[drawn["label"] == name].set_index("gene").loc[top]
            change = np.clip(np.nan_to_num(rows["log_fold_change"]), -5, 5)
            at = np.arange(len(top)), np.full(len(top), i)
            c.axes[0].scatter(*at, s=70 * rows["fraction"], c=change, cmap="RdBu_r", vmin=-5, vmax=5,
                               edgecolors=GREY, linewidths=0.4)  # fmt: skip
        c.axes[0].set_xticks(range(len(top)), top, rotation=90, fontsize=7)
        c.axes[0].set_yticks(range(len(labels)), labels, fontsize=8)
        c.axes[0].invert_yaxis()
        c.axes[0].set(title="Fold change (colour), fraction of cells (size)")
        c.axes[0].grid(visible=False)
        means = {name: float(np.mean(values)) for name, values in shared.items()}
        bars(c.axes[1], means, title="Of the 50 best genes of the pooled cells", form="{:.2f}")
        told = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
        return done(c, "find-markers", f"Best genes of {len(labels)} cell types. Of 50 pooled ones: {told}.")


def embed() -> Figure:
    from cloister.models.cell_bins import bin_cell
    from cloister.models.scgpt import Config, ScGPT

    sites = {p: a[::3].copy() for p, a in cl.demo_sites().items()}
    model = ScGPT.random(list(sites["basel"].var_names), Config(width=64, heads=4, hidden=64, layers=2, max_length=120))
    for adata in sites.values():
        cl.embed(adata, model, allow_random=True, device="cpu")
    x = np.concatenate([a.obsm["X_scGPT"] for a in sites.values()])
    kinds = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
    u, s, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    run = cl.rehearse("bin-values", data=sites)
    depth, own, shared = [], [], []
    for p, a in sites.items():
        counts, binned = a.X.toarray(), run.data[p].layers["binned"].toarray()
        for i, row in enumerate(counts):
            at = row > 0
            depth.append(row.sum())
            own.append(bin_cell(row[at], 51, np.random.default_rng(i)).mean())
            shared.append(binned[i][at].mean())
    with canvas(2, width=9.2, height=3.2) as c:
        points(
            c.axes[0], u[:, :2] * s[:2], kinds, ["macrophage", "endothelial", "AT2", "T"], title="Vectors, three sites"
        )
        legend(c.axes[0])
        c.axes[1].scatter(depth, shared, s=5, c=COLOURS[1], lw=0, label="edges shared by all sites")
        c.axes[1].scatter(depth, own, s=5, c=COLOURS[0], lw=0, label="quantiles of the cell itself")
        log_scale(c.axes[1], "x")
        c.axes[1].set(xlabel="counts of the cell", ylabel="mean bin of its genes", title="Two ways to bin")
        c.axes[1].legend(markerscale=2.5)
        both = [np.corrcoef(np.log(depth), y)[0, 1] for y in (own, shared)]
        told = f"correlation of a cell's mean bin with its log depth: {both[0]:.2f} by its own quantiles, {both[1]:.2f}"
        return done(c, "embed", f"Cells as vectors of an encoder with random weights; {told} by shared edges.")


def find_outliers() -> Figure:
    from cloister.demo.rows import auroc
    from cloister.models import isolation_forest

    sites = cl.demo_rows()
    run = cl.rehearse("find-outliers", data=sites, contamination=0.1)
    truth = np.concatenate([a.obs["outlier_truth"].to_numpy() for a in sites.values()])
    rows = [np.asarray(a.X, dtype=float) for a in sites.values()]

    def forest(x: Any) -> Any:
        return isolation_forest.fit(x, rng=np.random.default_rng(0)).score(x)

    score = np.concatenate([run.data[p].obs["outlier_score"].to_numpy() for p in sites])
    table = {
        "pooled forest": auroc(forest(np.concatenate(rows)), truth),
        "cloister, hardened": auroc(score, truth),
        "each site alone": auroc(np.concatenate([forest(x) for x in rows]), truth),
    }
    with canvas(2, width=9.2, height=3.0) as c:
        bins = np.linspace(score.min(), score.max(), 40)
        for flag, colour, name in ((False, COLOURS[0], "normal"), (True, COLOURS[1], "pathological")):
            share = np.histogram(score[truth == flag], bins)[0] / (truth == flag).sum()
            c.axes[0].stairs(share, bins, lw=2, color=colour, label=f"{name} ({(truth == flag).sum()})")
        c.axes[0].axvline(
            run.data["basel"].uns["cloister"]["outlier_cut"], color="k", lw=1, ls=":", label="flagged from here"
        )
        c.axes[0].set(xlabel="outlier score", ylabel="share of the rows", title="Cardiotocograms of three sites")
        c.axes[0].legend()
        bars(c.axes[1], table, title="AUROC over all rows")
        told = ", ".join(f"{k} {v:.3f}" for k, v in table.items())
        return done(c, "find-outliers", f"Scores of normal and pathological rows, and AUROC: {told}.")


def map_labels() -> Figure:
    sites = cl.demo_sites()
    run = cl.rehearse("map-labels", data=sites, query="vienna", use_rep="X_pca")
    table = cl.mapping_baselines(sites, query="vienna", use_rep="X_pca")
    accuracy = {
        "pooled k-NN": table["pooled k-NN"]["accuracy"],
        "cloister, hardened": run.results["vienna"]["accuracy"],
        **{f"{p} alone": table[f"{p} alone"]["accuracy"] for p in ("basel", "lugano")},
    }
    a = run.data["vienna"]
    own, mapped = a.obs["cell_type"].astype(str), a.obs["mapped"].astype(str)
    names = own.value_counts().index[:6].tolist()
    with canvas(3, width=10.4, height=3.0) as c:
        points(c.axes[0], a.obsm["X_pca"], own, names, title="Vienna, its own labels")
        points(c.axes[1], a.obsm["X_pca"], mapped, names, title="Vienna, mapped labels")
        legend(c.axes[1])
        bars(c.axes[2], accuracy, title="Accuracy at Vienna")
        told = ", ".join(f"{k} {v:.3f}" for k, v in accuracy.items())
        return done(c, "map-labels", f"Vienna's cells by own and by mapped label. Accuracy: {told}.")


def propagate_labels() -> Figure:
    rng = np.random.default_rng(0)
    sites = {p: a[rng.permutation(a.n_obs)[:200]].copy() for p, a in cl.demo_sites().items()}
    for p, a in sites.items():
        keep = rng.random(a.n_obs) < (0 if p == "vienna" else 0.2)
        a.obs["some"] = a.obs["cell_type"].astype(object).where(keep)
    run = cl.rehearse("propagate-labels", data=sites, label_key="some", use_rep="X_pca", bits=1024, timeout=600.0)
    a = run.data["vienna"]
    truth = a.obs["cell_type"].astype(str)
    names = truth.value_counts().index[:6].tolist()
    with canvas(3, width=10.4, height=3.0) as c:
        for p, colour in zip(sites, (COLOURS[0], COLOURS[2], COLOURS[1]), strict=True):
            obs = run.data[p].obs[sites[p].obs["some"].isna()]
            right = (obs["propagated"].astype(str) == obs["cell_type"].astype(str)).to_numpy()
            right = right[np.argsort(-obs["propagated_confidence"].to_numpy(), kind="stable")]
            n = np.arange(1, len(right) + 1)
            c.axes[2].plot(n / len(n), np.cumsum(right) / n, color=colour, label=f"{p}: {right.mean():.0%} of all")
        c.axes[2].set(
            xlabel="share of the cells, surest first", ylabel="right", ylim=(0, 1.03), title="Without a label before"
        )
        c.axes[2].legend(loc="lower left")
        points(c.axes[0], a.obsm["X_pca"], a.obs["propagated"].astype(str), names, title="Vienna, propagated")
        points(c.axes[1], a.obsm["X_pca"], truth, names, title="Vienna, the truth")
        legend(c.axes[1])
        given = {p: int(x.obs["some"].notna().sum()) for p, x in sites.items()}
        return done(c, "propagate-labels", f"Labels given: {given}; Vienna's propagated labels beside the truth.")


def fine_tune() -> Figure:
    from cloister.cells import tables

    sites, truth, held = hidden_labels(0.2)
    run = cl.rehearse("fine-tune", data=sites, label_key="known", use_rep="X_pca")
    baseline = linear_accuracy({p: tables.embedding(a, "X_pca") for p, a in sites.items()}, truth, held)
    pooled, alone = baseline.items()
    table = dict([pooled, ("cloister, hardened", hit_rate(run, truth, held)), alone])
    history = run.results["basel"]["history"]
    with canvas(2, width=9.2, height=3.0) as c:
        c.axes[0].plot([h["accuracy"] for h in history], "o-", ms=4, color=COLOURS[0])
        c.axes[0].set(
            xlabel="round", xticks=range(0, 21, 5), ylim=(0, 1.03), title="Held-out cells of all sites, with noise"
        )
        bars(c.axes[1], table, title="Accuracy on labels that were hidden")
        told = ", ".join(f"{k} {v:.3f}" for k, v in table.items())
        return done(c, "fine-tune", f"Validation by round, and accuracy on hidden labels: {told}.")


def train_cellcnn() -> Figure:
    sites = cl.demo_donors()
    options = {"n_steps": 4, "n_filters": 4, "n_cells": 100, "learning_rate": 0.4, "open_model": True}
    with tempfile.TemporaryDirectory() as keep:
        run = cl.rehearse("train-cellcnn", data=sites, keep=keep, timeout=600.0, **options)
        asked = cl.rehearse("predict-cellcnn", data=sites, query="vienna", keep=keep, timeout=600.0)
    markers = [str(m) for m in sites["basel"].var_names]
    filters = np.asarray(run.results["basel"]["filters"])
    filters = filters if filters.shape[-1] == len(markers) else filters.T
    obs = asked.data["vienna"].obs.groupby("donor", observed=True).first()
    right = int((obs["condition"].astype(str) == obs["predicted"].astype(str)).sum())
    strongest = markers[int(np.abs(filters).max(axis=0).argmax())]
    with canvas(1, width=9.2, height=2.8) as c:
        reach = float(np.abs(filters).max())
        image = c.axis.imshow(filters, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
        c.axis.set_yticks(range(len(filters)), [f"filter {i + 1}" for i in range(len(filters))])
        c.axis.set_xticks(range(len(markers)), markers, rotation=90, fontsize=8)
        c.axis.set_title(f"Opened by consent; asked encrypted, it is right on {right} of Vienna's {len(obs)} donors")
        c.axis.grid(visible=False)
        c.paper.colorbar(image, ax=c.axis, label="weight")
        return done(
            c, "train-cellcnn", f"Filters by markers of a model trained under encryption; {strongest} weighs most."
        )


def compare_groups() -> Figure:
    sites = cl.demo_cohort()
    options: dict[str, Any] = {"groups": ("control", "case"), "donor_key": "donor", "label_key": "cell_type"}
    run = cl.rehearse("compare-groups", data=sites, **options)
    planted = set(sites["basel"].var_names[sites["basel"].var["planted"]])
    beside = cl.group_baselines(sites, **options)

    def rows(tables: Any) -> Any:
        table = tables["expression"]
        return table[table["cell_type"] == "macrophage"]

    def hits(tables: Any) -> int:
        return len(planted & set(rows(tables)[rows(tables)["fdr"] < 0.05]["gene"]))

    found, pooled = rows(run.data["basel"].uns["groups"]), rows(beside["pooled"]).set_index("gene")
    counts = {"pooled": hits(beside["pooled"]), "cloister, hardened": hits(run.data["basel"].uns["groups"])}
    counts |= {f"{p} alone": hits(beside[f"{p} alone"]) for p in sites}
    with canvas(2, width=9.2, height=3.2) as c:
        own = found["gene"].isin(planted).to_numpy()
        for which, colour, label in ((~own, GREY, "other genes"), (own, COLOURS[1], "planted")):
            part = found[which]
            c.axes[0].scatter(part["log_fold_change"], -np.log10(part["p"]), s=14, c=colour, lw=0, label=label)
        c.axes[0].set(title="Macrophages, case against control", xlabel="log2 fold change", ylabel="-log10 p")
        c.axes[0].legend(loc="upper left")
        bars(c.axes[1], counts, title=f"Of {len(planted)} planted genes, found at 5 % FDR", form="{:.0f}")
        apart = float(np.abs(np.log(found["p"]).to_numpy() - np.log(pooled.loc[found["gene"], "p"]).to_numpy()).max())
        told = ", ".join(f"{k} {v}" for k, v in counts.items())
        return done(c, "compare-groups", f"log p equals the pooled one to {apart:.0e}. Planted genes found: {told}.")


def model_outcome() -> Figure:
    sites = cl.demo_outcomes()
    types = tuple(sorted(set.intersection(*(set(a.obs["cell_type"]) for a in sites.values()))))
    survival: dict[str, Any] = {"outcome_key": "died", "time_key": "years", "horizon": 6.0, "donor_key": "donor"}
    options = survival | {"model": "cox", "features": ("share:T",), "covariates": ("age",)}
    options |= {"label_key": "cell_type", "labels": types}
    run = cl.rehearse("model-outcome", data=sites, **options)
    found = {"cloister, hardened": run.data["basel"].uns["outcome"], **cl.outcome_baselines(sites, **options)}
    arms = {"group_key": "condition", "groups": ("control", "case")}
    curves = cl.rehearse("model-outcome", data=sites, model="km", **survival, **arms)
    with canvas(2, width=9.2, height=3.2) as c:
        for i, arm in enumerate(arms["groups"]):
            table = curves.data["basel"].uns["outcome"]["curves"]
            part = table[table["arm"] == arm]
            c.axes[0].step(part["time"], part["survival"], where="post", color=COLOURS[i], label=arm)
            c.axes[0].fill_between(
                part["time"], part["low"], part["high"], step="post", color=COLOURS[i], alpha=0.15, lw=0
            )
        c.axes[0].set(title="90 donors of three hospitals", xlabel="years", ylabel="survival", ylim=(0, 1.02))
        c.axes[0].legend(loc="lower left")
        rows = {name: tables["coefficients"].iloc[0] for name, tables in found.items() if len(tables["coefficients"])}
        for i, row in enumerate(rows.values()):
            colour = COLOURS[0] if i == 0 else GREY
            c.axes[1].plot([row["low"], row["high"]], [i, i], color=colour, lw=2)
            c.axes[1].plot([row["coefficient"]], [i], "s", color=colour, ms=5)
        c.axes[1].axvline(0, color="#535c66", lw=0.8, ls="--")
        c.axes[1].set_yticks(range(len(rows)), list(rows))
        c.axes[1].invert_yaxis()
        c.axes[1].set(title="Share of T cells, Cox regression", xlabel="log hazard ratio, 95 % interval")
        told = ", ".join(f"{k} {r['coefficient']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for k, r in rows.items())
        return done(c, "model-outcome", f"Log hazard ratio of the share of T cells: {told}.")


def find_programs() -> Figure:
    sites = cl.demo_cohort()
    labels = ("macrophage", "endothelial", "AT2", "T")
    options: dict[str, Any] = {"donor_key": "donor", "labels": labels, "n_programs": 3, "n_columns": 80}
    run = cl.rehearse("find-programs", data=sites, **options)
    found = run.data["basel"].uns["program"]["loadings"]
    beside = cl.program_baselines(sites, **options)
    pooled = beside.pop("pooled")

    def near(table: Any) -> float:
        both = table.merge(pooled, on=["cell_type", "gene"], suffixes=("", "_p"))
        basis = np.linalg.qr(both[[f"program_{k}_p" for k in (1, 2, 3)]].to_numpy())[0]
        return float(np.linalg.norm(basis.T @ both["program_1"].to_numpy()) / np.linalg.norm(table["program_1"]))

    table = {"cloister, hardened": near(found)} | {name: near(one) for name, one in beside.items()}
    wide = found.pivot_table(index="gene", columns="cell_type", values="program_1", fill_value=0.0)
    wide = wide.reindex(columns=list(labels), fill_value=0.0)
    wide = wide.loc[wide.abs().max(axis=1).sort_values(ascending=False, kind="stable").index[:12]]
    with canvas(2, width=9.2, height=3.4) as c:
        reach = float(np.abs(wide.to_numpy()).max())
        image = c.axes[0].imshow(wide, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
        c.axes[0].set_xticks(range(len(labels)), labels, fontsize=8)
        c.axes[0].set_yticks(range(len(wide)), list(wide.index), fontsize=8)
        c.axes[0].set_title("Loadings of the first program")
        c.axes[0].grid(visible=False)
        c.paper.colorbar(image, ax=c.axes[0])
        bars(c.axes[1], table, title="First program, in the pooled span")
        told = ", ".join(f"{k} {v:.3f}" for k, v in table.items())
        return done(c, "find-programs", f"Part of the first program in the span of three pooled ones: {told}.")


def train_classifier() -> Figure:
    from cloister.models.discriminant import SETTINGS, Solver, Statistics

    sites = cl.demo_sites()
    truth = {p: a.obs["cell_type"].astype(str).to_numpy() for p, a in sites.items()}
    del sites["vienna"].obs["cell_type"]
    run = cl.rehearse("train-classifier", data=sites, validation=0.0)  # the first setting
    x = {p: run.model.inputs(a).toarray().astype(float) for p, a in sites.items()}

    def right(*who: str) -> tuple[float, Any]:
        """The same statistics of these sites' cells in one place, all digits and all pairs of genes."""
        rows, names = np.vstack([x[p] for p in who]), np.concatenate([truth[p] for p in who])
        labels, codes = np.unique(names, return_inverse=True)
        kept = np.bincount(codes)[codes] >= 10
        labels, codes = np.unique(names[kept], return_inverse=True)
        fit = Solver(Statistics.of(rows[kept], codes, len(labels))).fit(SETTINGS[0])
        scores = fit.scores(x["vienna"])
        here = [k for k, name in enumerate(labels) if name in run.model.labels]
        return float(np.mean(labels[scores.argmax(axis=1)] == truth["vienna"])), scores[:, here]

    pooled, scores = right("basel", "lugano")
    ours = float(np.mean(run.data["vienna"].obs["predicted"].astype(str).to_numpy() == truth["vienna"]))
    table = {"pooled": pooled, "cloister, hardened": ours, "basel alone": right("basel")[0]}
    table["lugano alone"] = right("lugano")[0]
    theirs = run.model.model.scores(x["vienna"])
    with canvas(2, width=9.2, height=3.2) as c:
        c.axes[0].scatter(scores, theirs, s=3, c=COLOURS[0], lw=0)
        c.axes[0].set(title="Scores of Vienna's cells", xlabel="pooled", ylabel="federated")
        bars(c.axes[1], table, title="Accuracy at Vienna, which has no label")
        alike = float(np.corrcoef(scores.ravel(), theirs.ravel())[0, 1])
        told = ", ".join(f"{k} {v:.3f}" for k, v in table.items())
        return done(c, "train-classifier", f"Scores correlate with the pooled ones by {alike:.3f}. Accuracy: {told}.")


def adapt_model() -> Figure:
    from cloister.cells.demo import demo_encoder
    from cloister.demo.story import KNOWN

    sites, truth, held = hidden_labels(0.2)
    for p, a in sites.items():  # as in the demo: a hospital has labelled the kinds that it knows, all are scored
        a.obs["scored"] = a.obs["cell_type"].astype(object).where(held[p])
        a.obs["known"] = a.obs["known"].where(np.isin(truth[p], KNOWN[p]))
    options = {"ring": "small", "timeout": 600.0}
    run = cl.rehearse("adapt-model", data=sites, model=str(demo_encoder()), label_key="known", **options)
    taps = {p: np.asarray(run.data[p].obsm["predicted_features"]) for p in sites}
    found = cl.adaptation_baselines(run, truth_key="scored", fine_tuning_rate=3e-3)
    table = {"cloister, hardened" if way == "together" else way: row["accuracy"] for way, row in found.items()}
    names = ["macrophage", "endothelial", "T", "AT2"]
    with canvas(2, width=9.2, height=3.2) as c:
        both = np.concatenate([*taps.values()]), np.concatenate([truth[p] for p in taps])
        points(c.axes[0], *both, names, title="Two of a site's taps")
        c.axes[0].set(xlabel="tap 1", ylabel="tap 2")
        legend(c.axes[0])
        bars(c.axes[1], table, title="Accuracy on labels that were hidden")
        told = ", ".join(f"{k} {v:.3f}" for k, v in table.items())
        return done(c, "adapt-model", f"Two taps of {len(both[0])} cells by type. Accuracy: {told}.")


PICTURES: dict[str, Callable[[], Figure]] = {
    "bin-values": bin_values,
    "shared-pca": shared_pca,
    "integrate": integrate,
    "quality-control": quality_control,
    "choose-genes": choose_genes,
    "cluster-cells": cluster_cells,
    "find-markers": find_markers,
    "shared-map": shared_map,
    "embed": embed,
    "find-outliers": find_outliers,
    "map-labels": map_labels,
    "propagate-labels": propagate_labels,
    "compare-groups": compare_groups,
    "model-outcome": model_outcome,
    "find-programs": find_programs,
    "train-classifier": train_classifier,
    "fine-tune": fine_tune,
    "train-cellcnn": train_cellcnn,
    "adapt-model": adapt_model,
}


# ---- the atlas, and what `cl.pl` draws of it -------------------------------------------------------------------------


@functools.cache
def atlas() -> Any:
    """The study that `cloister new study --template atlas` writes, on the demo's sites."""
    series = cl.rehearse(parse_study(study_of("atlas", [])), data=cl.demo_sites())
    series.check()
    return series


def plot(name: str) -> Figure:
    draw, alt = PLOTS[name]
    return Figure(title=name, alt=alt, png=png_of(draw(atlas()), DPI))


PLOTS: dict[str, tuple[Callable[[Any], Any], str]] = {  # pictures of docs/atlas.md and docs/plots.md, of the atlas
    "atlas": (lambda run: cl.pl.embedding(run, color="cluster", by_site=True), "Common clusters of three sites."),
    "atlas-types": (lambda run: cl.pl.confusion(run, "cell_type", "cluster"), "Clusters of the cells of each type."),
    "atlas-composition": (lambda run: cl.pl.composition(run, "cell_type"), "Shares of cell types by site."),
    "atlas-markers": (lambda run: cl.pl.dotplot(run, n_genes=2), "The two best markers of every cluster."),
    "atlas-mixing": (cl.pl.mixing, "Neighbours by site, against chance."),
    "atlas-counts": (cl.pl.violin, "Counts and genes per cell, by site."),
}

if __name__ == "__main__":
    sys.exit(main())
