"""find-programs: how well programs agree with those of the pooled donors, and how well a membership attack works.

    python benchmarks/programs.py [--donors 20] [--repetitions 10]

Donors are drawn from the lung cells of `demo_cohort`; half of each site's donors take part, the others do not. The
attacker knows the whole profile of a donor, and asks whether it took part at one site: the share of the profile's
spread in the span of what was opened, as in arXiv 2606.24938. Opened are, in turn:

open        the site's own programs, as that paper sends them (ten of its donors)
donors      second moments of the site's donors, exact; what a secure sum of two sites shows to the other
groups      second moments of the site's groups, as common_programs adds them; all other sites collude
all sites   the sum of the latter over all sites, which is what one honest-but-curious party has
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

import cloister as cl
from cloister.disclosure import Thresholds
from cloister.study import Party
from cloister.workflows.find_programs import common_programs as protocol
from cloister.workflows.find_programs.workflow import Options, params_of, profiles_of

LABELS = ("macrophage", "endothelial", "AT2", "T")
RANK = 10


def span(second: np.ndarray, rank: int | None = None) -> np.ndarray:
    values, vectors = np.linalg.eigh(second)
    keep = values > 1e-8 * values.max()
    order = np.flatnonzero(keep)[::-1][:rank]
    return vectors[:, order]


def auc(members: np.ndarray, others: np.ndarray) -> float:
    return float(np.mean((members[:, None] > others[None]) + 0.5 * (members[:, None] == others[None])))


def square(part: np.ndarray) -> np.ndarray:
    d = int((np.sqrt(8 * len(part) + 1) - 1) / 2)
    m = np.zeros((d, d))
    m[np.triu_indices(d)] = part
    return m + np.triu(m, 1).T


def trial(donors: int, seed: int, least: int, options: Options) -> dict[str, float]:
    data = cl.demo_cohort(2 * donors, 120, seed=seed)
    held, absent = {}, {}
    for name, adata in data.items():
        whole, _ = profiles_of(adata, options, Thresholds(min_donors=least))
        take = np.random.default_rng([seed, 1]).permutation(2 * donors)
        for into, at in ((held, take[:donors]), (absent, take[donors:])):
            into[Party(name)] = replace(whole, x=whole.x[at], present=whole.present[at], cells=whole.cells[at])
    params = params_of(tuple(held), Party("hub"), options)
    common = tuple(cl_common(held))
    sides = {u: protocol.Side(params, mine, common) for u, mine in held.items()}
    outs = {u: protocol.Side(params, mine, common) for u, mine in absent.items()}
    chosen = protocol.choose(params, common, np.sum([s.means().values for s in sides.values()], axis=0))
    seconds = {u: square(s.moments(chosen).values) for u, s in sides.items()}
    u = next(iter(held))
    one = {w: s._centred(s.x, chosen.columns, chosen.mean) for w, s in (("in", sides[u]), ("out", outs[u]))}
    exact = one["in"].T @ one["in"]
    spans = {
        "open": span(exact, RANK),
        "donors": span(exact),
        "groups": span(seconds[u]),
        "all sites": span(np.sum([*seconds.values()], axis=0)),
    }

    def fits(x: np.ndarray, basis: np.ndarray) -> np.ndarray:
        return np.square(x @ basis).sum(axis=1) / np.square(x).sum(axis=1)

    found = {name: auc(fits(one["in"], basis), fits(one["out"], basis)) for name, basis in spans.items()}
    pooled = {p: replace(m, thresholds=Thresholds(1, 1)) for p, m in held.items()}
    best = protocol.ideal(params, pooled)[Party("hub")]
    ours = protocol.programs_of(params, chosen, np.sum([*seconds.values()], axis=0)[np.triu_indices(len(exact))])
    both = np.intersect1d(ours.columns, best.columns)
    a = ours.loadings[np.searchsorted(ours.columns, both)]
    b = best.loadings[np.searchsorted(best.columns, both)]
    cosines = np.linalg.svd(np.linalg.qr(a[:, :2])[0].T @ np.linalg.qr(b)[0])[1]
    return found | {"first two programs": float(cosines.min())}


def cl_common(held: dict[Party, protocol.Profiles]) -> list[str]:
    from cloister.cells import genes

    return list(genes.genes_in_common({u: p.names for u, p in held.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donors", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=10)
    given = parser.parse_args()
    options = Options(donor_key="donor", labels=LABELS, n_programs=4, n_columns=300)
    print(f"{given.donors} donors at each of three sites take part, as many do not; {given.repetitions} repetitions")
    print(
        "area under the curve of the attack on one site; smallest cosine of the first two programs with the pooled ones"
    )
    for least in (2, 3, 5, 10):
        rows = [
            trial(given.donors, seed, least, replace(options, min_donors=least)) for seed in range(given.repetitions)
        ]
        told = ", ".join(f"{name} {np.mean([r[name] for r in rows]):.3f}" for name in rows[0])
        print(f"  min_donors {least}: {told}")
