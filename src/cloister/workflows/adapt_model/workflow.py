"""Adapt a provider's model to the sites' labels, without showing it or them (`adapt-model`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cloister.cells import tables as cells
from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError
from cloister.papers import encrypted_loss
from cloister.report.figures import curves
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Study
from cloister.workflows import Workflow
from cloister.workflows.adapt_model import model_card, packing
from cloister.workflows.adapt_model.block_plan import used
from cloister.workflows.adapt_model.inference import (
    all_taps,
    answer,
    answers_path,
    ask,
    beyond,
    check_kept,
    exposed,
    inputs_of,
    kept_taps,
    left_out,
    load,
    taps_path,
)
from cloister.workflows.adapt_model.options import Options as Options
from cloister.workflows.adapt_model.training import (
    check_classes,
    check_samples,
    loss_params,
    losses_of,
    present,
    privacy_of,
    release_of,
    serve_training,
    thresholds_of,
    train,
)
from cloister.workflows.fine_tune import checked_training
from cloister.workflows.fine_tune.training_parts import Trained
from cloister.workflows.modes import modes_of

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.adapter import Adapted

DEFAULT_NOISE = 5.0  # of hardened mode: see the table of accuracy against epsilon in docs/measured/adapt-model.md
FEW = 20  # labelled samples of a site per unit of noise, as in fine-tune


def adapt_model(adata: AnnData, session: Session | RemoteSession) -> Adapted:
    """Train an adapter and a head on taps of a provider's hidden model, together with the other sites.

    Parameters
    ----------
    adata
        Images (rows of X) or cells; those with a label train, all are labelled in the end.
    session
        This site's place in a study of `adapt-model`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    The adapter and head (`Adapted`). Sets `adata.obs[key_added]`, `adata.obs[f"{key_added}_confidence"]`,
    `adata.obsm[f"{key_added}_features"]` (the taps of each sample) and `adata.uns[key_added]`. Samples on
    which the model left its intervals have no label, and NaN as features; the result names them (`left_out`).
    """
    _, outcome = WORKFLOW.at_site(adata, session)
    return cast("Adapted", outcome.model)


def in_mode(options: Options, mode: str) -> Options:
    """The options with the defaults of a mode in place of `0`, `None` and `auto`."""
    hardened = mode == "hardened"
    noise = options.dp_noise
    if noise is None:
        noise = DEFAULT_NOISE if hardened else 0.0
    scores = not (noise and options.donor_key)  # noise for a donor does not cover its held-out samples
    optimizer = options.optimizer
    if optimizer == "auto":
        optimizer = "adam" if hardened else "sgd"
    return replace(
        options,
        validation=options.validation if scores else 0.0,
        lr=options.lr or (0.03 if hardened else 0.05),
        local_epochs=options.local_epochs or (1 if hardened else 2),
        optimizer=optimizer,
        dp_noise=noise,
        min_cells=options.min_cells if hardened else 0,
    )


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    if session.mode == "hardened" and options.stage != "ask":  # before the model is queried, which is the longer part
        checked_training.check_consent(options.dp_noise or 0.0, session.consent)
        check_samples(adata, options, thresholds_of(session, options))
    check_kept(session, options)
    told = session.run(model_card.owner, model_card.Params(session.sites, session.coordinator))
    inputs = inputs_of(adata, told.card)
    kept = kept_taps(session, options, told, inputs)
    if options.stage != "ask":
        check_classes(session, options, present(adata, options))
    if kept is not None and options.stage == "train":
        session.note("used", f"taps of {kept.count} samples, queried in an earlier run")
        taps = all_taps(session, told, inputs, kept)
    else:
        taps = ask(session, options, told, inputs, kept)
    adata.obsm[f"{options.key_added}_features"] = np.asarray(taps).reshape(len(taps), -1)
    if options.stage == "ask":
        result = {"asked": len(taps), "taps": str(taps_path(session, options)), "model": told.digest} | beyond(
            adata, taps
        )
        return Outcome(adata, result)
    again = range(1, options.rounds if options.permutation == "round" else 1)
    trained, adapted = train(
        adata, session, options, told, [taps, *(ask(session, options, told, inputs) for _ in again)]
    )
    write(adata, options.key_added, adapted, taps)
    result = summary(told, trained, adapted.parameters, len(inputs)) | beyond(adata, taps)
    if privacy := privacy_of(options):
        result["privacy"] = privacy
    if session.mode == "published":
        result["losses"] = losses_of(session, told, trained)
    adata.uns[options.key_added] = json.dumps(result)
    return Outcome(adata, result, model=adapted)


def coordinator(session: Session, options: Options) -> Outcome:
    """The provider: load the model, answer under encryption, add up what trains the adapter."""
    encoder, told = load(options)
    session.run(model_card.provider, model_card.Params(session.sites, session.coordinator), told)
    found: dict[str, Any] = exposed(session, options, told)
    if options.stage != "ask":
        check_classes(session, options, None)
    if options.stage != "train":
        for _ in range(options.rounds if options.permutation == "round" else 1):
            answered = answer(session, options, told, encoder, answers_path(session, options))
        found["answered"] = {str(site): count for site, count in answered.items()}
    if options.stage == "ask":
        return Outcome(None, found)
    trained = serve_training(session, options, told)
    if session.mode == "published":
        session.run(encrypted_loss.provider, loss_params(session, told, len(trained.labels)))
    return Outcome(None, {"labels": list(trained.labels), "history": trained.history} | found)


# ---- results ---------------------------------------------------------------------------------------------------------


def write(adata: AnnData, key_added: str, adapted: Adapted, taps: Any) -> None:
    p, missing = adapted.probabilities(np.nan_to_num(taps)), left_out(taps)
    names = np.array(adapted.labels, dtype=object)[p.argmax(axis=1)]
    names[missing] = None
    cells.write_labels(adata, key_added, names, np.where(missing, np.nan, p.max(axis=1)), share_name="confidence")
    adata.obsm[f"{key_added}_features"] = np.asarray(taps).reshape(len(taps), -1)


def summary(told: model_card.Announcement, trained: Trained, parameters: int, samples: int) -> dict[str, Any]:
    tokens = packing.cheapest(told.shape, told.crypto, samples).tokens
    found: dict[str, Any] = {
        "labels": list(trained.labels),
        "parameters": parameters,
        "best_round": trained.best_round,
        "history": trained.history,
        "model": told.digest,
        "taps": list(told.shape.taps),
        "rank": told.shape.rank,
        "budget": used(told.shape, told.crypto, tokens=tokens),
    }
    if trained.notes:
        found["notes"] = list(trained.notes)
    return found


def check(adata: AnnData, options: Any) -> list[str]:
    """Raise `DataError` if these samples cannot take part; return what the user should know."""
    notes = ["the provider limits the number of samples that a site may query; every query counts"]
    if options.stage == "ask":
        cells.check_cells(adata, need_names=False)
        return notes
    cells.check_cells(adata, label_key=options.label_key, need_names=False)
    column = adata.obs[options.label_key].dropna().astype(str)
    if len(column) < 2:
        raise DataError(f"{len(column)} labelled sample(s) in adata.obs[{options.label_key!r}]; at least 2 are needed")
    if options.labels and (unknown := sorted(set(column) - set(options.labels))):
        raise DataError(
            f"{len(unknown)} label(s) in adata.obs[{options.label_key!r}] are not in the study's vocabulary (e.g. "
            f"'{unknown[0]}'); rename or remove them, or agree on a longer list of labels"
        )
    if options.donor_key is not None:
        if options.donor_key not in adata.obs:
            raise DataError(
                f"adata.obs[{options.donor_key!r}] is missing; pass the column with the donors as donor_key="
            )
        if adata.obs[options.donor_key].isna().any():
            raise DataError(f"adata.obs[{options.donor_key!r}] has missing values; name the donor of every sample")
    if options.min_cells:  # hardened mode
        check_samples(adata, options, Thresholds(options.min_cells, options.min_donors))
    if options.dp_noise and options.donor_key is None and len(column) < FEW * options.dp_noise:
        notes.append(
            f"{len(column)} labelled samples here are few for dp_noise={options.dp_noise:g}: the adapter may be worse "
            "than one trained here alone; agree on less noise, or set bottleneck=0"
        )
    return notes if options.stage == "both" else notes[1:]


def check_study(study: Study, options: Options) -> None:
    """Raise where options do not fit the study's mode; `options` are as `in_mode` gives them."""
    if study.mode == "hardened":
        check_hardened(options)
    elif options.dp_noise or options.donor_key is not None:
        raise ParameterError("options 'dp_noise' and 'donor_key' are for mode hardened; published mode adds no noise")
    if options.permutation == "round" and study.mode != "published":
        raise ParameterError("permutation 'round' is of mode published; hardened mode opens nothing to permute")
    if options.clients_per_round and not 2 <= options.clients_per_round <= len(study.sites):
        raise ParameterError(f"option 'clients_per_round' must be 0 or 2 to {len(study.sites)} sites")


