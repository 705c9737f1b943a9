"""Disclosure thresholds: what a site's cells and donors may add to a value that other parties learn.

A threshold over all sites protects no site: another site can subtract its own part or inflate its input. So each site
enforces the thresholds on its own rows. Whatever the other parties send, every number that a site adds to an opened sum
is based on at least `min_cells` of its own cells and `min_donors` of its own donors, or the number is zero.

    rows = Rows(n, donor=codes, thresholds=Thresholds())
    part = rows.grouped(label, n_labels, sums)                  a Contribution: sums of small groups are zero
    words = ch.contribute(part.map(code.encode), protocol=NAME, line="L3", what="sums per label")

`Contribution` objects are created in this module only, and the values of one leave it through `Channel.contribute`,
which writes the smallest group behind them into the receipt. `tests/test_disclosure.py` verifies both.

Kinds of sums and their criteria:

- `whole`: a sum over all rows. The rows together must reach the thresholds (`check` raises before anything is sent).
- `grouped`, `overlapping`: a sum for each of k groups. A group below a threshold contributes zero. Suppressed groups
  must not have a complement: where groups partition the rows and the total is opened too, first drop the rows of small
  groups with `open_rows`, so that the total is over the rest.
- `counted`: sums of sparse products, entry by entry. An entry needs enough terms that are not zero. Where the terms are
  magnitudes, `Shares` says which part of an entry one cell and one donor have: an entry of which one cell has more than
  three quarters, or one donor more than nine tenths, is zero (the dominance rule of statistical disclosure control
  [HDF+12]).
- `coarse`: numbers of rows that meet conditions, in multiples of `min_cells`.
- `weighted`: Σ_i w_ik v_i with real weights. The criterion is leverage, h_ik = w_ik² / Σ_j w_jk²: the largest part of
  column k that one row can have. The effective group size is 1 / max_i h_ik; m rows of equal weight have size m. The
  same holds for donors, with the absolute weights of a donor's rows added up.

Columns of one call are opened together, so linear combinations of them are disclosed as well: two groups that differ in
one row give that row. For `overlapping` and `weighted`, the criterion therefore is the leverage of a row in all open
columns together and the sum over all rows. Columns that would raise it above 1 / `min_cells` are suppressed (`_joint`).
Sums of different calls and rounds are not compared; docs/security/disclosure.md says what this leaves open.

`similar` bounds every sum and every round at once. It divides a site's rows into groups of similar rows, each above the
thresholds, before the first message. A protocol that computes on the means of these groups alone can open any function
of them, at points that other parties choose, any number of times: no opened value depends on less than a group.

Rows are cells, or samples that stand for several cells each (`cells`). Where no donor is named, only cells count.

References
----------
[HDF+12] Hundepool et al., Statistical Disclosure Control, Wiley 2012, 4.2: threshold, (n, k) dominance and p% rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cloister.arrays import F64, I64, Array, Bits
from cloister.errors import DataError, ParameterError

SPAN = 1e-11  # part of a column, outside the others, that counts as rounding
SLACK = 1e-9  # of effective group sizes, which are quotients of floating-point sums
CELL_SHARE = 0.75  # of a sum of magnitudes, at most, that one cell has
DONOR_SHARE = 0.9  # the same of one donor


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The smallest group of a site's own cells and donors that an opened value may be based on."""

    min_cells: int = 10
    min_donors: int = 3  # applies where donors are named

    def __post_init__(self) -> None:
        for name, least in (("min_cells", self.min_cells), ("min_donors", self.min_donors)):
            if least < 1:
                raise ParameterError(f"'{name}' must be at least 1, found {least}")

    def raised(self, floors: Mapping[str, int]) -> Thresholds:
        """The thresholds after a site's own settings, which can raise them and never lower them."""
        least = {name: max(getattr(self, name), floors.get(name, 0)) for name in ("min_cells", "min_donors")}
        return Thresholds(**least)


