"""Train one classifier on the labelled cells of all sites (`fine-tune`)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.disclosure import Rows, Thresholds
from cloister.errors import DataError, ParameterError
from cloister.models.linear import hold_out
from cloister.papers import federated_training
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.embed import write_features
from cloister.workflows.fine_tune import checked_training
from cloister.workflows.fine_tune.options import IMAGES, check_in_mode
from cloister.workflows.fine_tune.options import Options as Options
from cloister.workflows.fine_tune.parts import FileStore, figures
from cloister.workflows.fine_tune.pseudo_labels import Pseudo
from cloister.workflows.fine_tune.training_parts import Offer, Trained
from cloister.workflows.fine_tune.training_terms import Params
from cloister.workflows.modes import modes_of
from cloister.workflows.one_space import note_on_space
from cloister.workflows.options import privacy_budget
from cloister.workflows.saved_models import load_model

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.classifier import Blueprint
    from cloister.models.learner import Examples
    from cloister.study import Study
    from cloister.workflows.saved_models.fine_tuned import FineTuned, Inputs


LARGE_IMAGE = 64  # pixels a side from which a ResNet begins with a 7 x 7 convolution
DEFAULT_NOISE = 5.0  # of hardened mode: see the table of accuracy against epsilon in docs/measured/fine-tune.md
FEW = 20  # labelled cells of a site per unit of noise: measured with 130 to 165 labels at four sites and dp_noise=5
MIN_SCORED = 100  # validation cells: an accuracy of 0.9 is then known to 0.03; of fewer, chance would choose the round


def fine_tune(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> Any:
    """Train a classifier together with the other sites, by averaging updates that nobody sees alone.

    Parameters
    ----------
    adata
        Cells; those with a label train, all are labelled in the end.
    session
        This site's place in a study of `fine-tune`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    The trained classifier (`FineTuned`), with `predict` and `save`; or `(adata, classifier)` if `copy=True`. Sets:

    `adata.obs[key_added]`, `adata.obs[f"{key_added}_confidence"]` : :class:`pandas.Series`
        The model's label and its probability, for every cell.
    `adata.uns[key_added]` : :class:`str`
        JSON: curves, best round, label names, privacy budget, notes for this site.
    """
    adata, outcome = WORKFLOW.at_site(adata, session, copy=copy)
    return (adata, outcome.model) if copy else outcome.model


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    trained, classifier = train(adata, session, options)
    classifier.predict(adata, key_added=options.key_added)
    if options.features_added is not None:
        write_features(adata, classifier, options.features_added)
    result = summary(session, in_mode(options, session.mode), trained)
    adata.uns[options.key_added] = json.dumps(result)
    return Outcome(adata, result, model=classifier)


def train(adata: AnnData, session: Session, options: Options) -> tuple[Trained, FineTuned]:
    from cloister.models.classifier import Network, first_weights, make
    from cloister.models.learner import GLOBAL_RNG, Learner
    from cloister.models.scgpt import best_device
    from cloister.workflows.saved_models.fine_tuned import FineTuned

    options = in_mode(options, session.mode)
    first = None if options.init is None else first_weights(options.init)
    examples, blueprint, pretrained = examples_of(adata, options, first, seed=session.study.seed)
    least = session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors)
    given = given_labels(adata, options)
    if session.mode == "hardened" and not options.labels and not options.semi_supervised:
        given = frequent_labels(given, donors_of(adata, options), least)

    def build(labels: tuple[str, ...]) -> Learner:
        at = {name: i for i, name in enumerate(labels)}
        codes = np.array([-1 if name is None else at[name] for name in given], dtype=np.int64)
        with GLOBAL_RNG:
            module = make(blueprint, labels, pretrained, first)
        return Learner(
            module,
            len(labels),
            recipe_of(options, session.study.seed, len(session.sites)),
            examples,
            codes,
            hold_out(codes, options.validation, session.rng("validation")),
            describe=blueprint.describe(labels),
            site=session.me,
            device=best_device(),
            global_rng=options.model == "scgpt",
            unlabelled=options.semi_supervised,
            donor=donors_of(adata, options),
        )

    brought = tuple(sorted({name for name in given if name is not None}))
    inputs = inputs_of(adata, options, session.study.seed)
    shape = f"{blueprint.kind} of {blueprint.inputs} {blueprint.checkpoint} {inputs.space} {inputs.edges}"
    offer = Offer(shape, brought, build, least)
    if session.mode == "hardened":
        trained = session.run(checked_training.site, checked_params(session, options), offer)
    else:
        trained = session.run(federated_training.site, params_of(session, options), offer)
    network = Network.of(trained.learner, trained.theta, blueprint, trained.labels)
    return trained, FineTuned(network, inputs, pretrained)


def given_labels(adata: AnnData, options: Options) -> list[str | None]:
    column = adata.obs[options.label_key]
    return [None if missing else str(v) for v, missing in zip(column, column.isna(), strict=True)]


def frequent_labels(given: list[str | None], donor: Any, least: Thresholds) -> list[str | None]:
    """The labels without those that few cells or donors here have: names are sent without noise."""
    names = sorted({name for name in given if name is not None})
    at = {name: i for i, name in enumerate(names)}
    codes = np.array([-1 if name is None else at[name] for name in given], dtype=np.int64)
    keep = Rows(len(given), donor, least).open_rows(codes, len(names))
    return [name if k else None for name, k in zip(given, keep, strict=True)]


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up, score, choose the best round; in published mode also draw who trains."""
    options = in_mode(options, session.mode)
    if session.mode == "hardened":
        trained = session.run(checked_training.coordinator, checked_params(session, options))
        return Outcome(None, summary(session, options, trained))
    store = None if options.checkpoint is None else FileStore(Path(options.checkpoint))
    trained = session.run(federated_training.coordinator, params_of(session, options), store)
    return Outcome(None, summary(session, options, trained))


