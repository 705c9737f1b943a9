"""Compare groups of donors: which genes and which shares of cell types differ (`compare-groups`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cloister.arrays import F64, I64
from cloister.cells import tables as cells
from cloister.cells.bulks import add_up
from cloister.cells.genes import check_unique, gene_names, plain_name
from cloister.disclosure import Thresholds
from cloister.errors import DataError
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Party
from cloister.workflows import Workflow
from cloister.workflows.compare_groups import figures as drawn
from cloister.workflows.compare_groups import pooled_contrasts as protocol
from cloister.workflows.compare_groups.contrast_terms import Bulk, Donors, Params, Part, Table, admitted
from cloister.workflows.compare_groups.options import Options as Options
from cloister.workflows.modes import modes_of

if TYPE_CHECKING:
    from anndata import AnnData


def compare_groups(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Find the genes and the cell types that differ between groups of donors of all sites.

    Counts are added up per donor and cell type, and compared as limma-voom does on the pooled donors; shares of cell
    types by a linear model of the same kind (propeller). Every donor is one sample.

    Parameters
    ----------
    adata
        Raw counts, sparse or dense (for `compare="composition"` any values), with the columns that the study names.
    session
        This site's place in a study of `compare-groups`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.uns[key_added]["expression"]` : :class:`pandas.DataFrame`
        A row per cell type, contrast and gene: `log_fold_change` (base 2), `average`, `error`, `t`, `p`, `fdr`.
    `adata.uns[key_added]["composition"]` : :class:`pandas.DataFrame`
        A row per contrast and cell type: `effect` (log odds, or angle), the mean shares, `error`, `t`, `p`, `fdr`.
    `adata.uns[key_added]["summary"]` : :class:`str`
        JSON: donors, priors, differences found, what was left out and why, and what this site excluded of its own.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    mine = donors_of(adata, options, session.thresholds(min_donors=options.min_donors))
    found: protocol.Compared = session.run(protocol.site, params_of(session.sites, session.coordinator, options), mine)
    made = outcome_of(found, options)
    if found.excluded:
        made.result["excluded_here"] = list(found.excluded)  # the other parties do not learn this
    made.adata = adata
    adata.uns[options.key_added] = {**drawn.tables(found, options), "summary": json.dumps(made.result)}
    return made


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and follow the fit."""
    params = params_of(session.sites, session.coordinator, options)
    return outcome_of(session.run(protocol.coordinator, params), options)


def outcome_of(found: protocol.Compared, options: Options) -> Outcome:
    return Outcome(None, drawn.summary(found, options), model=drawn.Comparison(**drawn.tables(found, options)))


def params_of(sites: tuple[Party, ...], coordinator: Party, options: Options) -> Params:
    return Params(
        sites,
        coordinator,
        options.groups,
        options.pairs(),
        options.covariates,
        options.block,
        () if options.label_key is None else options.labels or None,
        options.expression,
        options.composition,
        "rle",
        "logit",
        options.min_donors,
        options.min_count,
    )


# ---- cells of a site -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Samples:
    """Which cell belongs to which sample; a sample is one donor's cells of one group."""

    of_cell: I64  # -1: of no group
    donor: I64  # (n,)
    group: I64
    first: I64  # one cell of each sample


