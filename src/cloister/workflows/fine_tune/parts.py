"""What `fine-tune` keeps between rounds, how its options go together, and its curves."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.errors import DataError, ParameterError
from cloister.models import graph
from cloister.report.figures import confusion, curves
from cloister.session import Outcome
from cloister.workflows.fine_tune.training_parts import State

if TYPE_CHECKING:
    from cloister.workflows.fine_tune.workflow import Options

IMAGES = ("cnn", "resnet", "vit")


def check_options(options: Options) -> None:
    """Raise where options of `fine-tune` are wrong, or do not go together."""
    if not 0 <= options.validation < 1:
        raise ParameterError(f"option 'validation' must be in [0, 1), found {options.validation}")
    if options.labels and (len(set(options.labels)) != len(options.labels) or len(options.labels) < 2):
        raise ParameterError("option 'labels' needs at least two names, each once")
    _check_model(options)
    if options.schedule_rounds and (options.schedule != "cosine" or options.schedule_rounds < options.rounds):
        raise ParameterError("option 'schedule_rounds' needs schedule='cosine', and no fewer rounds than are trained")
    if options.dp_noise is not None and options.dp_noise < 0:
        raise ParameterError(f"option 'dp_noise' must be at least 0, found {options.dp_noise:g}")
    if options.local_epochs < 0 or options.lr < 0:
        raise ParameterError("options 'local_epochs' and 'lr' must be above 0, or 0 for the default of the mode")
    if not 0 < options.dp_delta < 1:
        raise ParameterError(f"option 'dp_delta' must lie between 0 and 1, found {options.dp_delta}")
    if options.algorithm == "scaffold":
        if options.optimizer != "sgd" or options.momentum or options.weighting != "plain":
            raise ParameterError("scaffold corrects plain steps: set optimizer='sgd', momentum=0, weighting='plain'")
        if options.checkpoint is not None or options.dp_noise or options.semi_supervised:
            raise ParameterError(
                "scaffold keeps state at the sites and sends two vectors: it goes with neither checkpoint=, "
                "dp_noise nor semi_supervised; use fedavg or fedprox"
            )
    asked = ("balance", "scale_confidence", "class_weights")
    if not options.semi_supervised and (idle := [name for name in asked if getattr(options, name)]):
        raise ParameterError(f"option '{idle[0]}' is about pseudo-labels; set semi_supervised=True, or leave it out")
    if options.semi_supervised and options.pseudo_labels != "network":
        graph.check_sizes(1 << 40, options.bits, options.n_neighbors, options.alpha, options.similarity_power)


def check_in_mode(options: Options, mode: str) -> None:
    """Raise where options do not fit the mode; `options` have the defaults of the mode filled in."""
    if mode == "hardened":
        _check_hardened(options)
        return
    if options.dp_noise and (options.score_every or options.patience or options.weighting != "plain"):
        raise ParameterError(
            "with dp_noise in published mode, set score_every=0, patience=0 and weighting='plain': counts of cells "
            "carry no noise there"
        )
    if options.donor_key is not None or options.dp_unit != "site":
        raise ParameterError("published mode protects whole sites; 'donor_key' and 'dp_unit' are for mode hardened")
    if options.semi_supervised and options.dp_noise and options.pseudo_labels == "xclp":
        raise ParameterError("dp_noise covers updates only; with xclp, labels of other sites would go around it")


def _check_hardened(options: Options) -> None:
    only = {
        "algorithm": (
            options.algorithm == "fedavg",
            "every step is common to all sites",
        ),
        "optimizer": (options.optimizer == "adam", "every party computes the steps of Adam itself"),
        "weighting": (options.weighting == "cells", "every cell, or every donor with donor_key, counts alike"),
        "clients_per_round": (not options.clients_per_round, "all sites train in every step"),
        "checkpoint": (options.checkpoint is None, "no state is evaluated again, so a run cannot be resumed"),
        "dp_unit": (options.dp_unit in ("cell", "donor"), "noise protects cells, or donors with donor_key"),
    }
    for name, (fits, why) in only.items():
        if not fits:
            found = getattr(options, name)
            raise ParameterError(f"option '{name}' = {found!r} is for mode published; in mode hardened {why}")
    if (options.dp_unit == "donor") != (options.donor_key is not None):
        raise ParameterError("noise protects donors if donor_key names them, and cells otherwise; leave dp_unit out")
    if options.model in ("cnn", "resnet") and options.tune != "head":
        raise ParameterError(
            f"model '{options.model}' has batch normalisation, which mixes cells, so that gradients of single cells "
            "cannot be clipped; in mode hardened use mlp, vit or scgpt, or tune='head' with init="
        )
    if options.dp_noise and (options.patience or options.metric != "accuracy"):
        raise ParameterError("with dp_noise the last round is taken; leave out 'patience' and 'metric'")
    depends = options.pseudo_labels != "network" or options.scale_confidence or options.class_weights
    if options.semi_supervised and options.dp_noise and depends:
        raise ParameterError(
            "dp_noise does not cover pseudo-labels that depend on other cells; set pseudo_labels='network' without "
            "scale_confidence and class_weights, or dp_noise=0, to which every site must consent"
        )


def _check_model(options: Options) -> None:
    shape = options.image_shape
    if options.model in IMAGES and (len(shape) != 3 or min(shape) < 1):
        raise ParameterError(f"model '{options.model}' needs image_shape= as height, width, channels")
    if options.model == "cnn" and min(shape[:2]) < 16:
        raise ParameterError("the 13-layer CNN needs images of at least 16 x 16")
    if options.model in ("resnet", "vit") and shape[0] != shape[1]:
        raise ParameterError(f"model '{options.model}' needs square images")
    if not 0 <= options.rotation <= 180 or (options.rotation and options.model not in IMAGES):
        raise ParameterError(f"option 'rotation' is for images, from 0 to 180 degrees, found {options.rotation:g}")
    if options.model == "scgpt":
        if options.pretrained is None or options.init is not None:
            raise ParameterError("model 'scgpt' needs pretrained= with the folder of a checkpoint, and takes no init=")
        if options.unit_embedding:
            raise ParameterError("option 'unit_embedding' is for the other models than scgpt")
    elif options.tune not in ("all", "head") or (options.tune == "head" and options.init is None):
        raise ParameterError(
            f"model '{options.model}' trains all, or with init= the head alone, found tune='{options.tune}'"
        )


@dataclass(frozen=True)
class FileStore:
    """The coordinator's state in one `.npz`, for its owner's eyes only, replaced as a whole after every round."""

    path: Path

    def save(self, state: State) -> None:
        meta = {
            "digest": state.digest.hex(),
            "t": state.t,
            "best_at": state.best_at,
            "best_score": state.best_score if math.isfinite(state.best_score) else None,
            "history": state.history,
        }
        content = io.BytesIO()
        packed = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        np.savez(content, meta=packed, theta=state.theta, best=state.best)
        files.write(self.path, content.getvalue())

    def load(self) -> State | None:
        if not self.path.exists():
            return None
        try:
            with np.load(io.BytesIO(self.path.read_bytes()), allow_pickle=False) as kept:
                meta, theta, best = json.loads(kept["meta"].tobytes()), kept["theta"], kept["best"]
            score = -math.inf if meta["best_score"] is None else float(meta["best_score"])
            return State(
                bytes.fromhex(meta["digest"]), int(meta["t"]), theta, best, int(meta["best_at"]), score, meta["history"]
            )
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{self.path} is not a checkpoint of fine-tune ({type(e).__name__}); remove it") from None


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """Loss and accuracy over the rounds; at every site that is here, its own labels against the model's."""
    rows: list[dict[str, Any]] = next((o.result["history"] for o in outcomes.values() if o.result.get("history")), [])
    made = []
    for title, ylabel, keys in (
        ("Loss over the rounds", "loss", {"loss": "held-out cells", "train_loss": "training cells"}),
        (
            "Held-out cells over the rounds",
            "score",
            {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro-F1"},
        ),
    ):
        lines = {name: [row[key] for row in rows if key in row] for key, name in keys.items()}
        lines = {name: ys for name, ys in lines.items() if ys}
        if lines:
            made.append(curves(lines, title=title, xlabel="round", ylabel=ylabel, start=0))
    return made + confusions(outcomes, options)


def confusions(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """At every site that is here, its own labels against the model's."""
    tables = []
    for site, outcome in outcomes.items():
        obs = None if outcome.adata is None else outcome.adata.obs
        if obs is None or not {options.label_key, options.key_added} <= set(obs.columns):
            continue
        own = obs[options.label_key]
        known = own.notna().to_numpy()
        if known.any():
            title = f"Labels of {site}, given and predicted (training cells included)"
            predicted = obs[options.key_added].astype(str)[known].tolist()
            given = own.astype(str)[known].tolist()
            tables.append(confusion(given, predicted, title=title, rows="given label", columns="predicted label"))
    return tables