def recipe_of(options: Options, seed: int, sites: int) -> Any:
    from cloister.models.learner import Recipe

    return Recipe(
        options.local_epochs,
        options.batch_size,
        options.optimizer,
        options.momentum,
        options.weight_decay,
        options.mu if options.algorithm == "fedprox" else 0.0,
        seed,
        (options.clients_per_round or sites) / sites if options.algorithm == "scaffold" else 0.0,
        options.scale_confidence,
        options.class_weights,
    )


APART = ("checkpoint", "key_added", "features_added", "pretrained", "init")  # options that may differ between sites


def in_mode(options: Options, mode: str) -> Options:
    """The options with the defaults of a mode in place of `0`, `None` and `auto`."""
    hardened = mode == "hardened"
    noise = options.dp_noise
    if noise is None:
        suits = options.algorithm != "scaffold" and covers_pseudo_labels(options)
        noise = DEFAULT_NOISE if hardened and suits else 0.0
    unit = options.dp_unit
    if unit == "auto":
        unit = "site" if not hardened else "cell" if options.donor_key is None else "donor"
    scores = not (hardened and noise and unit == "donor")  # noise for a donor does not cover its held-out cells
    return replace(
        options,
        validation=options.validation if scores else 0.0,
        lr=options.lr or (3e-2 if hardened else 3e-3),
        local_epochs=options.local_epochs or (1 if hardened else 5),
        dp_noise=noise,
        dp_unit=unit,
    )


def covers_pseudo_labels(options: Options) -> bool:
    """Whether noise covers all that a cell can change: not where its pseudo-label depends on other cells."""
    alone = options.pseudo_labels == "network" and not options.scale_confidence and not options.class_weights
    return not options.semi_supervised or alone


def checked_params(session: Session, options: Options) -> checked_training.Params:
    local = {k: v for k, v in vars(options).items() if k not in APART}
    return checked_training.Params(
        session.sites,
        session.coordinator,
        json.dumps(local, sort_keys=True),
        rounds=options.rounds,
        steps=options.local_epochs,
        rate=options.lr,
        schedule=options.schedule,
        decay=options.schedule_rounds,
        weight_decay=options.weight_decay,
        labels=options.labels,
        score_every=options.score_every if options.validation else 0,
        metric=options.metric,
        patience=options.patience,
        noise=options.dp_noise or 0.0,
        clip=options.dp_clip,
        epsilon=epsilon_of(options),
        delta=options.dp_delta if options.dp_noise else 0.0,
        unit=options.dp_unit,
        pseudo=pseudo_of(session, options),
        min_scored=MIN_SCORED,
        min_cells=options.min_cells,
        min_donors=options.min_donors,
    )


def params_of(session: Session, options: Options) -> Params:
    local = {k: v for k, v in vars(options).items() if k not in APART}
    return Params(
        session.sites,
        session.coordinator,
        json.dumps(local, sort_keys=True),
        options.rounds,
        options.clients_per_round,
        options.lr,
        options.schedule,
        options.weighting,
        options.update_bound,
        options.labels,
        options.score_every,
        options.metric,
        options.patience,
        options.dp_noise or 0.0,
        options.dp_clip,
        epsilon_of(options),
        options.dp_delta if options.dp_noise else 0.0,
        session.study.seed,
        pseudo_of(session, options),
        options.schedule_rounds,
        MIN_SCORED,
        resume=True,
    )


