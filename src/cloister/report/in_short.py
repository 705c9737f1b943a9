"""What a run tells whom, in a few plain words: for the top of a report and of `cloister explain`.

The protocol files say the same in full and exactly, under `Reveals`; this is for who has a minute. A test holds that
every workflow and mode is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rows = tuple[tuple[str, str], ...]  # who, what

STAYS, HUB, SITES, EVERYONE, TOGETHER = (
    "Stays at its site",
    "The coordinator learns",
    "Every site learns",
    "Everyone learns",
    "If parties put together what they have",
)
_TWO_OF_THREE = "any two of the three parties that compute see everything"

IN_SHORT: dict[tuple[str, str], Rows] = {
    ("bin-values", "hardened"): (
        (STAYS, "every cell and every value."),
        (HUB, "how many values all sites together have in each small interval; which genes each site measured."),
        (SITES, "the common bin edges."),
        (TOGETHER, "the coordinator and all sites but one see the counts of the last site."),
    ),
    ("bin-values", "published"): (
        (STAYS, "the cells; but a site with few values sends almost the values themselves."),
        (HUB, "each site's own quantiles, its smallest and largest value, its number of cells and its genes."),
        (SITES, "the averaged bin edges; with two sites, each works out the other's quantiles."),
    ),
    ("find-outliers", "hardened"): (
        (STAYS, "every row, and every count below min_count."),
        (HUB, "the column names of each site, and answers about counts over all sites, not which values they are of."),
        (SITES, "the common forest; mean, scale and rough extremes of each column over all sites; how many rows."),
        (
            TOGETHER,
            "the coordinator and one site see small counts, too; all sites but one learn it of the last alone.",
        ),
    ),
    ("find-outliers", "published"): (
        (STAYS, "nothing for sure: rows are sent rotated and stretched, and that can be undone."),
        (HUB, "every row in that form, and all scores; with a few known rows, everybody's rows."),
        (SITES, "how many rows there are, and the scores without their owners."),
        (TOGETHER, "the coordinator and any one site have everybody's rows."),
    ),
    ("shared-pca", "hardened"): (
        (STAYS, "every cell."),
        (HUB, "over all sites: number of cells, mean, variance and covariance of genes; which genes each site has."),
        (SITES, "the common components, means and deviations, and the number of all cells."),
        (TOGETHER, "the coordinator and all sites but one see these sums of the last site, never a cell."),
    ),
    ("train-classifier", "hardened"): (
        (STAYS, "every cell; which cell has which label."),
        (
            EVERYONE,
            "over all sites: cells, mean and variance of genes, cells per label, and how the model's error changes"
            " with its coefficients, at no more than 200 points that nobody can choose; the model.",
        ),
        (HUB, "which genes and which labels each site has."),
        (TOGETHER, "the coordinator and all sites but one see these sums of the last site."),
    ),
    ("map-labels", "hardened"): (
        (STAYS, "every cell, every distance, every neighbour; labels of single reference cells."),
        ("The asking site learns", "a label for each of its cells, and how the votes fell if that was agreed."),
        (EVERYONE, "numbers of cells, rounded up; label names; roughly the longest vector, unless a bound is agreed."),
        (TOGETHER, f"{_TWO_OF_THREE}."),
    ),
    ("map-labels", "published"): (
        (STAYS, "every cell, every distance, every neighbour."),
        ("The asking site learns", "a label for each of its cells."),
        (EVERYONE, "the true numbers of cells, and the label names."),
        (TOGETHER, f"{_TWO_OF_THREE}."),
    ),
    ("map-labels", "plain"): (
        (STAYS, "little: the asking site's embeddings are shown to everyone."),
        (HUB, "these embeddings and distances to references, from which it can rebuild reference cells."),
        (SITES, "the asking site's embeddings, and which of its own references are near them."),
    ),
    ("propagate-labels", "hardened"): (
        (STAYS, "every vector, and the label of every single cell."),
        (HUB, "which cells are neighbours and how near; which cells have a label; how many cells each site has."),
        (SITES, "the scores of its own cells; numbers of cells and class names of the others."),
        (
            TOGETHER,
            "the coordinator and a site find many labels and rough directions of others; any two of the three"
            " parties that compute see the codes of all cells.",
        ),
    ),
    ("propagate-labels", "published"): (
        (STAYS, "the vectors themselves."),
        (HUB, "all distances between cells, so their positions up to a rotation; which cells have a label."),
        (SITES, "enough to work out labels of other sites' cells; numbers of cells and class names of the others."),
        (TOGETHER, "the coordinator and a site find the vectors of all others."),
    ),
    ("fine-tune", "hardened"): (
        (STAYS, "every cell and its label; every site's own update of the model."),
        (
            HUB,
            "each round's mean update and loss; how often held-out labels are right; label names and, if rounds differ"
            " in sites, training cells of each.",
        ),
        (SITES, "the common model, which may itself tell something about the cells it was trained on."),
        (TOGETHER, "the coordinator and some sites see the mean of the others; of two sites, each sees the other's."),
    ),
    ("fine-tune", "published"): (
        (STAYS, "every cell and its label; every site's own update of the model."),
        (HUB, "mean updates, losses and label names; with semi_supervised, all distances between a round's cells."),
        (SITES, "the common model, which may itself tell something about the cells it was trained on."),
        (TOGETHER, "the coordinator and some sites see the mean of the others; of two sites, each sees the other's."),
    ),
    ("train-cellcnn", "hardened"): (
        (STAYS, "every cell, donor, label and gradient; the model stays encrypted."),
        (EVERYONE, "names of markers and classes; mean and spread of each marker over all sites."),
        ("Only if every site agrees", "the final model is opened to all (open_model), or validation errors."),
        (TOGETHER, "all sites have the key, and see everything; all but one, even with the coordinator, see no more."),
    ),
    ("train-cellcnn", "published"): (
        (STAYS, "every cell, donor, label and gradient."),
        (HUB, "whether a guess of a site's whole batch is right, since gradients are not re-randomised."),
        (EVERYONE, "the final model; names of markers and classes; mean and spread of each marker over all sites."),
        (TOGETHER, "all sites have the key. The opening hides key shares by less than hardened mode does."),
    ),
    ("train-cellcnn", "clear"): (
        (STAYS, "every cell. Nothing is encrypted here: this is the twin for trying out settings."),
        (HUB, "every site's gradient in every step, which tells much about its donors."),
        (SITES, "the model throughout, and the mean gradient of every step."),
    ),
    ("predict-cellcnn", "hardened"): (
        (STAYS, "every cell and donor of the asking site; the model, if it was never opened."),
        ("The asking site learns", "the class scores of its own donors; many well-chosen donors would tell the model."),
        (EVERYONE, "how many donors were asked about, rounded up."),
        (TOGETHER, "all sites have the key of an encrypted model, and see everything."),
    ),
    ("adapt-model", "hardened"): (
        (STAYS, "every sample and label; the provider's model stays with the provider."),
        (
            "The provider (coordinator) learns",
            "how many batches a site brings; mean updates and scores of the adapter.",
        ),
        (SITES, "a few projected numbers per sample, the shape of the model, and the common adapter."),
        (TOGETHER, "who may ask often enough can imitate the model; a budget bounds how often."),
    ),
    ("adapt-model", "published"): (
        (STAYS, "every sample and label."),
        ("The provider (coordinator) learns", "how many samples a site brings; mean updates and losses."),
        (SITES, "every intermediate value, from which it can rebuild the provider's model."),
    ),
    ("serve-model", "hardened"): (
        (STAYS, "every sample; the provider's model stays with the provider."),
        ("The provider (coordinator) learns", "how many batches a site brings."),
        (SITES, "a few projected numbers per sample, and from them its labels."),
        (TOGETHER, "who may ask often enough can imitate the model; a budget bounds how often."),
    ),
    ("serve-model", "published"): (
        (STAYS, "every sample."),
        ("The provider (coordinator) learns", "how many samples a site brings."),
        (SITES, "every intermediate value, from which it can rebuild the provider's model."),
    ),
}


def in_short(workflow: str, mode: str, parameters: Mapping[str, Any] | None = None) -> Rows:
    """Rows of who and what; none for a workflow that is not one of ours."""
    if workflow == "train-cellcnn" and (parameters or {}).get("encrypted") is False:
        mode = "clear"
    return IN_SHORT.get((workflow, mode), ())
