"""Attacks on the groups of `integrate`, on real cells: what is recovered, beside what is known or guessed without.

    python benchmarks/group_attacks.py

Blood cells of one study (`pbmc_federation.h5ad`, 2000 cells) and glioblastoma of one patient
(`glioblastoma_panobinostat_zhao.h5ad`, 1000 cells), 30 principal components each. The attacker knows the means and
sizes of all groups, which is the most that the sums of a run can give; where it says so, also which groups to look at.

  far cell     one cell in a random direction, 1 to 10^12 times as far from the mean as a mean cell: the largest cosine
               of a group's mean with that direction, with the cell, without it, and where groups are cut across the
               direction of largest variance as it is; the length of the mean of the group that the cell is in
  weight       the largest part of a group's clipped mean that one cell has, times the cells of the group
  membership   area under the curve of the distance to the nearest mean, for half of the cells in groups and half not;
               the variance of cells that means of their groups explain, and the nearest means that of other cells
  two runs     one of them without a cell: groups that differ, all of one run less all of the other, of clipped and of
               plain means: cosine with the cell; beside that of the cell with the mean of its group
  thresholds   two runs with thresholds from 10 to 20 whose first cuts differ in one cell, one half less the other
"""

from __future__ import annotations

import argparse
import platform
from itertools import combinations
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp

from cloister import disclosure
from cloister.disclosure import Rows, Thresholds
from cloister.models.harmony import unit

SETS = (("pbmc_federation", "batch", 2000), ("glioblastoma_panobinostat_zhao", "patient_id", 1000))
robust = disclosure._main_direction


def components(path: Path, key: str, most: int, d: int = 30):
    """Cells of the first site in d principal components of 1000 genes."""
    whole = ad.read_h5ad(path)
    whole = whole[(whole.obs[key] == sorted(whole.obs[key].unique())[0]).to_numpy()]
    x = np.asarray(whole.X.toarray() if sp.issparse(whole.X) else whole.X, np.float64)
    if np.array_equal(x[:50], np.rint(x[:50])):
        x = np.log1p(x / x.sum(axis=1, keepdims=True) * 1e4)
    x = x[np.random.default_rng(0).permutation(len(x))[:most]]
    genes = np.argsort(-x.var(axis=0))[:1000]
    u, s, _ = np.linalg.svd(x[:, genes] - x[:, genes].mean(axis=0), full_matrices=False)
    return u[:, :d] * s[:d]


def largest_variance(centred, rounds=8):
    direction = centred.T @ centred[:, int(np.square(centred).sum(axis=0).argmax())]
    for _ in range(rounds):
        direction = centred.T @ (centred @ (direction / np.linalg.norm(direction)))
    return direction / np.linalg.norm(direction)


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def far_cell(x, times):
    rng, center = np.random.default_rng(1), x.mean(axis=0)
    usual = np.linalg.norm(x - center, axis=1).mean()
    for distance in (1, 3, 10, 100, 1e6, 1e12):
        found = {"clipped": [], "as it is": [], "without": []}
        length = []
        for _ in range(times):
            i, u = int(rng.integers(len(x))), unit(rng.normal(size=(1, x.shape[1])))[0]
            far = x.copy()
            far[i] = center + distance * usual * u
            for name, rows in (("clipped", far), ("as it is", far), ("without", np.delete(x, i, axis=0))):
                disclosure._main_direction = largest_variance if name == "as it is" else robust
                groups = Rows(len(rows)).similar(rows)
                means = groups.clipped_means(rows)
                found[name].append(float((unit(means - center) @ u).max()))
                if name == "clipped":
                    length.append(np.linalg.norm(means[groups.codes[i]] - center) / usual)
        disclosure._main_direction = robust
        rows = ", ".join(f"{name} {np.mean(some):.2f}" for name, some in found.items())
        print(f"  far cell, {distance:g} times: cosine {rows}; length of its group's mean {np.mean(length):.2f} usual")


