"""Budget: how much may be asked of the same cells in all, under whatever study.

    [budget]                            # local/site.toml
    file = "budget.json"                # in `local`; or a full path, which the kits of several studies can share
    runs = 100                          # runs begun
    queries = 300                       # workflows computed: a run of a study of three steps asks three times
    epsilon = 10.0                      # ε of all runs with noise together (accounting.py); without it, no limit
    delta = 1e-5                        # δ at which it is stated
    query_cells = 20000                 # cells that one querier may have labelled by these, over all studies

The file stores what was spent by the fingerprint of the matrix. A run is charged before its first message and stays
charged, however it ends. Cells that change are other cells, and begin anew. Query cells are charged to the querier's
identity key, so that another name in another study does not help, before the first message that depends on references.
A querier that comes with a new key begins anew: agree on keys that stay (`[keys]` of the study), and share the file.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister import files
from cloister.deploy.approval import accounting
from cloister.deploy.approval.accounting import Release, Total
from cloister.deploy.approval.approval import Refusal, stamp_now
from cloister.errors import ParameterError
from cloister.study import Study
from cloister.workflows import pipeline

FILE = "budget.json"  # in `local`
QUERIERS = "queriers"  # in it: identity key → cells labelled for it, beside what was spent on each matrix
USUAL = {"runs": 100, "queries": 300, "query_cells": 20_000, "delta": accounting.DELTA}
NAMES = {"runs": "runs", "queries": "queries", "epsilon": "epsilon"}
KEYS = {*NAMES, "query_cells", "delta"}


def read_budget(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The table of site.toml, with what is usual where it says nothing; the error names the key."""
    if unknown := raw.keys() - {"file", *KEYS}:
        known = ", ".join(sorted(KEYS))
        raise ParameterError(f"site.toml [budget]: unknown key '{min(unknown)}'; known are file, {known}")
    for key in raw.keys() & KEYS:
        kinds = (int, float) if key in ("epsilon", "delta") else (int,)
        if isinstance(raw[key], bool) or not isinstance(raw[key], kinds) or not 0 <= raw[key] < math.inf:
            raise ParameterError(f"site.toml [budget]: '{key}' must be a number, 0 or more, found {raw[key]!r}")
    if not 0 < raw.get("delta", accounting.DELTA) < 1:
        raise ParameterError(f"site.toml [budget]: 'delta' must be above 0 and below 1, found {raw['delta']!r}")
    if not isinstance(raw.get("file", ""), str):
        raise ParameterError("site.toml [budget]: 'file' must be a path in quotes")
    return {"file": FILE, **USUAL, **raw}


def cost_of(study: Study) -> dict[str, float]:
    """What one run of the study spends; worked out when it is approved, and kept with the approval."""
    parts = pipeline.check_steps(study)
    epsilon = sum(float(workflow.privacy(options).get("epsilon", 0.0)) for _, workflow, options in parts)
    return {"runs": 1, "queries": len(parts), "epsilon": epsilon}


@dataclass(frozen=True)
class Budget:
    """What may be spent on one site's cells, and the file that keeps what was."""

    path: Path
    allowed: Mapping[str, Any]
    me: str

    def spent(self, matrix: str) -> dict[str, float]:
        """What was spent so far; ε is that of all runs together."""
        entry = self._load().get(matrix, {})
        return {key: entry.get(key, 0) for key in NAMES} | {"epsilon": self.privacy(matrix).epsilon}

    def privacy(self, matrix: str, study: Study | None = None) -> Total:
        """ε of all runs on these cells together, with one run more of `study` if it is given."""
        entry = self._load().get(matrix, {})
        rows = [row for row in entry.get("history", []) if row.get("epsilon")]
        known = [row for row in rows if "releases" in row]
        releases = [Release(*release) for row in known for release in row["releases"]]
        earlier = float(entry.get("epsilon", 0.0)) - sum(float(row["epsilon"]) for row in known)
        runs = len(rows)
        if study is not None and (more := accounting.releases_of(study)):
            releases, runs = releases + more, runs + 1
        delta = float(self.allowed.get("delta", accounting.DELTA))
        return accounting.compose(releases, delta, max(0.0, round(earlier, 9)), runs)

    def check(self, matrix: str, cost: Mapping[str, float], study: Study) -> None:
        """Raise `Refusal` if a run that costs this would spend more than is left."""
        spent = self.spent(matrix)
        after = {key: spent[key] + cost[key] for key in NAMES}
        if cost["epsilon"]:
            after["epsilon"] = self.privacy(matrix, study).epsilon
        for key, name in NAMES.items():
            most = self.allowed.get(key)
            if most is not None and cost[key] and after[key] > most * (1 + 1e-12):
                raise Refusal(
                    f"'{self.me}' allows {most:g} {name} on these cells over all studies, {spent[key]:g} are spent and"
                    f" with this run it would be {after[key]:g}; to allow more, raise {key} under [budget] in"
                    " local/site.toml"
                )

    def charge(self, matrix: str, study: Study, cost: Mapping[str, float]) -> None:
        """Spend what one run of the study takes, or raise `Refusal`."""
        with self._locked():
            self.check(matrix, cost, study)
            whole = self._load()
            entry = whole.setdefault(matrix, {**dict.fromkeys(NAMES, 0), "history": []})
            for key in NAMES:
                entry[key] = entry.get(key, 0) + cost[key]
            row = {"when": stamp_now(), "study": study.name, "digest": study.digest.hex(), **cost}
            if releases := accounting.releases_of(study):
                row["releases"] = [[r.unit, r.noise, r.sums] for r in releases]
            entry["history"] = [*entry.get("history", []), row]
            files.write(self.path, json.dumps(whole, indent=1))

    def queried(self, querier: bytes, name: str = "") -> int:
        """Cells labelled so far for this identity key, or for this party's name, whichever is more."""
        counts = self._load().get(QUERIERS, {})
        return max(int(counts.get(key, 0)) for key in (querier.hex(), f"name {name}"))

    def charge_queries(self, querier: bytes, cells: int, name: str) -> None:
        """Spend query cells of one querier, or raise `Refusal`.

        They count for its identity key and for its name, because another study may use another of the two.
        """
        if cells < 0:
            raise Refusal(f"'{name}' requests {cells} cells; expected 0 or more")
        with self._locked():
            whole, most, spent = self._load(), self.allowed["query_cells"], self.queried(querier, name)
            if spent + cells > most:
                raise Refusal(
                    f"'{self.me}' labels {most} cells for one querier over all studies; '{name}' used {spent} and"
                    f" requests {cells} more; to allow this, raise query_cells under [budget] in local/site.toml"
                )
            counts = whole.setdefault(QUERIERS, {})
            for key in (querier.hex(), f"name {name}"):
                counts[key] = counts.get(key, 0) + cells
            files.write(self.path, json.dumps(whole, indent=1))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with files.locked(self.path, wait=60.0):
                yield
        except OSError as e:
            raise ParameterError(f"{self.path} cannot be written ({e.strerror}), so no run can be counted") from None

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            raw = json.loads(self.path.read_text(encoding="utf-8"))
            for matrix, entry in raw.items():
                if not all(x >= 0 for x in (entry.values() if matrix == QUERIERS else map(entry.get, NAMES))):
                    raise ValueError(entry)
            return {str(k): dict(v) for k, v in raw.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise ParameterError(
                f"{self.path} is damaged, so nobody knows what was spent on these cells; put it right"
            ) from None
