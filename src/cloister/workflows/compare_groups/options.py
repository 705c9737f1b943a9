"""Options of `compare-groups`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cloister.errors import ParameterError
from cloister.workflows.options import check_min_donors, option

if TYPE_CHECKING:
    pass

VERSUS = " vs "


@dataclass(frozen=True)
class Options:
    groups: tuple[str, ...] = option(help="names of the groups to compare, the reference group first")
    donor_key: str = option(help="column of obs with donor names")
    group_key: str = option("condition", "column of obs with the group of each cell's donor")
    label_key: str | None = option(
        None,
        "column of obs with cell types, for one table per type and their fractions; without it, one table of all cells",
    )
    compare: Literal["both", "expression", "composition"] = option(
        "both", "quantity to compare: gene expression, fractions of cell types, or both"
    )
    contrasts: tuple[str, ...] = option((), "comparisons 'A vs B'; by default every group against the first")
    covariates: tuple[str, ...] = option((), "further columns of obs in the design, numeric or categorical")
    block: Literal["site", "donor", "none"] = option(
        "site", "blocking factor: one level per site, one per donor (paired groups), or none"
    )
    labels: tuple[str, ...] = option((), "complete list of cell types; if empty, the sites' names are collected")
    layer: str | None = option(None, "layer with the counts; X by default")
    names: Literal["index", "symbol", "ensembl"] = option(
        "index", "gene names to match by: var_names, or symbols or Ensembl ids from var"
    )
    min_cells: int = option(10, "minimum number of cells per donor and cell type")
    min_count: float = option(
        10.0, "minimum count of a gene in a donor of mean library size; enough donors must reach it"
    )
    min_donors: int = option(3, "minimum number of a site's own donors behind any opened number", opens=True)
    fdr: float = option(0.05, "false discovery rate below which the report marks a difference")
    key_added: str = option("groups", "key of uns for the result")

    def __post_init__(self) -> None:
        if len(self.groups) < 2 or len(set(self.groups)) != len(self.groups):
            raise ParameterError("option 'groups' needs at least two names, each once, the reference first")
        if any(VERSUS in name for name in self.groups):
            raise ParameterError(f"the name of a group may not contain {VERSUS!r}; rename it at all sites")
        if self.compare == "composition" and self.label_key is None:
            raise ParameterError("shares of cell types need the option 'label_key'")
        if len(set(self.covariates)) != len(self.covariates) or {self.group_key, self.donor_key} & {*self.covariates}:
            raise ParameterError("option 'covariates' must name further columns, each once")
        if not 0 < self.fdr < 1 or not self.min_count > 0 or self.min_cells < 1:
            raise ParameterError("options 'fdr' must be in (0, 1), 'min_count' above 0, 'min_cells' at least 1")
        check_min_donors(self.min_donors)
        self.pairs()

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The contrasts, as positions among the groups."""
        if not self.contrasts:
            return tuple((i, 0) for i in range(1, len(self.groups)))
        made = []
        for text in self.contrasts:
            one, _, other = text.partition(VERSUS)
            if one == other or not {one, other} <= set(self.groups):
                raise ParameterError(f"contrast {text!r} must be 'A vs B' with two of {', '.join(self.groups)}")
            made.append((self.groups.index(one), self.groups.index(other)))
        return tuple(made)

    def contrast_names(self) -> list[str]:
        return [f"{self.groups[a]}{VERSUS}{self.groups[b]}" for a, b in self.pairs()]

    @property
    def expression(self) -> bool:
        return self.compare != "composition"

    @property
    def composition(self) -> bool:
        return self.compare != "expression" and self.label_key is not None