def noisy_sums(options: Options) -> int:
    """How many sums with noise a run opens."""
    if options.dp_unit == "site":
        return options.rounds
    score_every = options.score_every if options.validation else 0
    return checked_training.openings(options.rounds, options.local_epochs, score_every)


def epsilon_of(options: Options) -> float:
    return privacy_budget(options.dp_noise or 0.0, options.dp_delta, noisy_sums(options))


def release_of(options: Options) -> tuple[str, float, int] | None:
    return (options.dp_unit, options.dp_noise, noisy_sums(options)) if options.dp_noise else None


def privacy_of(options: Options) -> dict[str, Any]:
    """What a run spends; of options as `in_mode` gives them."""
    if not options.dp_noise:
        return {}
    who = {
        "cell": "one cell, against that cell contributing nothing",
        "donor": "all cells of one donor, against none",
        "site": "all data of one site, against none",
    }[options.dp_unit]
    return {"epsilon": epsilon_of(options), "delta": options.dp_delta, "protects": who}


def pseudo_of(session: Session, options: Options) -> Pseudo:
    return Pseudo(
        options.pseudo_labels if options.semi_supervised else "none",
        options.warm_rounds,
        options.bits,
        options.n_neighbors,
        options.alpha,
        options.hamming,
        private=session.mode == "hardened",
        power=options.similarity_power,
        balance=options.balance,
    )


def inputs_of(adata: AnnData, options: Options, seed: int) -> Inputs:
    from cloister.workflows.saved_models.fine_tuned import Inputs

    return Inputs.of(
        adata,
        model=options.model,
        use_rep=options.use_rep if options.model == "mlp" else None,
        layer=options.layer if options.model == "scgpt" else None,
        binning=options.binning,
        gene_key=options.gene_key,
        image_shape=options.image_shape,
        rotation=options.rotation,
        seed=seed,
    )


def examples_of(
    adata: AnnData, options: Options, first: Any = None, *, seed: int = 0
) -> tuple[Examples, Blueprint, Any]:
    """The cells as the model takes them in, and the description of the model that fits them."""
    from cloister.models.classifier import Blueprint
    from cloister.models.learner import Table
    from cloister.models.scgpt import ScGPT

    shared: dict[str, Any] = {"dropout": options.dropout, "width": options.width, "seed": seed, "tune": options.tune}
    loaded = ScGPT.load(str(options.pretrained)) if options.model == "scgpt" else None
    examples = inputs_of(adata, options, seed).examples(adata, loaded)
    if loaded is not None:
        tuned: dict[str, Any] = {"last_layers": options.last_layers, "lora_rank": options.lora_rank}
        return examples, Blueprint("scgpt", len(loaded.vocab), checkpoint=loaded.digest, **tuned, **shared), loaded
    assert isinstance(examples, Table)
    shared["unit"] = options.unit_embedding
    if options.model == "mlp":
        return examples, Blueprint("mlp", examples.x.shape[1], hidden=options.hidden, **shared), None
    side, _, channels = options.image_shape
    if options.model == "resnet":
        given = side >= LARGE_IMAGE if first is None else first.get("conv1.weight", np.zeros((1, 1, 3))).shape[-1] > 3
        shared["stem"] = 7 if given else 3
    return examples, Blueprint(options.model, channels, side, **shared), None


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    use_rep = options.use_rep if options.model == "mlp" else None
    images = options.model in IMAGES
    cells.check_cells(adata, use_rep=use_rep, need_names=False, allow_negative=options.model == "mlp")
    if options.label_key not in adata.obs:
        raise DataError(f"adata.obs[{options.label_key!r}] is missing; pass the column with the labels as label_key=")
    if images and math.prod(options.image_shape) != adata.n_vars:
        raise DataError(
            f"images of {options.image_shape} have {math.prod(options.image_shape)} values, X {adata.n_vars}"
        )
    if options.init is not None:
        from cloister.models.classifier import first_weights, make

        first = first_weights(options.init)
        make(examples_of(adata, options, first)[1], ("one", "other"), None, first)
    column = adata.obs[options.label_key].dropna().astype(str)
    counts = column.value_counts()
    if options.labels and (unknown := sorted(set(counts.index) - set(options.labels))):
        raise DataError(
            f"{len(unknown)} label(s) in adata.obs[{options.label_key!r}] are not in the study's vocabulary (e.g. "
            f"'{unknown[0]}'); rename or remove them, or agree on a longer list of labels"
        )
    if len(column) < 2 and not options.semi_supervised:
        raise DataError(f"{len(column)} labelled cell(s) in adata.obs[{options.label_key!r}]; at least 2 are needed")
    if options.dp_unit != "site" and not options.semi_supervised and len(column) < options.min_cells:
        raise DataError(
            f"{len(column)} labelled cells in adata.obs[{options.label_key!r}], fewer than min_cells = "
            f"{options.min_cells}; a sum over so few comes close to single cells, so leave this site out of the study"
        )
    notes = note_on_space(use_rep)
    if len(counts) == 1:
        notes.append(f"all labelled cells here are '{counts.index[0]}'; this site teaches the model nothing else")
    if options.donor_key is not None:
        if options.donor_key not in adata.obs:
            raise DataError(
                f"adata.obs[{options.donor_key!r}] is missing; pass the column with the donors as donor_key="
            )
        if adata.obs[options.donor_key].isna().any():
            raise DataError(f"adata.obs[{options.donor_key!r}] has missing values; name the donor of every cell")
    if options.dp_unit != "site" and not options.labels and not options.semi_supervised:
        least = Thresholds(options.min_cells, options.min_donors)
        frequent = set(frequent_labels(given_labels(adata, options), donors_of(adata, options), least)) - {None}
        hint = "list the study's labels as labels= to train on them"
        if not frequent:
            donors = "" if options.donor_key is None else f" and min_donors = {least.min_donors}"
            raise DataError(f"no label here reaches min_cells = {least.min_cells}{donors}; {hint}")
        if rare := sorted(set(counts.index) - frequent):
            notes.append(
                f"{len(rare)} label(s) of few cells or donors here (e.g. '{rare[0]}') do not train, so their names "
                f"are not sent; {hint}"
            )
    if options.dp_noise and options.dp_unit in ("donor", "site"):
        notes.append(f"noise protects whole {options.dp_unit}s; with few of them the model may learn little")
    if options.dp_noise and options.dp_unit == "cell" and len(column) < FEW * options.dp_noise:
        notes.append(
            f"{len(column)} labelled cells here are few for dp_noise={options.dp_noise:g}: the model may be worse than "
            "one trained here alone; use train-classifier, or agree on less noise"
        )
    return notes


