"""Training an adapter on the sites' taps: `checked_training` if hardened, `federated_training` if published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cloister.disclosure import Rows, Thresholds
from cloister.errors import ParameterError
from cloister.models.linear import hold_out
from cloister.mpc.sums import common_seed, count_tests
from cloister.papers import encrypted_loss, federated_training
from cloister.session import Session
from cloister.workflows.adapt_model import model_card
from cloister.workflows.adapt_model.inference import left_out
from cloister.workflows.fine_tune import checked_training
from cloister.workflows.fine_tune.training_parts import Offer, Trained
from cloister.workflows.fine_tune.training_terms import Params
from cloister.workflows.options import privacy_budget

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.adapter import Adapted, Adapter, AdapterLearner
    from cloister.workflows.adapt_model.options import Options


def given(adata: AnnData, options: Options) -> list[str | None]:
    column = adata.obs[options.label_key]
    return [None if missing else str(v) for v, missing in zip(column, column.isna(), strict=True)]


def present(adata: AnnData, options: Options) -> Any:
    found = set(given(adata, options))
    return np.array([name in found for name in options.labels], np.int64)


def check_classes(session: Session, options: Options, mine: Any) -> None:
    """Published mode with listed labels: raise at every party if no site has a sample of one of them.

    Hardened mode opens no such bits: one may depend on a single sample, and noise does not cover it.
    """
    if not options.labels or session.mode == "hardened":
        return
    sites, hub = session.sites, session.coordinator
    seed, tests = common_seed.Params(sites, hub), count_tests.Params(sites, hub, len(options.labels), 1, len(sites))
    if mine is None:
        there = session.run(count_tests.coordinator, tests, session.run(common_seed.coordinator, seed))
    else:
        common = session.run(common_seed.site, seed)
        there = session.run(count_tests.site, tests, mine, common.secret, common.present)
    lacking = [name for name, found in zip(options.labels, there.bits, strict=True) if not found]
    if lacking:
        raise ParameterError(f"no site has a sample labelled '{lacking[0]}'; take it off the list of labels")


def codes_of(names: Sequence[str | None], labels: Sequence[str]) -> Any:
    """The position of every sample's label; -1 where there is none."""
    at = {name: i for i, name in enumerate(labels)}
    return np.array([-1 if name is None else at[name] for name in names], np.int64)


def donors_of(adata: AnnData, options: Options) -> Any:
    """A code for every sample's donor, or `None`."""
    if options.donor_key is None:
        return None
    return np.unique(adata.obs[options.donor_key].astype(str).to_numpy(), return_inverse=True)[1]


def check_samples(adata: AnnData, options: Options, least: Thresholds) -> None:
    """Hardened mode: raise `DataError` if too few samples would train here; before the model is queried about any."""
    names = given(adata, options)
    codes, donor = codes_of(names, sorted({name for name in names if name is not None})), donors_of(adata, options)
    trains = codes >= 0
    trains[hold_out(codes, options.validation, np.random.default_rng(0))] = False
    Rows(int(trains.sum()), None if donor is None else donor[trains], least).check("labelled training samples")


def thresholds_of(session: Session, options: Options) -> Thresholds:
    return session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors)


def train(
    adata: AnnData, session: Session, options: Options, told: model_card.Announcement, by_round: Sequence[Any]
) -> tuple[Trained, Adapted]:
    """Train on taps (n, taps, r): the same in all rounds, or some for each of them (published mode only)."""
    import torch

    from cloister.models.adapter import Adapted
    from cloister.models.learner import Table

    taps, names = by_round[0], given(adata, options)
    missing = np.any([left_out(some) for some in by_round], axis=0)
    tables = tuple(Table(torch.as_tensor(np.nan_to_num(some), dtype=torch.float32)) for some in by_round)
    hardened = session.mode == "hardened"

    def build(labels: tuple[str, ...]) -> AdapterLearner:
        codes = codes_of(names, labels)
        codes[missing] = -1
        held = hold_out(codes, options.validation, session.rng("validation"))
        each = tables if len(tables) > 1 else ()
        return learner_of(
            options, taps.shape[1:], labels, tables[0], codes, held, session.me, session.study.seed, by_round=each,
            watch=not hardened, donor=donors_of(adata, options),
        )  # fmt: skip

    brought = tuple(sorted({name for name in names if name is not None}))
    shape = f"taps of {told.digest}"
    if hardened:
        offer = Offer(shape, brought, build, thresholds_of(session, options))
        trained: Trained = session.run(checked_training.site, checked_params(session, options, told), offer)
    else:
        trained = session.run(
            federated_training.site, training_params(session, options, told), Offer(shape, brought, build)
        )
    learner = cast("AdapterLearner", trained.learner)
    learner.place(trained.theta)
    return trained, Adapted(cast("Adapter", learner.model.eval()), trained.labels, told.digest)


