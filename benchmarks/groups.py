"""compare-groups beside limma-voom on pooled donors and each site alone: what is found, how exactly, at what cost.

    python benchmarks/groups.py [--quick] [--data ../shared/data] [--limma]

blood       Kang's control and stimulated cells (`pbmc_federation.h5ad`), drawn into 24 generated donors with effects of
            their own, over three sites: differences of coefficients and log p to the pooled fit, known interferon genes
            among the first 25, genes found together and alone
null        the same control cells alone, donors put into two groups at random: how many genes are called different
cytometry   `bodenmiller_bcrxl_catalyst.npz`: four patients, stimulated and not, at two sites; cell types by gates on
            lineage markers; shares compared within patients (half an hour of stimulation should move none)
scale       generated counts: donors and genes as of a real cohort, bytes and seconds
disclosure  what a party learns that has the sums of one honest site alone: in how many genes the unordered counts of a
            group of m donors follow from the opened products of 2c + 1 and of c; how many donors stand behind a gene's
            sums if weights of samples were used at a site of n donors; what common weights cost

`--limma` asks limma itself (R with limma and edgeR) about the blood of all cells together.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse

import cloister as cl
from cloister.disclosure import Thresholds
from cloister.models import voom
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import Party
from cloister.workflows.compare_groups import contrast_steps, pooled_contrasts
from cloister.workflows.compare_groups.contrast_terms import part_of
from cloister.workflows.compare_groups.workflow import Options, donors_of, params_of

KNOWN = ("ISG15", "IFIT1", "IFIT2", "IFIT3", "IFI6", "MX1", "ISG20", "OAS1", "IFITM3", "IRF7")
SITES = ("basel", "lugano", "vienna")


def blood(path: Path, every: int, *, null: bool = False, seed: int = 0) -> dict[str, ad.AnnData]:
    """Twelve donors per group, four at each site; every donor sees each gene by a factor of its own."""
    rng = np.random.default_rng(seed)
    whole = ad.read_h5ad(path)
    batches = ["kang_ctrl"] if null else ["kang_ctrl", "kang_stim"]
    whole = whole[whole.obs["batch"].isin(batches).to_numpy()][::every].copy()
    stimulated = rng.permutation(whole.n_obs) % 2 == 1 if null else (whole.obs["batch"] == "kang_stim").to_numpy()
    number = rng.integers(0, 12, whole.n_obs)
    donor = 12 * stimulated + number
    x = sparse.csr_matrix(whole.X)
    own = np.clip(np.exp(rng.normal(-0.35, 0.3, (24, whole.n_vars))), 0.1, 1.0)
    row = np.repeat(np.arange(whole.n_obs), np.diff(x.indptr))
    x.data = rng.binomial(x.data.astype(np.int64), own[donor[row], x.indices]).astype(np.float32)
    x.eliminate_zeros()
    whole.X = x
    whole.obs["condition"] = np.where(stimulated, "stimulated", "control")
    whole.obs["donor"] = [f"donor-{d}" for d in donor]
    return {site: whole[number % 3 == k].copy() for k, site in enumerate(SITES)}


def cytometry(path: Path) -> dict[str, ad.AnnData]:
    """Four generated donors of each patient's cells, two patients at each of two sites, gated into five populations."""
    with np.load(path) as file:
        x, markers, sample, patient, treated = (file[k] for k in ("X", "markers", "sample", "patient", "sample_label"))
    at = {str(m): np.arcsinh(x[:, i] / 5) for i, m in enumerate(markers)}
    lymphoid, presents = at["CD3"] > 2.5, at["HLA-DR"] > 2  # CD20 and CD4 are stained less in the stimulated samples
    myeloid = ~lymphoid & ((at["CD14"] > 1.5) | (at["CD33"] > 2))
    kind = np.full(len(x), "other", dtype=object)
    kind[lymphoid] = np.where(at["CD4"][lymphoid] > 2, "CD4 T", "CD8 T")
    kind[myeloid] = "monocyte"
    kind[~lymphoid & ~myeloid & presents] = "B"
    kind[~lymphoid & ~myeloid & ~presents & (at["CD7"] > 1.5)] = "NK"
    obs = pd.DataFrame({"donor": patient[sample], "cell_type": kind}, index=[f"cell-{i}" for i in range(len(x))])
    obs["donor"] = [f"{d}-{i % 4}" for i, d in enumerate(obs["donor"])]  # four patients are too few for thresholds
    obs["condition"] = np.where(treated[sample] == 1, "BCR-XL", "reference")
    whole = ad.AnnData(x, obs=obs, var=pd.DataFrame(index=[str(m) for m in markers]))
    home = np.isin(patient[sample], np.unique(patient)[:2])
    return {"basel": whole[home].copy(), "lugano": whole[~home].copy()}


