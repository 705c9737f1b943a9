"""Federated training: what the secure sum costs, that it changes nothing, and what sites gain by training together.

    python benchmarks/training.py [--quick] [--part overhead|annotation|semi|few|noise|g1] [--data ../shared/data]

overhead    ten sites, an MLP of one million weights: seconds and bytes a round with the secure sum, and with the same
            sums in the clear over the same messages and the same channel, one after the other in one run
annotation  cell types of blood (four batches as sites) and lung (five donors as sites): one model on pooled cells, the
            federated one round by round, FedProx, and each site alone, on the same held-out cells of all sites; the
            federated model once more through the whole protocol, and how far its weights are from plain averaging

semi        the same cells with three labels per type at half of the sites: labels alone, and pseudo-labels from the
            network itself, from label propagation within each site, and across sites (XCLP)

few         one cell in twenty has a label: `fine-tune` with the defaults of both modes beside logistic regression on
            pooled cells (C picked with hindsight) and at each site alone; the demo's lung sites, and blood

noise       accuracy of hardened mode against ε, beside exact sums, published mode (FedAvg), pooled cells and each site
            alone, on a held-out fifth of every site's cells: blood, lung and the demo
g1          cells of two honest sites that one malicious site reads from opened updates: in published mode, in hardened
            mode without noise, and with the default noise; three seeds

Semi-supervised training on images is in `training_images.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numpy as np
import torch
from sklearn.metrics import f1_score

from cloister.arrays import U64
from cloister.errors import DataError
from cloister.models.classifier import Blueprint, make
from cloister.models.learner import Learner, Recipe, Table
from cloister.mpc.net.wire import message
from cloister.mpc.sums import secure_sum
from cloister.papers import federated_training
from cloister.rehearsal.rehearsal import rehearse

torch.set_num_threads(1)


# ---- what the secure sum costs ---------------------------------------------------------------------------------------


@message("L8", protocol="clear_sum")
class Clear:  # u → S
    y: U64


async def clear_contributor(ch, params, x, **_):
    await ch.send(params.aggregator, Clear(x))


async def clear_aggregator(ch, params):
    got = await ch.gather(params.contributors, Clear, y=(params.length,))
    return secure_sum.Sum(np.sum([m.y for m in got.values()], axis=0, dtype=np.uint64), tuple(got))


CLEAR = SimpleNamespace(
    Params=secure_sum.Params, cost=secure_sum.cost, contributor=clear_contributor, aggregator=clear_aggregator
)


def made_up(n_sites, cells, dims=512, labels=20):
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 1, (labels, dims))
    sites = {}
    for i in range(n_sites):
        y = rng.integers(0, labels, cells)
        a = ad.AnnData(np.zeros((cells, 1), np.float32))
        a.obsm["X_made"] = (centres[y] + rng.normal(0, 3, (cells, dims))).astype(np.float32)
        a.obs["kind"] = [f"kind {k}" for k in y]
        sites[f"site-{i:02d}"] = a
    return sites


def _row(name, x):
    return (
        f"  {name:7s} {x[0]:6.2f} s wall, {x[1]:6.2f} CPU-s, {x[2] / 1e6:.2f} MB up and {x[3] / 1e6:.2f} MB down a site"
    )


def overhead(quick):
    n_sites, cells = 10, 2000
    sites = made_up(n_sites, cells)
    size = {"hidden": (1024, 450), "use_rep": "X_made", "label_key": "kind", "timeout": 300.0, "score_every": 0}
    size["mode"] = "published"
    lines = []
    rehearse("fine-tune", sites, rounds=1, **size)  # what happens only once in a process
    for epochs in (1,) if quick else (1, 5):
        figures, rounds = {"clear": [], "secure": []}, 2 if quick or epochs > 1 else 5
        for name, module in (("clear", CLEAR), ("secure", secure_sum)) * (1 if epochs > 1 else 2):
            per = []
            for r in (1, 1 + rounds):  # the difference is the rounds, without set-up and prediction
                with mock.patch.object(federated_training, "secure_sum", module):
                    began = time.perf_counter()
                    run = rehearse("fine-tune", sites, rounds=r, local_epochs=epochs, **size)
                    wall = time.perf_counter() - began
                cpu = sum(c["cpu_seconds"] for c in run.cost.values())
                sent = [c["bytes"] for p, c in run.cost.items() if p != "coordinator"]
                down = run.cost["coordinator"]["bytes"] / n_sites
                per.append(np.array([wall, cpu, np.mean(sent), down]))
            figures[name].append((per[1] - per[0]) / rounds)
            model = run.outcomes["site-00"].model
            figures[name + " weights"] = torch.cat([p.detach().reshape(-1) for p in model.module.parameters()]).numpy()
        plain, ours = (np.mean(figures[name], axis=0) for name in ("clear", "secure"))
        same = np.abs(figures["secure weights"] - figures["clear weights"]).max()
        weights = len(figures["clear weights"])
        head = f"{n_sites} sites x {cells} cells, {weights} weights, {epochs} local epoch(s), per round:"
        lines += [head, *(_row(name, x) for name, x in (("clear", plain), ("secure", ours)))]
        more = ours / plain - 1
        lines.append(
            f"  overhead {100 * more[0]:+.0f} % wall, {100 * more[1]:+.0f} % CPU, {100 * more[2]:+.1f} % bytes up; "
            f"largest difference of the weights {same:.1e}"
        )
    return lines


# ---- cell types ------------------------------------------------------------------------------------------------------


def studies(data, quick):
    rng = np.random.default_rng(1)
    blood = ad.read_h5ad(data / "scrna" / "pbmc_federation.h5ad")
    lung = ad.read_h5ad(data / "scrna" / "lung_ts_vs_hlca.h5ad")
    lung.obs["cell_type"] = lung.obs["cell_type_coarse"]
    for name, whole, key in (("blood", blood, "batch"), ("lung", lung, "donor")):
        sites = {}
        for site in whole.obs[key].unique():
            at = np.flatnonzero(whole.obs[key] == site)
            if len(at) >= 150:
                at = rng.permutation(at)[: 800 if quick else None]
                sites[str(site).lower().replace("_", "-")] = whole[np.sort(at)].copy()
        yield name, dict(list(sites.items())[:5])


def annotation(data, quick):
    lines = []
    rounds = 10 if quick else 20
    for name, sites in studies(data, quick):
        placed = rehearse("shared-pca", sites, n_top_genes=1000, n_components=50, timeout=300.0).data
        labels = tuple(sorted({str(v) for a in sites.values() for v in a.obs["cell_type"]}))
        x = {p: placed[p].obsm["X_shared_pca"].astype(np.float32) for p in sites}
        y = {p: np.array([labels.index(str(v)) for v in sites[p].obs["cell_type"]]) for p in sites}
        rng = np.random.default_rng(0)
        test = {p: rng.permutation(len(y[p]))[: len(y[p]) // 5] for p in sites}
        train = {p: np.setdiff1d(np.arange(len(y[p])), test[p]) for p in sites}
        seen_x, seen_y = (np.concatenate([v[p][test[p]] for p in sites]) for v in (x, y))
        blueprint = Blueprint("mlp", 50, hidden=(128,), dropout=0.1)

        def learner(parts, who, mu=0.0, blueprint=blueprint, labels=labels, x=x, y=y):
            rows = np.concatenate([x[p][at] for p, at in parts.items()])
            codes = np.concatenate([y[p][at] for p, at in parts.items()])
            recipe = Recipe(epochs=1, batch_size=64, mu=mu)
            return Learner(
                make(blueprint, labels), len(labels), recipe, Table(torch.from_numpy(rows)), codes, [],
                describe="", site=who,
            )  # fmt: skip

        def judge(one, theta, seen_x=seen_x, seen_y=seen_y):
            one.examples, kept = Table(torch.from_numpy(seen_x)), one.examples
            guess = one.logits(theta).argmax(axis=1)
            one.examples = kept
            return float((guess == seen_y).mean()), float(f1_score(seen_y, guess, average="macro"))

        def alone(one, epochs):
            theta = np.zeros(one.size)
            for t in range(epochs):
                theta = theta + one.train(theta.astype(np.float32), t, 2e-3)[0]
            return theta.astype(np.float32)

        central = learner(train, "central")
        top = judge(central, alone(central, rounds))
        count = sum(map(len, y.values()))
        lines.append(
            f"{name}: {len(sites)} sites, {count} cells, {len(labels)} types, {len(seen_y)} held-out cells, MLP on 50 "
            f"shared components, {rounds} epochs or rounds"
        )
        lines.append(f"  central            acc {top[0]:.4f}  macro-F1 {top[1]:.4f}")
        curves = {}
        for kind, mu in (("fedavg", 0.0), ("fedprox", 0.1)):
            learners = {p: learner({p: train[p]}, p, mu) for p in sites}
            total = sum(one.cells for one in learners.values())
            theta, curve = np.zeros(central.size), []
            for t in range(rounds):
                ups = [one.train(theta.astype(np.float32), t, 2e-3)[0] * one.cells / total for one in learners.values()]
                theta = theta + np.sum(ups, axis=0)
                curve.append(judge(central, theta.astype(np.float32)))
            curves[kind] = (curve, theta)
            marks = [r for r in (1, 2, 3, 5, 10, 20) if r <= rounds]
            told = ", ".join(f"round {r}: {curve[r - 1][0]:.4f}" for r in marks)
            lines.append(f"  {kind:18s} acc {curve[-1][0]:.4f}  macro-F1 {curve[-1][1]:.4f}   ({told})")
        within = next((t + 1 for t, (a, _) in enumerate(curves["fedavg"][0]) if a >= top[0] - 0.04), None)
        lines.append(f"  within 4 points of central after round {within}")
        each = {p: judge(learner({p: train[p]}, p), alone(learner({p: train[p]}, p), rounds)) for p in sites}
        told = ", ".join(f"{p} {a:.3f}/{f:.3f}" for p, (a, f) in each.items())
        mean = np.mean(list(each.values()), axis=0)
        lines.append(f"  each site alone    acc {mean[0]:.4f}  macro-F1 {mean[1]:.4f}   ({told})")

        cut = {}
        for p in sites:
            cut[p] = placed[p][train[p]].copy()
            cut[p].obs["cell_type"] = cut[p].obs["cell_type"].astype(str)
        run = rehearse(
            "fine-tune", cut, use_rep="X_shared_pca", labels=labels, rounds=rounds, lr=2e-3, hidden=(128,),
            validation=0.0, score_every=0, timeout=300.0, local_epochs=1, mode="published",
        )  # fmt: skip
        module = next(o.model for o in run.outcomes.values() if o.model is not None).module
        found = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
        wanted = central.first.numpy() + curves["fedavg"][1]
        theta = (found - central.first.numpy()).astype(np.float32)
        lines.append(
            f"  through the protocol: acc {judge(central, theta)[0]:.4f}, weights within "
            f"{np.abs(found - wanted).max():.1e} of plain averaging (largest weight {np.abs(wanted).max():.2f})"
        )
    return lines


# ---- few labels ------------------------------------------------------------------------------------------------------


def semi(data, quick):
    """Labels for a few cells of half of the sites; the other sites have none. XCLP in the clear, equal in output."""
    from cloister.models import graph

    lines = []
    rounds, warm, seeds = (6, 2, 2) if quick else (15, 5, 3)
    for name, sites in studies(data, quick=True):
        placed = rehearse("shared-pca", sites, n_top_genes=1000, n_components=50, timeout=300.0).data
        labels = tuple(sorted({str(v) for a in sites.values() for v in a.obs["cell_type"]}))
        x = {p: placed[p].obsm["X_shared_pca"].astype(np.float32) for p in sites}
        y = {p: np.array([labels.index(str(v)) for v in sites[p].obs["cell_type"]]) for p in sites}
        blueprint = Blueprint("mlp", 50, hidden=(64,), dropout=0.1)
        owners = list(sites)[: len(sites) // 2]
        found = {arm: [] for arm in ("labelled", "network", "client", "xclp")}
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            given = {}
            for p in sites:
                given[p] = np.full(len(y[p]), -1)
                if p in owners:
                    few = [rng.permutation(np.flatnonzero(y[p] == k))[:3] for k in np.unique(y[p])]
                    at = np.concatenate(few)
                    given[p][at] = y[p][at]
            for arm, scores in found.items():
                learners = {
                    p: Learner(
                        make(blueprint, labels), len(labels), Recipe(epochs=2, batch_size=32, seed=seed),
                        Table(torch.from_numpy(x[p])), given[p], [], describe="", site=p, unlabelled=True,
                    )
                    for p in sites
                }  # fmt: skip
                theta = np.zeros(next(iter(learners.values())).size)
                for t in range(rounds):
                    now, clients = theta.astype(np.float32), owners
                    for one in learners.values():  # about as many steps on labels alone as beside pseudo-labels
                        alone = arm == "labelled" or t < warm
                        one.recipe = replace(one.recipe, epochs=40 if alone else 2)
                    if arm != "labelled" and t >= warm:
                        clients = list(sites)
                        if arm == "xclp":
                            seen = {p: learners[p].embed(now) for p in sites}
                            planes = graph.hyperplanes(bytes(32), 4096, 64)
                            packed = np.concatenate([graph.codes(v, planes) for v, _ in seen.values()])
                            known = np.concatenate([k for _, k in seen.values()])
                            told = graph.propagate(packed, known, n_classes=len(labels), exact=False)
                            cuts = np.cumsum([len(k) for _, k in seen.values()])[:-1]
                            for p, code, sure in zip(
                                sites, np.split(told.label, cuts), np.split(told.confidence, cuts), strict=True
                            ):
                                learners[p].teach(code, sure)
                        else:
                            for p in sites:
                                learners[p].teach_itself(now, arm, n_neighbors=10, alpha=0.99)
                    ups = [learners[p].train(now, t, 2e-3)[0] for p in clients]
                    theta = theta + np.mean(ups, axis=0)
                guess = np.concatenate([learners[p].logits(theta.astype(np.float32)).argmax(axis=1) for p in sites])
                truth, hidden = (np.concatenate([v[p] for p in sites]) for v in (y, given))
                rest = hidden < 0
                scores.append([(guess == truth)[rest].mean(), f1_score(truth[rest], guess[rest], average="macro")])
        count = int(sum((g >= 0).sum() for g in given.values()))
        lines.append(
            f"{name}, few labels: {count} of {sum(map(len, y.values()))} cells labelled, at {len(owners)} of "
            f"{len(sites)} sites; {rounds} rounds, {warm} on labels alone, {seeds} seed(s); cells without a label:"
        )
        for arm, scores in found.items():
            mean, spread = np.mean(scores, axis=0), np.std(scores, axis=0)
            lines.append(f"  {arm:9s} acc {mean[0]:.3f} ± {spread[0]:.3f}  macro-F1 {mean[1]:.3f} ± {spread[1]:.3f}")
    return lines


def few(data, quick):
    """Defaults with few labels."""
    import cloister as cl

    sets = {"demo": (cl.demo_sites(), "X_pca")}
    file = data / "scrna" / "pbmc_federation.h5ad"
    if file.exists():
        whole = ad.read_h5ad(file)[:: 4 if quick else 2]
        blood = {
            str(n).lower().replace("_", "-"): whole[(whole.obs["batch"] == n).to_numpy()].copy()
            for n in whole.obs["batch"].unique()
        }
        shared = cl.rehearse("shared-pca", blood, n_components=30, library_key="n_counts_all_genes", timeout=900)
        sets["blood"] = (shared.data, "X_shared_pca")
    return [
        f"{name}, seed {seed}: " + few_labels(sites, use_rep, 0.05, seed)
        for name, (sites, use_rep) in sets.items()
        for seed in range(4)
    ]


def noise(data, quick):
    """Hidden labels of a fifth of the cells, by mode and noise; means over draws of that fifth."""
    import cloister as cl
    from cloister.workflows.fine_tune import workflow as fine_tune

    sets = {"demo": (cl.demo_sites(), "X_pca")}
    for name, sites in studies(data, quick):
        placed = rehearse("shared-pca", sites, n_top_genes=1000, n_components=50, timeout=300.0).data
        sets[name] = (placed, "X_shared_pca")
    arms = {"published (FedAvg)": {"mode": "published"}, "hardened, dp_noise=0": {"dp_noise": 0.0}}
    for z in (1.0, 2.5, 5.0, 10.0, 20.0):
        epsilon = fine_tune.epsilon_of(fine_tune.in_mode(fine_tune.Options(dp_noise=z), "hardened"))
        arms[f"hardened, dp_noise={z:g}, epsilon={epsilon:g}"] = {"dp_noise": z}
    arms |= {f"hardened, defaults, dp_clip={clip:g}": {"dp_clip": clip} for clip in (0.3, 3.0)}
    lines = []
    for name, (sites, use_rep) in sets.items():
        draws = [split(sites, seed) for seed in range(3)]
        lines.append(f"{name}: {len(sites)} sites, {sum(a.n_obs for a in sites.values())} cells, defaults, "
                     f"{len(draws)} draws of the hidden fifth; accuracy / macro-F1")  # fmt: skip
        for arm, options in arms.items():
            scores = []
            for seed, (bare, truth, hidden) in enumerate(draws):
                run = cl.rehearse("fine-tune", bare, use_rep=use_rep, timeout=300, seed=seed, **options)
                guess = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in bare}
                scores.append(judged(guess, truth, hidden))
            lines.append(f"  {arm:44s} {np.mean(scores, axis=0)[0]:.3f} / {np.mean(scores, axis=0)[1]:.3f}")
        pooled, alone = [], []
        for bare, truth, hidden in draws:
            x = {p: np.asarray(a.obsm[use_rep], np.float32) for p, a in bare.items()}
            pooled.append(judged(clear(x, truth, hidden, [*bare], 0), truth, hidden))
            alone.append(np.mean([judged(clear(x, truth, hidden, [p], 0), truth, hidden) for p in bare], axis=0))
        for arm, scores in (("pooled cells, 20 epochs of Adam", pooled), ("each site alone, 20 epochs", alone)):
            lines.append(f"  {arm:44s} {np.mean(scores, axis=0)[0]:.3f} / {np.mean(scores, axis=0)[1]:.3f}")
    return lines


def split(sites, seed):
    """Cells with the labels of a fifth hidden, all labels, and which are hidden."""
    rng = np.random.default_rng(seed)
    bare, truth, hidden = {}, {}, {}
    for p, a in sites.items():
        truth[p] = a.obs["cell_type"].astype(str).to_numpy()
        hidden[p] = np.isin(np.arange(a.n_obs), rng.permutation(a.n_obs)[: a.n_obs // 5])
        bare[p] = a.copy()
        bare[p].obs["cell_type"] = np.where(hidden[p], np.nan, truth[p].astype(object))
    return bare, truth, hidden


def judged(guess, truth, hidden):
    seen, right = (np.concatenate([v[p][hidden[p]] for p in truth]) for v in (guess, truth))
    return float((seen == right).mean()), float(f1_score(right, seen, average="macro"))


def clear(x, truth, hidden, names, seed):
    """Labels from one network of the default size, trained in the clear on the cells of these sites."""
    labels = sorted({v for t in truth.values() for v in t})
    rows = np.concatenate([x[p][~hidden[p]] for p in names])
    codes = np.array([labels.index(v) for p in names for v in truth[p][~hidden[p]]])
    blueprint = Blueprint("mlp", rows.shape[1], hidden=(128,), dropout=0.1, seed=seed)
    one = Learner(
        make(blueprint, tuple(labels)), len(labels), Recipe(20, 64, seed=seed), Table(torch.from_numpy(rows)), codes,
        [], describe="", site="all",
    )  # fmt: skip
    theta = one.train(np.zeros(one.size, np.float32), 0, 3e-3)[0].astype(np.float32)
    found = {}
    for p in x:
        one.examples = Table(torch.from_numpy(x[p]))
        found[p] = np.array(labels)[one.logits(theta).argmax(axis=1)]
    return found


def g1(data, quick):
    """One malicious site of three, 360 cells each, the default network on the demo's cells."""
    import sys

    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "attacks")]
    import test_training_attacks as attacks

    arms = {
        "as it was (FedAvg, bound 4, any cell count)": attacks.old_step,
        "hardened, dp_noise=0 (needs consent)": attacks.new_step(0.0),
        "hardened, dp_noise=1": attacks.new_step(1.0),
        "hardened, default (dp_noise=5)": attacks.new_step(5.0),
        "the attacker's own cells as guesses": None,
    }
    lines = ["G1, 720 honest cells: cells with a reading of cosine > 0.99 (beyond the attacker's own cells), > 0.9"]
    for arm, step_of in arms.items():
        found = []
        for seed in range(3):
            make_step = step_of or (lambda learners, seed=seed: attacks.guess_by_own(seed))
            best = [attacks.attacked(seed, make_step, scale=scale, fall=fall) for scale, fall in STEERED]
            found.append([max(b[0][0] for b in best), max(b[0][1] for b in best), max(b[1][0] for b in best)])
        told = "; ".join(f"{close} ({beyond}), {near}" for close, beyond, near in found)
        lines.append(f"  {arm:44s} {told}")
    return lines


