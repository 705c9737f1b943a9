"""The story that the demo tells: one set of cells, from the files of three hospitals to a model of a disease.

Thirty-six donors, twelve at each hospital, half of them ill. In the ill, macrophages express twenty genes more, and
most T cells are missing; at Vienna a clone grows. Each hospital has labelled the kinds of cells that it knows. All of
this is drawn by `demo_cohort` over real lung cells, with the seed that it always had. How many donors there are, how
strong the clone is, who knows what and what CellCnn sees was chosen, after some trials, so that there is something to
gain; no seed was picked by what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import demo as demo_data
from cloister.cells.files import read_cells, write_cells
from cloister.rehearsal.rehearsal import rehearse

if TYPE_CHECKING:
    from anndata import AnnData

EPITHELIUM = ("AT1", "AT2", "basal", "ciliated", "secretory")
STROMA = ("endothelial", "fibroblast", "pericyte", "smooth muscle")
LYMPHOCYTES = ("B", "NK/NKT", "T", "plasma")
MYELOID = ("basophil/mast", "dendritic", "macrophage", "monocyte")
KNOWN = {  # which cells a hospital has labelled
    "basel": (*EPITHELIUM, *STROMA),
    "lugano": (*STROMA, *MYELOID, *LYMPHOCYTES),
    "vienna": LYMPHOCYTES,
}
HELD = 0.2  # share of all cells that is kept for scores, and has no label anywhere
CLONE = 0.12  # of Vienna's cells
SPACE: Mapping[str, Any] = {"n_components": 10, "n_top_genes": 300}
CLASSIFIER: Mapping[str, Any] = {"n_top_genes": 300}
GROUPS: Mapping[str, Any] = {"groups": ("control", "case"), "donor_key": "donor", "label_key": "predicted"}


@dataclass
class Story:
    """The hospitals' cells, and what the steps before have made of them; a step that was not played is made up for."""

    sites: dict[str, AnnData]  # counts; donor, condition, age, and cell_type where the hospital has labelled it
    truth: dict[str, Any]  # all labels, by site
    clone: dict[str, Any]  # which cells are of the clone
    held: dict[str, Any]  # which cells are kept for scores

    @classmethod
    def draw(cls, n_cells: int = 160) -> Story:
        """The story's cells, so many of each donor."""
        import pandas as pd

        rng = np.random.default_rng(0)
        sites = demo_data.demo_cohort(n_cells=n_cells, clone=CLONE)
        truth = {p: a.obs["cell_type"].astype(str).to_numpy().copy() for p, a in sites.items()}
        clone = {p: a.obs.pop("clone").to_numpy() for p, a in sites.items()}
        held = {p: rng.random(a.n_obs) < HELD for p, a in sites.items()}
        for p, a in sites.items():
            a.obs["cell_type"] = pd.Categorical(np.where(np.isin(truth[p], KNOWN[p]) & ~held[p], truth[p], None))
        return cls(sites, truth, clone, held)

    def write(self, folder: Path) -> None:
        """Leave the hospitals' files in a folder, and go on with what is read from them."""
        folder.mkdir(parents=True, exist_ok=True)
        for p, a in self.sites.items():
            write_cells(a, folder / f"{p}.h5ad")
            self.sites[p] = read_cells(folder / f"{p}.h5ad", probe=False)  # our own file

    @property
    def about(self) -> str:
        """The story in a few sentences."""
        donors = sum(a.obs["donor"].nunique() for a in self.sites.values())
        return (
            f"{len(self.sites)} hospitals, {donors} donors, {sum(a.n_obs for a in self.sites.values())} lung cells."
            " Half of the donors are ill: their macrophages express twenty genes more, and most of their T cells are"
            " missing. At Vienna a clone grows. Basel has labelled epithelium and stroma, Lugano stroma and immune"
            " cells, Vienna lymphocytes; one cell in five is kept for scores. Cells are real; donors, disease and clone"
            " are simulated. Sizes and effects were chosen so that there is something to gain; no seed was picked by"
            " what comes out."
        )

    @property
    def seen(self) -> dict[str, Any]:
        """Which cells have a label."""
        return {p: a.obs["cell_type"].notna().to_numpy() for p, a in self.sites.items()}

    @cached_property
    def space(self) -> dict[str, AnnData]:
        """After `shared-pca`."""
        return rehearse("shared-pca", self.sites, **SPACE).data

    @cached_property
    def integrated(self) -> dict[str, AnnData]:
        """After `integrate`."""
        return rehearse("integrate", self.space, rounds=2).data

    @cached_property
    def labelled(self) -> dict[str, AnnData]:
        """After `train-classifier`: every cell has a label in `predicted`."""
        return rehearse("train-classifier", self.sites, **CLASSIFIER).data

    @cached_property
    def found(self) -> tuple[str, ...]:
        """After `compare-groups`: the genes that differ in macrophages of the ill."""
        return differing(rehearse("compare-groups", self.labelled, **GROUPS).data["basel"].uns["groups"])

    def some(self, data: Mapping[str, AnnData], every: int = 3) -> dict[str, AnnData]:
        """Every third cell: for workflows whose cost grows with pairs of cells."""
        return {p: a[::every].copy() for p, a in data.items()}


def differing(tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Genes of macrophages with a false discovery rate below 5 %, in the order of their names."""
    table = tables["expression"]
    return tuple(sorted(map(str, table[(table["cell_type"] == "macrophage") & (table["fdr"] < 0.05)]["gene"])))


def panel(
    sites: Mapping[str, AnnData], genes: tuple[str, ...], like: Mapping[str, AnnData] | None = None
) -> dict[str, AnnData]:
    """Log values of a few genes, less the mean of the hospital's own cells, or of those that it had before (`like`)."""
    cut = {}
    for p, a in sites.items():
        cut[p] = a[:, list(genes)].copy()
        cut[p].X = (logs(a, genes) - logs(a if like is None else like[p], genes).mean(axis=0)).astype(np.float32)
    return cut


def logs(a: AnnData, genes: tuple[str, ...]) -> Any:
    return np.log1p(a[:, list(genes)].X.toarray() / np.maximum(np.asarray(a.X.sum(axis=1)), 1) * 1e3)
