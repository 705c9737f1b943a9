"""Training an adapter on taps that the sites have: what a site brings to `federated_training` for `adapt-model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cloister.errors import ParameterError
from cloister.models.linear import hold_out
from cloister.net.seat import Seat
from cloister.protocols.fedavg import federated_training
from cloister.protocols.fedavg.training_parts import Offer, Trained
from cloister.protocols.fedavg.training_terms import Params
from cloister.protocols.inference import encrypted_loss, model_card
from cloister.protocols.sums import common_seed, count_tests
from cloister.workflows.adaptation.asking import left_out

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.adapter import Adapted, Adapter, AdapterLearner
    from cloister.workflows.adapt_model import Options


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
    adata: AnnData, seat: Seat, options: Options, told: model_card.Announcement, by_round: Sequence[Any]
) -> tuple[Trained, Adapted]:
    """Train on taps (n, taps, r): the same in all rounds, or some for each of them."""
    import torch

    from cloister.models.adapter import Adapted
    from cloister.models.learner import Table

    taps, names = by_round[0], given(adata, options)
    missing = np.any([left_out(some) for some in by_round], axis=0)
    tables = tuple(Table(torch.as_tensor(np.nan_to_num(some), dtype=torch.float32)) for some in by_round)

    def build(labels: tuple[str, ...]) -> AdapterLearner:
        at = {name: i for i, name in enumerate(labels)}
        codes = np.array([-1 if name is None else at[name] for name in names], np.int64)
        codes[missing] = -1
        held = hold_out(codes, options.validation, seat.rng("validation"))
        each = tables if len(tables) > 1 else ()
        watch = seat.mode == "published"
        return learner_of(
            options, taps.shape[1:], labels, tables[0], codes, held, seat.me, seat.study.seed, by_round=each,
            watch=watch,
        )  # fmt: skip

    brought = tuple(sorted({name for name in names if name is not None}))
    params = training_params(seat, options, told)
    trained: Trained = seat.run(federated_training.site, params, Offer(f"taps of {told.digest}", brought, build))
    learner = cast("AdapterLearner", trained.learner)
    learner.place(trained.theta)
    return trained, Adapted(cast("Adapter", learner.model.eval()), trained.labels, told.digest)


def learner_of(
    options: Options, size: tuple[int, int], labels: tuple[str, ...], table: Any, codes: Any, held: Any, site: str,
    seed: int, **more: Any,
) -> AdapterLearner:  # fmt: skip
    """The adapter of these options over so many taps and numbers, with a site's samples."""
    from cloister.models.adapter import AdapterLearner, Config, make

    config = Config(*size, len(labels), options.bottleneck, options.alpha, seed=seed)
    more |= {"decay": options.decay, "decay_at": options.decay_at if options.schedule == "step" else ()}
    recipe = recipe_of(options, seed)
    return AdapterLearner(
        make(config), len(labels), recipe, table, codes, held, describe=str(config), site=site, **more
    )


def recipe_of(options: Options, seed: int) -> Any:
    from cloister.models.learner import Recipe

    return Recipe(options.local_epochs, options.batch_size, options.optimizer, options.momentum, seed=seed)


def training_params(seat: Seat, options: Options, told: model_card.Announcement) -> Params:
    apart = ("model", "ledger", "device", "key_added", "stage", "taps", "budget")
    local = {k: v for k, v in vars(options).items() if k not in apart}
    return Params(
        seat.sites,
        seat.coordinator,
        json.dumps([local, told.digest], sort_keys=True),
        options.rounds,
        options.clients_per_round,
        rate=options.lr,
        schedule="cosine" if options.schedule == "cosine" else "constant",  # the learner steps down itself
        labels=options.labels,
        metric=options.metric,
        patience=options.patience,
        seed=seat.study.seed,
    )


# ---- the published loss ----------------------------------------------------------------------------------------------


def loss_params(seat: Seat, told: model_card.Announcement, labels: int) -> encrypted_loss.Params:
    return encrypted_loss.Params(seat.sites, seat.coordinator, told.crypto, labels)


def losses_of(seat: Seat, told: model_card.Announcement, trained: Trained) -> list[float]:
    """Published mode: the mean loss of every batch of training by the provider's hand, in the order of training."""
    seen = cast("AdapterLearner", trained.learner).batches_seen
    params = loss_params(seat, told, len(trained.labels))
    sizes = np.array([len(codes) for _, codes in seen], np.int64)
    p, codes = (np.concatenate([one[i] for one in seen]) for i in (0, 1))
    return [float(x) for x in seat.run(encrypted_loss.owner, params, p, codes, sizes)]