def apart(found: pd.DataFrame, wanted: pd.DataFrame, keys: list[str], effect: str) -> str:
    """Differences of coefficients and of log10 p in the rows that both have; donors left out change which these are."""
    both = found.merge(wanted, on=keys, suffixes=("", "_pooled"))
    effects = np.abs(both[effect] - both[f"{effect}_pooled"])
    logs = np.abs(np.log10(both["p"]) - np.log10(both["p_pooled"]))
    return (
        f"{len(both)} of {len(found)} rows in common with {len(wanted)}; coefficients {effects.median():.0e} (median), "
        f"{effects.max():.0e} (most); log10 p {logs.median():.0e}, {logs.max():.0e}"
    )


def told(run: cl.Run, took: float) -> str:
    sites = [c for p, c in run.cost.items() if p != "coordinator"]
    cpu, sent = max(c["cpu_seconds"] for c in sites), max(c["bytes"] for c in sites)
    openings = run.results["coordinator"]["openings"]
    return f"{openings} openings, {sent / 1e6:.2f} MB and {cpu:.2f} CPU-s a site, {took:.1f} s in all"


def timed(sites: dict[str, ad.AnnData], **options: object) -> tuple[cl.Run, str]:
    began = time.perf_counter()
    run = rehearse("compare-groups", sites, timeout=600.0, **options)
    return run, told(run, time.perf_counter() - began)


def on_blood(path: Path, every: int) -> None:
    sites = blood(path, every)
    options = {"groups": ("control", "stimulated"), "donor_key": "donor", "label_key": "cell_type"}
    run, cost = timed(sites, **options)
    beside = cl.group_baselines(sites, **options)
    found = run.data["basel"].uns["groups"]
    far = apart(
        found["expression"], beside["pooled"]["expression"], ["cell_type", "contrast", "gene"], "log_fold_change"
    )
    shares = apart(found["composition"], beside["pooled"]["composition"], ["contrast", "cell_type"], "effect")
    cells = sum(a.n_obs for a in sites.values())
    print(f"blood: 3 sites, 24 donors, {cells} cells; {cost}")
    print(f"  beside limma on pooled donors: {far}")
    print(f"  shares: {shares}")
    print(f"  {'cell type':12s} genes  differ  pooled  alone ({', '.join(sites)})  known: compared / in first 25")
    for label, part in found["expression"].groupby("cell_type"):
        counts = []
        for name in ("pooled", *(f"{p} alone" for p in sites)):
            table = beside[name]["expression"]
            counts.append(int((table[table["cell_type"] == label]["fdr"] < 0.05).sum()))
        there, first = set(KNOWN) & set(part["gene"]), set(KNOWN) & set(part["gene"].head(25))
        alone = "  ".join(f"{n:4d}" for n in counts[1:])
        differ = int((part["fdr"] < 0.05).sum())
        print(f"  {label:12s} {len(part):5d}  {differ:6d}  {counts[0]:6d}  {alone:22s}  {len(there)} / {len(first)}")
    for label, why in run.results["basel"]["left_out"].items():
        print(f"  left out: {label}: {why}")


def on_nothing(path: Path, every: int, times: int) -> None:
    called, compared, shares = 0, 0, 0
    for seed in range(times):
        sites = blood(path, every, null=True, seed=seed)
        run, _ = timed(sites, groups=("control", "stimulated"), donor_key="donor", label_key="cell_type")
        found = run.data["basel"].uns["groups"]
        called += int((found["expression"]["fdr"] < 0.05).sum())
        compared += len(found["expression"])
        shares += int((found["composition"]["fdr"] < 0.05).sum())
    print(
        f"null: {times} draws of two groups that do not differ: {called} of {compared} genes and {shares} shares called"
    )


