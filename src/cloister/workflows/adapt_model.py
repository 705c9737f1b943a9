"""Adapt a provider's model to the sites' labels, without showing it or them (`adapt-model`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from cloister.cells import tables as cells
from cloister.cells.demo import demo_encoder
from cloister.crypto.owner_ckks import devices
from cloister.crypto.owner_ckks import scheme as block
from cloister.errors import DataError, ParameterError
from cloister.models.linear import hold_out
from cloister.models.polynomial import Encoder
from cloister.net.seat import Outcome, Place, Seat
from cloister.protocols.fedavg import federated_training
from cloister.protocols.fedavg.training_parts import Offer, Trained
from cloister.protocols.fedavg.training_terms import Params
from cloister.protocols.inference import (
    encrypted_inference,
    encrypted_loss,
    lying_owner,
    model_card,
    packing,
    permuted_inference,
)
from cloister.protocols.inference.block_plan import used
from cloister.protocols.sums import common_seed, count_tests
from cloister.report.figures import curves
from cloister.workflows import Workflow
from cloister.workflows.modes import modes_of
from cloister.workflows.options import option

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.adapter import Adapted


@dataclass(frozen=True)
class Options:
    model: str = option("model.npz", "file of the provider's model, at the coordinator")
    label_key: str = option("cell_type", "column of obs with the labels; NaN where there is none")
    labels: tuple[str, ...] = option((), "all label names; if none, the sites' names are collected")
    ring: Literal["small", "standard"] = option("standard", "lattice: small models only, or any")
    budget: int = option(65536, "samples that a site may ask about, over all runs")
    ledger: str | None = option(None, "file in which the provider counts them; if none, beside the model's")
    device: Literal["cpu", "gpu"] = option("cpu", "where the provider computes: its CPU, or its NVIDIA card")
    bottleneck: int = option(8, "width of the adapter; 0 for linear probing")
    rounds: int = option(20, "rounds of averaging")
    local_epochs: int = option(1, "passes over a site's samples in a round")
    batch_size: int = option(32, "samples a step")
    lr: float = option(0.01, "learning rate")
    optimizer: Literal["adam", "sgd"] = option("adam", "local optimiser")
    validation: float = option(0.1, "share of each label's samples kept for validation")
    metric: Literal["accuracy", "macro_f1", "loss"] = option("accuracy", "that chooses the best round")
    key_added: str = option("predicted", "column of obs with the model's labels")

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ParameterError(f"option 'validation' must be in [0, 1), found {self.validation}")
        if self.labels and (len(set(self.labels)) != len(self.labels) or len(self.labels) < 2):
            raise ParameterError("option 'labels' needs at least two names, each once")
        if self.budget < 1 or self.bottleneck < 0:
            raise ParameterError("options 'budget' and 'bottleneck' cannot be negative, and 'budget' not 0")


def adapt_model(adata: AnnData, seat: Seat | Place) -> Adapted:
    """Train an adapter and a head on features of a model that its provider keeps, together with the other sites.

    Parameters
    ----------
    adata
        Images (rows of X) or cells; those with a label train, all are labelled in the end.
    seat
        This site's place in a study of `adapt-model`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    The adapter and head (`Adapted`). Sets `adata.obs[key_added]`, `adata.obs[f"{key_added}_confidence"]`,
    `adata.obsm[f"{key_added}_features"]` (what the model told of each sample) and `adata.uns[key_added]`. Samples on
    which the model left its intervals have no label, and NaN as features; the result names them (`left_out`).
    """
    _, outcome = WORKFLOW.at_site(adata, seat)
    return cast("Adapted", outcome.model)


def site(seat: Seat, adata: AnnData, options: Options) -> Outcome:
    told = seat.run(model_card.owner, model_card.Params(seat.sites, seat.coordinator))
    inputs = inputs_of(adata, told.card)
    check_classes(seat, options, present(adata, options))
    taps = ask(seat, options, told, inputs)
    trained, adapted = train(adata, seat, options, told, taps)
    write(adata, options.key_added, adapted, taps)
    result = summary(told, trained, adapted.parameters, len(inputs)) | beyond(adata, taps)
    if seat.mode == "published":
        result["loss"] = loss_of(seat, options, told, adapted, taps, given(adata, options))
    adata.uns[options.key_added] = json.dumps(result)
    return Outcome(adata, result, model=adapted)


def coordinator(seat: Seat, options: Options) -> Outcome:
    """The provider: load the model, answer under encryption, average the updates."""
    encoder, told = load(options)
    seat.run(model_card.provider, model_card.Params(seat.sites, seat.coordinator), told)
    check_classes(seat, options, None)
    answer(seat, options, told, encoder)
    trained: Trained = seat.run(federated_training.coordinator, training_params(seat, options, told), None)
    if seat.mode == "published":
        seat.run(encrypted_loss.provider, loss_params(seat, told, len(trained.labels)))
    found = {"labels": list(trained.labels), "history": trained.history}
    return Outcome(None, found | exposed(seat, options, told))


# ---- inference -------------------------------------------------------------------------------------------------------


def load(options: Any) -> tuple[Any, model_card.Announcement]:
    """The provider's model and what it tells of it; raises if it cannot compute where it is meant to."""
    devices.check(options.device)
    encoder = Encoder.load(options.model)
    small, quadratic = options.ring == "small", encoder.shape.attention == "quadratic"
    if small and quadratic:
        raise ParameterError("a model with quadratic attention needs the long modulus: option ring = 'standard'")
    crypto = block.QUADRATIC if quadratic else block.SMALL if small else block.STANDARD
    return encoder, model_card.told_by(encoder, crypto)


