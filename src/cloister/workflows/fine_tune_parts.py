"""What `fine-tune` keeps between rounds, and its curves."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister.errors import DataError
from cloister.protocols.training_parts import State
from cloister.seat import Outcome


@dataclass(frozen=True)
class FileStore:
    """The coordinator's state in one `.npz`, replaced as a whole after every round."""

    path: Path

    def save(self, state: State) -> None:
        meta = {
            "digest": state.digest.hex(),
            "t": state.t,
            "best_at": state.best_at,
            "best_score": state.best_score if math.isfinite(state.best_score) else None,
            "history": state.history,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        with open(beside, "wb") as f:
            np.savez(f, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), theta=state.theta, best=state.best)
        os.replace(beside, self.path)

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
            raise DataError(f"{self.path} is no checkpoint of fine-tune ({type(e).__name__}); remove it") from None


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """Curves of loss, accuracy and bytes over the rounds."""
    from matplotlib.figure import Figure

    found = next((o.result for o in outcomes.values() if o.result.get("history")), None)
    if found is None:
        return []
    rows = found["history"]
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for key, axes in (("loss", left), ("train_loss", left), ("accuracy", middle), ("macro_f1", middle)):
        points = [(row["round"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=key.replace("_", " "))
    rounds = [row["round"] + 1 for row in rows if "clients" in row]
    per_round = sum(found["bytes_per_round"].values()) / 1e6
    right.plot(rounds, [r * per_round for r in rounds], marker=".", label="MB per site, both ways")
    for axes in (left, middle, right):
        axes.set_xlabel("round")
        if axes.lines:
            axes.legend(frameon=False)
    return [figure]