def on_cytometry(path: Path) -> None:
    sites = cytometry(path)
    options = {"groups": ("reference", "BCR-XL"), "donor_key": "donor", "label_key": "cell_type", "block": "donor"}
    options |= {"compare": "composition"}
    run, cost = timed(sites, **options)
    found = run.data["basel"].uns["groups"]["composition"]
    far = apart(
        found, cl.group_baselines(sites, **options)["pooled"]["composition"], ["contrast", "cell_type"], "effect"
    )
    cells = sum(a.n_obs for a in sites.values())
    print(f"cytometry: 2 sites, 4 patients in 16 generated donors, in pairs, {cells} cells; {cost}")
    print(f"  beside limma on pooled donors: {far}")
    for row in found.itertuples():
        print(f"  {row.cell_type:9s} {row.share_before:6.1%} -> {row.share:6.1%}  p {row.p:.3f}  FDR {row.fdr:.3f}")


def generated(donors: int, genes: int, types: int, rng: np.random.Generator) -> dict[str, ad.AnnData]:
    """One cell per donor and type."""
    base, sites = np.exp(rng.normal(3, 1.5, genes)), {}
    for site in SITES:
        n = donors // len(SITES)
        donor, label = np.repeat(np.arange(n), types), np.tile(np.arange(types), n)
        x = rng.poisson(base * np.exp(rng.normal(0, 0.3, (len(donor), genes)))).astype(np.float32)
        obs = pd.DataFrame({"donor": [f"{site}-{d}" for d in donor], "cell_type": [f"type {k}" for k in label]})
        obs["condition"] = np.where(donor % 2, "case", "control")
        obs.index = pd.Index([f"{site}-{i}" for i in range(len(obs))])
        sites[site] = ad.AnnData(sparse.csr_matrix(x), obs=obs, var=pd.DataFrame(index=[f"G{i}" for i in range(genes)]))
    return sites


def on_scale(donors: int, genes: int, types: int) -> None:
    """Counts of donors as they come, one cell per donor and type: what is sent does not depend on cells."""
    sites = generated(donors, genes, types, np.random.default_rng(0))
    _, cost = timed(sites, groups=("control", "case"), donor_key="donor", label_key="cell_type", min_cells=1)
    print(f"scale: 3 sites, {donors} donors, {genes} genes, {types} cell types; {cost}")