def inputs_of(adata: AnnData, card: Mapping[str, Any]) -> Any:
    """Samples as the model takes them in, (n, tokens - 1, inputs); raises `DataError` if they do not fit the card."""
    from cloister.models.student import cell_inputs, patches

    if card["kind"] == "images":
        h, w, c, p = (int(card[k]) for k in ("height", "width", "channels", "patch"))
        x = cells.embedding(adata, None).astype(np.float64)
        if x.shape[1] != h * w * c:
            raise DataError(
                f"the model takes images of {h} x {w} x {c} ({h * w * c} values), found rows of {x.shape[1]} in X; "
                "resize or pad the images"
            )
        x = x / (255.0 if x.size and x.max() > 1.5 else 1.0)
        x = (x - float(card["mean"])) / float(card["std"])
        return patches(x.reshape(-1, h, w, c).transpose(0, 3, 1, 2), p)
    genes = [str(g) for g in card["genes"]]
    at = {str(name): i for i, name in enumerate(adata.var_names)}
    missing = [g for g in genes if g not in at]
    if missing:
        raise DataError(
            f"{len(missing)} of the model's {len(genes)} genes are not in adata.var_names (e.g. '{missing[0]}'); the "
            "panel is fixed: add them, with zeros if they were not measured"
        )
    x = cells.loaded(adata)[:, [at[g] for g in genes]]
    x = np.asarray(x.toarray() if hasattr(x, "toarray") else x, np.float64)
    if cells.expression_kind(adata) == "counts":
        x = np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1.0) * float(card["target"]))
    elif cells.expression_kind(adata) == "scaled":
        raise DataError("expression has negative values, so it was scaled; bring counts or log values")
    return cell_inputs(x / float(card["unit"]))


def ask(seat: Seat, options: Any, told: model_card.Announcement, inputs: Any) -> Any:
    """The taps of these samples, (n, taps, r)."""
    params = inference_params(seat, options, told)
    if seat.mode == "published":
        return seat.run(permuted_inference.owner, params, inputs)[:, :, 0]  # class tokens of all blocks
    return seat.run(encrypted_inference.owner, params, inputs)


def answer(seat: Seat, options: Any, told: model_card.Announcement, encoder: Any) -> Any:
    ledger, params = ledger_of(options), inference_params(seat, options, told)
    if seat.mode == "published":  # on a CPU always
        return seat.run(permuted_inference.provider, params, encoder, ledger)
    return seat.run(encrypted_inference.provider, params, encoder, ledger, options.device)


def ledger_of(options: Any) -> encrypted_inference.Ledger:
    """Counts over all runs, in a file beside the model; only the demo's model, which everybody has, needs none."""
    if options.ledger is None and Path(options.model).resolve() == demo_encoder().resolve():
        return encrypted_inference.Ledger()
    return encrypted_inference.Ledger(Path(options.ledger or f"{options.model}.ledger.json"))


def exposed(seat: Seat, options: Any, told: model_card.Announcement) -> dict[str, str]:
    """For the provider's results: how much of its model the budget leaves to one lying site."""
    if seat.mode == "published":  # every site has the model anyway
        return {}
    return {"exposure": str(lying_owner.exposure(told.shape, told.crypto, options.budget))}


def inference_params(seat: Seat, options: Any, told: model_card.Announcement) -> Any:
    module = permuted_inference if seat.mode == "published" else encrypted_inference
    return module.Params(seat.sites, seat.coordinator, told.shape, told.crypto, options.budget)


def beyond(adata: AnnData, taps: Any) -> dict[str, Any]:
    """Samples on which the model left its intervals, by name: for the site alone."""
    names = [str(name) for name in adata.obs_names[left_out(taps)]]
    return {"left_out": names} if names else {}


def left_out(taps: Any) -> Any:
    """Which samples have no features."""
    return np.isnan(taps).any(axis=(1, 2))


# ---- training --------------------------------------------------------------------------------------------------------


def given(adata: AnnData, options: Options) -> list[str | None]:
    column = adata.obs[options.label_key]
    return [None if missing else str(v) for v, missing in zip(column, column.isna(), strict=True)]