def check_hardened(options: Options) -> None:
    if options.optimizer != "adam":
        raise ParameterError(
            f"option 'optimizer' = '{options.optimizer}' is for mode published; in mode hardened every party computes "
            "the steps of Adam itself"
        )
    if options.clients_per_round:
        raise ParameterError(
            f"option 'clients_per_round' = {options.clients_per_round} is for mode published; in mode hardened all "
            "sites train in every step"
        )
    if options.min_cells < 1 or options.min_donors < 1:
        raise ParameterError("options 'min_cells' and 'min_donors' must be at least 1")
    if options.dp_noise and (options.patience or options.metric != "accuracy"):
        raise ParameterError("with dp_noise the last round is taken; leave out 'patience' and 'metric'")


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"adapter.npz": outcome.model.to_bytes()}


def read_model(path: Path, options: Options) -> Any:
    from cloister.models.adapter import Adapted

    return Adapted.load(path)


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """Accuracy over the rounds."""
    found = next((o.result for o in outcomes.values() if o.result.get("history")), None)
    rows = [row for row in (found or {}).get("history", []) if "accuracy" in row]
    if not rows:
        return []
    shown = ("accuracy", "balanced_accuracy", "macro_f1")
    values = {key.replace("_", " "): [row[key] for row in rows] for key in shown if key in rows[0]}
    return [
        curves(values, title="Held-out samples of all sites over the rounds", xlabel="round", ylabel="score", start=0)
    ]


WORKFLOW = Workflow(
    name="adapt-model",
    summary="Adapt a provider's hidden encoder to the sites' labels; the provider sees no sample.",
    options=Options,
    modes=modes_of("adapt-model"),
    site=site,
    coordinator=coordinator,
    check=check,
    check_study=check_study,
    in_mode=in_mode,
    privacy=privacy_of,
    release=release_of,
    reads=lambda options, site: () if options.stage == "ask" else ("label_key", "donor_key"),
    writes=("obs[{key_added!r}]", "uns[{key_added!r}]", "obsm['{key_added}_features']"),
    files=files,
    model=("adapter.npz", read_model),
    figures=figures,
)
