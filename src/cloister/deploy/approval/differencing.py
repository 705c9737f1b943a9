"""Differencing across runs: a site does not answer twice with cells that differ in only a few.

Two results over almost the same cells disclose the few cells in which they differ, by subtraction. So a site stores
fingerprints of the rows it has answered with, and rejects a run whose rows differ from an earlier run's by fewer than
`min_cells` rows, or by rows of fewer than `min_donors` donors. Exactly the same cells may be used again.

Sums over several earlier runs can be combined too. Every run is a vector of zeros and ones over all rows. The leverage
of a row in the space of these vectors is the largest part that it has in any combination of them; m rows whose sum can
be computed have leverage 1/m each. A run is rejected if it raises the leverage of a row above 1 / `min_cells`. Rows
that were in the same runs form an atom. A run is also rejected if it makes the sum over an atom of fewer than
`min_donors` donors a combination of runs.

Labels count too. If a group of cells with the same label has at least `min_cells` cells in both runs, it may not differ
by fewer, whether cells were added, removed or relabelled; nor may fewer cells have changed in any column of obs that
both studies read.

Groups are compared whatever their columns are called: the sums of a type in one study and of a cluster in another
disclose the cells in which the two differ. So every group of cells that a run may have summed apart counts, and so do
the cells of all small labels together. No two groups may differ by 1 to `min_cells` - 1 cells or by cells of too few
donors. No combination of groups may rest on fewer cells, such as the union of two clusters less one of another run.
Columns are admitted when a step is about to read them (`admit_step`), so labels of an earlier step of the same run are
compared as well. Another party can move the borders of clusters, and so choose groups; see docs/security/disclosure.md.

Every row has three fingerprints: of its name, of its values, and of the names of the genes that are not zero. The last
one is the same after another normalisation and in another order of genes; it is used where it tells most rows apart.
So renaming cells does not hide that they are the same, nor does scaling them, nor both. Fingerprints are 64 bits of a
keyed hash; the key is drawn at this site and stays in its folder, beside the file of the budget. Kits that share a
budget share this too; kits that do not are not compared:

    answered.key    (0600) 32 random bytes
    answered.npz    (0600) for each set of cells: fingerprints of names, values, genes, donors and columns; the study;
                    which of the columns may have been summed by group
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.arrays import F64, I64, U64, Bits
from cloister.cells.fingerprint import RowPrints
from cloister.deploy.approval.approval import Refusal, stamp_now
from cloister.disclosure import Thresholds
from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy

if TYPE_CHECKING:
    from anndata import AnnData

KEY, FILE = "answered.key", "answered.npz"
DISTINCT = 0.9  # fraction of rows with different patterns, from which patterns tell rows apart
ODD = np.uint64(0x9E3779B97F4A7C15)
ALLOW = "cloister site KIT --approve --allow-small-change"


@dataclass(frozen=True)
class Answered:
    """One earlier set of cells."""

    matrix: str  # fingerprint of the whole matrix
    study: str
    when: str
    rows: RowPrints
    groups: frozenset[str] = frozenset()  # columns whose groups of cells may have been summed apart


@dataclass(frozen=True)
class AnsweredCells:
    """The sets of cells that this site has answered with, on disk."""

    folder: Path

    def check(
        self,
        adata: AnnData,
        matrix: str,
        donor_key: str | None,
        least: Thresholds,
        columns: Iterable[str] = (),
        groups: Iterable[str] = (),
    ) -> None:
        """Raise `Refusal` if a run on these cells would disclose a few of them, together with earlier runs."""
        if earlier := self._load():
            check_new(earlier, self._rows(earlier, adata, matrix, donor_key, [*columns, *groups]), least, groups)

    def admit(
        self,
        adata: AnnData,
        matrix: str,
        donor_key: str | None,
        study: str,
        least: Thresholds | None = None,
        columns: Iterable[str] = (),
        groups: Iterable[str] = (),
    ) -> None:
        """Check and store, in one step, that a run on these cells is about to be answered; without `least`, store it.

        Two runs that begin at the same time are compared as well. `columns` are those of obs that the study reads,
        `groups` those by whose values it may sum cells.
        """
        with self._locked():
            earlier = self._load()
            rows = self._rows(earlier, adata, matrix, donor_key, [*columns, *groups])
            self._add(earlier, matrix, study, rows, least, groups)

    def admit_step(
        self,
        adata: AnnData,
        matrix: str,
        study: str,
        least: Thresholds | None,
        columns: Iterable[str],
        groups: Iterable[str],
    ) -> None:
        """The same for a later step of a run on admitted cells, with columns that an earlier step may have written.

        `matrix` are the cells that were admitted when the run began; a step may have dropped some of them.
        """
        with self._locked():
            earlier = self._load()
            known = next((a.rows for a in earlier if a.matrix == matrix), None)
            if known is None:
                raise ParameterError(f"{self.folder / FILE} lacks the cells of this run; restore it from a backup")
            prints = RowPrints.of_columns(adata, self._key(), [*columns, *groups])
            at = known.positions(adata.obs_names, self._key())
            if at is None:
                raise Refusal("an earlier step added or renamed cells, so they cannot be compared with earlier runs")
            if len(at) != len(known.name):
                matrix = f"{matrix} without {len(known.name) - len(at)} cell(s)"
            self._add(earlier, matrix, study, replace(known.only(at), columns=prints), least, groups)

    def _add(
        self,
        earlier: list[Answered],
        matrix: str,
        study: str,
        rows: RowPrints,
        least: Thresholds | None,
        groups: Iterable[str],
    ) -> None:
        by = frozenset(groups) & rows.columns.keys()
        if least is not None:
            check_new(earlier, rows, least, by)
        if not any(a.matrix == matrix and a.groups >= by and _covers(a.rows, rows) for a in earlier):
            self._save([*earlier, Answered(matrix, study, stamp_now(), rows, by)])

    def _rows(
        self, earlier: list[Answered], adata: AnnData, matrix: str, donor_key: str | None, columns: Iterable[str]
    ) -> RowPrints:
        known = next((a.rows for a in earlier if a.matrix == matrix), None)
        if known is not None and (known.donor is not None or donor_key is None):
            return replace(known, columns=RowPrints.of_columns(adata, self._key(), columns))
        return RowPrints.of(adata, self._key(), donor_key, columns)

    def _key(self) -> bytes:
        path = self.folder / KEY
        if not path.exists():
            if (self.folder / FILE).exists():
                raise ParameterError(
                    f"{path} is missing, and stored fingerprints depend on it; restore it from a backup"
                )
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
                        stored[f"name{i}"],
                        stored[f"value{i}"],
                        stored[f"donor{i}"] if row["donors"] else None,
                        stored[f"pattern{i}"] if row.get("patterns") else None,
                        {name: stored[f"column{i}.{k}"] for k, name in enumerate(row.get("columns", ()))},
                    ), frozenset(row.get("groups", row.get("columns", ()))))
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
            {"matrix": a.matrix, "study": a.study, "when": a.when}
            | {"donors": a.rows.donor is not None, "patterns": a.rows.pattern is not None}
            | {"columns": [*a.rows.columns], "groups": sorted(a.groups)}
            for a in sets
        ]
        columns: dict[str, Any] = {"index": np.frombuffer(json.dumps(index).encode(), np.uint8)}
        for i, a in enumerate(sets):
            columns |= {f"name{i}": a.rows.name, f"value{i}": a.rows.value}
            if a.rows.donor is not None:
                columns[f"donor{i}"] = a.rows.donor
            if a.rows.pattern is not None:
                columns[f"pattern{i}"] = a.rows.pattern
            columns |= {f"column{i}.{k}": prints for k, prints in enumerate(a.rows.columns.values())}
        content = io.BytesIO()
        np.savez(content, **columns)
        path = self.folder / FILE
        try:
            files.write(path, content.getvalue())
        except OSError as e:
            raise ParameterError(f"{path} cannot be written ({e.strerror}), so no run can start") from None


def check_new(earlier: list[Answered], new: RowPrints, least: Thresholds, groups: Iterable[str] = ()) -> None:
    """Raise `Refusal` if answers over the earlier sets and the new one disclose rows below the thresholds.

    `groups` are the columns of the new rows by whose values cells may be summed.
    """
    for kind in ("name", "value", "pattern"):
        if not _tells_apart(new, kind):
            continue
        known = [one for one in earlier if _tells_apart(one.rows, kind)]
        for one in known:
            _check_pair(one, new, kind, least)
        _check_combinations(known, new, kind, least)
    for one in earlier:
        for name in one.rows.columns.keys() & new.columns.keys():
            _check_column(one, new, name, least)
    if by := sorted(frozenset(groups) & new.columns.keys()):
        for kind in ("name", "value", "pattern"):
            if _tells_apart(new, kind):
                known = [one for one in earlier if one.groups and _tells_apart(one.rows, kind)]
                _check_groups(known, new, by, kind, least)


def _covers(stored: RowPrints, new: RowPrints) -> bool:
    pairs = [(stored.columns.get(name), prints) for name, prints in new.columns.items()]
    return np.array_equal(stored.name, new.name) and all(a is not None and np.array_equal(a, b) for a, b in pairs)


def _check_column(one: Answered, new: RowPrints, name: str, least: Thresholds) -> None:
    """Reject the run if a group of cells with one value, or the whole column, differs in too few cells or donors."""
    then, now = _numbered(one.rows, "name"), _numbered(new, "name")
    old_values, values = one.rows.columns[name], new.columns[name]
    both, at_then, at_now = np.intersect1d(then, now, return_indices=True)
    moved = old_values[at_then] != values[at_now]
    changed = (np.isin(then, both[moved]), np.isin(now, both[moved]))
    _check_few(one, new, changed, f"{int(moved.sum())} cell(s) have another '{name}'", int(moved.sum()), least)
    for value in np.intersect1d(old_values, values):
        here_then, here_now = old_values == value, values == value
        if min(here_then.sum(), here_now.sum()) < least.min_cells:
            continue  # below the threshold in one of the runs, where the group contributed nothing
        gone = here_then & ~np.isin(then, now[here_now])
        added = here_now & ~np.isin(now, then[here_then])
        rows = int(gone.sum() + added.sum())
        _check_few(one, new, (gone, added), f"one group of '{name}' differs by {rows} cell(s)", rows, least)


@dataclass(frozen=True)
class _Grouping:
    """The groups of one column, over the cells of all runs."""

    what: str  # in words
    codes: I64  # (n,), -1 for cells in no group


def _check_groups(earlier: list[Answered], new: RowPrints, by: list[str], kind: str, least: Thresholds) -> None:
    """Reject the run if one of its groups, with groups of any columns and runs, discloses too few cells or donors."""
    everyone = np.unique(np.concatenate([_numbered(rows, kind) for rows in (*(one.rows for one in earlier), new)]))
    told, labels = list[_Grouping](), list[_Grouping]()
    for one in earlier:
        for name in sorted(one.groups):
            what = f"'{name}' of study '{one.study}' ({one.when[:10]})"
            told.append(_Grouping(what, _codes(everyone, one.rows, name, kind, least)))
    for name in by:
        labels.append(_Grouping(f"'{name}'", _codes(everyone, new, name, kind, least)))
    told = _different(told)
    labels = [g for g in _different(labels) if not any(np.array_equal(g.codes, old.codes) for old in told)]
    if not labels:
        return
    codes = np.stack([g.codes for g in (*told, *labels)], axis=1)
    atoms, at, sizes = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    member = [atoms[:, [k]] == np.arange(int(atoms[:, k].max(initial=-1)) + 1) for k in range(atoms.shape[1])]
    donor = _donor_of(everyone, [one.rows for one in earlier] + [new], kind)
    there = None
    if donor is not None:
        whose = np.unique(donor, return_inverse=True)[1]
        there = np.zeros((len(atoms), int(whose.max()) + 1), bool)
        there[at.ravel(), whose] = True
    for k, mine in enumerate(labels, len(told)):
        for j, other in enumerate((*told, *labels)[:k]):
            _check_two(mine.what, member[k], other.what, member[j], sizes, there, least)
    before = _leverage(np.concatenate(member[: len(told)], axis=1), sizes) if told else np.zeros(len(atoms))
    now = _leverage(np.concatenate(member, axis=1), sizes)
    worse = np.where(now > before + 1e-6, now, 0.0)
    if worse.max() > (1 - 1e-6) / max(least.min_cells - 1, 0.5):
        raise Refusal(
            f"a combination of groups of {mine.what} and of {len(told)} column(s) of earlier runs rests on about "
            f"{1 / worse.max():.0f} cell(s), fewer than {least.min_cells}; to allow it: {ALLOW}"
        )
    if there is not None and (few := (worse * sizes > 1 - 1e-6) & (there.sum(axis=1) < least.min_donors)).any():
        raise Refusal(
            f"{int(sizes[few].min())} cell(s) of fewer than {least.min_donors} donors could be computed from groups of "
            f"{mine.what} and of {len(told)} column(s) of earlier runs; to allow it: {ALLOW}"
        )


def _check_two(what: str, mine: Bits, of: str, other: Bits, sizes: I64, there: Bits | None, least: Thresholds) -> None:
    """No group of one column may differ in too few cells, or donors, from a group of the other column."""
    common = (mine * sizes[:, None]).T @ other
    apart = (mine.T @ sizes)[:, None] + (other.T @ sizes)[None] - 2 * common
    few = (apart > 0) & (apart < least.min_cells)
    for i, j in np.argwhere((apart > 0) & (common > 0)) if there is not None else ():
        few[i, j] |= there[mine[:, i] != other[:, j]].any(axis=0).sum() < least.min_donors  # type: ignore[index]
    if few.any():
        raise Refusal(
            f"a group of {what} differs from one of {of} by {int(apart[few].min())} cell(s), fewer than "
            f"{least.min_cells} cells or {least.min_donors} donors: both results together disclose them; to allow it: "
            f"{ALLOW}"
        )


def _codes(everyone: U64, rows: RowPrints, name: str, kind: str, least: Thresholds) -> I64:
    """The group of each cell: of all small groups together one, if it is large enough; -1 for cells in none.

    By values, cells that look alike cannot be told apart, and are in none.
    """
    _, codes, sizes = np.unique(rows.columns[name], return_inverse=True, return_counts=True)
    small = sizes < least.min_cells
    number = np.where(small, len(sizes) if sizes[small].sum() >= least.min_cells else -1, np.arange(len(sizes)))
    own = number[codes]
    if kind != "name":
        _, at, times = np.unique(getattr(rows, kind), return_inverse=True, return_counts=True)
        own[times[at] > 1] = -1
    spread = np.full(len(everyone), -1)
    spread[np.searchsorted(everyone, _numbered(rows, kind))] = own
    _, first, codes = np.unique(spread[spread >= 0], return_index=True, return_inverse=True)
    spread[spread >= 0] = np.argsort(np.argsort(first))[codes]  # by the first cell, whatever the labels are called
    return spread


def _different(groupings: list[_Grouping]) -> list[_Grouping]:
    """Without those that have no group, and those that divide the cells as one before."""
    kept: list[_Grouping] = []
    for one in groupings:
        if one.codes.max(initial=-1) >= 0 and not any(np.array_equal(one.codes, k.codes) for k in kept):
            kept.append(one)
    return kept


def _check_few(
    one: Answered, new: RowPrints, differ: tuple[Bits, Bits], what: str, rows: int, least: Thresholds
) -> None:
    named = one.rows.donor is not None or new.donor is not None
    donors = len(_donors(one.rows.donor, differ[0]) | _donors(new.donor, differ[1]))
    if not rows or (rows >= least.min_cells and (not named or donors >= least.min_donors)):
        return
    raise Refusal(
        f"{what} since study '{one.study}' ({one.when[:10]}), fewer than {least.min_cells} cells or "
        f"{least.min_donors} donors: both results together disclose them; to allow it: {ALLOW}"
    )


def _tells_apart(rows: RowPrints, kind: str) -> bool:
    """Whether cells are known again by this kind of fingerprint; patterns of a few genes are alike in many cells."""
    prints = getattr(rows, kind)
    return prints is not None and (kind != "pattern" or len(np.unique(prints)) >= DISTINCT * len(prints))


def _numbered(rows: RowPrints, kind: str) -> U64:
    """Fingerprints, all different: the second of two equal rows is another row than the first."""
    prints: U64 = getattr(rows, kind)
    order = np.argsort(prints, kind="stable")
    first = np.searchsorted(prints[order], prints[order])
    count = np.empty(len(prints), np.uint64)
    count[order] = np.arange(len(prints)) - first
    return prints + count * ODD


def _check_pair(one: Answered, new: RowPrints, kind: str, least: Thresholds) -> None:
    then, now = _numbered(one.rows, kind), _numbered(new, kind)
    gone, added = ~np.isin(then, now), ~np.isin(now, then)
    rows = int(gone.sum() + added.sum())
    if not rows:
        return
    named = one.rows.donor is not None or new.donor is not None
    donors = len(_donors(one.rows.donor, gone) | _donors(new.donor, added))
    if rows >= least.min_cells and (not named or donors >= least.min_donors):
        return
    of = f" of {donors} donor(s)" if named else ""
    raise Refusal(
        f"these cells differ from those of study '{one.study}' ({one.when[:10]}) by {rows} cell(s){of}, fewer than "
        f"{least.min_cells} cells or {least.min_donors} donors: both results together disclose them; to allow it: "
        f"{ALLOW}"
    )


def _check_combinations(earlier: list[Answered], new: RowPrints, kind: str, least: Thresholds) -> None:
    """Reject the run if a combination of it and earlier ones rests on too few rows, or on an atom of too few donors."""
    sets = [_numbered(one.rows, kind) for one in earlier]
    if not sets:
        return
    everyone = np.unique(np.concatenate([*sets, _numbered(new, kind)]))
    member = np.stack([np.isin(everyone, rows) for rows in (*sets, _numbered(new, kind))], axis=1)
    atoms, at, sizes = np.unique(member, axis=0, return_inverse=True, return_counts=True)
    before, now = _leverage(atoms[:, :-1], sizes), _leverage(atoms, sizes)
    worse = np.where(now > before + 1e-6, now, 0.0)
    if worse.max() > (1 + 1e-6) / least.min_cells:
        raise Refusal(
            f"a combination of this run and {len(earlier)} earlier one(s) rests on about {1 / worse.max():.0f} "
            f"cell(s), fewer than {least.min_cells}; to allow it: {ALLOW}"
        )
    donor = _donor_of(everyone, [one.rows for one in earlier] + [new], kind)
    for k in range(len(atoms)) if donor is not None else ():
        inside, unit = at.ravel() == k, np.eye(len(atoms))[k]
        few = len(np.unique(donor[inside])) < least.min_donors  # type: ignore[index]
        if few and _spans(atoms.T.astype(float), unit) and not _spans(atoms[:, :-1].T.astype(float), unit):
            raise Refusal(
                f"{int(inside.sum())} cell(s) of fewer than {least.min_donors} donors could be computed from this run "
                f"and {len(earlier)} earlier one(s) together; to allow it: {ALLOW}"
            )


def _leverage(atoms: Bits, sizes: I64) -> F64:
    """Of one row of each atom: the largest part that it can have in a combination of the runs."""
    root = np.sqrt(sizes.astype(np.float64))[:, None]
    basis, singular, _ = np.linalg.svd(atoms * root, full_matrices=False)
    kept = basis[:, singular > 1e-9 * singular.max(initial=0.0)] / root
    leverage: F64 = np.square(kept).sum(axis=1)
    return leverage


def _spans(rows: F64, unit: F64) -> bool:
    solution = np.linalg.lstsq(rows.T, unit, rcond=None)[0]
    return bool(np.abs(rows.T @ solution - unit).max() < 1e-6)


def _donors(donor: U64 | None, rows: Bits) -> set[int]:
    """Donors of some rows; rows whose donors are unknown may all be of one."""
    if donor is None:
        return {-1} if rows.any() else set()
    return {int(d) for d in donor[rows]}


def _donor_of(everyone: U64, sets: list[RowPrints], kind: str) -> U64 | None:
    """The donor of each row, or None unless all sets name them."""
    donor = np.zeros(len(everyone), np.uint64)
    for rows in sets:
        if rows.donor is None:
            return None
        donor[np.searchsorted(everyone, _numbered(rows, kind))] = rows.donor
    return donor
