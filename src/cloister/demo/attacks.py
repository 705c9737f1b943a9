"""What the demo's parties could make of what they see: attacks of `cloister.papers.attacks`, on the demo's own runs.

An attack reads the messages of the run (`attacks.sent`) and its results, as the party that it plays got them, and says
beside its outcome what guessing gives. A vector that is masked, or a ciphertext, is read as if it were not: the same
attack on the same place in the conversation, whose outcome would change if the protection were missing. Where a mode
opens a value that neither messages nor files hold (masked rows, shares, a forest, a graph), it is computed here by the
functions that the protocol itself uses; the tests of the protocols hold the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cloister.disclosure import Thresholds
from cloister.errors import CloisterError
from cloister.models import cellcnn, graph, polynomial
from cloister.models.harmony import unit
from cloister.models.linear import hold_out
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.replicated import Ring
from cloister.mpc.sums import packed_words as lanes
from cloister.mpc.sums import pooled_quantiles, pooled_scaling
from cloister.papers import averaged_quantiles, clear_training, federated_harmony, masked_forest, plain_knn
from cloister.papers.attacks import masked_rows, opened_forest, single_site, trilateration
from cloister.papers.attacks import propagation as attack
from cloister.papers.attacks.block_regression import fit_block
from cloister.papers.attacks.opened_forest import lucky
from cloister.papers.attacks.sent import MASKED, Sent
from cloister.study import Party
from cloister.workflows.adapt_model.inference import inputs_of
from cloister.workflows.compare_groups import workflow as compare_groups
from cloister.workflows.compare_groups.contrast_terms import Table, part_of
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.find_programs import common_programs
from cloister.workflows.find_programs import workflow as find_programs
from cloister.workflows.fine_tune import workflow as fine_tune
from cloister.workflows.fine_tune.training_terms import Weights
from cloister.workflows.model_outcome import workflow as model_outcome
from cloister.workflows.propagate_labels import workflow as propagate_labels
from cloister.workflows.quality_control.cell_quality import STEP
from cloister.workflows.shared_pca import shared_pca
from cloister.workflows.train_cellcnn import encrypted_training


def own_quantiles(sent: Sent, edges: Any, own: Mapping[str, Any], pooled: Any) -> str:
    """bin-values: the coordinator on each site's own quantiles, read off what the site sent, or the shared edges."""
    grid = pooled_quantiles.Params(tuple(map(Party, own)), Party("coordinator"), len(edges), whole=True).grid
    sent_quantiles = sent.by_sender(averaged_quantiles.Local, to="coordinator")
    added = sent.by_sender(MASKED, to="coordinator", scope="coarse")

    def guess(p: str) -> Any:
        if p in sent_quantiles:
            return sent_quantiles[Party(p)].edges
        counts = single_site.read_counts(added[Party(p)].y[:-2], pooled_quantiles.MOST)
        if counts is None:
            return edges
        return single_site.quantiles_of(counts, grid, np.linspace(0, 1, len(edges)))

    def off(value: Any, p: str) -> float:
        return float(np.mean(np.abs(value / own[p] - 1)))

    miss, blind = (np.mean([off(f(p), p) for p in own]) for f in (guess, lambda p: pooled))
    return f"a site's own quantiles, off by {miss:.0%} (guessing: {blind:.0%})"


def own_means(sent: Sent, space: Mapping[str, Any], common: list[str], logs: Mapping[str, Any]) -> str:
    """shared-pca: one site on another's mean of the chosen genes: read off what it sent, or by taking one's own out."""
    me, *others = logs
    added = sent.by_sender(MASKED, to="coordinator", scope="moments")
    true = {p: np.mean(x, axis=0) for p, x in logs.items()}
    mean, deviation = np.asarray(space["mean"]), np.asarray(space["deviation"])
    rest = single_site.subtract(mean, int(space["cells"]), true[me], len(logs[me]))
    at = [common.index(str(g)) for g in space["genes"]]

    def guess(p: str) -> Any:
        n, *sums = np.split(shared_pca.join_sum(added[Party(p)].y[:-2]), 1 + len(common) * np.arange(4))
        return sums[2][at] / n[0] if n[0] == round(n[0]) and 1 <= n[0] < space["cells"] else rest

    def off(value: Any, p: str) -> float:
        return float(np.sqrt(np.mean(((value - true[p]) / deviation) ** 2)))

    miss, blind = (np.mean([off(f(p), p) for p in others]) for f in (guess, lambda p: mean))
    return f"others' means, off by {miss:.2f} sd (guessing: {blind:.2f})"