@dataclass(frozen=True, slots=True)
class Contribution:
    """Numbers that a site adds to opened sums, and the smallest group of its own behind any that is not suppressed."""

    values: Array
    cells: int | None  # smallest (effective) number of cells; None where nothing is based on cells
    donors: int | None  # smallest (effective) number of donors; None where donors are not named
    withheld: int = 0  # groups that were suppressed

    def map(self, function: Callable[[Any], Array]) -> Contribution:
        """The same contribution in another form: encoded, scaled or reshaped."""
        return replace(self, values=function(self.values))


@dataclass(frozen=True, slots=True)
class Shares:
    """Largest part that one cell, and one donor, has of each sum of magnitudes."""

    cell: Array | None = None
    donor: Array | None = None

    @staticmethod
    def of(total: Array, cell: Array | None = None, donor: Array | None = None) -> Shares:
        """From sums of magnitudes and the largest part of one cell and one donor; 0 where the sum is 0."""
        parts = (None if x is None else np.divide(x, total, out=np.zeros(np.shape(total)), where=total > 0)
                 for x in (cell, donor))  # fmt: skip
        return Shares(*parts)

    @property
    def dominated(self) -> Bits:
        """Sums of which one cell has more than `CELL_SHARE` or one donor more than `DONOR_SHARE`."""
        parts = [x > most * (1 + SLACK) for x, most in ((self.cell, CELL_SHARE), (self.donor, DONOR_SHARE))
                 if x is not None]  # fmt: skip
        found: Bits = np.logical_or.reduce(parts) if parts else np.zeros((), bool)
        return found


@dataclass(frozen=True, slots=True)
class Groups:
    """Cells and donors of this site in each of k groups, and which groups reach the thresholds."""

    cells: Array  # (k,), effective sizes where rows have weights
    donors: Array | None  # (k,)
    open: Bits  # (k,)

    @property
    def empty(self) -> Bits:
        none: Bits = self.cells == 0
        return none