def check_study(study: Study, options: Options) -> None:
    """Raise where options do not fit the study's mode; `options` are as `in_mode` gives them."""
    check_in_mode(options, study.mode)
    if options.clients_per_round and not 2 <= options.clients_per_round <= len(study.sites):
        raise ParameterError(
            f"expected between 2 and {len(study.sites)} clients a round (0 for all), found {options.clients_per_round}"
        )


def donors_of(adata: AnnData, options: Options) -> Any:
    """A code for every cell's donor, or `None`."""
    if options.donor_key is None:
        return None
    return np.unique(adata.obs[options.donor_key].astype(str).to_numpy(), return_inverse=True)[1]


def summary(session: Session, options: Options, trained: Trained) -> dict[str, Any]:
    size, K = len(trained.theta), len(trained.labels)
    if session.mode == "hardened":
        cost = checked_training.cost(checked_params(session, options), size, K)
    else:
        cost = federated_training.cost(params_of(session, options), size, K)
    controls = len(trained.theta) // 2 if options.algorithm == "scaffold" else 0  # half of what travels
    found: dict[str, Any] = {
        "labels": list(trained.labels),
        "parameters": len(trained.theta) - controls,
        "best_round": trained.best_round,
        "history": trained.history,
        "bytes_per_round": cost,
    }
    if options.dp_noise:
        found["privacy"] = privacy_of(options)
    if trained.notes:
        found["notes"] = list(trained.notes)
    return found


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"model.npz": outcome.model.to_bytes()}


WORKFLOW = Workflow(
    name="fine-tune",
    summary="Train one neural network on all sites' labelled cells, from secure sums of noisy gradients.",
    options=Options,
    modes=modes_of("fine-tune"),
    site=site,
    coordinator=coordinator,
    check=check,
    check_study=check_study,
    in_mode=in_mode,
    privacy=privacy_of,
    release=release_of,
    reads=lambda options, site: ("label_key", "use_rep" if options.model == "mlp" else "layer", "donor_key"),
    writes=("obs[{key_added!r}]", "uns[{key_added!r}]", "obsm[{features_added!r}]"),
    files=files,
    model=("model.npz", lambda path, options: load_model(path, options.pretrained)),
    figures=figures,
)
