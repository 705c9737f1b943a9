"""Differencing across runs: a site does not answer twice with cells that differ in only a few.

Two results over almost the same cells disclose the few cells in which they differ, by subtraction. So a site stores
fingerprints of the rows it has answered with, and rejects a run whose rows differ from an earlier run's by fewer than
`min_cells` rows, or by rows of fewer than `min_donors` donors. Exactly the same cells may be used again.

Sums over several earlier runs can be combined too. Rows that were in the same runs form an atom, and every answer is
known by atoms: it is a vector of zeros and ones. The sum over one atom can be computed if its unit vector is a linear
combination of these. A run is also rejected if it makes that possible for an atom below the thresholds.

Every row has two fingerprints: of its name and of its values. Renaming cells does not hide that they are the same, and
neither does another normalisation. Fingerprints are 64 bits of a keyed hash; the key is drawn at this site and stays
in its folder, beside the file of the budget, so kits that share a budget share this too:

    answered.key    (0600) 32 random bytes
    answered.npz    (0600) for each set of cells: fingerprints of names, values and donors, the matrix and the study
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.arrays import F64, U64, Bits
from cloister.cells.fingerprint import RowPrints
from cloister.crypto.entropy import Entropy
from cloister.disclosure import Thresholds
from cloister.errors import ParameterError
from cloister.runtime.sign_off.approval import Refusal, stamp_now

if TYPE_CHECKING:
    from anndata import AnnData

KEY, FILE = "answered.key", "answered.npz"
ALLOW = "cloister site KIT --approve --allow-small-change"


@dataclass(frozen=True)
class Answered:
    """One earlier set of cells."""

    matrix: str  # fingerprint of the whole matrix
    study: str
    when: str
    rows: RowPrints


@dataclass(frozen=True)
class AnsweredCells:
    """The sets of cells that this site has answered with, on disk."""

    folder: Path

    def check(self, adata: AnnData, matrix: str, donor_key: str | None, least: Thresholds) -> None:
        """Raise `Refusal` if a run on these cells would disclose a few of them, together with earlier runs."""
        if earlier := self._load():
            check_new(earlier, self._rows(adata, matrix, donor_key), least)

    def record(self, adata: AnnData, matrix: str, donor_key: str | None, study: str) -> None:
        """Store that a run on these cells is about to be answered."""
        with self._locked():
            earlier = self._load()
            if any(a.matrix == matrix for a in earlier):
                return
            rows = self._rows(adata, matrix, donor_key)
            self._save([*earlier, Answered(matrix, study, stamp_now(), rows)])

    def _rows(self, adata: AnnData, matrix: str, donor_key: str | None) -> RowPrints:
        known = next((a.rows for a in self._load() if a.matrix == matrix), None)
        if known is not None and (known.donor is not None or donor_key is None):
            return known
        return RowPrints.of(adata, self._key(), donor_key)

    def _key(self) -> bytes:
        path = self.folder / KEY
        if not path.exists():
            files.write(path, Entropy().bytes(32))
        key = path.read_bytes()
        if len(key) != 32:
            raise ParameterError(f"{path} is damaged; restore it, since stored fingerprints depend on it")
        return key

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with files.locked(self.folder / FILE, wait=60.0):
            yield

    def _load(self) -> list[Answered]:
        path = self.folder / FILE
        try:
            with np.load(path, allow_pickle=False) as stored:
                index = json.loads(stored["index"].tobytes())
                return [
                    Answered(row["matrix"], row["study"], row["when"], RowPrints(
                        stored[f"name{i}"], stored[f"value{i}"], stored[f"donor{i}"] if row["donors"] else None
                    ))
                    for i, row in enumerate(index)
                ]  # fmt: skip
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError):
            raise ParameterError(
                f"{path} is damaged, so the cells of earlier runs are unknown; restore it from a backup"
            ) from None

    def _save(self, sets: list[Answered]) -> None:
        index = [
            {"matrix": a.matrix, "study": a.study, "when": a.when, "donors": a.rows.donor is not None} for a in sets
        ]
        columns: dict[str, Any] = {"index": np.frombuffer(json.dumps(index).encode(), np.uint8)}
        for i, a in enumerate(sets):
            columns |= {f"name{i}": a.rows.name, f"value{i}": a.rows.value}
            if a.rows.donor is not None:
                columns[f"donor{i}"] = a.rows.donor
        content = io.BytesIO()
        np.savez(content, **columns)
        path = self.folder / FILE
        try:
            files.write(path, content.getvalue())
        except OSError as e:
            raise ParameterError(f"{path} cannot be written ({e.strerror}), so no run can start") from None


def check_new(earlier: list[Answered], new: RowPrints, least: Thresholds) -> None:
    """Raise `Refusal` if answers over the earlier sets and the new one disclose rows below the thresholds."""
    for kind in ("name", "value"):
        for one in earlier:
            _check_pair(one, new, kind, least)
        _check_atoms(earlier, new, kind, least)


def _check_pair(one: Answered, new: RowPrints, kind: str, least: Thresholds) -> None:
    then, now = getattr(one.rows, kind), getattr(new, kind)
    gone, added = ~np.isin(then, now), ~np.isin(now, then)
    rows = int(gone.sum() + added.sum())
    if not rows:
        return
    donors = _donors(one.rows.donor, gone) | _donors(new.donor, added)
    named = one.rows.donor is not None and new.donor is not None
    if rows >= least.min_cells and (not named or len(donors) >= least.min_donors):
        return
    of = f" of {len(donors)} donor(s)" if named else ""
    raise Refusal(
        f"these cells differ from those of study '{one.study}' ({one.when[:10]}) by {rows} cell(s){of}, fewer than "
        f"{least.min_cells} cells or {least.min_donors} donors: both results together disclose them; to allow it: "
        f"{ALLOW}"
    )


def _check_atoms(earlier: list[Answered], new: RowPrints, kind: str, least: Thresholds) -> None:
    """Reject the run if it makes the sum over an atom below the thresholds a combination of answers."""
    sets = [getattr(one.rows, kind) for one in earlier]
    if len(sets) < 2:
        return
    everyone = np.unique(np.concatenate([*sets, getattr(new, kind)]))
    member = np.stack([np.isin(everyone, rows) for rows in (*sets, getattr(new, kind))], axis=1)
    atoms, at = np.unique(member, axis=0, return_inverse=True)
    donor = _donor_of(everyone, [one.rows for one in earlier] + [new], kind)
    for k in range(len(atoms)):
        inside = at.ravel() == k
        few = inside.sum() < least.min_cells
        if donor is not None:
            few = few or len(np.unique(donor[inside])) < least.min_donors
        unit = np.eye(len(atoms))[k]
        if few and _spans(atoms.T.astype(float), unit) and not _spans(atoms[:, :-1].T.astype(float), unit):
            raise Refusal(
                f"{int(inside.sum())} cell(s) could be computed from this run and {len(earlier)} earlier ones "
                f"together; to allow it: {ALLOW}"
            )


def _spans(rows: F64, unit: F64) -> bool:
    solution = np.linalg.lstsq(rows.T, unit, rcond=None)[0]
    return bool(np.abs(rows.T @ solution - unit).max() < 1e-6)


def _donors(donor: U64 | None, rows: Bits) -> set[int]:
    return set() if donor is None else {int(d) for d in donor[rows]}


def _donor_of(everyone: U64, sets: list[RowPrints], kind: str) -> U64 | None:
    """The donor of each row, or None unless all sets name them."""
    donor = np.zeros(len(everyone), np.uint64)
    for rows in sets:
        if rows.donor is None:
            return None
        donor[np.searchsorted(everyone, getattr(rows, kind))] = rows.donor
    return donor
