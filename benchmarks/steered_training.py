"""What opened weights show of one donor if a malicious site steers a training: the functionality, in the clear.

    python benchmarks/steered_training.py --data ../shared/data      a site with ten CMV donors, two steps

The attacker submits a gradient that moves the model far along a random direction, where the error polynomial grows with
the fifth power of the logit, and subtracts what it knows from the opened weights. Printed: cosines between what is left
and the mean input of the donor that is nearest, and how much of the batch sum that donor makes up. First for inputs per
donor, then for means of groups of three or more donors, where the cosine with the nearest group is printed as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cloister.disclosure import Thresholds
from cloister.models import cellcnn
from cloister.workflows.train_cellcnn.donor_groups import DonorGroups

LARGEST = 64.0  # norm of W and V that is opened


def inputs(data, donors, config, rng):
    """Batches of one site: means of 200 cells of its donors, standardised, and whose they are."""
    cells, owner = data["X_milli"] / 1000.0, data["donor"]
    cells = (cells - cells.mean(axis=0)) / cells.std(axis=0)
    who = rng.choice(donors, (config.steps, config.batch))
    X = np.array([[cells[rng.choice(np.flatnonzero(owner == d), 200)].mean(axis=0) for d in row] for row in who])
    return X, cellcnn.one_hot(data["donor_label"][who], 2), who


def grouped(data, donors, config):
    """Batches of the same site if it trains on means of groups; who is behind a place is the number of its group."""
    cells = data["X_milli"] / 1000.0
    cells = (cells - cells.mean(axis=0)) / cells.std(axis=0)
    names = np.array([f"d{d}" for d in data["donor"]])
    groups = DonorGroups.of({f"d{d}": str(data["donor_label"][d]) for d in donors}, names, Thresholds(10, 3))
    means = groups.inputs(cells[groups.rows(names)[0]])[0]
    who = np.tile(np.resize(np.arange(len(groups)), config.batch), (config.steps, 1))
    labels = np.array([int(k) for k in groups.labels])
    of = np.array([cells[names == f"d{d}"].mean(axis=0) for d in donors])
    return means[who], cellcnn.one_hot(labels[who], 2), who, of


def attack(config, honest, rng, size):
    """Opened W, V under an attacker that aims at weights of that size; the honest gradient of the last step by them."""
    X, Y, who, *of_donors = honest
    w, direction = cellcnn.initial(config), rng.normal(size=config.markers)
    direction /= np.linalg.norm(direction)
    target = size * np.outer(direction, [1.0, -1.0])
    for t in range(config.steps):
        mine = np.zeros((config.markers, config.classes))
        if t == 0:  # moves W so that W·V is near the target, whatever the other site does
            step = (w.W - target @ np.linalg.pinv(w.V)) @ np.linalg.pinv(w.V.T)
            mine = 2 * step / config.learning_rate
        last, before = cellcnn.gradient(config, w.M, X[t], Y[t]), w
        w = cellcnn.update(config, w, (mine + last) / 2)
    if not np.sqrt(np.sum(w.W**2) + np.sum(w.V**2)) <= LARGEST:
        return None
    U = X[-1] @ before.M
    weight = np.abs(U[:, 0]) ** 5
    share = np.array([weight[who[-1] == d].sum() for d in np.unique(who)]) / weight.sum()
    means = np.array([X[-1][who[-1] == d].mean(axis=0) for d in np.unique(who)])
    best = int(share.argmax())
    z = last[:, 0]
    near = [abs(means @ z) / np.linalg.norm(means, axis=1) / np.linalg.norm(z)]
    near += [abs(of @ z) / np.linalg.norm(of, axis=1) / np.linalg.norm(z) for of in of_donors]
    return near[0][best], share[best], near[-1].max()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    args = parser.parse_args()
    data = dict(np.load(args.data / "nk_cmv_pricell" / "nk_cmv_cells.npz"))
    config = cellcnn.Config(markers=37, filters=8, classes=2, batch=100, steps=2, learning_rate=0.1, momentum=0.0)
    ten = np.arange(10)
    for per, honest in (
        ("donor", inputs(data, ten, config, np.random.default_rng(0))),
        ("group", grouped(data, ten, config)),
    ):
        print(f"inputs per {per}")
        report(config, honest, per)


def report(config, honest, per):
    for size in (0.0, 1.0, 3.0, 10.0):
        found = [attack(config, honest, np.random.default_rng(k), size) for k in range(20)]
        kept = np.array([f for f in found if f is not None])
        if len(kept):
            cosine, share, nearest = np.median(kept, axis=0)
            print(
                f"|M| {size:4.0f}: {len(kept):2d} of 20 directions opened; cosine {cosine:.2f}, at most"
                f" {kept[:, 0].max():.2f}; largest {per}'s share of the sum {share:.2f}, at most"
                f" {kept[:, 1].max():.2f}; cosine with the nearest donor {nearest:.2f}, at most {kept[:, 2].max():.2f}"
            )
        else:
            print(f"|M| {size:4.0f}: none opened")


if __name__ == "__main__":
    main()
