"""Donors for the tests of `pooled_contrasts`: counts with planted effects, over sites; limma's answer on them."""

import csv
import json
import subprocess
from pathlib import Path

import numpy as np

from cloister.disclosure import Thresholds
from cloister.study import Party
from cloister.testing import Case
from cloister.workflows.compare_groups import pooled_contrasts
from cloister.workflows.compare_groups.contrast_terms import Bulk, Donors, Params, part_of, transformed

HUB = Party("hub")
NONE = Thresholds(1, 1)  # nothing is excluded
VECTORS = Path(__file__).parents[1] / "vectors" / "limma.json"
SCRIPT = Path(__file__).with_name("groups") / "limma.R"


def bulk(rng, group, g, shift=0.0, depth=60.0):
    """Negative binomial counts of samples: the first tenth of the genes goes up or down with the group."""
    base = np.exp(np.random.default_rng(1).normal(3.0, 1.5, g))  # the same genes at every site
    up = np.where(np.arange(g) < g // 10, np.where(np.arange(g) % 2, -1.0, 1.0), 0.0)
    size = rng.uniform(0.5, 1.6, (len(group), 1))
    spread = np.exp(rng.normal(0, 0.25, (len(group), g)))
    mean = base * size * spread * 2.0 ** (np.asarray(group)[:, None] * up + shift) * depth / 60.0
    return rng.poisson(rng.gamma(8.0, mean / 8.0)).astype(np.float64)


def site(rng, i, g=80, per_group=(4, 4), labels=("B", "T"), covariates=False, paired=False, thresholds=None):
    group = np.repeat(np.arange(len(per_group)), per_group)
    n = len(group)
    donor = np.concatenate([np.arange(k) for k in per_group]) if paired else np.arange(n)
    names = tuple(f"G{k:03d}" for k in range(g))
    own = np.random.default_rng(100 + i).normal(0, 0.3, g)  # what this site measures more of
    bulks = {k: Bulk(np.arange(n), bulk(rng, group, g, own)) for k in labels or ("",)}
    cells = {k: rng.poisson(rng.gamma(20.0, (40 + 15 * j * group + 20 * j) / 20.0)) for j, k in enumerate(labels)}
    extra = ()
    if covariates:
        extra = (rng.normal(50, 9, n).round(1), tuple(np.where(rng.permutation(n) % 2, "f", "m").tolist()))
    return Donors(names, donor, group, extra, bulks, cells, thresholds or Thresholds())


def case(seed=0, sites=3, per_group=(4, 4), g=60, labels=("B", "T"), covariates=False, thresholds=None, **options):
    rng = np.random.default_rng(seed)
    how = {"covariates": covariates, "paired": options.get("block") == "donor", "thresholds": thresholds}
    names = [Party(f"site-{i}") for i in range(sites)]
    inputs = {u: (site(rng, i, g, per_group, labels, **how),) for i, u in enumerate(names)}
    groups = ("control", "mild", "severe")[: len(per_group)]
    params = Params(
        tuple(names),
        HUB,
        groups,
        covariates=("age", "sex") if covariates else (),
        **({"composition": bool(labels)} | options),
    )
    return Case(params, inputs)


def plain(c):
    return {u: mine for u, (mine,) in c.inputs.items()}


# ---- limma -----------------------------------------------------------------------------------------------------------

CASES = {
    "sites": {"seed": 1, "labels": (), "per_group": (3, 3)},
    "no blocks, covariates, three groups": {
        "seed": 2,
        "labels": (),
        "per_group": (4, 3, 3),
        "covariates": True,
        "block": "none",
        "contrasts": ((1, 0), (2, 0), (2, 1)),
    },
    "sites, covariates, library sizes": {
        "seed": 3,
        "labels": (),
        "per_group": (3, 3),
        "covariates": True,
        "normalise": "library",
    },
    "within donors": {"seed": 4, "labels": (), "block": "donor", "sites": 2, "per_group": (4, 4)},
    "many donors": {"seed": 5, "labels": (), "per_group": (6, 6), "g": 60, "min_count": 25.0},
    "shares": {"seed": 6, "labels": ("B", "T", "NK", "DC"), "g": 4, "expression": False, "per_group": (3, 3)},
    "shares, asin": {
        "seed": 7,
        "labels": ("B", "T", "NK", "DC"),
        "g": 4,
        "expression": False,
        "transform": "asin",
        "per_group": (3, 3),
    },
}


def tables(c):
    """The tables of a case before its first sum."""
    brought = {
        u: pooled_contrasts.Brings(pooled_contrasts.labels_of(c.params, d), d.levels()) for u, d in plain(c).items()
    }
    names = next(iter(plain(c).values())).names
    return pooled_contrasts.tables_of(c.params, names, pooled_contrasts.agree(c.params, brought))


def pooled(c):
    """All samples of all sites as one table: what limma is given."""
    params, table = c.params, tables(c)[-1]
    rows, counts = [], []
    for u, mine in plain(c).items():
        part = part_of(table, mine)
        counts.append(part.counts)
        for i in range(len(part.group)):
            own = u if params.block == "site" else f"{u}-{part.donor[i]}"
            rows.append({"group": params.groups[part.group[i]], "block": own})
            rows[-1] |= {k: v[i] for k, v in zip(params.covariates, part.covariates, strict=True)}
    return rows, np.concatenate(counts)


def ask_limma(c, folder):
    """Run R; rows of result and prior as text."""
    params, (rows, counts) = c.params, pooled(c)
    values = counts
    if params.composition:
        values = transformed(counts, counts.sum(axis=1), params.transform)
    with (folder / "samples.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    formula = "".join(f" + {name}" for name in params.covariates) + ("" if params.block == "none" else " + block")
    contrasts = ";".join(f"{params.groups[a]} {params.groups[b]}" for a, b in params.contrasts)
    with (folder / "terms.csv").open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["groups", "formula", "contrasts", "min_count", "normalise"])
        writer.writerow([" ".join(params.groups), formula, contrasts, params.min_count, params.normalise])
    name = "values.csv" if params.composition else "counts.csv"
    np.savetxt(folder / name, values.T, delimiter=",", fmt="%.17g")
    subprocess.run(["Rscript", str(SCRIPT), str(folder)], check=True, capture_output=True)
    read = [list(csv.DictReader((folder / n).read_text().splitlines())) for n in ("result.csv", "prior.csv")]
    return {"result": read[0], "prior": read[1][0]}


def written(c):
    """The donors of a case as plain lists: random numbers need not be the same on every machine."""
    return {
        u: {
            "donor": mine.donor.tolist(),
            "group": mine.group.tolist(),
            "covariates": [list(x) for x in mine.covariates],
            "counts": {k: b.counts.astype(int).tolist() for k, b in mine.bulks.items()},
            "cells": {k: n.tolist() for k, n in mine.cells.items()},
        }
        for u, mine in plain(c).items()
    }


def stored(name):
    """A case as it is stored, and limma's answer."""
    kept = json.loads(VECTORS.read_text())[name]
    c = case(**CASES[name], thresholds=NONE)
    inputs = {}
    for u, row in kept["donors"].items():
        bulks = {k: Bulk(np.arange(len(x)), np.array(x, float)) for k, x in row["counts"].items()}
        more = tuple(tuple(x) if isinstance(x[0], str) else np.array(x) for x in row["covariates"])
        cells = {k: np.array(n) for k, n in row["cells"].items()}
        names = plain(c)[u].names
        inputs[u] = (Donors(names, np.array(row["donor"]), np.array(row["group"]), more, bulks, cells, NONE),)
    return Case(c.params, inputs), kept["limma"]


def same_as_limma(result, answer, params, rtol=1e-6):
    """Every row that limma tested, and no other: means, effects, t, log p, false discovery, prior."""
    for j, (a, b) in enumerate(params.contrasts):
        rows = [r for r in answer["result"] if r["contrast"] == f"{params.groups[a]} {params.groups[b]}"]
        assert len(rows) == len(result.names)
        found = result.tested[j]
        limma = {key: np.array([float(r[key]) for r in rows]) for key in ("average", "effect", "t", "p", "fdr")}
        mine = {"average": result.average, "effect": found.effect, "t": found.t, "p": found.p, "fdr": found.fdr}
        mine["p"], limma["p"] = np.log(mine["p"]), np.log(limma["p"])
        for key, theirs in limma.items():
            np.testing.assert_allclose(mine[key], theirs, rtol=rtol, atol=1e-9, err_msg=key)
    np.testing.assert_allclose(result.prior.df, float(answer["prior"]["df"]), rtol=rtol)
    np.testing.assert_allclose(result.prior.variance, float(answer["prior"]["variance"]), rtol=rtol)
    assert result.df == int(answer["prior"]["residual"])