def products(n: int, m: int, least: int, most: int) -> list[tuple[int, ...]]:
    """The ways to write n as m odd factors in increasing order."""
    if m == 1:
        return [(n,)] if least <= n <= most else []
    found = []
    factor = least
    while factor**m <= n and factor <= most:
        if n % factor == 0:
            found += [(factor, *rest) for rest in products(n // factor, m - 1, factor, most)]
        factor += 2
    return found


def on_disclosure(genes: int) -> None:
    """One honest site, everything else known: libraries of its donors, and the part of all other sites."""
    rng = np.random.default_rng(0)
    base = np.exp(rng.normal(3, 1.0, genes))
    for m in (3, 4, 5):
        alone = both = 0
        for mean in base[: genes if m < 5 else genes // 4]:
            c = rng.poisson(rng.gamma(8.0, mean / 8.0, (2, m)))
            ways = [products(int(np.prod(2 * g.astype(object) + 1)), m, 1, 4 * int(c.max()) + 21) for g in c]
            alone += len(ways[0]) == 1
            counts = [[np.prod([(f - 1) // 2 for f in way], dtype=object) for way in group] for group in ways]
            whole = np.prod(c.astype(object))
            pairs = sum(whole == a * b for a in counts[0] for b in counts[1]) if whole else len(ways[0]) * len(ways[1])
            both += pairs == 1
        n = genes if m < 5 else genes // 4
        print(f"disclosure: {m} donors a group, {n} genes: counts of a group follow from its sum in {alone / n:.0%},"
              f" with the product of all counts in {both / n:.0%}")  # fmt: skip
    for n in (4, 6, 12, 20, 40):
        sites = generated(2 * n * len(SITES), genes, 1, rng)
        chosen = Options(groups=("control", "case"), donor_key="donor", min_cells=1, min_count=1.0)
        held = {Party(p): donors_of(a, chosen) for p, a in sites.items()}
        params = params_of(tuple(held), Party("coordinator"), chosen)
        (t,) = pooled_contrasts.tables_of(params, next(iter(held.values())).names, pooled_contrasts.Agreed((), ()))
        parts = [part_of(t, replace(mine, thresholds=Thresholds(1, 2))) for mine in held.values()]
        for step in contrast_steps.STEPS[:-1]:
            if step.shapes(t):
                pooled_contrasts.take(step, [t], pooled_contrasts.added(step, t, parts))
        y, library = t.values(parts[0])
        fitted = voom.fitted_values(t.design(parts[0]), y, parts[0].blocks("site"), t.plain.coefficients)
        own = t.trend.weights(fitted + np.log2(library + 1)[:, None] - np.log2(1e6))
        sizes = contrast_steps.donors_with(t, parts[0], own)
        low, middle = np.quantile(sizes, [0.0, 0.5])
        found, wanted = (
            pooled_contrasts.ideal(params, {p: replace(mine, thresholds=least) for p, mine in held.items()})[
                Party("coordinator")
            ]
            .results[0]
            .tested[0]
            for least in (Thresholds(1, 3), Thresholds(1, 1))
        )
        far = np.abs(np.log10(found.p) - np.log10(wanted.p)) if len(found.p) == len(wanted.p) else np.array([np.nan])
        print(f"disclosure: {2 * n} donors at a site, weights of samples: effective donors {low:.2f} (least),"
              f" {middle:.2f} (median gene), at least 3 in {np.mean(sizes >= 3):.0%}; beside limma log10 p differs by"
              f" {np.median(far):.3f} (median), {np.quantile(far, 0.95):.3f} (95 %)")  # fmt: skip


def ask_limma(path: Path, every: int) -> None:
    """limma's own answer on all cells together, beside the federated one."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import group_cases

    from cloister.testing import Case

    sites = blood(path, every)
    options = {"groups": ("control", "stimulated"), "donor_key": "donor"}
    run, _ = timed(sites, **options)
    chosen = Options(**options)
    params = params_of(tuple(sites), "coordinator", chosen)
    case = Case(params, {p: (donors_of(a, chosen),) for p, a in sites.items()})
    with tempfile.TemporaryDirectory() as folder:
        answer = group_cases.ask_limma(case, Path(folder))["result"]
    names = donors_of(sites["basel"], chosen).names
    found = run.data["basel"].uns["groups"]["expression"].set_index("gene")
    wanted = pd.DataFrame({"effect": [float(r["effect"]) for r in answer], "p": [float(r["p"]) for r in answer]})
    wanted.index = pd.Index([names[int(r["row"]) - 1] for r in answer])
    mine = found.loc[wanted.index]
    assert len(mine) == len(found)
    effect = (np.abs(mine["log_fold_change"] - wanted["effect"]) / np.abs(wanted["effect"]).clip(1e-3)).max()
    log_p = (np.abs(np.log(mine["p"]) - np.log(wanted["p"])) / np.abs(np.log(wanted["p"])).clip(1e-3)).max()
    print(f"limma itself, {len(found)} genes of all cells: coefficients {effect:.0e}, log p {log_p:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every second cell, one null draw, a smaller cohort")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--limma", action="store_true", help="ask R, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    threads, load = os.environ["OMP_NUM_THREADS"], os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s) a party, load {load:.0f}")
    every, cells = (2 if args.quick else 1), args.data / "scrna" / "pbmc_federation.h5ad"
    if cells.exists():
        on_blood(cells, every)
        on_nothing(cells, every, 1 if args.quick else 10)
        if args.limma:
            ask_limma(cells, every)
    else:
        print(f"{cells} is not here; no blood")
    gates = args.data / "cytometry" / "bodenmiller_bcrxl_catalyst.npz"
    if gates.exists():
        on_cytometry(gates)
    else:
        print(f"{gates} is not here; no cytometry")
    on_disclosure(100 if args.quick else 1000)
    on_scale(*((60, 2000, 4) if args.quick else (60, 20_000, 12)))


if __name__ == "__main__":
    main()