def serve_training(session: Session, options: Options, told: model_card.Announcement) -> Trained:
    """The coordinator's part."""
    trained: Trained
    if session.mode == "hardened":
        trained = session.run(checked_training.coordinator, checked_params(session, options, told))
    else:
        trained = session.run(federated_training.coordinator, training_params(session, options, told), None)
    return trained


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


def agreed(options: Options, told: model_card.Announcement) -> str:
    """Options of training and the model's digest, as text: the same at all parties."""
    apart = ("model", "ledger", "device", "key_added", "stage", "taps", "budget")
    local = {k: v for k, v in vars(options).items() if k not in apart}
    return json.dumps([local, told.digest], sort_keys=True)


def checked_params(session: Session, options: Options, told: model_card.Announcement) -> checked_training.Params:
    """Of hardened mode; `options` as `adapt_model.in_mode` gives them."""
    noise = options.dp_noise or 0.0
    return checked_training.Params(
        session.sites,
        session.coordinator,
        agreed(options, told),
        rounds=options.rounds,
        steps=options.local_epochs,
        rate=options.lr,
        schedule=options.schedule,
        decay_at=options.decay_at,
        factor=options.decay,
        labels=options.labels,
        score_every=score_every(options),
        metric=options.metric,
        patience=options.patience,
        noise=noise,
        clip=options.dp_clip,
        epsilon=epsilon_of(options),
        delta=options.dp_delta if noise else 0.0,
        unit="cell" if options.donor_key is None else "donor",
        min_cells=options.min_cells,
        min_donors=options.min_donors,
    )


def score_every(options: Options) -> int:
    return 1 if options.validation else 0


def noisy_sums(options: Options) -> int:
    """How many sums with noise a run opens."""
    return checked_training.openings(options.rounds, options.local_epochs, score_every(options))


def epsilon_of(options: Options) -> float:
    return privacy_budget(options.dp_noise or 0.0, options.dp_delta, noisy_sums(options))


def release_of(options: Options) -> tuple[str, float, int] | None:
    if not privacy_of(options):
        return None
    return ("cell" if options.donor_key is None else "donor", options.dp_noise or 0.0, noisy_sums(options))


def privacy_of(options: Options) -> dict[str, Any]:
    """What a run spends; of options as `adapt_model.in_mode` gives them."""
    if not options.dp_noise or options.stage == "ask":
        return {}
    who = "one sample, against that sample contributing nothing"
    if options.donor_key is not None:
        who = "all samples of one donor, against none"
    return {"epsilon": epsilon_of(options), "delta": options.dp_delta, "protects": who}


def training_params(session: Session, options: Options, told: model_card.Announcement) -> Params:
    """Of published mode."""
    return Params(
        session.sites,
        session.coordinator,
        agreed(options, told),
        options.rounds,
        options.clients_per_round,
        rate=options.lr,
        schedule="cosine" if options.schedule == "cosine" else "constant",  # the learner steps down itself
        labels=options.labels,
        metric=options.metric,
        patience=options.patience,
        seed=session.study.seed,
    )


# ---- the published loss ----------------------------------------------------------------------------------------------


def loss_params(session: Session, told: model_card.Announcement, labels: int) -> encrypted_loss.Params:
    return encrypted_loss.Params(session.sites, session.coordinator, told.crypto, labels)


def losses_of(session: Session, told: model_card.Announcement, trained: Trained) -> list[float]:
    """Published mode: the mean loss of every batch of training by the provider's hand, in the order of training."""
    seen = cast("AdapterLearner", trained.learner).batches_seen
    params = loss_params(session, told, len(trained.labels))
    sizes = np.array([len(codes) for _, codes in seen], np.int64)
    p, codes = (np.concatenate([one[i] for one in seen]) for i in (0, 1))
    return [float(x) for x in session.run(encrypted_loss.owner, params, p, codes, sizes)]
