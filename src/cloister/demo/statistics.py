"""Demos of statistics over all sites: shared bins, a shared space, cells moved in it, outliers, groups of donors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

from cloister.cells import tables as cells
from cloister.cells.genes import genes_in_common
from cloister.demo import attacks
from cloister.demo.rows import Played, Tell, auroc, cost_of, percent
from cloister.demo.story import GROUPS, OUTCOME, PROGRAMS, SPACE, Story, differing
from cloister.models import isolation_forest, leiden, umap_map, variable_genes
from cloister.models.harmony import EVERYTHING, Settings
from cloister.papers import averaged_quantiles, federated_harmony
from cloister.papers.attacks.sent import MASKED, Sent
from cloister.papers.baselines.groups import group_baselines
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import Party
from cloister.workflows.bin_values.workflow import digitise, spread
from cloister.workflows.find_programs import program_baselines
from cloister.workflows.integrate.harmony_steps import Cells, Params, together
from cloister.workflows.model_outcome import outcome_baselines
from cloister.workflows.quality_control.baselines import doublet_scores

TREES = 400  # with 100, chance moves an area by 0.013, a third of what is to be seen


def bin_values(story: Story, tell: Tell) -> Played:
    """Share of values that get the bin which the pooled quantiles would give them."""
    sites = story.sites
    values = {p: np.concatenate([*cells.nonzero_values(a)]) for p, a in sites.items()}
    levels = np.linspace(0, 1, 50)
    pooled = np.quantile(np.concatenate([*values.values()]), levels)

    def right(edges: Callable[[str], Any]) -> float:
        shares = {p: spread(np.arange(len(v), dtype=np.uint64), 0) for p, v in values.items()}
        hits = [digitise(v, edges(p), shares[p]) == digitise(v, pooled, shares[p]) for p, v in values.items()]
        return float(np.mean(np.concatenate(hits)))

    alone = right(lambda p: np.quantile(values[p], levels))
    own = {p: np.quantile(v, levels) for p, v in values.items()}
    runs, rows = [], []
    for mode in ("hardened", "published"):
        sent = Sent(*MASKED, averaged_quantiles.Local)
        run = rehearse("bin-values", sites, mode=mode, on_event=tell, on_frame=sent)
        edges = {p: run.data[p].uns["cloister"]["bin_edges"] for p in sites}
        share = right(edges.__getitem__)
        leak = attacks.own_quantiles(sent, edges["basel"], own, pooled)
        runs.append(run)
        rows.append(("bin-values", mode, "same bin", *percent(alone, share, 1.0), leak, *cost_of(run)))
    return runs, rows


def shared_pca(story: Story, tell: Tell) -> Played:
    """Smallest cosine between the space that was found and the one of all cells in one place."""
    sites, sent = story.sites, Sent(*MASKED)
    run = rehearse("shared-pca", sites, on_event=tell, on_frame=sent, **SPACE)
    story.space = run.data
    genes = [str(g) for g in run.data["basel"].uns["X_shared_pca"]["genes"]]
    at = [sites["basel"].var_names.get_loc(g) for g in genes]
    logs = {}
    for p, a in sites.items():
        x = np.asarray(a.X.todense(), dtype=np.float64)
        logs[p] = np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e4)[:, at]

    def axes(y: Any) -> Any:
        deviation = y.std(axis=0, ddof=1)
        z = np.clip((y - y.mean(axis=0)) / np.where(deviation > 0, deviation, 1), None, 10)
        return np.linalg.svd(z - z.mean(axis=0), full_matrices=False)[2][:10].T

    def nearness(a: Any, b: Any) -> float:
        return float(np.linalg.svd(np.linalg.qr(a)[0].T @ np.linalg.qr(b)[0])[1].min())

    pooled = axes(np.concatenate([*logs.values()]))
    place = {str(g): i for i, g in enumerate(run.data["basel"].var_names)}
    loadings = np.asarray(run.data["basel"].varm["X_shared_pca"])[[place[g] for g in genes]]
    alone = float(np.mean([nearness(axes(y), pooled) for y in logs.values()]))
    common = genes_in_common({p: [str(g) for g in a.var_names] for p, a in sites.items()})
    leak = attacks.own_means(sent, run.data["basel"].uns["X_shared_pca"], common, logs)
    figures = (f"{alone:.3f}", f"{nearness(loadings, pooled):.3f}", "1.000")
    return [run], [("shared-pca", "hardened", "cosine", *figures, leak, *cost_of(run))]


def integrate(story: Story, tell: Tell) -> Played:
    """How much of a cell's neighbourhood is not of its own site, as a share of what it is where cells lie anywhere."""
    sites = story.space
    of = np.repeat(np.arange(len(sites)), [a.n_obs for a in sites.values()])
    spread = 1 - float(np.square(np.bincount(of) / len(of)).sum())

    def mixed(x: Any) -> str:
        from scipy.spatial import cKDTree

        near = cKDTree(x).query(x, 11)[1][:, 1:]
        return f"{np.mean(of[near] != of[:, None]) / spread:.1%}"

    x = {p: a.obsm["X_shared_pca"] for p, a in sites.items()}
    whole = Params(tuple(map(Party, x)), Party("coordinator"), "X_shared_pca", Settings(rounds=2))
    one_batch = {p: np.zeros(len(y), np.int64) for p, y in x.items()}
    one_place = together(whole, {Party(p): Cells(y, one_batch[p], thresholds=EVERYTHING) for p, y in x.items()})
    pooled = mixed(np.concatenate([one_place[Party(p)].moved for p in x]))
    alone = mixed(np.concatenate([*x.values()]))
    runs, rows = [], []
    for mode in ("hardened", "published"):
        sent = Sent(*MASKED, federated_harmony.Mine)
        run = rehearse("integrate", sites, mode=mode, rounds=2, on_event=tell, on_frame=sent)
        found = mixed(np.concatenate([run.data[p].obsm["X_integrated"] for p in x]))
        leak = attacks.own_directions(sent, x)
        runs.append(run)
        rows.append(("integrate", mode, "mixed", alone, found, pooled, leak, *cost_of(run)))
    story.integrated = runs[0].data
    return runs, rows


