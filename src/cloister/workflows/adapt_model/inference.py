"""Asking a provider's model about samples (`adapt-model`, `serve-model`): what goes in, comes back and is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.cells import tables as cells
from cloister.cells.demo import demo_encoder
from cloister.errors import DataError, ParameterError
from cloister.models.polynomial import Encoder, takes
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.papers import permuted_inference
from cloister.provider.gpu import devices
from cloister.session import Session
from cloister.study import Party
from cloister.workflows.adapt_model import encrypted_inference, leakage_bound, model_card
from cloister.workflows.adapt_model.checkpoint import Taps

if TYPE_CHECKING:
    from anndata import AnnData


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
    from cloister.models.student import cell_inputs, image_inputs

    if card["kind"] == "images":
        return image_inputs(cells.embedding(adata, None), card)
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
    return cell_inputs(x / float(card["unit"]), int(card.get("per_token", 1)))


def ask(session: Session, options: Any, told: model_card.Announcement, inputs: Any, kept: Taps | None = None) -> Any:
    """The taps of these samples, (n, taps, r); what `kept` has is not asked again."""
    params = inference_params(session, options, told)
    if session.mode != "published":
        return session.run(encrypted_inference.owner, params, inputs, kept)
    kept = kept or Taps()
    with kept.held(told.crypto):
        taps = session.run(permuted_inference.owner, params, inputs)[:, :, 0]  # class tokens of all blocks
        kept.read = []  # all are asked about at once
        kept.add(taps, None)
    return taps


def answer(
    session: Session, options: Any, told: model_card.Announcement, encoder: Any, folder: Path | None = None
) -> Any:
    ledger, params = ledger_of(options, session.study.keys), inference_params(session, options, told)
    if session.mode == "published":  # on a CPU always, and from the beginning
        return session.run(permuted_inference.provider, params, encoder, ledger)
    return session.run(encrypted_inference.provider, params, encoder, ledger, options.device, folder)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def taps_path(session: Session, options: Any) -> Path | None:
    """The site's own file of taps."""
    return None if options.taps is None else Path(options.taps) / f"{session.me}.taps.npz"


def answers_path(session: Session, options: Any) -> Path | None:
    """The provider's folder for what a broken asking needs to go on."""
    return None if options.taps is None else Path(options.taps) / f"{session.me}.answers"


def kept_taps(session: Session, options: Any, told: model_card.Announcement, inputs: Any) -> Taps | None:
    """What this site has kept of these samples under this model and mode; raises if its file is of others."""
    path = taps_path(session, options)
    if path is None:
        return None
    kept = Taps.open(path, fingerprint(inputs, told, session.mode), told.crypto)
    if session.mode == "published" and options.stage != "train" and kept.count:
        raise DataError(f"{path} holds the taps of these samples already; train on them: stage = 'train'")
    if options.stage == "train" and kept.count < (asked := int(to_ask(session, told, inputs).sum())):
        raise DataError(
            f"{path} holds the taps of {kept.count} of {asked} samples; ask for the rest first: stage = 'ask'"
        )
    return kept


def stored_taps(session: Session, options: Any, told: model_card.Announcement, inputs: Any) -> Taps | None:
    """The same for `serve-model`: a file for each set of samples, under this model and mode.

    Without it a provider could have every run with the same samples fail a check, and learn one bit from each. In mode
    published nothing is checked.
    """
    if session.mode == "published":
        return None
    about = fingerprint(inputs, told, session.mode)
    folder = Path(options.adapter).resolve().parent / "taps" if options.taps is None else Path(options.taps)
    try:
        files.private_folder(folder)
    except OSError as e:
        raise DataError(f"{folder} cannot be written ({e.strerror}); name a folder for taps with taps=") from None
    return Taps.open(folder / f"{session.me}.{about[:16]}.taps.npz", about, told.crypto)


def to_ask(session: Session, told: model_card.Announcement, inputs: Any) -> Any:
    """Which samples the model is asked about: hardened, none that is beyond what it takes in."""
    return np.ones(len(inputs), bool) if session.mode == "published" else takes(told.shape, inputs)


def all_taps(session: Session, told: model_card.Announcement, inputs: Any, kept: Taps) -> Any:
    """What is kept, in the samples' places; NaN for those that were not asked about."""
    found = np.concatenate(kept.read)
    taps = np.full((len(inputs), *found.shape[1:]), np.nan)
    taps[to_ask(session, told, inputs)] = found
    return taps


def check_kept(session: Session, options: Any) -> None:
    """Before anything is sent: raise if the taps to train on are not there."""
    path = taps_path(session, options)
    if options.stage == "train" and path is not None and not path.exists():
        raise DataError(f"there is no file of taps {path}; ask first: stage = 'ask'")


def fingerprint(inputs: Any, told: model_card.Announcement, mode: str) -> str:
    """Of the samples as the model takes them in, of the model's card and of the mode."""
    h = hashlib.sha256(f"{told.digest} {mode} {inputs.shape}".encode())
    h.update(np.ascontiguousarray(inputs, "<f8").tobytes())
    return h.hexdigest()


def ledger_of(options: Any, keys: Mapping[Party, bytes]) -> encrypted_inference.Ledger:
    """Counts over all runs and studies, in a file beside the model; the demo's model, which everybody has, needs none.

    `keys` are the study's identity keys: a site is counted by its key as well as by its name.
    """
    if options.ledger is None and Path(options.model).resolve() == demo_encoder().resolve():
        return encrypted_inference.Ledger(keys=keys)
    own = Path(f"{Path(options.model).resolve()}.ledger.json")  # one, by whatever name the model goes
    return encrypted_inference.Ledger(own if options.ledger is None else Path(options.ledger).resolve(), keys=keys)


def exposed(session: Session, options: Any, told: model_card.Announcement) -> dict[str, str]:
    """For the provider's results: how much of its model the budget leaves to one malicious site."""
    if session.mode == "published":  # every site has the model anyway
        return {}
    return {"exposure": str(leakage_bound.exposure(told.shape, told.crypto, options.budget))}


def inference_params(session: Session, options: Any, told: model_card.Announcement) -> Any:
    module = permuted_inference if session.mode == "published" else encrypted_inference
    return module.Params(session.sites, session.coordinator, told.shape, told.crypto, options.budget)


def beyond(adata: AnnData, taps: Any) -> dict[str, Any]:
    """Samples on which the model left its intervals, by name: for the site alone."""
    names = [str(name) for name in adata.obs_names[left_out(taps)]]
    return {"left_out": names} if names else {}


def left_out(taps: Any) -> Any:
    """Which samples have no features."""
    return np.isnan(taps).any(axis=(1, 2))
