"""Predict the class of a site's donors with a CellCnn that stays encrypted, or that was opened (`predict-cellcnn`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import cellcnn
from cloister.net.seat import Outcome, Place, Seat
from cloister.protocols.cellcnn import (
    encrypted_training,
    encrypted_validation,
    oblivious_prediction,
    private_prediction,
)
from cloister.protocols.cellcnn.cellcnn_circuit import choose_ring
from cloister.protocols.cellcnn.key_store import KeyStore
from cloister.report.figures import COLOURS, canvas, shown
from cloister.study import Party, Study
from cloister.workflows import Workflow
from cloister.workflows.figures.cellcnn import donor_means
from cloister.workflows.modes import modes_of
from cloister.workflows.options import option

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.protocols.cellcnn.encrypted_training import Trained


@dataclass(frozen=True)
class Options:
    query: str = option(help="the site whose donors are predicted")
    keep: str = option(help="folder of the training: train-cellcnn's keep")
    sample_key: str = option("donor", "column of obs that names the donor of a cell")
    opened: bool = option(default=False, help="use the opened model, held by the coordinator")
    max_donors: int = option(64, "most donors that a query may have; public")
    key_added: str = option("predicted", "column of obs that is written")

    def __post_init__(self) -> None:
        if self.max_donors < 1 or not self.key_added or not self.keep:
            raise ParameterError("options: max_donors at least 1, and names for keep and key_added")


def check(adata: AnnData, options: Options) -> list[str]:
    cells.check_cells(adata, allow_negative=True)
    if options.sample_key not in adata.obs:
        raise DataError(f"adata.obs['{options.sample_key}'] is missing; name the column of donors with sample_key=")
    return []


def load_model(options: Options, me: Party) -> cellcnn.Model:
    path = Path(options.keep) / me / "model.json"
    try:
        return cellcnn.Model.from_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"there is no model at {path}; run train-cellcnn with keep={options.keep!r} first") from None


def trained_of(options: Options, seat: Seat, made: cellcnn.Model) -> Trained:
    sites, hub = seat.sites, seat.coordinator
    store = KeyStore(options.keep, seat.me)
    params = encrypted_training.Params(sites, hub, choose_ring(made.config, len(sites)), made.config)
    if not store.steps(params.tag):  # a training with validation has a ring of its own
        ring = encrypted_validation.ring_for(made.config, len(sites))
        params = encrypted_training.Params(sites, hub, ring, made.config)
    return encrypted_training.load_trained(params, store, site=seat.role == "site")


def predict_cellcnn(adata: AnnData, seat: Seat | Place, *, copy: bool = False) -> AnnData | None:
    """Predict the class of each of this site's donors, or help another site to.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. At the site that the study names as `query`, sets per cell of a donor

    `adata.obs[key_added]`, `adata.obs[key_added + "_score"]` : :class:`pandas.Series`
        The class, and the fitted sigmoid of its logit.
    """
    adata, _ = WORKFLOW.at_site(adata, seat, copy=copy)
    return adata if copy else None


def site(seat: Seat, adata: AnnData, options: Options) -> Outcome:
    made = load_model(options, seat.me)
    asking = seat.me == options.query
    X: Any = np.zeros((0, made.config.markers))
    donors: list[str] = []
    if asking:
        X, donors, _ = donor_means(made, adata, options.sample_key)
        if len(donors) > options.max_donors:
            raise DataError(
                f"{len(donors)} donors, more than max_donors={options.max_donors}; agree on a larger number"
            )
    U = ask(seat, options, made, X)
    if not asking:
        return Outcome(adata)
    found = [made.classes[k] for k in cellcnn.predict(U)]
    scores = cellcnn.sigmoid(made.config, U).max(axis=1)
    names = adata.obs[options.sample_key].astype(str).to_numpy()
    at = {d: i for i, d in enumerate(donors)}
    of = [at[n] for n in names]
    cells.write_labels(adata, options.key_added, [found[i] for i in of], scores[of], share_name="score")
    rows = [{"donor": d, "class": c, "score": float(s)} for d, c, s in zip(donors, found, scores, strict=True)]
    return Outcome(adata, {"predictions": rows})


def coordinator(seat: Seat, options: Options) -> Outcome:
    ask(seat, options, load_model(options, seat.me), None)
    return Outcome()


def check_study(study: Study, options: Options) -> None:
    if options.query not in study.sites:
        raise ParameterError(f"option 'query' names '{options.query}', which is no site of the study")


def ask(seat: Seat, options: Options, made: cellcnn.Model, X: Any) -> Any:
    """Play this party's role in the prediction; logits at the querier."""
    sites, hub, query = seat.sites, seat.coordinator, Party(options.query)
    if options.opened:
        chunks = -(-options.max_donors // private_prediction.RING.slots)
        p = private_prediction.Params(query, hub, made.config.markers, made.config.classes, chunks)
        if seat.me == query:
            return seat.run(private_prediction.querier, p, X)
        if seat.me != hub:
            return seat.run(private_prediction.bystander, p)
        if made.weights is None:
            raise DataError("the model was not opened; train with open_model=true, or predict with opened=false")
        return seat.run(private_prediction.server, p, made.weights.M)
    trained = trained_of(options, seat, made)
    ring, n = trained.params.ckks, len(sites)
    chunks = oblivious_prediction.chunks(made.config, ring, n, options.max_donors)
    q = oblivious_prediction.Params(sites, hub, query, ring, made.config, chunks)
    if seat.me == query:
        return seat.run(oblivious_prediction.querier, q, trained, X)
    if seat.me == hub:
        return seat.run(oblivious_prediction.aggregator, q, trained)
    return seat.run(oblivious_prediction.holder, q, trained)


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """How sure the model is of every donor's class."""
    rows: list[dict[str, Any]] = next(
        (o.result["predictions"] for o in outcomes.values() if o.result.get("predictions")), []
    )
    if not rows:
        return []
    rows = rows[:40]
    kinds = sorted({row["class"] for row in rows})
    with canvas(height=1.2 + 0.26 * len(rows)) as c:
        for i, kind in enumerate(kinds):
            at = [j for j, row in enumerate(rows) if row["class"] == kind]
            hatch = ("", "//", "..", "xx")[i % 4]
            score = [rows[j]["score"] for j in at]
            c.axis.barh(at, score, color=COLOURS[i % len(COLOURS)], hatch=hatch, edgecolor="w", label=shown(kind))
        c.axis.set_yticks(range(len(rows)), [shown(row["donor"]) for row in rows])
        c.axis.invert_yaxis()
        c.axis.set(xlabel="score of the predicted class", xlim=(0, 1))
        c.axis.legend(title="predicted", loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)
        told = "; ".join(f"{row['donor']}: {row['class']} ({row['score']:.2f})" for row in rows[:10])
        return [c.done("Donors by predicted class", f"Score of the predicted class of each donor: {told}.")]


WORKFLOW = Workflow(
    name="predict-cellcnn",
    summary="Predict the class of a site's donors with an encrypted or an opened CellCnn.",
    options=Options,
    modes=modes_of("predict-cellcnn"),
    site=site,
    coordinator=coordinator,
    check=check,
    reads=lambda options, site: ("sample_key",),
    writes=("obs[{key_added!r}]",),
    check_study=check_study,
    figures=figures,
    stand_in={"query": "any", "keep": "any"},
)