@dataclass(frozen=True, slots=True)
class SimilarGroups:
    """Disjoint groups of similar rows of one site, each above the thresholds (microaggregation).

    Groups are formed from the site's own rows alone. In the span of all groups, a cell has leverage 1 / (cells of its
    group), whatever weights the groups get later, and however often. In clipped means it has less than twice that.
    """

    codes: I64  # (n,), the group of each row; -1 for rows in none
    cells: I64  # (k,)
    donors: I64 | None  # (k,); None where donors are not named

    def __len__(self) -> int:
        return len(self.cells)

    def means(self, values: Array) -> F64:
        """Mean over the rows of each group, (k, …), of `values` of shape (n, …); all rows weigh the same."""
        inside = self.codes >= 0
        sums = np.zeros((len(self), *values.shape[1:]))
        np.add.at(sums, self.codes[inside], values[inside])
        sizes = np.bincount(self.codes[inside], minlength=len(self)).reshape(-1, *[1] * (values.ndim - 1))
        means: F64 = sums / sizes
        return means

    def clipped_means(self, values: F64, rounds: int = 10) -> F64:
        """Means over the rows of each group, (k, d), of which an outlying row bends none far.

        A row that is farther from the mean than half of its group counts at that distance, in its own direction. The
        mean is that of the rows clipped so, found in `rounds` steps (an M-estimator of location). At its fixed point,
        deviations add up to zero and at least half of the rows have the largest length, so no row has more than
        2 / (rows of the group) of the sum of their squares. The first step starts at the medians: from the plain mean,
        a row at distance D would be left with about D / 10^8 after ten steps.
        """
        inside = np.flatnonzero(self.codes >= 0)
        if not len(inside) or len(inside) == len(self):
            return self.means(values)
        order = inside[np.argsort(self.codes[inside], kind="stable")]
        code, rows = self.codes[order], values[order]
        sizes = np.bincount(code, minlength=len(self))
        start = np.cumsum(np.append(0, sizes[:-1]))
        means = np.stack([np.median(group, axis=0) for group in np.split(rows, start[1:])])
        for _ in range(rounds):
            away = rows - means[code]
            length = np.linalg.norm(away, axis=1)
            reach = length[np.lexsort((length, code))][start + sizes // 2]
            away *= np.minimum(1.0, reach[code] / np.maximum(length, 1e-300))[:, None]
            means = means + np.add.reduceat(away, start, axis=0) / sizes[:, None]
        return means

    def contribution(self, values: Array) -> Contribution:
        """Numbers computed from group means and sizes alone."""
        donors = None if self.donors is None else int(self.donors.min(initial=2**62))
        if not len(self):
            return Contribution(np.zeros_like(values), None, None)
        return Contribution(np.asarray(values), int(self.cells.min()), donors)


@dataclass(frozen=True)
class Rows:
    """A site's rows: how many there are, whose they are, and how many cells each stands for."""

    n: int
    donor: I64 | None = None  # (n,), codes; None where donors are not named
    thresholds: Thresholds = field(default_factory=Thresholds)
    cells: I64 | None = None  # (n,), cells behind each row; None: one each

    def __post_init__(self) -> None:
        for name in ("donor", "cells"):
            column = getattr(self, name)
            if column is not None and column.shape != (self.n,):
                raise DataError(f"expected one entry of '{name}' per row, {self.n}, found {len(column)}")
            if column is not None and (not np.issubdtype(column.dtype, np.integer) or column.min(initial=0) < 0):
                raise DataError(f"'{name}' must hold integers of 0 or more: a row without a donor is not another donor")

    def only(self, keep: I64 | Bits) -> Rows:
        """Some of the rows, by position or mask."""
        at = np.flatnonzero(keep) if np.asarray(keep).dtype == bool else np.asarray(keep)
        donor = None if self.donor is None else self.donor[at]
        return replace(self, n=len(at), donor=donor, cells=None if self.cells is None else self.cells[at])

    # ---- groups ------------------------------------------------------------------------------------------------------

    def groups(self, codes: I64, k: int) -> Groups:
        """Sizes of the groups that `codes` names, 0 … k-1; a row with code -1 is in none."""
        inside = codes >= 0
        at = codes[inside]
        if len(at) and int(at.max()) >= k:
            raise ParameterError(f"expected group codes below {k}, found {int(at.max())}")
        weights = None if self.cells is None else self.cells[inside]
        cells = np.bincount(at, weights, minlength=k).astype(np.int64)
        donors = None
        if self.donor is not None:
            pairs = np.unique(np.stack([at, self.donor[inside]]), axis=1)[0] if len(at) else at
            donors = np.bincount(pairs, minlength=k).astype(np.int64)
        return self._judge(cells, donors)

    def members(self, inside: Bits) -> Groups:
        """Sizes of k groups that may overlap; `inside` is (n, k)."""
        cells = (inside if self.cells is None else inside * self.cells[:, None]).sum(axis=0).astype(np.int64)
        donors = None
        if self.donor is not None:
            donors = (self._by_donor(inside.astype(np.float64)) > 0).sum(axis=0).astype(np.int64)
        return self._judge(cells, donors)

    def effective(self, weights: F64) -> Groups:
        """Effective sizes 1 / max leverage of the k columns of `weights`, (n, k)."""
        cells = effective_sizes(np.abs(weights))
        if self.cells is not None and self.n:
            cells = cells * self.cells.min()  # each row stands for at least so many
        donors = None if self.donor is None else effective_sizes(self._by_donor(np.abs(weights)))
        return self._judge(cells, donors)

    def open_rows(self, codes: I64, k: int) -> Bits:
        """Rows whose group reaches the thresholds; sums over these have no suppressed complement."""
        keep = np.zeros(self.n, bool)
        inside = codes >= 0
        keep[inside] = self.groups(codes, k).open[codes[inside]]
        return keep

    def balanced_rows(self, codes: I64, k: int) -> Bits:
        """Rows of groups that reach the thresholds, without those by which one donor has more than half of a group.

        For sums of magnitudes over groups: means of a group are not nearly those of one donor. A group that does not
        reach the thresholds after that has no rows.
        """
        keep = self.open_rows(codes, k)
        if self.donor is None:
            return keep
        for code in np.unique(codes[keep]):
            at = np.flatnonzero(codes == code)
            left = self._undominated(at)
            keep[at] = False
            if self._reaches(left):
                keep[left] = True
        return keep

    def excluded(self, codes: I64, names: Sequence[str]) -> dict[str, int]:
        """Names of the non-empty groups without `balanced_rows`, with their cells, for messages at this site."""
        groups = self.groups(codes, len(names))
        small = np.flatnonzero(
            ~np.isin(np.arange(len(names)), codes[self.balanced_rows(codes, len(names))]) & ~groups.empty
        )
        return {names[int(k)]: int(groups.cells[k]) for k in small}

    def sized(self, cells: I64, donors: I64 | None, shares: Shares | None = None) -> Groups:
        """Groups whose cells and donors were counted some rows at a time; `donors` where they are named."""
        if (donors is None) != (self.donor is None):
            raise ParameterError("expected numbers of donors where donors are named, and none otherwise")
        return self._judge(cells, donors, shares)

    def summed(self, groups: Groups, sums: Array) -> Contribution:
        """Sums for each of these groups, (k, …); small groups are zero."""
        return self._contribution(groups, np.asarray(sums))

    # ---- order statistics --------------------------------------------------------------------------------------------

    def spans(self, codes: I64, k: int, values: Array) -> tuple[F64, F64]:
        """Per group, the smallest value that enough rows are at or below, and the largest that enough are at or above.

        A set is large enough if it reaches the thresholds: without donors these are the `min_cells`-th smallest and
        largest values of the group. Groups that do not reach the thresholds have (+inf, -inf).
        """
        inside = codes >= 0
        at, found = codes[inside], values[inside].astype(np.float64)
        least, cells = self.thresholds, None if self.cells is None else self.cells[inside]
        low = _ranked(at, found, k, least.min_cells, cells)
        high = -_ranked(at, -found, k, least.min_cells, cells)
        if self.donor is not None:
            n = int(self.donor.max(initial=-1)) + 1
            pairs, who = np.unique(at * max(n, 1) + self.donor[inside], return_inverse=True)
            first, last = np.full(len(pairs), np.inf), np.full(len(pairs), -np.inf)
            np.minimum.at(first, who, found)
            np.maximum.at(last, who, found)
            low = np.maximum(low, _ranked(pairs // max(n, 1), first, k, least.min_donors))
            high = np.minimum(high, -_ranked(pairs // max(n, 1), -last, k, least.min_donors))
        return low, high

    def blocks(self, values: F64) -> I64:
        """Codes of microaggregation: runs of rows in the order of `values`, each of which reaches the thresholds.

        A statistic of the codes, or of one value per code, is based on whole runs: neither it nor its complement or
        difference is of a smaller group. Rows with equal values are in one run. The last run takes what is left; all
        codes are -1 if all rows together are too few.
        """
        order = np.argsort(values, kind="stable")
        codes, ends, least = np.full(self.n, -1, np.int64), [], self.thresholds
        last = np.append(np.diff(values[order]) != 0, [True])[: self.n].tolist()  # of rows with the same value
        cells = [1] * self.n if self.cells is None else self.cells[order].tolist()
        donors = None if self.donor is None else self.donor[order].tolist()
        held, seen = 0, set()
        for i in range(self.n):
            held += cells[i]
            if donors is not None:
                seen.add(donors[i])
            if last[i] and held >= least.min_cells and (donors is None or len(seen) >= least.min_donors):
                ends.append(i + 1)
                held, seen = 0, set()
        if not ends:
            return codes
        ends[-1] = self.n
        codes[order] = np.searchsorted(np.array(ends), np.arange(self.n), side="right")
        return codes

    def similar(self, x: F64, within: I64 | None = None, *, complete: bool = False) -> SimilarGroups:
        """Groups of rows that are near each other in `x`, (n, d), each of which reaches the thresholds.

        Sets of rows are halved across their direction of largest variance as long as both halves reach the thresholds,
        so a group has at most about twice `min_cells` cells unless donors require more. Rows with different codes in
        `within` are never in one group; codes whose rows are too few, and code -1, are in no group. Where donors count,
        no donor has more than half of a group's cells: of one that has more than all others, rows that are too many are
        in no group. With `complete` these rows stay: for protocols that open a sum over all rows of a code too, whose
        difference from the groups would be the rows that were left out.
        """
        codes = np.full(self.n, -1, np.int64)
        first = np.zeros(self.n, np.int64) if within is None else within
        waiting = [np.flatnonzero(first == code) for code in np.unique(first[first >= 0])]
        cells: list[int] = []
        donors: list[int] = []
        while waiting:
            at = waiting.pop()
            if not (self._reaches(at) if complete else self._enough(at)[-1]):
                continue
            halves = self._halves(at, x)
            if halves is not None:
                waiting += halves
                continue
            at = at if complete else self._undominated(at)
            size, people = self._size(at)
            codes[at] = len(cells)
            cells.append(size)
            if people is not None:
                donors.append(people)
        return SimilarGroups(
            codes, np.array(cells, np.int64), None if self.donor is None else np.array(donors, np.int64)
        )

    def _reaches(self, at: I64) -> bool:
        """Whether these rows are enough cells of enough donors, whoever has most of them."""
        cells, donors = self._size(at)
        return cells >= self.thresholds.min_cells and (donors is None or donors >= self.thresholds.min_donors)

    def _size(self, at: I64) -> tuple[int, int | None]:
        cells = len(at) if self.cells is None else int(self.cells[at].sum())
        return cells, None if self.donor is None else len(np.unique(self.donor[at]))

    def _halves(self, at: I64, x: F64) -> list[I64] | None:
        """Two parts of these rows that both reach the thresholds, about equal; None if there are none.

        Without donors one part is a multiple of `min_cells`, so that little is left over in the end.
        """
        least, middle = self.thresholds, len(at) / 2
        if self._size(at)[0] < 2 * least.min_cells:
            return None
        if self.donor is None and self.cells is None:
            middle = least.min_cells * round(middle / least.min_cells)
        centred = x[at] - np.median(x[at], axis=0)
        for _ in range(2 if self.donor is not None else 1):  # a second direction where donors forbid the first
            direction = _main_direction(centred)
            order = np.argsort(centred @ direction, kind="stable")
            allowed = np.flatnonzero(self._enough(at[order]) & self._enough(at[order[::-1]])[::-1])
            if len(allowed):
                cut = int(allowed[np.argmin(np.abs(allowed - middle))])
                return [at[order[:cut]], at[order[cut:]]]
            centred = centred - np.outer(centred @ direction, direction)
        return None

    def _enough(self, at: I64) -> Bits:
        """For 0 … len(at), whether so many of these rows, from the first, reach the thresholds."""
        cells = np.cumsum(np.append(0, np.ones(len(at), np.int64) if self.cells is None else self.cells[at]))
        enough: Bits = cells >= self.thresholds.min_cells
        if self.donor is not None:
            new = np.zeros(len(at) + 1, np.int64)
            new[np.unique(self.donor[at], return_index=True)[1] + 1] = 1
            enough &= np.cumsum(new) >= self.thresholds.min_donors
            if self.thresholds.min_donors > 1:
                of, most = self.donor[at], np.zeros_like(cells)
                for donor in np.unique(of):
                    mine = (of == donor) if self.cells is None else (of == donor) * self.cells[at]
                    most = np.maximum(most, np.cumsum(np.append(0, mine)))
                enough &= 2 * (cells - most) >= self.thresholds.min_cells  # what `_undominated` leaves
        return enough

    def _undominated(self, at: I64) -> I64:
        """These rows, without those by which one donor has more cells than all others together."""
        if self.donor is None or self.thresholds.min_donors < 2 or not len(at):
            return at
        cells = np.ones(len(at), np.int64) if self.cells is None else self.cells[at]
        by_donor = np.bincount(self.donor[at], cells)
        most = int(by_donor.argmax())
        mine, spare = np.flatnonzero(self.donor[at] == most), 2 * int(by_donor[most]) - int(cells.sum())
        if spare <= 0:
            return at
        turn = np.argsort(np.arange(len(mine)) * 0.6180339887498949 % 1.0, kind="stable")  # spread over all
        left = np.cumsum(cells[mine[turn]]) <= by_donor[most] - spare
        return np.sort(np.concatenate([np.delete(at, mine), at[mine[turn[left]]]]))

    def _by_donor(self, weights: F64) -> F64:
        assert self.donor is not None
        _, at = np.unique(self.donor, return_inverse=True)
        sums = np.zeros((int(at.max(initial=-1)) + 1, weights.shape[1]))
        np.add.at(sums, at, weights)
        return sums

    def _judge(self, cells: Array, donors: Array | None, shares: Shares | None = None) -> Groups:
        least = self.thresholds
        large: Bits = cells >= least.min_cells * (1 - SLACK)
        if donors is not None:
            large = large & (donors >= least.min_donors * (1 - SLACK))
        if shares is not None:
            large = large & ~shares.dominated.ravel()
        return Groups(cells, donors, large)

    # ---- contributions -----------------------------------------------------------------------------------------------

    def check(self, what: str = "cells", *, magnitudes: bool = False) -> None:
        """Raise a `DataError` unless all rows together reach the thresholds.

        With `magnitudes`, also if one donor has more than nine tenths of them.
        """
        groups = self.groups(np.zeros(self.n, np.int64), 1)
        if groups.open[0]:
            if magnitudes and self.donor is not None and self.thresholds.min_donors > 1:
                largest = int(np.bincount(self.donor, self.cells).max())
                if largest > DONOR_SHARE * groups.cells[0]:
                    raise DataError(
                        f"one donor has {largest} of {int(groups.cells[0])} {what} here, more than {DONOR_SHARE:.0%}: "
                        "sums over all of them are nearly that donor's; leave some of its cells out"
                    )
            return
        least, cells = self.thresholds, int(groups.cells[0])
        if cells < least.min_cells:
            raise DataError(
                f"{cells} {what} here, fewer than min_cells = {least.min_cells}: a sum over so few comes close to "
                "single cells; leave this site out of the study"
            )
        assert groups.donors is not None
        raise DataError(
            f"{what} of {int(groups.donors[0])} donors here, fewer than min_donors = {least.min_donors}: a sum over so "
            "few comes close to single persons; leave this site out of the study"
        )

    def whole(self, sums: Array) -> Contribution:
        """Sums over all rows; zero where all rows together are too few."""
        groups = self.groups(np.zeros(self.n, np.int64), 1)
        return self._contribution(groups, np.asarray(sums)[None]).map(lambda x: x[0])

    def grouped(self, codes: I64, k: int, sums: Array | None = None) -> Contribution:
        """Sums for each group, (k, …), or the groups' numbers of cells; small groups are zero."""
        return self._of(self.groups(codes, k), sums)

    def overlapping(self, inside: Bits, sums: Array | None = None) -> Contribution:
        """The same for groups that may overlap, `inside` of (n, k). The complement of a group is a group too.

        A column that all rows but a few belong to discloses those few where the number of all rows is opened. Columns
        whose complement is neither empty nor above the thresholds are therefore suppressed. So are columns that differ
        from other ones, or from combinations of them, in too few rows or donors.
        """
        groups, rest = self.members(inside), self.members(~inside)
        open_ = groups.open & (rest.open | inside.all(axis=0))
        return self._of(replace(groups, open=self._joint(inside.astype(np.float64), groups, open_, apart=True)), sums)

    def weighted(self, weights: F64, sums: Array | None = None) -> Contribution:
        """Weighted sums, (k, …), or the columns' total weights; columns that few rows dominate are zero."""
        groups = self.effective(weights)
        open_ = self._joint(weights, groups, groups.open, apart=False)
        return self._of(replace(groups, open=open_), weights.sum(axis=0) if sums is None else sums)

    def _joint(self, columns: F64, groups: Groups, among: Bits, *, apart: bool) -> Bits:
        """Which of these columns can be open together: no combination of them is based on fewer rows than allowed.

        The leverage of a row in the space of all open columns, and of the sum over all rows, is at most 1 / min_cells;
        that of a donor's rows in the columns at most 1 / min_donors. With `apart`, columns are groups: their donors are
        counted instead, in the difference of every two. Larger groups come first.
        """
        least, each = self.thresholds, np.ones(self.n) if self.cells is None else self.cells.astype(np.float64)
        scale, basis = np.sqrt(each), _unit(np.sqrt(each))[:, None]
        kept: list[int] = []
        order = np.flatnonzero(among)
        for k in order[np.argsort(-groups.cells[order], kind="stable")].tolist():
            residual = _orthogonal(basis, _unit(columns[:, k] * scale))
            if float(np.linalg.norm(residual)) > SPAN:
                wider = np.concatenate([basis, _unit(residual)[:, None]], axis=1)
                leverage = np.square(wider).sum(axis=1) / np.maximum(each, 1.0)  # of one cell
                if leverage.max(initial=0.0) > (1 + SLACK) / least.min_cells:
                    continue
            else:
                wider = basis
            if self.donor is not None and self._few_donors(columns[:, [*kept, k]], apart=apart):
                continue
            basis = wider
            kept.append(k)
        open_: Bits = np.isin(np.arange(columns.shape[1]), kept)
        return open_

    def _few_donors(self, columns: F64, *, apart: bool) -> bool:
        """Whether the last column, with the others, discloses rows of too few donors."""
        assert self.donor is not None
        if apart:
            differ = columns[:, :-1] != columns[:, -1:]
            donors = (self._by_donor(differ[:, differ.any(axis=0)].astype(np.float64)) > 0).sum(axis=0)
            return bool((donors < self.thresholds.min_donors).any())
        basis = np.linalg.qr(columns / np.linalg.norm(columns, axis=0))[0]
        parts = (basis[self.donor == d] for d in np.unique(self.donor))
        largest = max(float(np.linalg.norm(part, ord=2)) ** 2 for part in parts)
        return largest > (1 + SLACK) / self.thresholds.min_donors

    def counted(
        self, sums: Array, cells: Array, donors: Array | None = None, shares: Shares | None = None
    ) -> Contribution:
        """Sums of which each entry is based on that many cells and donors here; entries below a threshold are zero.

        For sums with many zero terms, such as Σ_i x_ig x_ih of sparse x: `cells` counts the terms that are not zero.
        With `shares`, entries that one cell or donor dominates are zero too.
        """
        flat = None if donors is None else np.ravel(donors)
        groups = self._judge(np.ravel(cells), flat, shares)
        return self._contribution(groups, np.ravel(sums)).map(lambda x: x.reshape(np.shape(sums)))

    def coarse(self, counts: I64, offset: int, times: int = 1) -> Contribution:
        """Numbers of rows that meet conditions, to multiples of `min_cells`: up with the probability of the remainder.

        A row adds at most `times` to a count, and the step is `times` as large. `offset` is drawn uniformly below the
        step once for all counts of one sum, and is secret. A row changes a count with probability 1 / `min_cells`, and
        then by a whole step: single rows cannot be counted, but with that probability one row shows. Two counts that
        are equal before rounding are equal after it.
        """
        step = times * self.thresholds.min_cells
        if not 0 <= offset < step:
            raise ParameterError(f"expected an offset of 0 to {step - 1}, found {offset}")
        return self.whole((np.asarray(counts, np.int64) + offset) // step * step)

    def measured(self, cells: F64, donors: F64 | None, sums: Array) -> Contribution:
        """Weighted sums, (k, …), whose effective sizes (k,) were worked out elsewhere, as 1 / the largest leverage.

        For weights that are not stored as a whole, and for the leverage in several columns at once, which is larger
        than that in any of them.
        """
        if (donors is None) != (self.donor is None):
            raise ParameterError("effective numbers of donors are needed where donors are named, and only there")
        return self._of(self._judge(cells, donors), sums)

    def _of(self, groups: Groups, sums: Array | None) -> Contribution:
        return self._contribution(groups, groups.cells if sums is None else np.asarray(sums))

    def _contribution(self, groups: Groups, sums: Array) -> Contribution:
        if len(sums) != len(groups.open):
            raise ParameterError(f"expected sums of {len(groups.open)} groups, found {len(sums)}")
        shape = (-1, *[1] * (sums.ndim - 1))
        values = np.where(groups.open.reshape(shape), sums, np.zeros((), sums.dtype))
        cells, donors = (_smallest(sizes, groups.open) for sizes in (groups.cells, groups.donors))
        return Contribution(values, cells, donors, int((~groups.open & ~groups.empty).sum()))


def constant(values: Array, why: str) -> Contribution:
    """Numbers that do not depend on cells or donors; `why` says so to the reader of the code."""
    if not why:
        raise ParameterError("say why these numbers do not depend on cells")
    return Contribution(np.asarray(values), None, None)


def join(parts: Sequence[Contribution]) -> Contribution:
    """Several contributions as one vector, with the smallest group behind any of them."""
    return Contribution(
        np.concatenate([np.ravel(p.values) for p in parts]),
        min((p.cells for p in parts if p.cells is not None), default=None),
        min((p.donors for p in parts if p.donors is not None), default=None),
        sum(p.withheld for p in parts),
    )


def _main_direction(centred: F64, rounds: int = 8) -> F64:
    """About the direction of largest variance, by power iteration from the column with the largest one.

    Rows that are longer than the median count at that length, so that none has more than about 2 / n of the variance.
    Otherwise one far row would be the direction of every cut around it, and the rows in its group would show it. Where
    half of the rows are equal, the next longer length counts.
    """
    length = np.linalg.norm(centred, axis=1)
    longer = np.sort(length)[len(length) // 2 :]
    reach = longer[longer > 0][:1].sum()
    centred = centred * np.minimum(1.0, reach / np.maximum(length, 1e-300))[:, None]
    spread = np.square(centred).sum(axis=0)
    direction = _unit(centred.T @ centred[:, int(spread.argmax())])
    for _ in range(rounds):
        direction = _unit(centred.T @ (centred @ direction))
    return direction


def _unit(x: F64) -> F64:
    length = float(np.linalg.norm(x))
    return x / length if length > 0 else x


def _orthogonal(basis: F64, x: F64) -> F64:
    """X without its part in the space of an orthonormal basis; twice, for rounding."""
    for _ in range(2):
        x = x - basis @ (basis.T @ x)
    return x


def _smallest(sizes: Array | None, among: Bits) -> int | None:
    return int(sizes[among].min() + SLACK) if sizes is not None and among.any() else None


def effective_sizes(weights: F64) -> F64:
    """1 / max_i w_i² / Σ_j w_j², per column; 0 for a column of zeros."""
    squares = np.square(weights)
    largest = squares.max(axis=0, initial=0.0)
    sizes: F64 = np.where(largest > 0, squares.sum(axis=0) / np.where(largest > 0, largest, 1.0), 0.0)
    return sizes


def _ranked(at: I64, values: F64, k: int, rank: int, weights: I64 | None = None) -> F64:
    """Per group the smallest value that rows of total weight `rank` are at or below; +inf in groups of less."""
    order = np.lexsort((values, at))
    groups = at[order]
    start = np.searchsorted(groups, np.arange(k + 1))
    below = np.concatenate([[0], np.cumsum(np.ones(len(at), np.int64) if weights is None else weights[order])])
    position = np.searchsorted(below, below[start[:-1]] + rank) - 1
    there = position < start[1:]
    ranked = np.full(k, np.inf)
    ranked[there] = values[order[position[there]]]
    return ranked


def largest_of(group: I64, values: F64, k: int, rank: int) -> F64:
    """The `rank`-th largest value of each of k groups; -inf in groups of fewer."""
    return -_ranked(group, -values, k, rank)
