"""What the auditor of an encrypted training can make of another site's batch sums: the functionality, in the clear.

    python benchmarks/combined_batches.py --data ../shared/data      a site with ten CMV donors, 20 to 120 steps

The auditor holds [Z] of every step and can submit any linear combination of them, scaled, as its gradient of the last
step, so that the opened weights show that combination. It holds the weights near zero, where the gradient of an input x
of class y is x·(1/2 - y), and knows which input is of which donor. Printed, for means of groups of three or more donors
(the default), inputs per class, per donor, and as in the preset `rrms-donor` (10 inputs of each donor): the largest
weight that one input or one donor can get (1: it stands alone), and the cosine between the best combination for a donor
and this donor's mean input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cloister.disclosure import Thresholds
from cloister.models import cellcnn
from cloister.workflows.train_cellcnn.donor_groups import DonorGroups


def site(data, per, n_inputs, config, cells, rng):
    """Inputs of one site as `train-cellcnn` draws them: signed, donors behind them, donors' means, batches."""
    x = data["X_milli"] / 1000.0
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    mine = np.flatnonzero(data["donor"] < 10)
    donor = data["donor"][mine]
    y = data["donor_label"][donor]
    if per == "group":
        names = np.array([f"d{d}" for d in donor])
        groups = DonorGroups.of({f"d{d}": str(data["donor_label"][d]) for d in range(10)}, names, Thresholds(10, 3))
        used, whose = groups.rows(names)
        inputs, labels = groups.inputs(x[mine][used])[0], [int(k) for k in groups.labels]
        signed = np.array([v * (0.5 - k) for k, v in zip(labels, inputs, strict=True)])
        of = np.array([int(d[1:]) for d in np.array(groups.donors)[groups.codes >= 0]])
        shares = groups.inputs(np.eye(10)[of[whose]])[0]
    else:
        rows = cellcnn.draw_rows(donor, y, n_cells=cells, per=per, n_inputs=n_inputs, rng=rng)
        labels, behind = zip(*rows, strict=True)
        signed = np.array([x[mine][r].mean(axis=0) * (0.5 - k) for k, r in zip(labels, behind, strict=True)])
        shares = np.array([np.bincount(donor[r], minlength=10) / cells for r in behind])
    means = np.array([x[mine][donor == d].mean(axis=0) for d in range(10)])
    at = cellcnn.draw_batches(np.arange(len(signed))[:, None].astype(float), np.array(labels), config, rng)[0]
    return signed, shares, means, at[..., 0].astype(int)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    args = parser.parse_args()
    data = dict(np.load(args.data / "nk_cmv_pricell" / "nk_cmv_cells.npz"))
    drawn = (("group", 0, 100, 60), ("class", 200, 100, 20), ("donor", 40, 100, 20), ("donor", 10, 32, 120))
    for per, n_inputs, batch, steps in drawn:
        config = cellcnn.Config(37, filters=8, classes=2, batch=batch, steps=steps, learning_rate=0.2, momentum=0.9)
        signed, shares, means, at = site(data, per, n_inputs, config, 200, np.random.default_rng(0))
        A = np.array([np.bincount(row, minlength=len(signed)) for row in at])  # (steps, inputs)
        alone = np.einsum("ti,ti->i", np.linalg.pinv(A).T, A).max()
        D = A @ shares  # (steps, donors)
        c = np.linalg.pinv(D)  # (donors, steps)
        weight = np.diag(c @ D)
        read = c @ A @ signed
        cosines = np.abs((read * means).sum(axis=1)) / np.linalg.norm(read, axis=1) / np.linalg.norm(means, axis=1)
        one = np.abs(signed[at[0]].sum(axis=0) @ means.T) / np.linalg.norm(signed[at[0]].sum(axis=0))
        one /= np.linalg.norm(means, axis=1)
        print(
            f"per {per}: {len(signed)} inputs, {steps} steps of {batch}; largest weight of an input {alone:.2f},"
            f" of a donor {weight.max():.2f};"
            f" cosine with the donor {np.median(cosines):.2f} in the median, at most {cosines.max():.2f}"
            f" (one batch: {np.median(one):.2f}, {one.max():.2f})"
        )


if __name__ == "__main__":
    main()
