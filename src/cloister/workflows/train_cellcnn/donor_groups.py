"""Inputs that rest on groups of donors: a site trains on the mean of each group, and on nothing else.

A malicious site can steer the model in every step, and combine the gradients of all steps in what is opened. No check
of messages bounds the weight of one input in an opened value: it may be any function of the inputs. The bound is in the
inputs. Every class is divided into groups of at least `min_donors` donors. Each donor stands for the same number of
cells. An input is the mean of one group, so whatever is opened is a function of these means:

    donors of a class, in the order of their names, in runs that reach the thresholds            `DonorGroups.of`
    as many cells of each donor: evenly spaced ones, or each several times                       `rows`
    values far beyond what enough cells of all groups reach are set to an end of that range      `fence`
    means of the groups' donors                                                                  `inputs`

Groups follow from names, classes, thresholds and the numbers of cells of donors: neither values, nor the seed, nor
other parties change them, and donors are held out by whole groups. So several runs at the same donors and thresholds
open functions of the same means. Groups of different runs are compared at the site (`approval.differencing`). The sums
of `pooled_scaling` are over the same cells with the same weights, so they are functions of these groups, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, Array
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.errors import DataError
from cloister.mpc.sums import pooled_scaling


@dataclass(frozen=True)
class DonorGroups:
    """A site's donors in disjoint groups, each of one class and above the thresholds."""

    donors: tuple[str, ...]  # in order of their names
    classes: tuple[str, ...]  # of each donor
    codes: I64  # the group of each donor; -1 for those of a class with too few donors here
    size: int  # cells that stand for a donor
    least: int  # cells that a donor's mean rests on, effectively
    thresholds: Thresholds

    @classmethod
    def of(cls, classes: Mapping[str, str], names: Array, thresholds: Thresholds) -> DonorGroups:
        """From the class of each donor, and the donor of each of this site's cells."""
        donors = tuple(sorted(classes))
        counts = np.array([(names == d).sum() for d in donors], np.int64)
        size = int(np.sort(counts)[(len(counts) - 1) // 2])
        least = int((size // -(-size // counts)).min())  # a donor's cell occurs up to ⌈size / cells⌉ times
        codes, k = np.full(len(donors), -1, np.int64), 0
        for label in sorted(set(classes.values())):
            at = np.array([i for i, d in enumerate(donors) if classes[d] == label])
            rows = Rows(len(at), np.arange(len(at)), thresholds, cells=np.full(len(at), least))
            blocks = rows.blocks(np.arange(len(at), dtype=np.float64))
            codes[at] = np.where(blocks >= 0, blocks + k, -1)
            k = int(codes.max()) + 1
        return cls(donors, tuple(classes[d] for d in donors), codes, size, least, thresholds)

    def __len__(self) -> int:
        return int(self.codes.max(initial=-1)) + 1

    @property
    def labels(self) -> list[str]:
        """The class of each group."""
        return [self.classes[int(np.argmax(self.codes == g))] for g in range(len(self))]

    def check(self) -> None:
        """Raise `DataError` if no class has enough donors for a group."""
        if not len(self):
            raise DataError(
                f"no class has min_donors = {self.thresholds.min_donors} donors with min_cells ="
                f" {self.thresholds.min_cells} cells at this site: inputs are means over that many; leave this site out"
                " of the study, or agree on smaller thresholds"
            )

    def left_out(self) -> dict[str, int]:
        """Classes with too few donors here for a group, and how many these are."""
        alone = [c for c, g in zip(self.classes, self.codes, strict=True) if g < 0]
        return {c: alone.count(c) for c in sorted(set(alone))}

    def held_out(self, count: int, rng: np.random.Generator) -> list[str]:
        """Donors of whole groups, at least `count` of each class, that are not trained on."""
        chosen: list[int] = []
        labels = self.labels
        for label in sorted(set(labels)) if count else []:
            of_class = [g for g, c in enumerate(labels) if c == label]
            sizes = np.bincount(self.codes[self.codes >= 0])
            if np.sort(sizes[of_class])[:-1].sum() < count:  # whichever groups are held out, one is left
                raise DataError(
                    f"class '{label}' has too few donors at this site to hold out {count} of them, in groups of"
                    f" min_donors = {self.thresholds.min_donors} or more, and train on others; use a smaller"
                    " hold_out, or leave this site out of the study"
                )
            held, order = 0, rng.permutation(of_class).tolist()
            while held < count:
                held += int(sizes[order[0]])
                chosen.append(order.pop(0))
        return [d for d, g in zip(self.donors, self.codes, strict=True) if g in chosen]

    def without(self, donors: list[str]) -> DonorGroups:
        """The groups that have none of these donors."""
        return self._only(~np.isin(self.donors, donors))

    def among(self, donors: list[str]) -> DonorGroups:
        """The groups of these donors."""
        return self._only(np.isin(self.donors, donors))

    def _only(self, keep: Array) -> DonorGroups:
        at = np.flatnonzero(keep & (self.codes >= 0))
        _, codes = np.unique(self.codes[at], return_inverse=True)
        donors, classes = (tuple(x[i] for i in at) for x in (self.donors, self.classes))
        return DonorGroups(donors, classes, codes.astype(np.int64), self.size, self.least, self.thresholds)

    def rows(self, names: Array) -> tuple[I64, I64]:
        """Rows of `size` cells of each donor that is in a group, one donor after the other, and whose they are."""
        found = []
        for donor in (d for d, g in zip(self.donors, self.codes, strict=True) if g >= 0):
            at = np.flatnonzero(names == donor)
            found.append(at[np.arange(self.size) * len(at) // self.size])
        rows = np.concatenate(found) if found else np.zeros(0, np.int64)
        return rows, np.repeat(np.arange(len(found)), self.size)

    def fence(self, x: F64, names: Array) -> pooled_scaling.Fence:
        """The range that enough cells of all groups reach, also of those that are held out: the same in every run."""
        rows, whose = self.rows(names)
        rows, first = np.unique(rows, return_index=True)  # a cell that occurs several times is one cell
        return pooled_scaling.Fence.of(x[rows], Rows(len(rows), whose[first], self.thresholds))

    def inputs(self, cells: F64) -> tuple[F64, Contribution]:
        """The mean of each group, from the cells that `rows` names: for use at this site, and to be sent encrypted."""
        codes = self.codes[self.codes >= 0]
        of_donors = cells.reshape(len(codes), self.size, -1).mean(axis=1)
        means = np.stack([of_donors[codes == g].mean(axis=0) for g in range(len(self))])
        of = Rows(len(codes), np.arange(len(codes)), self.thresholds, cells=np.full(len(codes), self.least))
        return means, of.grouped(codes, len(self), means)