def present(adata: AnnData, options: Options) -> Any:
    found = set(given(adata, options))
    return np.array([name in found for name in options.labels], np.int64)


def check_classes(seat: Seat, options: Options, mine: Any) -> None:
    """With listed labels: raise at every party if no site has a sample of one of them."""
    if not options.labels:
        return
    sites, hub = seat.sites, seat.coordinator
    seed, tests = common_seed.Params(sites, hub), count_tests.Params(sites, hub, len(options.labels), 1, len(sites))
    if mine is None:
        there = seat.run(count_tests.coordinator, tests, seat.run(common_seed.coordinator, seed))
    else:
        common = seat.run(common_seed.site, seed)
        there = seat.run(count_tests.site, tests, mine, common.secret, common.present)
    lacking = [name for name, found in zip(options.labels, there.bits, strict=True) if not found]
    if lacking:
        raise ParameterError(f"no site has a sample labelled '{lacking[0]}'; take it off the list of labels")


def train(
    adata: AnnData, seat: Seat, options: Options, told: model_card.Announcement, taps: Any
) -> tuple[Trained, Any]:
    import torch

    from cloister.models.adapter import Adapted, Config, make
    from cloister.models.learner import Learner, Recipe, Table

    names = given(adata, options)
    seed = seat.study.seed

    def build(labels: tuple[str, ...]) -> Learner:
        at = {name: i for i, name in enumerate(labels)}
        codes = np.array([-1 if name is None else at[name] for name in names], np.int64)
        codes[left_out(taps)] = -1
        config = Config(taps.shape[1], taps.shape[2], len(labels), options.bottleneck, seed=seed)
        recipe = Recipe(options.local_epochs, options.batch_size, options.optimizer, seed=seed)
        held = hold_out(codes, options.validation, seat.rng("validation"))
        table = Table(torch.as_tensor(np.nan_to_num(taps), dtype=torch.float32))
        return Learner(make(config), len(labels), recipe, table, codes, held, describe=str(config), site=seat.me)

    brought = tuple(sorted({name for name in names if name is not None}))
    params = training_params(seat, options, told)
    trained = seat.run(federated_training.site, params, Offer(f"taps of {told.digest}", brought, build))
    trained.learner.place(trained.theta)
    return trained, Adapted(trained.learner.model.eval(), trained.labels, told.digest)


def training_params(seat: Seat, options: Options, told: model_card.Announcement) -> Params:
    local = {k: v for k, v in vars(options).items() if k not in ("model", "ledger", "device", "key_added")}
    return Params(
        seat.sites,
        seat.coordinator,
        json.dumps([local, told.digest], sort_keys=True),
        options.rounds,
        rate=options.lr,
        labels=options.labels,
        metric=options.metric,
        seed=seat.study.seed,
    )


def loss_params(seat: Seat, told: model_card.Announcement, labels: int) -> Any:
    return encrypted_loss.Params(seat.sites, seat.coordinator, told.crypto, labels)


def loss_of(
    seat: Seat, options: Options, told: model_card.Announcement, adapted: Adapted, taps: Any, names: Any
) -> float:
    """Published mode: the mean loss by the provider's hand, on encrypted labels and predictions."""
    at = np.flatnonzero([name is not None for name in names])
    codes = np.array([adapted.labels.index(names[i]) for i in at])
    params = loss_params(seat, told, len(adapted.labels))
    return float(seat.run(encrypted_loss.owner, params, adapted.probabilities(taps)[at], codes))


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
    cells.check_cells(adata, label_key=options.label_key, need_names=False)
    column = adata.obs[options.label_key].dropna().astype(str)
    if len(column) < 2:
        raise DataError(f"{len(column)} labelled sample(s) in adata.obs[{options.label_key!r}]; at least 2 are needed")
    if options.labels and (unknown := sorted(set(column) - set(options.labels))):
        raise DataError(
            f"{len(unknown)} label(s) in adata.obs[{options.label_key!r}] are not in the study's vocabulary (e.g. "
            f"'{unknown[0]}'); rename or remove them, or agree on a longer list of labels"
        )
    return ["the model's owner bounds how many samples you may ask about; every sample asked counts"]


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
    values = {key.replace("_", " "): [row[key] for row in rows] for key in ("accuracy", "macro_f1")}
    return [
        curves(values, title="Held-out samples of all sites over the rounds", xlabel="round", ylabel="score", start=0)
    ]


WORKFLOW = Workflow(
    name="adapt-model",
    summary="Adapt a provider's encoder to the sites' labels; neither side sees the other's.",
    options=Options,
    modes=modes_of("adapt-model"),
    site=site,
    coordinator=coordinator,
    check=check,
    reads=lambda options, site: ("label_key",),
    writes=("obs[{key_added!r}]", "uns[{key_added!r}]", "obsm['{key_added}_features']"),
    files=files,
    model=("adapter.npz", read_model),
    figures=figures,
)
