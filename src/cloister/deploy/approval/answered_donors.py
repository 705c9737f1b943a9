"""Differencing over donors: a site does not answer two regressions that differ in only a few of its donors.

`differencing` compares the cells of runs. Regressions and programs leave donors out by their features, and move values
that are far from the others. So two runs on the same cells can differ in one donor: by a covariate that it lacks, by a
value that only one of the runs moved, by a horizon a day later. The site stores what each run answered about which
donors, and rejects a run that differs from an earlier one on some of the same donors

- by fewer than `min_donors` donors, or by fewer who share a value of a feature or outcome,
- in fewer than `min_donors` values of any feature or outcome, under whatever name,
- in what has to stay the same: the grid of time, the groups of similar donors.

It also limits the number of columns that all runs on the same donors relate to outcomes. For whoever knows the
features, each column is one more equation for the outcomes; with p columns and a constant the mean leverage of a donor
is (p + 1) / n. So p + 1 may be half the number of donors, as in one run.

Names and values are 64 bits of a keyed hash, with the key of `differencing`:

    answered_donors.json    (0600) for each run: study, donors, columns, terms
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from cloister import files
from cloister.arrays import Array
from cloister.deploy.approval.approval import Refusal, stamp_now
from cloister.deploy.approval.differencing import ALLOW, AnsweredCells
from cloister.disclosure import DonorTable, Thresholds
from cloister.errors import ParameterError

FILE = "answered_donors.json"


@dataclass(frozen=True)
class Answered:
    """One earlier run."""

    study: str
    when: str
    donors: list[str]
    columns: Mapping[str, list[str]]  # one print per donor, of values as sums use them
    levels: Mapping[str, list[str]]  # the same of values as they are
    terms: Mapping[str, str]
    spent: list[str]


@dataclass(frozen=True)
class AnsweredDonors:
    """What this site has answered about its donors, on disk."""

    folder: Path

    def admit(self, table: DonorTable, study: str, least: Thresholds | None) -> None:
        """Check and store, in one step, that a run is about to be answered; without `least`, store it."""
        if not table.donors:
            return
        with files.locked(self.folder / FILE, wait=60.0):
            earlier = self._load()
            new = self._prints(table, study, len(earlier))
            if least is not None:
                check_new(earlier, new, least.min_donors)
            if not any(_same(one, new) for one in earlier):
                self._save([*earlier, new])

    def _prints(self, table: DonorTable, study: str, number: int) -> Answered:
        key = AnsweredCells(self.folder).key()

        def prints(kind: bytes, values: list[str]) -> list[str]:
            return [hashlib.blake2b(v.encode(), digest_size=8, key=key, person=kind).hexdigest() for v in values]

        def tables(columns: Mapping[str, Array]) -> dict[str, list[str]]:
            return {  # -0 is 0
                name: prints(b"column", [float(v).hex() for v in np.asarray(values, np.float64) + 0.0])
                for name, values in columns.items()
            }

        terms = dict(zip(table.terms, prints(b"term", [*table.terms.values()]), strict=True))
        spent = [f"{column} {number}" for column in table.spent] if table.again else [*table.spent]
        donors = prints(b"donor", [*table.donors])
        return Answered(study, stamp_now(), donors, tables(table.columns), tables(table.levels), terms, spent)

    def _load(self) -> list[Answered]:
        path = self.folder / FILE
        try:
            return [Answered(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError):
            raise ParameterError(
                f"{path} is damaged, so the donors of earlier runs are unknown; restore it from a backup"
            ) from None

    def _save(self, runs: list[Answered]) -> None:
        path = self.folder / FILE
        try:
            files.write(path, json.dumps([asdict(one) for one in runs]).encode())
        except OSError as e:
            raise ParameterError(f"{path} cannot be written ({e.strerror}), so no run can start") from None


def _same(one: Answered, new: Answered) -> bool:
    return replace(one, study=new.study, when=new.when) == new


def check_new(earlier: list[Answered], new: Answered, least: int) -> None:
    """Raise `Refusal` if answers to the earlier runs and the new one disclose fewer than `least` donors."""
    related = [one for one in earlier if {*one.donors} & {*new.donors}]
    for one in related:
        _check_pair(one, new, least)
    known = {column for one in related for column in one.spent}
    total, most = len(known | {*new.spent}), len(new.donors) // 2 - 1
    if known and not {*new.spent} <= known and total > most:
        raise Refusal(
            f"all runs on these donors together would relate {total} columns to outcomes, more than the {most} that "
            f"{len(new.donors)} donors bear: each is one more equation for their outcomes; to allow it: {ALLOW}"
        )


def _check_pair(one: Answered, new: Answered, least: int) -> None:
    since = f"since study '{one.study}' ({one.when[:10]})"

    def check(differ: int, what: str) -> None:
        if 0 < differ < least:
            raise Refusal(
                f"{what} {since}, fewer than {least} donors: both results together disclose them; to allow it: {ALLOW}"
            )

    for name in one.terms.keys() & new.terms.keys():
        if one.terms[name] != new.terms[name]:
            raise Refusal(
                f"the {name} differ {since}, so both results together may disclose single donors; to allow it: {ALLOW}"
            )
    differ = len({*one.donors} ^ {*new.donors})
    check(differ, f"the donors differ by {differ}")
    both = {*one.donors} & {*new.donors}
    for theirs, then in _by_donor(one.donors, one.columns).items():
        for mine, now in _by_donor(new.donors, new.columns).items():
            moved = sum(then[d] != now[d] for d in both)
            check(moved, f"'{mine}' has another value than '{theirs}' in {moved} donor(s)")
    for theirs, then in _by_donor(one.donors, one.levels).items():
        for mine, now in _by_donor(new.donors, new.levels).items():
            if theirs != mine and any(then[d] != now[d] for d in both):
                continue  # another column, and not by another name
            for value in {*then.values()} & {*now.values()}:
                before, after = ({d for d, v in column.items() if v == value} for column in (then, now))
                if min(len(before), len(after)) >= least:
                    apart = len(before ^ after)
                    check(apart, f"those with one value of '{mine}' differ by {apart} donor(s)")


def _by_donor(donors: list[str], columns: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    return {name: dict(zip(donors, values, strict=True)) for name, values in columns.items()}