def quality_control(story: Story, tell: Tell) -> Played:
    """Area under the curve of doublets that were planted at every site; one site has forty cells."""
    rng, sites, truth = np.random.default_rng(0), {}, {}
    for i, (p, a) in enumerate(story.sites.items()):
        at = rng.permutation(a.n_obs)[: 44 if i == 2 else a.n_obs]
        n = len(at) // 13  # a pair of cells becomes one
        whole = a[at[n:]].copy()
        whole.X = scipy.sparse.csr_matrix(whole.X, dtype=np.float64)
        other = scipy.sparse.vstack([scipy.sparse.csr_matrix(a[at[:n]].X), whole.X[n:] * 0]).tocsr()
        whole.X, sites[p], truth[p] = (whole.X + other).tocsr(), whole, np.arange(len(at) - n) < n
    sent = Sent(*MASKED)
    run = rehearse("quality-control", sites, on_event=tell, on_frame=sent)
    of, planted = np.repeat(list(sites), [a.n_obs for a in sites.values()]), np.concatenate([*truth.values()])
    counts = {p: a.X for p, a in sites.items()}
    alone = np.concatenate([doublet_scores(x, np.zeros(x.shape[0])) for x in counts.values()])
    together = np.concatenate([run.data[p].obs["doublet_score"] for p in sites])
    pooled = doublet_scores(scipy.sparse.vstack([*counts.values()]), of)
    figures = (f"{auroc(v, planted):.3f}" for v in (alone, together, pooled))
    leak = attacks.own_largest(run.data["basel"].uns["quality_control"], counts)
    return [run], [("quality-control", "hardened", "AUROC", *figures, leak, *cost_of(run))]


def choose_genes(story: Story, tell: Tell) -> Played:
    """How many of the genes that vary most within the batches of all cells in one place are chosen."""
    sites, sent, n = story.sites, Sent(*MASKED), 300
    run = rehearse("choose-genes", sites, n_top_genes=n, on_event=tell, on_frame=sent)
    own = {
        p: variable_genes.ranked(variable_genes.normalised_variance(variable_genes.capped(a.X, None, 10, 3)), n)
        for p, a in sites.items()
    }
    hits, ranks = (
        np.sum(x, axis=0).astype(float) for x in zip(*((r >= 0, np.maximum(r, 0)) for r in own.values()), strict=True)
    )
    pooled, _ = variable_genes.chosen(hits, ranks, n)
    found = sites["basel"].var_names.isin(run.data["basel"].var_names[run.data["basel"].var["highly_variable"]])
    alone = float(np.mean([(pooled & (r >= 0)).sum() / n for r in own.values()]))
    figures = percent(alone, float((pooled & found).sum() / n), 1.0)
    return [run], [("choose-genes", "hardened", f"of {n} genes", *figures, attacks.own_ranks(sent, own), *cost_of(run))]