STEERED = ((1.0, 3.0), (1.0, 1.5), (2.0, 3.0), (2.0, 0.0), (4.0, 3.0))  # length of a unit's weights, fall of its bias


def few_labels(sites, use_rep, share, seed):
    from sklearn.linear_model import LogisticRegression

    import cloister as cl

    rng = np.random.default_rng(seed)
    bare, truth, known = {}, {}, {}
    for s, a in sites.items():
        truth[s] = a.obs["cell_type"].astype(str).to_numpy()
        known[s] = rng.random(a.n_obs) < share
        bare[s] = a.copy()
        bare[s].obs["cell_type"] = np.where(known[s], truth[s].astype(object), np.nan)
    x = {s: np.asarray(a.obsm[use_rep], float) for s, a in sites.items()}

    def right(labels):
        return float(np.mean(np.concatenate([(labels(s) == truth[s])[~known[s]] for s in sites])))

    def linear(names, c):
        seen = np.vstack([x[s][known[s]] for s in names]), np.concatenate([truth[s][known[s]] for s in names])
        return LogisticRegression(C=c, max_iter=3000).fit(*seen)

    fits = [linear(sites, c) for c in (10, 1, 0.1, 0.01)]
    pooled = max(right(lambda s, m=m: m.predict(x[s])) for m in fits)
    alone = {s: linear([s], 0.1) for s in sites}
    tuned = []
    for mode in ("hardened", "published"):
        try:
            run = cl.rehearse("fine-tune", bare, use_rep=use_rep, timeout=300, mode=mode)
        except DataError:  # a site with fewer labels than min_cells
            tuned.append(float("nan"))
            continue
        tuned.append(right(lambda s, run=run: run.data[s].obs["predicted"].astype(str).to_numpy()))
    labels = sum(int(k.sum()) for k in known.values())
    by_site = right(lambda s: alone[s].predict(x[s]))
    told = f"fine-tune {tuned[0]:.3f} (hardened), {tuned[1]:.3f} (published)"
    return f"{labels} labels; pooled logistic regression {pooled:.3f}, {told}, alone {by_site:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=("overhead", "annotation", "semi", "few", "noise", "g1"), default=None)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    args = parser.parse_args()
    lines = [f"{platform.machine()}, {os.cpu_count()} cores, {os.environ['OMP_NUM_THREADS']} thread(s) a party, "
             f"torch {torch.__version__}, all parties on this machine"]  # fmt: skip
    if args.part in (None, "few"):
        lines += few(args.data, args.quick)
    if args.part in (None, "g1"):
        lines += g1(args.data, args.quick)
    if args.part in (None, "noise"):
        lines += noise(args.data, args.quick)
    if args.part == "semi":
        lines += semi(args.data, args.quick)
    if args.part in (None, "annotation"):
        if (args.data / "scrna" / "pbmc_federation.h5ad").exists():
            lines += annotation(args.data, args.quick)
            lines += semi(args.data, args.quick)
        else:
            lines.append(f"{args.data} holds no cells; nothing measured")
    if args.part in (None, "overhead"):
        lines += overhead(args.quick)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