def own_directions(sent: Sent, x: Mapping[str, Any]) -> str:
    """integrate: the coordinator on how the cells of a site lie otherwise than all: second moments of directions."""
    upper = np.triu_indices(next(iter(x.values())).shape[1])
    true = {p: (unit(y).T @ unit(y))[upper] for p, y in x.items()}
    pooled = np.sum([*true.values()], axis=0) / sum(map(len, x.values()))
    added = sent.by_sender(MASKED, to="coordinator", scope="sum/2")
    cosines = []
    for p, y in x.items():
        told = sent.of(federated_harmony.Mine, sender=p)
        read = told[1].part if told else added[Party(p)].y[: pooled.size].view(np.int64).astype(np.float64)
        size = read[upper[0] == upper[1]].sum()  # directions have length 1, so this is the number of cells
        guess, own = read / size - pooled, true[p] / len(y) - pooled
        cosines.append(float(abs(guess @ own) / (np.linalg.norm(guess) * np.linalg.norm(own))))
    return f"how a site differs from all, cosine {np.mean(cosines):.2f} (guessing: 0.00)"


def own_largest(found: Mapping[str, Any], counts: Mapping[str, Any]) -> str:
    """quality-control: everyone on the largest number of counts that a cell of a site has, from its histogram."""
    true = {p: float(np.log10(1 + x.sum(axis=1).max())) for p, x in counts.items()}
    table, sites = np.asarray(found["histograms"]["total_counts"]), [str(p) for p in found["sites"]]
    last = {p: STEP * (np.flatnonzero(row)[-1] + 0.5) for p, row in zip(sites, table, strict=True)}
    miss = np.mean([abs(last[p] - true[p]) for p in true])
    blind = np.mean([abs(np.mean([true[q] for q in true if q != p]) - true[p]) for p in true])
    return f"the largest counts of a cell, off by {10**miss - 1:.0%} (guessing: {10**blind - 1:.0%})"


def own_ranks(sent: Sent, ranks: Mapping[str, Any]) -> str:
    """choose-genes: the coordinator on which genes a site ranks high, from its sum."""
    added = sent.by_sender(MASKED, to="coordinator", scope="sum/1")
    hits = {p: (r >= 0).astype(float) for p, r in ranks.items()}
    likely = np.mean([*hits.values()], axis=0) > 0.5

    def guess(p: str) -> Any:
        read = shared_pca.join_sum(added[Party(p)].y[:-2])[1 : 1 + len(likely)]
        return read > 0.5 if np.all((read == 0) | (read == 1)) else likely

    right, blind = (np.mean([np.mean(f(p) == (hits[p] > 0)) for p in hits]) for f in (guess, lambda _: likely))
    return f"which genes a site ranks high, {right:.0%} right (guessing: {blind:.0%})"


def own_center(sent: Sent, x: Mapping[str, Any]) -> str:
    """cluster-cells: the coordinator on where the cells of a site lie on average, from its first sum."""
    true = {p: np.mean(y, axis=0) for p, y in x.items()}
    whole = np.concatenate([*x.values()])
    pooled, spread = whole.mean(axis=0), float(np.sqrt(whole.var(axis=0).sum()))
    added = sent.by_sender(MASKED, to="coordinator", scope="sum/1")

    def guess(p: str) -> Any:
        words = added[Party(p)].y[: 2 * (1 + 2 * len(pooled))]
        n, *read = shared_pca.join_sum(words)[: 1 + len(pooled)]
        return np.array(read) / n if n == round(n) and 1 <= n <= len(whole) else pooled

    def off(value: Any, p: str) -> float:
        return float(np.linalg.norm(value - true[p])) / spread

    miss, blind = (np.mean([off(f(p), p) for p in x]) for f in (guess, lambda p: pooled))
    return f"the mean cell of a site, off by {miss:.2f} sd (guessing: {blind:.2f})"