def samples_of(adata: AnnData, options: Options) -> Samples:
    donors, donor = np.unique(adata.obs[options.donor_key].astype(str).to_numpy(), return_inverse=True)
    place = {name: i for i, name in enumerate(options.groups)}
    group = np.array([place.get(name, -1) for name in adata.obs[options.group_key].astype(str)], np.int64)
    code = np.where(group < 0, -1, donor * len(options.groups) + group)
    there, first, of = np.unique(code, return_index=True, return_inverse=True)
    outside = int(there[0] == -1) if len(there) else 0
    there, first = there[outside:], first[outside:]
    kinds = len(options.groups)
    assert len(donors) * kinds > (there.max() if len(there) else 0)
    return Samples((of - outside).astype(np.int64), there // kinds, there % kinds, first)


def labels_of(adata: AnnData, options: Options) -> tuple[I64, list[str]]:
    """Code of each cell's type, -1 for none, and the types' names."""
    if options.label_key is None:
        return np.zeros(adata.n_obs, np.int64), [""]
    column = adata.obs[options.label_key]
    names = sorted({str(v) for v in column[~column.isna()]})
    place = {name: i for i, name in enumerate(names)}
    return np.array([place.get(str(v), -1) for v in column.astype(object)], np.int64), names


def donors_of(adata: AnnData, options: Options, thresholds: Thresholds | None = None) -> Donors:
    """Counts of each sample and cell type, in one pass over the cells."""
    thresholds = thresholds or Thresholds(min_donors=options.min_donors)
    samples, (label, labels) = samples_of(adata, options), labels_of(adata, options)
    n, usable = len(samples.donor), (samples.of_cell >= 0) & (label >= 0)
    code = np.where(usable, label * n + samples.of_cell, -1)
    number = np.bincount(code[usable], minlength=n * len(labels)).reshape(len(labels), n)
    bulks: dict[str, Bulk] = {}
    if options.expression:
        enough = np.flatnonzero(number.ravel() >= options.min_cells)
        place = np.full(n * len(labels) + 1, -1)  # the last is that of code -1
        place[enough] = np.arange(len(enough))
        counts = add_up(adata, place[code], len(enough), options.layer)
        for k, name in enumerate(labels):
            mine = np.flatnonzero(enough // n == k)
            bulks[name] = Bulk(enough[mine] % n, counts[mine], number[k, enough[mine] % n])
    shown = {name: number[k] for k, name in enumerate(labels)} if options.composition else {}
    covariates = tuple(covariate_of(adata, name, samples) for name in options.covariates)
    names = tuple(own_names(adata, options))
    return Donors(names, samples.donor, samples.group, covariates, bulks, shown, thresholds)


def covariate_of(adata: AnnData, name: str, samples: Samples) -> F64 | tuple[str, ...]:
    column = adata.obs[name]
    if column.dtype.kind in "iuf":
        numbers: F64 = column.to_numpy(dtype=np.float64)[samples.first]
        return numbers
    return tuple(str(column.iloc[i]) for i in samples.first)


def own_names(adata: AnnData, options: Options) -> list[str]:
    if options.names == "index":
        return [plain_name(str(name)) for name in adata.var_names]
    return gene_names(adata.var, options.names)


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these donors cannot take part; return what the user should know."""
    return notes_of(adata, options, checked_samples(adata, options))


def checked_samples(adata: AnnData, options: Options) -> Samples:
    """Raise `DataError` for cells that cannot be compared, wherever that is done."""
    for key in (options.group_key, *options.covariates, *([options.label_key] if options.label_key else [])):
        if key not in adata.obs:
            there = ", ".join(map(repr, adata.obs)) or "nothing"
            raise DataError(f"adata.obs[{key!r}] is missing; there is {there}")
    cells.donors(adata, options.donor_key)
    if options.expression:
        seen = cells.check_cells(adata, layer=options.layer)
        assert seen is not None
        if seen.kind != "counts":
            raise DataError(f"expected raw counts, found {seen.kind} values; pass layer=, or compare='composition'")
        check_unique(own_names(adata, options), "Gene names")
    samples = samples_of(adata, options)
    check_samples(adata, options, samples)
    check_covariates(adata, options, samples)
    return samples


def check_samples(adata: AnnData, options: Options, samples: Samples) -> None:
    if not len(samples.donor):
        raise DataError(f"no cell in adata.obs[{options.group_key!r}] is of {', '.join(options.groups)}")
    twice = len(set(samples.donor.tolist())) < len(samples.donor)
    if twice and options.block != "donor":
        raise DataError(
            "some donors have cells in several groups, which are not independent samples; "
            "pass block='donor' to compare them within donors"
        )
    if not twice and options.block == "donor":
        raise DataError(
            "no donor here has cells in two groups, so nothing can be compared within donors; pass block='site'"
        )
    if options.labels and (other := sorted({*labels_of(adata, options)[1]} - {*options.labels})):
        raise DataError(
            f"{len(other)} name(s) in adata.obs[{options.label_key!r}] are not in the study's list (e.g. '{other[0]}');"
            " rename them, or agree on a longer list"
        )


def check_covariates(adata: AnnData, options: Options, samples: Samples) -> None:
    """One value for each sample, and none missing."""
    here = samples.of_cell >= 0
    for name in options.covariates:
        column = adata.obs[name]
        if column[here].isna().any() or (column.dtype.kind == "f" and not np.isfinite(column[here]).all()):
            raise DataError(f"adata.obs[{name!r}] is missing for some cells; fill it, or leave the covariate out")
        codes = np.unique(column.astype(str).to_numpy(), return_inverse=True)[1]
        if np.any(codes[here] != codes[samples.first][samples.of_cell[here]]):
            raise DataError(f"adata.obs[{name!r}] differs between cells of one donor and group; a covariate may not")


def notes_of(adata: AnnData, options: Options, samples: Samples) -> list[str]:
    """What is left out of the sums, and why; raises `DataError` where nothing is left."""
    notes = []
    if outside := int((samples.of_cell < 0).sum()):
        notes.append(f"{outside} cells are of none of the groups, and left out")
    (label, labels), n = labels_of(adata, options), len(samples.donor)
    usable = (samples.of_cell >= 0) & (label >= 0)
    number = np.bincount(label[usable] * n + samples.of_cell[usable], minlength=n * len(labels)).reshape(-1, n)
    few = int(((number > 0) & (number < options.min_cells)).sum())
    if options.expression and few:
        notes.append(f"{few} samples have fewer than min_cells={options.min_cells} cells of a type, left out there")
    parts = own_parts(adata, options, samples, labels, number)
    if not any(len(part.group) for part in parts.values()):
        why = next((f"{name}: {part.excluded[-1]}" for name, part in parts.items() if part.excluded), "no cells")
        raise DataError(
            f"no table is left to which this site may add ({why}); sums over so few donors come close to single "
            "persons: leave this site out, or leave covariates out"
        )
    for name, part in parts.items():
        notes += [f"{name}: left out {text}" for text in part.excluded]
    return notes


def own_parts(adata: AnnData, options: Options, samples: Samples, labels: list[str], number: I64) -> dict[str, Part]:
    """The samples that this site may add to each table, by what it knows before the run: its own levels alone."""
    thresholds = Thresholds(min_donors=options.min_donors)
    covariates = tuple(covariate_of(adata, name, samples) for name in options.covariates)
    whole = Donors((), samples.donor, samples.group, covariates, {}, {}, thresholds)
    params = params_of((Party("here"), Party("there")), Party("coordinator"), options)

    def part(name: str, cells: I64, least: int, *, composition: bool) -> Part:
        rows = np.flatnonzero(cells >= least)
        table = Table(params, name, (), whole.levels(), composition=composition)
        none, library = cast("F64", np.zeros((len(cells), 0))), cast("F64", np.zeros(len(cells)))
        every = Part(samples.donor, samples.group, covariates, none, library, cells, thresholds)
        return admitted(params, every.only(rows), table.opened)

    made = {}
    if options.expression:
        for name, cells in zip(labels, number, strict=True):
            made[name or "all cells"] = part(name, cells, options.min_cells, composition=False)
    if options.composition:
        made["composition"] = part("composition", number.sum(axis=0), 1, composition=True)
    return made


def files(outcome: Outcome) -> dict[str, bytes]:
    """The tables, for a spreadsheet."""
    made = (
        {}
        if outcome.model is None
        else {"expression": outcome.model.expression, "composition": outcome.model.composition}
    )
    return {f"{name}.csv": table.to_csv(index=False).encode() for name, table in made.items() if len(table)}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    return drawn.figures(outcomes, options)


WORKFLOW = Workflow(
    name="compare-groups",
    summary="Find genes and cell types that differ between groups of donors, as limma-voom on pooled donors.",
    options=Options,
    modes=modes_of("compare-groups"),
    site=site,
    coordinator=coordinator,
    check=check,
    files=files,
    figures=figures,
    reads=lambda options, site: ("layer", "donor_key", "group_key", "label_key"),
    writes=("uns[{key_added!r}]",),
    retired={"normalise": "size factors are median ratios", "transform": "fractions are compared as logits"},
)