def cluster_cells(story: Story, tell: Tell) -> Played:
    """Agreement of clusters with the types that nobody was shown (normalised mutual information), over all cells.

    Clusters that sites find alone, each on components of its own, have nothing to do with each other.
    """
    sites, sent = story.integrated, Sent(*MASKED)
    run = rehearse("cluster-cells", sites, on_event=tell, on_frame=sent)
    x = {p: np.asarray(a.obsm["X_integrated"]) for p, a in sites.items()}
    truth = np.concatenate([story.truth[p] for p in x])

    def found(y: Any) -> Any:
        return leiden.partition(leiden.neighbour_graph(y, 15), 1.0, 0)

    apart = [found(own_components(a)) + 1000 * i for i, a in enumerate(story.sites.values())]
    together = agreement(np.concatenate([run.data[p].obs["cluster"].cat.codes for p in x]), truth)
    pooled = agreement(found(np.concatenate([*x.values()])), truth)
    figures = (f"{v:.3f}" for v in (agreement(np.concatenate(apart), truth), together, pooled))
    leak = attacks.own_center(sent, x)
    return [run], [("cluster-cells", "hardened", "NMI", *figures, leak, *cost_of(run))]


def own_components(adata: Any, n: int = 30) -> Any:
    """Components of one site's cells: logarithms on one scale, as scanpy computes them."""
    x = np.asarray(adata.X.todense(), dtype=np.float64)
    y = np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e4)
    deviation = y.std(axis=0, ddof=1)
    z = np.clip((y - y.mean(axis=0)) / np.where(deviation > 0, deviation, 1), None, 10)
    u, s, _ = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)
    return u[:, :n] * s[:n]


def shared_map(story: Story, tell: Tell) -> Played:
    """How many of a cell's 15 nearest cells of all sites are among the 15 nearest on the map; of every third cell."""
    sites, sent = {p: a[::3].copy() for p, a in story.integrated.items()}, Sent(*MASKED)
    run = rehearse("shared-map", sites, on_event=tell, on_frame=sent)
    x = {p: np.asarray(a.obsm["X_integrated"]) for p, a in sites.items()}
    whole = np.concatenate([*x.values()])

    def kept(y: Any) -> float:
        return umap_map.recall(whole, y, 15)

    apart = [umap_map.fitted(y, 15, 0.5, 0) + np.array([1e3 * i, 0.0]) for i, y in enumerate(x.values())]
    together = kept(np.concatenate([run.data[p].obsm["X_shared_map"] for p in x]))
    figures = percent(kept(np.concatenate(apart)), together, kept(umap_map.fitted(whole, 15, 0.5, 0)))
    leak = attacks.own_center(sent, x)
    return [run], [("shared-map", "hardened", "neighbours kept", *figures, leak, *cost_of(run))]


def find_markers(story: Story, tell: Tell) -> Played:
    """How many of the fifty best genes of the pooled cells are found, over labels that the model gave."""
    sites, sent = story.labelled, Sent(*MASKED)
    run = rehearse("find-markers", sites, label_key="predicted", on_event=tell, on_frame=sent)
    kinds = {p: a.obs["predicted"].astype(str).to_numpy() for p, a in sites.items()}
    x = {p: np.log1p(1e4 * a.X.toarray() / np.maximum(np.asarray(a.X.sum(axis=1)), 1)) for p, a in sites.items()}
    table, genes = run.data["basel"].uns["markers"], sites["basel"].var_names.to_numpy()
    labels = [str(name) for name in table["label"].unique()]
    together, alone = [], []
    for name in labels:
        pooled = best_genes(np.concatenate([*x.values()]), np.concatenate([*kinds.values()]) == name, genes)
        together.append(len(pooled & {*table[table["label"] == name]["gene"][:50]}) / 50)
        alone += [
            len(pooled & best_genes(y, kinds[p] == name, genes)) / 50
            for p, y in x.items()
            if (kinds[p] == name).sum() > 1
        ]
    sizes = {p: np.array([(of == name).sum() for name in labels], float) for p, of in kinds.items()}
    leak = attacks.own_label_sizes(sent, sizes)
    figures = percent(float(np.mean(alone)), float(np.mean(together)), 1.0)
    return [run], [("find-markers", "hardened", "of 50 genes", *figures, leak, *cost_of(run))]


def best_genes(x: Any, inside: Any, genes: Any) -> set[str]:
    """The fifty of largest Welch t of these cells against the rest."""
    moments = [(y.mean(axis=0), y.var(axis=0, ddof=1) / len(y)) for y in (x[inside], x[~inside])]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (moments[0][0] - moments[1][0]) / np.sqrt(moments[0][1] + moments[1][1])
    return {*genes[np.argsort(-np.nan_to_num(t, posinf=0.0), kind="stable")[:50]]}


def agreement(one: Any, other: Any) -> float:
    """Mutual information of two partitions, over the mean of their entropies."""
    table = np.zeros((len(np.unique(one)), len(np.unique(other))))
    np.add.at(table, (np.unique(one, return_inverse=True)[1], np.unique(other, return_inverse=True)[1]), 1.0 / len(one))
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    there = table > 0
    shared = float((table[there] * np.log(table[there] / np.outer(rows, columns)[there])).sum())
    mean = -float((rows * np.log(rows)).sum() + (columns * np.log(columns)).sum()) / 2
    return shared / mean if mean > 0 else 1.0


