"""Options, a site's donors, and the parts of the parties."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.arrays import F64, I64
from cloister.cells import tables as cells
from cloister.cells.bulks import add_up
from cloister.cells.donors import donor_ids
from cloister.cells.genes import check_unique, gene_names, plain_name
from cloister.disclosure import DonorTable, Thresholds
from cloister.errors import DataError, ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Party
from cloister.workflows import Workflow
from cloister.workflows.find_programs import common_programs as protocol
from cloister.workflows.find_programs import figures as drawn
from cloister.workflows.find_programs.common_programs import Params, Profiles
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option, read_options

if TYPE_CHECKING:
    from anndata import AnnData

NOBODY = Party("nobody")  # adds up


@dataclass(frozen=True)
class Options:
    donor_key: str = option(help="column of obs that names each cell's donor")
    label_key: str = option("cell_type", "column of obs with cell types")
    labels: tuple[str, ...] = option((), "names of the cell types that programs may span; needed")
    n_programs: int = option(5, "number of programs")
    n_columns: int = option(300, "pairs of cell type and gene that enter, those whose means vary most")
    center: Literal["site", "all"] = option(
        "site", "mean that is taken out: of each site, or of all; with all, programs include what differs between sites"
    )
    layer: str | None = option(None, "layer that holds the counts; X by default")
    names: Literal["index", "symbol", "ensembl"] = option("index", "gene names to match by, as in var")
    min_cells: int = option(10, "smallest number of cells of a donor and type; with fewer, the site's mean stands in")
    min_donors: int = option(3, "smallest number of a site's own donors behind any opened number", opens=True)
    key_added: str = option("program", "name in uns, and prefix of the scores in obs")

    def __post_init__(self) -> None:
        check_min_donors(self.min_donors)
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ParameterError("option 'labels' needs the names of the cell types, each once")
        if not 1 <= self.n_programs <= self.n_columns <= 2000 or self.min_cells < 1:
            raise ParameterError("expected 1 <= n_programs <= n_columns <= 2000, and min_cells of at least 1")


def find_programs(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Find programs of genes that vary together over donors and cell types, from the donors of all sites.

    Parameters
    ----------
    adata
        Raw counts, with the columns that the study names.
    session
        This site's place in a study of `find-programs`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obs[key_added + "_1"]`, ... : float
        Score of the cell's donor; it stays at the site. `model-outcome` takes it as a feature.
    `adata.uns[key_added]["loadings"]` : :class:`pandas.DataFrame`
        A row per cell type and gene, a column per program.
    `adata.uns[key_added]["summary"]` : :class:`str`
        JSON: donors, explained spread, the strongest genes of each program.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    mine, of_cell = profiles_of(adata, options, session.thresholds(min_donors=options.min_donors))
    session.admit_donors(answered_of(mine, options))
    found: protocol.Programs = session.run(protocol.site, params_of(session.sites, session.coordinator, options), mine)
    made = outcome_of(found, options)
    assert found.scores is not None
    for k in range(found.scores.shape[1]):
        adata.obs[f"{options.key_added}_{k + 1}"] = found.scores[of_cell, k]
    adata.uns[options.key_added] = {"loadings": drawn.loadings(found, options), "summary": json.dumps(made.result)}
    made.adata = adata
    return made


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and follow."""
    return outcome_of(
        session.run(protocol.coordinator, params_of(session.sites, session.coordinator, options)), options
    )


def outcome_of(found: protocol.Programs, options: Options) -> Outcome:
    return Outcome(None, drawn.summary(found, options), model=drawn.Loadings(drawn.loadings(found, options)))


def params_of(sites: tuple[Party, ...], coordinator: Party, options: Options) -> Params:
    sizes = (options.n_programs, options.n_columns, options.min_donors)
    return Params(sites, coordinator, options.labels, *sizes, within=options.center == "site")


def own_names(adata: AnnData, options: Options) -> list[str]:
    if options.names == "index":
        return [plain_name(str(name)) for name in adata.var_names]
    return gene_names(adata.var, options.names)