def own_label_sizes(sent: Sent, sizes: Mapping[str, Any]) -> str:
    """find-markers: the coordinator on how many cells of each label a site has, from its sum."""
    total = np.sum([*sizes.values()], axis=0)
    added = sent.by_sender(MASKED, to="coordinator", scope="sum/1")

    def guess(p: str) -> Any:
        read = shared_pca.join_sum(added[Party(p)].y[:-2])[: len(total)]
        return read if np.all((read >= 0) & (read <= total)) else total / len(sizes)

    def off(value: Any, p: str) -> float:
        return float(np.abs(value - sizes[p]).sum() / sizes[p].sum())

    miss, blind = (np.mean([off(f(p), p) for p in sizes]) for f in (guess, lambda _: total / len(sizes)))
    return f"a site's cells per label, off by {miss:.0%} (guessing: {blind:.0%})"


def own_donors(sent: Sent, sites: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """compare-groups: the coordinator on how many donors of each group and cell type a site has, from its first sum."""
    chosen = compare_groups.Options(**options)
    held = {p: compare_groups.donors_of(a, chosen) for p, a in sites.items()}
    params = compare_groups.params_of(tuple(map(Party, sites)), Party("coordinator"), chosen)
    labels, width = sorted({k for mine in held.values() for k in mine.labels()}), 2 * len(chosen.groups) + 2
    true = {}
    for p, mine in held.items():
        parts = [part_of(Table(params, k, mine.names, ()), mine) for k in labels]
        true[p] = np.stack([np.bincount(part.group, minlength=len(chosen.groups)) for part in parts])
    total = np.sum([*true.values()], axis=0)
    added = sent.by_sender(MASKED, to="coordinator", scope="sum/1")

    def guess(p: str) -> Any:
        read = shared_pca.join_sum(added[Party(p)].y[:-2])[: total.shape[0] * width].reshape(-1, width)
        counts = read[:, : total.shape[1]]
        return counts if np.all((counts >= 0) & (counts <= total)) else np.rint(total / len(sites))

    def right(found: Any, p: str) -> float:
        return float(np.mean((found == true[p])[total > 0]))

    hit, blind = (np.mean([right(f(p), p) for p in sites]) for f in (guess, lambda _: np.rint(total / len(sites))))
    return f"a site's donors per cell type, {hit:.0%} right (guessing: {blind:.0%})"


def own_scores(sent: Sent, sites: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """model-outcome: the coordinator on a site's mean outcome, from the site's first message."""
    chosen = model_outcome.Options(**options)
    true = {p: float(model_outcome.donors_of(a, chosen)[0].y.mean()) for p, a in sites.items()}
    added = sent.by_sender(MASKED, to="coordinator", scope="sum/1")
    whole = float(np.mean([*true.values()]))

    def guess(p: str) -> float:
        read = shared_pca.join_sum(added[Party(p)].y[:-2])
        donors, total = read[0], read[2]
        return float(total / donors) if 1 <= donors <= 1000 and abs(total) <= 1e4 else whole

    def right(v: float, p: str) -> bool:
        return abs(v - true[p]) < 0.05

    hit, blind = (np.mean([right(f(p), p) for p in sites]) for f in (guess, lambda _: whole))
    return f"a site's mean outcome, {hit:.0%} right (guessing: {blind:.0%})"


def membership(sites: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """find-programs: any party on which half of the donors took part, from the second moments that all learn.

    Beside it the same on sums over donors instead of groups.
    """
    chosen = find_programs.Options(**options)
    names = tuple(map(Party, sites))
    params, areas = find_programs.params_of(names, Party("coordinator"), chosen), {}
    for kind in ("groups", "donors"):
        halves: tuple[list[Any], list[Any]] = ([], [])
        for a in sites.values():
            whole = find_programs.profiles_of(a, chosen)[0]
            least = whole.thresholds if kind == "groups" else Thresholds(1, 1)
            for k, half in enumerate(halves):
                x, present, cells = whole.x[k::2].copy(), whole.present[k::2], whole.cells[k::2]
                mine = replace(whole, x=x, present=present, cells=cells, thresholds=least)
                half.append(common_programs.Side(params, mine, whole.names))
        _, size, right = np.linalg.svd(np.concatenate([s.table for s in halves[0]]), full_matrices=False)
        basis = right[size > 1e-9 * size[0]].T
        rows = [np.concatenate([s.x for s in half]) for half in halves]
        one, two = (np.square(x @ basis).sum(axis=1) / np.square(x).sum(axis=1) for x in rows)
        areas[kind] = float(np.mean(one[:, None] > two[None]))
    return f"who took part, AUROC {areas['groups']:.2f}; of exact sums {areas['donors']:.2f} (guessing: 0.50)"


def own_label_sums(sent: Sent, model: Any, x: Mapping[str, Any], truth: Mapping[str, Any], sites: list[str]) -> str:
    """train-classifier: the coordinator reads a site's own sum of expression per label from its first message."""
    labels, common = list(model.labels), list(model.model.common)
    at = np.array([common.index(gene) for gene in model.genes])
    first = sent.by_sender(MASKED, to="coordinator", scope="sum/1")
    cosines = []
    for p in sites:
        own = np.stack([x[p][truth[p] == name].sum(axis=0) for name in labels])
        words = first[Party(p)].y.view(np.int64).astype(np.float64)
        read = words[len(labels) : len(labels) * (1 + len(common))].reshape(len(labels), -1)[:, at]
        cosines.append(float(abs((own * read).sum()) / (np.linalg.norm(own) * np.linalg.norm(read))))
    return f"a site's own sums per label, cosine {np.mean(cosines):.2f} (guessing: 0.00)"


def references_rebuilt(sent: Sent, x: Mapping[str, Any], query: str, labels: Any) -> str:
    """map-labels: whoever was sent distances trilaterates; the querier reads its shares, and has its cells' labels.

    The run keeps no share: they are drawn here, as every mode under sharing draws them.
    """
    others, rng = [p for p in x if p != query], np.random.default_rng(0)
    lists: dict[str, Any] = {str(p): m for p, m in sent.by_sender(plain_knn.Nearest).items()}
    asked = [m.q.astype(np.float64) for m in sent.of(plain_knn.Queries)]
    numbers = np.unique(labels.astype(str), return_inverse=True)[1]
    hits = luck = 0
    for p in others:
        guesses = [trilateration.among_labels(x[query], numbers)]
        if p in lists:
            own = asked[0]  # the queries, in the units of the run
            scale = float((own[: len(x[query])] * x[query]).sum() / (x[query] ** 2).sum())
            view = trilateration.View(own, lists[p].rows, lists[p].d2.astype(np.float64))
            guesses += [guess[None] / scale for guess in trilateration.rebuild(view).values()]
        else:
            guesses += shares_read(x[p])
        guess = np.concatenate(guesses)
        hits += trilateration.hits(guess, x[p], within=0.01)
        luck += trilateration.hits(lucky(x[query], len(guess), rng), x[p], within=0.01)
    return f"{hits} of {sum(len(x[p]) for p in others)} references rebuilt (guessing: {luck})"


def shares_read(x: Any, bits: int = 16) -> list[Any]:
    """The two shares of a table that one computing party holds, each read as if it were the table."""
    ring = Ring(40)
    words = ring.encode(np.rint(np.ldexp(x, bits)).astype(np.int64))
    first = ring.draw(Entropy().prg(), words.shape)
    return [np.ldexp(ring.decode(share).astype(np.float64), -bits) for share in (first, words - first)]


def markers_compared(sent: Sent, model: Any, donors: Mapping[str, Any]) -> str:
    """train-cellcnn: the coordinator on which site's classes differ more in a marker, from the sites' gradients.

    Where these are encrypted, a site asks the opened model too, about itself and each other one; by guessing, it takes
    the others' classes not to differ.
    """
    truth = {}
    for p, a in donors.items():
        z, first = model.prepare(np.asarray(a.X, np.float64)), (a.obs["condition"] == model.classes[0]).to_numpy()
        truth[p] = z[first].mean(axis=0) - z[~first].mean(axis=0)
    m = len(model.markers)
    guess = {}
    for p in donors:
        plain = [g.z[None] for g in sent.of(clear_training.Gradient, sender=p)]
        read = [single_site.numbers_in(g.c0, 2 * m) for g in sent.of(encrypted_training.Gradient, sender=p)]
        steps = plain or [r.reshape(-1, m, 2) for r in read]
        guess[p] = single_site.class_pull(np.stack(steps, axis=1))  # (readings, m)
    shares = [single_site.compare({p: g[i] for p, g in guess.items()}, truth) for i in range(len(guess[p]))]
    text = f"who has more of a marker: {np.mean(shares):.0%} right (guessing: 50%)"
    if sent.of(clear_training.Gradient) or model.weights is None:
        return text
    pull = single_site.class_pull(single_site.gradients_in(cellcnn.initial(model.config), model.weights)[None])
    pulls = {p: pull * (pull @ d) / (pull @ pull) for p, d in truth.items()}  # in the units of this site's own
    attacked, blind = (
        np.mean([single_site.mine(p, d, rest[p], truth) for p, d in truth.items()])
        for rest in (pulls, {p: np.zeros(m) for p in truth})
    )
    return f"{text}; by a site, from the opened model: {attacked:.0%} (guessing: {blind:.0%})"


def labels_compared(sent: Sent, learners: Mapping[str, Any], truth: Mapping[str, Any], options: Any) -> tuple[Any, Any]:
    """fine-tune: the coordinator on which site has more of a label: from masked updates, and from plain ones.

    A site is shown every round's mean update: it takes its own out, and asks about itself and each other one; by
    guessing, it takes the others to have as many of each label. `learners` are the sites' own, averaged plainly beside
    the run. Returns the outcomes by mode, and where plain averaging ended: θ after the last round.
    """
    first = next(iter(learners.values()))
    k, wide, code = first.labels, options.hidden[-1], lanes.Code(options.update_bound, len(learners))
    total, theta = sum(learner.cells for learner in learners.values()), np.zeros(first.size)
    models = [model.theta.astype(np.float64) for model in sent.of(Weights, to=first.site)]
    right: dict[str, list[float]] = {"masked": [], "plain": [], "mine": []}

    def pulls(updates: Mapping[str, Any]) -> dict[str, Any]:
        heads = {p: u[-k * (wide + 1) : -k].reshape(k, wide) for p, u in updates.items()}
        return {p: single_site.label_pull(head) for p, head in heads.items()}

    for t in range(options.rounds):
        if t < 3 and not np.allclose(theta, models[t], atol=1e-4):
            raise CloisterError("the clear twin's mean updates are not those of the run; please report this")
        plain = {p: learner.train(theta.astype(np.float32), t, options.lr)[0] for p, learner in learners.items()}
        words = sent.by_sender(MASKED, to="coordinator", scope=f"update/{t}")
        masked: dict[str, Any] = {p: code.decode(m.y[:-2], first.size) for p, m in words.items()}
        for name, updates in (("masked", masked), ("plain", plain)):
            right[name].append(single_site.compare(pulls(updates), truth, least=0.01))
        mean = models[t + 1] - models[t]
        rest = {p: single_site.subtract(mean, total, u, learners[p].cells) for p, u in plain.items()}
        own, others = pulls(plain), pulls(rest)
        right["mine"] += [single_site.mine(p, own[p], others[p], truth, least=0.01) for p in own]
        theta = theta + sum(learners[p].cells / total * u for p, u in plain.items())
    blind = np.mean([single_site.mine(p, s, np.full(k, 1 / k), truth, least=0.01) for p, s in truth.items()])
    masked_right, plain_right, mine_right = (np.mean(shares) for shares in right.values())
    text = "who has more of a label: {:.0%} right (guessing: 50%)"
    more = f"; by a site, taking its own out: {mine_right:.0%} (guessing: {blind:.0%})"
    return {"published": text.format(masked_right) + more, "clear twin": text.format(plain_right)}, theta


def steps_compared(sent: Sent, learners: Mapping[str, Any], truth: Mapping[str, Any], history: Any) -> str:
    """fine-tune, hardened: the coordinator on which site has more of a label, from every step's masked gradients."""
    first = next(iter(learners.values()))
    k, wide, code = first.labels, first.model.head.in_features, FixedPoint(26, 2.0**24, len(learners))
    right = []
    for row in history[:-1]:
        words = sent.by_sender(MASKED, to="coordinator", scope=f"step/{row['round']}/0")
        vectors = {p: -code.decode(m.y[: first.trainable]) for p, m in words.items()}
        heads = {p: v[-k * (wide + 1) : -k].reshape(k, wide) for p, v in vectors.items()}
        pulls: dict[str, Any] = {p: single_site.label_pull(head) for p, head in heads.items()}
        right.append(single_site.compare(pulls, truth, least=0.01))
    return f"who has more of a label: {np.mean(right):.0%} right (guessing: 50%)"


def plain_learners(sites: Mapping[str, Any], labels: tuple[str, ...], options: Any, seed: int) -> dict[str, Any]:
    """The sites' models and cells, as the workflow makes them."""
    from cloister.models.classifier import make
    from cloister.models.learner import Learner

    learners = {}
    for p, a in sites.items():
        examples, blueprint, _ = fine_tune.examples_of(a, options, seed=seed)
        codes = a.obs["cell_type"].astype(object).map({n: i for i, n in enumerate(labels)}).fillna(-1).to_numpy(int)
        held = hold_out(codes, options.validation, np.random.default_rng([seed, *f"{p}/validation".encode()]))
        recipe = fine_tune.recipe_of(options, seed, len(sites))
        learners[p] = Learner(make(blueprint, labels), len(labels), recipe, examples, codes, held, describe="", site=p)
    return learners


def rows_unmasked(rows: Mapping[str, Any]) -> str:
    """Published find-outliers: the principal server with a few rows of one client."""
    parts = [np.asarray(a.X, dtype=np.float64) for a in rows.values()]
    X = np.concatenate(parts)
    known = X.shape[1] + 1
    masked = np.rint(X @ masked_forest.masking_matrix(Entropy().bytes(32), X.shape[1], 10.0) * 2**20) / 2**20
    rebuilt = masked_rows.unmask(masked, masked_rows.solve_mask(masked[:known], X[:known]))
    others = slice(len(parts[0]), None)
    guess = lucky(parts[0], len(X), np.random.default_rng(0))
    right, luck = ((np.abs(rows - X)[others].max(axis=1) < 0.01).mean() for rows in (rebuilt, guess))
    return f"{right:.0%} of others' rows, {known} rows known (guessing: {luck:.0%})"


def rows_rebuilt(rows: Mapping[str, Any]) -> str:
    """Hardened find-outliers: a site with the forest it is handed, against as many blind guesses."""
    parts = [np.asarray(a.X, dtype=np.float64) for a in rows.values()]
    rng = np.random.default_rng(0)
    params = counted_forest.Params(tuple(map(Party, rows)), Party("coordinator"))
    scaling = pooled_scaling.fenced_scaling(parts, params.thresholds)
    Z = scaling.apply(np.concatenate(parts))
    outline, geometry = counted_forest.grow_plainly(params, scaling, parts, bytes(32), rng)
    view = opened_forest.view(params, outline, geometry.steps, len(Z), Z.shape[1])
    guess = opened_forest.rebuild(view, most=2000, rng=rng)
    share, alone = opened_forest.rebuilt(Z, guess, within=0.2)
    luck, _ = opened_forest.rebuilt(Z, opened_forest.lucky(Z, max(len(guess), 1), rng), within=0.2)
    return f"{share:.0%} of {alone} lone rows (guessing: {luck:.0%})"


def points_and_labels(vectors: Mapping[str, Any], given: Mapping[str, Any], bits: int) -> dict[str, str]:
    """propagate-labels: vectors that server and first site rebuild together, labels that the first site solves for."""
    names = [*vectors]
    V = np.concatenate([vectors[p] for p in names])
    labels = np.concatenate([np.asarray(given[p], dtype=object) for p in names])
    classes = sorted({x for x in labels if x is not None})
    numbers = np.array([-1 if x is None else classes.index(x) for x in labels])
    codes = graph.codes(V, graph.hyperplanes(bytes(32), bits, V.shape[1]))
    H = graph.hamming(codes, codes)
    usual = propagate_labels.Options(bits=bits)
    keys = graph.smallest(H, 0, usual.n_neighbors)
    own = len(vectors[names[0]])
    known, rest = np.arange(own), np.arange(own, len(V))

    def cosine(similar: Any) -> float:
        return float(np.median(attack.hits(attack.rebuild_vectors(similar, known, V[known]), V)[rest]))

    labelled = np.flatnonzero(numbers >= 0)
    mine, others = labelled[labelled < own], labelled[labelled >= own]
    W = graph.adjacency(keys, bits, usual.power)
    S = np.concatenate([block for _, block in graph.influence(W, usual.alpha, labelled, labelled)], axis=1)
    scores = S.astype(np.int64) @ graph.one_hot(numbers[labelled], len(classes))
    at = {int(point): i for i, point in enumerate(labelled)}
    places = np.array([at[int(i)] for i in mine]), np.array([at[int(i)] for i in others])
    columns = S[np.ix_(labelled, places[0])]
    chance = np.bincount(numbers[others]).max() / len(others)

    def solved(seen: Any) -> float:
        guess = attack.solve_labels(seen, scores[mine], places[0], numbers[mine], places[1])
        return float(np.mean(guess == numbers[others]))

    middle = (V[known] / np.linalg.norm(V[known], axis=1, keepdims=True)).mean(axis=0)
    blind = float(np.median(attack.hits(np.tile(middle / np.linalg.norm(middle), (len(V), 1)), V)[rest]))
    return {
        mode: f"server and a site: vectors to cosine {found:.2f} (guessing: {blind:.2f}); "
        f"a site: {solved(seen):.0%} of labels (guessing: {chance:.0%})"
        for mode, found, seen in (
            ("published", cosine(attack.cosines(H, bits)), columns),
            ("hardened", blind, None),  # they hold sizes, and the labels of the site's own cells
        )
    }


def block_fitted(before: Any, after: Any, components: int) -> str:
    """How well the second block is fitted on samples that were kept out, and with the samples in another order."""
    order = np.random.default_rng(0).permutation(len(before))
    fits = (fit_block(before, before + (after - before)[at], components=components) for at in (slice(None), order))
    attacked, blind = (max(r, 0.0) for r in fits)
    return f"block 2 of the model, R² {attacked:.2f} (shuffled: {blind:.2f})"


def mixed_activations(encoder: polynomial.Encoder, adata: Any, n: int = 2000) -> tuple[Any, Any]:
    """Outputs of the first two blocks for mixtures of a site's cells, that it might have asked about, (n, numbers)."""
    from cloister.models.student import cell_inputs

    own, rng = inputs_of(adata, encoder.card)[..., 0], np.random.default_rng(0)
    i, j = rng.integers(0, len(own), (2, n))
    w = rng.random((n, 1))
    before, after = polynomial.hidden(encoder, cell_inputs(w * own[i] + (1 - w) * own[j]))[1:3]
    return np.asarray(before).reshape(n, -1), np.asarray(after).reshape(n, -1)


def blinded_block(encoder: polynomial.Encoder, adata: Any) -> str:
    """Hardened adapt-model: a site fits the second block from what it opens after it, and after the first.

    The run keeps nothing of what is refreshed: activations are blinded and opened here, by the functions of both sides.
    """
    before, after = mixed_activations(encoder, adata)
    bound = encoder.shape.x_bound
    return block_fitted(opened_blind(before, bound), opened_blind(after, bound), components=10)


def opened_blind(x: Any, bound: float) -> Any:
    """Activations (samples, numbers) up to ±bound as their owner opens them for a refresh, one at a time."""
    entropy, crypto = Entropy(), block.SMALL
    how = block.opening(crypto, "block", x.shape[1], 2, crypto.scale, bound, crypto.scale)
    scale = crypto.scale * 2.0**how.shift / how.factor / 2
    key, seed = block.OwnerKey(crypto, entropy), entropy.bytes(32)
    provider = block.Evaluator(crypto, key.b, key.seed)
    batches = []
    for some in np.split(x, range(crypto.slots, len(x), crypto.slots)):
        cts = block.expand(crypto, key.encrypt(some.T, seed, entropy), seed)[:, :, : how.primes]
        alone = [provider.blind(c[None], how, entropy.bytes(32), entropy) for c in cts]
        batches.append(key.read(np.concatenate(alone), scale, len(some)).T)
    return np.concatenate(batches)


def shown_block(encoder: polynomial.Encoder, opened: Any, adata: Any) -> str:
    """Published adapt-model: the same fit, from activations that the run has shown to be opened as they are.

    A run of two cells is too few to fit anything: they are compared with the encoder's own activations.
    """
    true = np.stack(polynomial.hidden(encoder, inputs_of(opened, encoder.card))[1:], axis=1)[:, :, 0]
    off = float(np.abs(opened.obsm["predicted_features"] - true.reshape(len(true), -1)).max())
    if off > 0.05:
        raise CloisterError("the published mode opened other activations than the model's; please report this")
    return block_fitted(*mixed_activations(encoder, adata), components=10)