def compare_groups(story: Story, tell: Tell) -> Played:
    """Genes that differ in macrophages of the ill, found at a false discovery rate of 5 %; labels are the model's."""
    sites, sent = story.labelled, Sent(*MASKED)
    run = rehearse("compare-groups", sites, on_event=tell, on_frame=sent, **GROUPS)
    var = sites["basel"].var
    planted, story.found = set(var.index[var["planted"]]), differing(run.data["basel"].uns["groups"])
    beside = {name: len(planted & {*differing(tables)}) for name, tables in group_baselines(sites, **GROUPS).items()}
    alone = float(np.mean([beside[f"{p} alone"] for p in sites]))
    leak = attacks.own_donors(sent, sites, GROUPS)
    figures = (f"{alone:.1f}", str(len(planted & {*story.found})), str(beside["pooled"]))
    return [run], [("compare-groups", "hardened", f"of {len(planted)} genes", *figures, leak, *cost_of(run))]


def model_outcome(story: Story, tell: Tell) -> Played:
    """How exactly the effect of T cells on a simulated score is known: standard errors, at each site and together."""
    sites = {p: a.copy() for p, a in story.labelled.items()}
    for i, a in enumerate(sites.values()):
        rng, donors = np.random.default_rng([7, i]), a.obs["donor"].astype(str)
        share = (a.obs["predicted"].astype(str) == "T").groupby(donors.to_numpy()).mean()
        a.obs["score"] = donors.map(-5 * share + rng.normal(0, 1, len(share))).to_numpy()
        a.obs["t_cell"] = (a.obs["predicted"].astype(str) == "T").astype(float).to_numpy()
    sent = Sent(*MASKED)
    run = rehearse("model-outcome", sites, on_event=tell, on_frame=sent, **OUTCOME)
    found = {"together": run.data["basel"].uns["outcome"], **outcome_baselines(sites, **OUTCOME)}
    error = {name: float(t["coefficients"]["error"].mean()) for name, t in found.items()}
    alone = float(np.mean([error[f"{p} alone"] for p in sites]))
    figures = (f"{v:.2f}" for v in (alone, error["together"], error["pooled"]))
    leak = attacks.own_scores(sent, sites, OUTCOME)
    return [run], [("model-outcome", "hardened", "standard error", *figures, leak, *cost_of(run))]


def find_programs(story: Story, tell: Tell) -> Played:
    """How much of the first program lies in the span of the pooled donors' first three; labels are the model's."""
    sites, sent = story.labelled, Sent(*MASKED)
    run = rehearse("find-programs", sites, on_event=tell, on_frame=sent, **PROGRAMS)
    beside = program_baselines(sites, **PROGRAMS)
    pooled = beside.pop("pooled")

    def near(table: Any) -> float:
        both = table.merge(pooled, on=["cell_type", "gene"], suffixes=("", "_p"))
        basis = np.linalg.qr(both[[f"program_{k}_p" for k in (1, 2, 3)]].to_numpy())[0]
        return float(np.linalg.norm(basis.T @ both["program_1"].to_numpy()) / np.linalg.norm(table["program_1"]))

    together, alone = near(run.data["basel"].uns["program"]["loadings"]), float(np.mean([*map(near, beside.values())]))
    leak = attacks.membership(sites, PROGRAMS)
    figures = (f"{v:.3f}" for v in (alone, together, 1.0))
    return [run], [("find-programs", "hardened", "cosine", *figures, leak, *cost_of(run))]


def find_outliers(story: Story, tell: Tell) -> Played:
    """Area under the ROC curve of all sites' scores; a clone grows at one site, where it is not rare."""
    from anndata import AnnData

    sites = {p: AnnData(np.asarray(a.obsm["X_integrated"]), obs=a.obs) for p, a in story.integrated.items()}
    truth = np.concatenate([*story.clone.values()])

    def forest(x: Any) -> Any:
        x = np.asarray(x, dtype=np.float64)
        return isolation_forest.fit(x, trees=TREES, rng=np.random.default_rng(0)).score(x)

    pooled = auroc(forest(np.concatenate([a.X for a in sites.values()])), truth)
    alone = auroc(np.concatenate([forest(a.X) for a in sites.values()]), truth)
    runs, rows = [], []
    for mode, attack in (("hardened", attacks.rows_rebuilt), ("published", attacks.rows_unmasked)):
        run = rehearse("find-outliers", sites, mode=mode, contamination=0.1, trees=TREES, on_event=tell)
        together = auroc(np.concatenate([run.data[p].obs["outlier_score"].to_numpy() for p in sites]), truth)
        runs.append(run)
        figures = (f"{v:.3f}" for v in (alone, together, pooled))
        rows.append(("find-outliers", mode, "AUROC", *figures, attack(sites), *cost_of(run)))
    return runs, rows
