"""What `fine-tune` keeps between rounds, how its options go together, and its curves."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister import files
from cloister.errors import DataError
from cloister.report.figures import confusion, curves
from cloister.session import Outcome
from cloister.workflows.fine_tune.training_parts import State


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