def weight(x):
    groups = Rows(len(x)).similar(x)
    means, parts = groups.clipped_means(x), []
    for k in range(len(groups)):
        length = np.linalg.norm(x[groups.codes == k] - means[k], axis=1)
        each = np.minimum(1.0, np.sort(length)[len(length) // 2] / length)
        parts.append(each.max() / each.sum() * len(length))
    print(f"  weight of a cell, times m: median {np.median(parts):.2f}, largest {max(parts):.2f} (bound 2)")


def membership(x):
    inside, outside = np.array_split(x, 2)
    total = np.square(outside - inside.mean(axis=0)).sum()
    for least in (10, 20, 50):
        groups = Rows(len(inside), None, Thresholds(least, 1)).similar(inside)
        means = groups.clipped_means(inside)

        def near(rows, means=means):
            return np.sqrt(np.square(rows[:, None] - means[None]).sum(axis=2)).min(axis=1)

        a, b = near(inside), near(outside)
        ranks = np.argsort(np.argsort(np.concatenate([a, b])))[len(a) :]
        area = (ranks.sum() - len(b) * (len(b) - 1) / 2) / len(a) / len(b)
        own = 1 - np.square(inside - means[groups.codes]).sum() / np.square(inside - inside.mean(axis=0)).sum()
        other = 1 - np.square(b).sum() / total
        print(f"  membership, groups of {least}: area {area:.3f}; variance explained {own:.2f}, of others {other:.2f}")


def two_runs(x, times):
    rng, found, changed = np.random.default_rng(1), [], []
    for _ in range(times):
        i, runs = int(rng.integers(len(x))), []
        for rows in (x, np.delete(x, i, axis=0)):
            groups = Rows(len(rows)).similar(rows)
            runs.append((groups, groups.clipped_means(rows), groups.means(rows)))
        names = [{mean.tobytes() for mean in run[1]} for run in runs]
        new = [[k for k, mean in enumerate(run[1]) if mean.tobytes() not in names[1 - j]] for j, run in enumerate(runs)]
        less = [
            np.subtract(*(g.cells[at] @ both[which][at] for (g, *both), at in zip(runs, new, strict=True)))
            for which in (0, 1)
        ]
        group = runs[0][1][runs[0][0].codes[i]]
        found.append([cosine(less[0], x[i]), cosine(less[1], x[i]), cosine(group, x[i])])
        changed.append(len(new[0]))
    clipped, plain, group = np.median(found, axis=0)
    above = np.mean([a > c for a, _, c in found])
    print(
        f"  two runs: {np.median(changed):.0f} of {len(names[0])} groups differ; cosine with the cell {clipped:.2f} "
        f"from clipped means, {plain:.2f} from plain ones, {group:.2f} of its group's mean; better in {above:.0%}"
    )


def thresholds(x):
    order = np.argsort((x - np.median(x, axis=0)) @ robust(x - np.median(x, axis=0)), kind="stable")
    runs, found = {}, []
    for least in range(10, 21):
        groups = Rows(len(x), None, Thresholds(least, 1)).similar(x)
        cut = least * round(len(x) / 2 / least)
        half = np.unique(groups.codes[order[:cut]])
        runs[least] = cut, [groups.cells[half] @ means[half] for means in (groups.clipped_means(x), groups.means(x))]
    for a, b in combinations(runs, 2):
        (one, first), (other, second) = sorted((runs[a], runs[b]), key=lambda run: run[0])
        if other - one == 1:
            found.append([cosine(s - f, x[order[one]]) for f, s in zip(first, second, strict=True)])
    if found:
        clipped, plain = np.median(found, axis=0)
        print(
            f"  thresholds: {len(found)} pairs of runs; cosine {clipped:.2f} from clipped means, {plain:.2f} from plain"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--times", type=int, default=20, help="random cells of an attack")
    args = parser.parse_args()
    print(f"{platform.machine()}, numpy {np.__version__}")
    for name, key, most in SETS:
        path = args.data / "scrna" / f"{name}.h5ad"
        if not path.exists():
            print(f"{path.name} is not here; not measured")
            continue
        x = components(path, key, most)
        print(f"{name}: {len(x)} cells, {x.shape[1]} components")
        far_cell(x, args.times)
        weight(x)
        membership(x)
        two_runs(x, args.times)
        thresholds(x[:1000])


if __name__ == "__main__":
    main()
