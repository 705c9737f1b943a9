"""Predict the class of a site's donors with a CellCnn that stays encrypted, or that was opened (`predict-cellcnn`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError, RefusedError
from cloister.models import cellcnn
from cloister.report.figures import COLOURS, canvas, shown
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import CONSENTS, Party, Study
from cloister.workflows import Workflow
from cloister.workflows.common.query_ledger import entries_of
from cloister.workflows.modes import modes_of
from cloister.workflows.options import option
from cloister.workflows.predict_cellcnn import cellcnn_card, oblivious_prediction, private_prediction
from cloister.workflows.train_cellcnn import encrypted_training, encrypted_validation
from cloister.workflows.train_cellcnn.cellcnn_circuit import choose_ring
from cloister.workflows.train_cellcnn.figures import donor_means
from cloister.workflows.train_cellcnn.key_store import CONSENT, Account, KeyStore

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.workflows.train_cellcnn.encrypted_training import Trained


@dataclass(frozen=True)
class Options:
    query: str = option(help="the site whose donors are predicted")
    keep: str = option(help="folder of the training: train-cellcnn's keep")
    sample_key: str = option("donor", "column of obs that names the donor of a cell")
    opened: bool = option(default=False, help="use the opened model, held by the coordinator")
    outside: bool = option(
        default=False, help="the querying site took no part in the training; every site must consent"
    )
    max_donors: int = option(8, "donors answered in a run, public; all count, present or not, up to half the markers")
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


def holders_of(session: Session, options: Options) -> tuple[Party, ...]:
    """The sites that trained."""
    return tuple(p for p in session.sites if not (options.outside and p == options.query))


def params_of(made: cellcnn.Model, holders: tuple[Party, ...], hub: Party, *, validated: bool) -> Any:
    """Of the training; one with validation has a ring of its own."""
    ring = (encrypted_validation.ring_for if validated else choose_ring)(made.config, len(holders))
    return encrypted_training.Params(holders, hub, ring, made.config)


def trained_of(options: Options, session: Session, made: cellcnn.Model) -> tuple[Trained, bool]:
    """What this party kept of the training, and whether that was one with validation."""
    store, holders = KeyStore(options.keep, session.me), holders_of(session, options)
    validated = not store.steps(params_of(made, holders, session.coordinator, validated=False).tag)
    params = params_of(made, holders, session.coordinator, validated=validated)
    if validated and not store.steps(params.tag):
        raise DataError(
            f"{store!r} has no encrypted model that {', '.join(holders)} trained together; the study must name those"
            " sites and may add one that queries from outside (outside=true); or query the opened model (opened=true)"
        )
    trained = encrypted_training.load_trained(params, store, site=session.role == "site", stopped=made.stopped)
    return trained, validated


def account_of(session: Session, options: Options, made: cellcnn.Model) -> Account:
    """How many donors this site has helped to answer for the querier under this model, in all runs and studies."""
    who = entries_of(session.study.keys, Party(options.query))
    known = made.weights is not None and not options.outside  # an opened model: the querier has it already
    store = KeyStore(options.keep, session.me)
    return store.account(who, made.config.markers, unbounded=known or CONSENT in session.consent)


def check_opened_outside(session: Session, made: cellcnn.Model) -> None:
    """An outsider's encrypted query to an opened model cannot be limited to a number of samples."""
    if CONSENT not in session.consent:
        raise RefusedError(
            f"a query from outside to an opened model of {made.config.markers} markers may determine it; add"
            f' "{CONSENT}" to [approve] consent in local/site.toml, which allows {CONSENTS[CONSENT]}, or agree on a'
            " study without"
        )


def predict_cellcnn(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Predict the class of each of this site's donors, or help another site to.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. At the site that the study names as `query`, sets per cell of a donor

    `adata.obs[key_added]`, `adata.obs[key_added + "_score"]` : :class:`pandas.Series`
        The class, and the fitted sigmoid of its logit.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    asking = session.me == options.query
    made, params, trained = begin(session, options)
    X: Any = np.zeros((0, made.config.markers))
    donors: list[str] = []
    if asking:
        X, donors, _ = donor_means(made, adata, options.sample_key)
        if len(donors) > options.max_donors:
            raise DataError(
                f"{len(donors)} donors, more than max_donors={options.max_donors}; agree on a larger number"
            )
    U = ask(session, options, made, params, trained, X)
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


def coordinator(session: Session, options: Options) -> Outcome:
    ask(session, options, *begin(session, options), None)
    return Outcome()


def begin(session: Session, options: Options) -> tuple[cellcnn.Model, Any, Trained | None]:
    """The model as this party knows it, its training, what was kept of it; the coordinator tells who is outside."""
    holders, hub, query = holders_of(session, options), session.coordinator, Party(options.query)
    if options.outside and session.me == query:
        told = session.run(cellcnn_card.querier, cellcnn_card.Params(holders, hub, query))
        return (
            told.model,
            None if options.opened else params_of(told.model, holders, hub, validated=told.validated),
            None,
        )
    if options.outside and session.role == "site":
        cellcnn_card.check_consent(session.consent)
    made, trained, validated = load_model(options, session.me), None, False
    if not options.opened:
        trained, validated = trained_of(options, session, made)
    if session.role == "site" and session.me != query and not options.opened:
        account_of(session, options, made).check(options.max_donors)
    if session.role == "site" and options.outside and options.opened:
        check_opened_outside(session, made)
    if options.outside:
        role = cellcnn_card.coordinator if session.me == hub else cellcnn_card.holder
        session.run(role, cellcnn_card.Params(holders, hub, query), cellcnn_card.Told(made, validated))
    return made, None if trained is None else trained.params, trained


def check_study(study: Study, options: Options) -> None:
    if options.query not in study.sites:
        raise ParameterError(f"option 'query' names '{options.query}', which is not a site of the study")
    if options.outside and len(study.sites) < 3:
        raise ParameterError("a query from outside needs the querying site and two sites or more that trained together")


def ask(session: Session, options: Options, made: cellcnn.Model, training: Any, trained: Trained | None, X: Any) -> Any:
    """Play this party's role in the prediction; logits at the querier."""
    hub, query = session.coordinator, Party(options.query)
    if options.opened:
        chunks = -(-options.max_donors // private_prediction.RING.slots)
        p = private_prediction.Params(query, hub, made.config.markers, made.config.classes, chunks)
        if session.me == query:
            return session.run(private_prediction.querier, p, X)
        if session.me != hub:
            return session.run(private_prediction.bystander, p)
        if made.weights is None:
            raise DataError("the model was not opened; train with open_model=true, or predict with opened=false")
        return session.run(private_prediction.server, p, made.weights.M)
    holders, ring = training.holders, training.ckks
    chunks = oblivious_prediction.chunks(made.config, ring, len(holders), options.max_donors)
    q = oblivious_prediction.Params(holders, hub, query, ring, made.config, chunks, options.max_donors)
    if trained is None:
        return session.run(oblivious_prediction.outsider, q, X)
    if session.me == query:
        return session.run(oblivious_prediction.querier, q, trained, X)
    if session.me == hub:
        return session.run(oblivious_prediction.aggregator, q, trained)
    return session.run(oblivious_prediction.holder, q, trained, account_of(session, options, made))


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
    summary="Predict the class of a site's donors with an encrypted or opened CellCnn.",
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
