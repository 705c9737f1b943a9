"""What one honest site contributes to opened sums in every hardened workflow, whatever inputs the others choose.

    python benchmarks/disclosure.py            prints the table, and writes benchmarks/logs/disclosure.txt

For each workflow, `check_disclosure` rehearses three hospitals of the demo's lung cells: once with honest inputs and
once for each attack on the other sites' cells (repeated tenfold, all values zero, values times a thousand, one label
for all cells). Encrypted training is slow and has one attack. The check fails if a number that the honest site adds to
an opened sum does not come from the disclosure module, or is based on fewer than ten of its own cells or three of its
own donors. Donors are counted where the workflow is told which column names them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import anndata
import numpy as np

from cloister.cells.demo import demo_cohort
from cloister.disclosure import Thresholds
from cloister.rehearsal.check_disclosure import check_disclosure

LOG = Path(__file__).parent / "logs" / "disclosure.txt"


def repeated(adata):
    made = anndata.concat([adata] * 10, index_unique="-")
    made.var = adata.var
    return made


def zeroed(adata):
    made = adata.copy()
    made.X = made.X * 0
    for key in made.obsm:
        made.obsm[key] = made.obsm[key] * 0
    return made


def inflated(adata):
    made = adata.copy()
    made.X = made.X * 1000
    for key in made.obsm:
        made.obsm[key] = made.obsm[key] * 1000
    return made


def one_label(adata):
    made = adata.copy()
    made.obs["cell_type"] = str(made.obs["cell_type"].iloc[0])
    return made


ATTACKS = {"repeated": repeated, "zeroed": zeroed, "inflated": inflated, "one label": one_label}
WORKFLOWS = {
    "bin-values": {"donor_key": "donor"},
    "shared-pca": {"n_top_genes": 200, "n_components": 10},
    "integrate": {"use_rep": "X_pca"},
    "find-outliers": {"use_rep": "X_pca", "trees": 20, "donor_key": "donor"},
    "compare-groups": {"donor_key": "donor", "group_key": "condition", "groups": ["control", "case"]},
    "train-classifier": {"label_key": "cell_type", "donor_key": "donor"},
    "fine-tune": {"label_key": "cell_type", "use_rep": "X_pca", "rounds": 2, "donor_key": "donor"},
    "train-cellcnn": {"sample_key": "donor", "target_key": "condition", "n_steps": 1},
}


def sites():
    """Three hospitals, with an embedding that all of them share."""
    data = demo_cohort()
    joined = np.log1p(np.concatenate([a.X.toarray() for a in data.values()]))
    axes = np.linalg.svd(joined - joined.mean(0), full_matrices=False)[2][:10].T
    for adata in data.values():
        adata.obsm["X_pca"] = (np.log1p(adata.X.toarray()) - joined.mean(0)) @ axes
    return data


def main() -> None:
    only = sys.argv[1:] or list(WORKFLOWS)
    head = (
        f"{'workflow':18s}{'runs':>6s}{'contributions':>15s}{'withheld':>10s}{'cells':>7s}{'donors':>8s}{'seconds':>9s}"
    )
    lines = ["smallest group of the honest site behind any number that it added to an opened sum", head]
    print("\n".join(lines), flush=True)
    for name in only:
        began, attacks = time.perf_counter(), [*ATTACKS.values()]
        options = dict(WORKFLOWS[name])
        if name == "train-cellcnn":
            attacks, options["keep"] = [inflated], tempfile.mkdtemp()
        found = check_disclosure(name, sites(), "basel", attacks=attacks, least=Thresholds(), **options)
        seconds = time.perf_counter() - began
        row = (found.runs, found.contributions, found.withheld, found.cells or "-", found.donors or "-")
        widths = (6, 15, 10, 7, 8)
        lines.append(
            f"{name:18s}" + "".join(f"{x!s:>{w}s}" for x, w in zip(row, widths, strict=True)) + f"{seconds:9.0f}"
        )
        print(lines[-1], flush=True)
    if len(only) == len(WORKFLOWS):
        LOG.write_text("\n".join([lines[0], *(line[:-9] for line in lines[1:])]) + "\n")


if __name__ == "__main__":
    main()