def profiles_of(adata: AnnData, options: Options, thresholds: Thresholds | None = None) -> tuple[Profiles, I64]:
    """Log counts per ten thousand of each donor and cell type, and which donor each cell is of."""
    thresholds = thresholds or Thresholds(min_donors=options.min_donors)
    donors, of_cell = np.unique(adata.obs[options.donor_key].astype(str).to_numpy(), return_inverse=True)
    place = {name: i for i, name in enumerate(options.labels)}
    label = np.array([place.get(str(v), -1) for v in adata.obs[options.label_key].astype(object)], np.int64)
    n, T = len(donors), len(options.labels)
    code = np.where(label >= 0, of_cell * T + label, -1)
    counts = add_up(adata, code, n * T, options.layer).reshape(n, T, -1)
    number = np.bincount(code[code >= 0], minlength=n * T).reshape(n, T)
    library = counts.sum(axis=2, keepdims=True)
    x: F64 = np.log1p(1e4 * counts / np.maximum(library, 1.0))
    present = (number >= options.min_cells) & (library[:, :, 0] > 0)
    cells_of = np.bincount(of_cell, minlength=n).astype(np.int64)
    names, ids = tuple(own_names(adata, options)), donor_ids(adata, of_cell, donors.tolist())
    return Profiles(names, x, present, cells_of, thresholds, ids), of_cell.astype(np.int64)


def answered_of(mine: Profiles, options: Options) -> DonorTable:
    """What a run answers about which donors of this site: their types, and groups, which have to stay the same."""
    params = params_of((), Party("coordinator"), options)
    groups = protocol.Side(params, mine, mine.names).groups.codes
    sets = sorted(tuple(d for d, g in zip(mine.donors, groups, strict=True) if g == k) for k in np.unique(groups))
    present = [(d, row.tolist()) for d, row in zip(mine.donors, mine.present, strict=True)]
    terms = {"groups of similar donors": json.dumps(sets), "cell types of the donors": json.dumps(present)}
    return DonorTable(mine.donors, {}, {}, terms)


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these donors cannot take part; return what the user should know."""
    cells.donors(adata, options.donor_key)
    if options.label_key not in adata.obs:
        there = ", ".join(map(repr, adata.obs))
        raise DataError(f"adata.obs[{options.label_key!r}] is missing; there is {there}")
    seen = cells.check_cells(adata, layer=options.layer)
    assert seen is not None
    if seen.kind != "counts":
        raise DataError(f"expected raw counts, found {seen.kind} values; pass layer=")
    check_unique(own_names(adata, options), "Gene names")
    mine, _ = profiles_of(adata, options)
    params = params_of((Party("here"), Party("there")), Party("coordinator"), options)
    protocol.check_site(params, mine)
    few = np.flatnonzero(mine.present.sum(axis=0) < options.min_donors)
    return [f"fewer than {options.min_donors} donors here have enough cells of '{options.labels[t]}'" for t in few]


def program_baselines(data: Mapping[str, AnnData], **options: Any) -> dict[str, Any]:
    """The same programs of the pooled donors and of each site alone, without groups.

    Returns
    -------
    `pooled`, and `SITE alone` for every site → a table of loadings as in `find_programs`.
    """
    chosen: Options = read_options(Options, options, "find-programs")
    held = {Party(p): replace(profiles_of(a, chosen)[0], thresholds=Thresholds(1, 1)) for p, a in data.items()}
    some = {"pooled": held} | {f"{p} alone": {p: mine} for p, mine in held.items()}
    params = params_of(tuple(held), NOBODY, chosen)
    return {name: drawn.loadings(protocol.ideal(params, xs)[NOBODY], chosen) for name, xs in some.items()}


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"loadings.csv": outcome.model.table.to_csv(index=False).encode()}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    return drawn.figures(outcomes, options)


WORKFLOW = Workflow(
    name="find-programs",
    summary="Find programs of genes that vary together over donors and cell types; donor scores stay at their site.",
    options=Options,
    modes=modes_of("find-programs"),
    site=site,
    coordinator=coordinator,
    check=check,
    files=files,
    figures=figures,
    reads=lambda options, site: ("layer", "donor_key", "label_key"),
    writes=("uns[{key_added!r}]",),
)
