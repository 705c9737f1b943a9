"""Options, a site's donors, and the parts of the parties."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.cells import tables as cells
from cloister.cells.donors import donor_ids
from cloister.cells.genes import check_unique, gene_names, plain_name
from cloister.disclosure import DonorTable, Thresholds
from cloister.errors import DataError, ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Party
from cloister.workflows import Workflow
from cloister.workflows.model_outcome import figures as drawn
from cloister.workflows.model_outcome import pooled_outcomes as protocol
from cloister.workflows.model_outcome.features import (
    Design,
    Samples,
    column_of,
    matrix_of,
    numbers_of,
    samples_of,
    weights_of,
)
from cloister.workflows.model_outcome.pooled_outcomes import Donors, Params
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option

if TYPE_CHECKING:
    from anndata import AnnData

SURVIVAL = ("cox", "km")
COUNTS = ("poisson", "negbin")
BLOCK = Thresholds().min_donors  # smallest block of donors that are left out together


@dataclass(frozen=True)
class Options:
    model: Literal["cox", "km", "logistic", "linear", "poisson", "negbin"] = option(
        help="kind of outcome: Cox regression, Kaplan-Meier curves, or logistic, linear, Poisson, negative binomial"
    )
    outcome_key: str = option(help="column of obs with each donor's outcome; for survival, whether the event was seen")
    donor_key: str = option(help="column of obs that names each cell's donor")
    features: tuple[str, ...] = option((), "features of a donor: COLUMN, share:TYPE, gene:NAME or mean:COLUMN")
    covariates: tuple[str, ...] = option((), "features that every regression is adjusted for")
    interactions: tuple[str, ...] = option((), "products of two of them, 'A * B'")
    contrasts: tuple[str, ...] = option((), "combinations of coefficients to test, 'A - B'")
    each: bool = option(default=False, help="a regression for each feature, instead of one with all of them")
    event: str = option("", "value of outcome_key that is the outcome; by default 1 or True")
    time_key: str | None = option(None, "column of obs with the time of the event or of the last visit")
    horizon: float = option(0.0, "time at which follow-up is cut, in the unit of time_key; needed for survival")
    intervals: int = option(36, "intervals of time up to the horizon; events of one interval are tied")
    exposure_key: str | None = option(None, "column of obs with the exposure of a count, such as years of observation")
    group_key: str | None = option(None, "column of obs with the arms of survival curves")
    groups: tuple[str, ...] = option((), "names of the arms")
    label_key: str | None = option(None, "column of obs with cell types, for features of cell types")
    labels: tuple[str, ...] = option((), "all names of cell types, for shares")
    layer: str | None = option(None, "layer that holds the counts; X by default")
    names: Literal["index", "symbol", "ensembl"] = option("index", "gene names to match by, as in var")
    min_cells: int = option(10, "smallest number of cells of a donor, and of a type for its expression")
    min_donors: int = option(3, "smallest number of a site's own donors behind any opened number", opens=True)
    level: float = option(0.95, "level of confidence intervals")
    key_added: str = option("outcome", "name in uns")

    def __post_init__(self) -> None:
        check_min_donors(self.min_donors)
        if not 0 < self.level < 1 or self.min_cells < 1:
            raise ParameterError("options 'level' must be in (0, 1) and 'min_cells' at least 1")
        if self.survival:
            if self.time_key is None or not self.horizon > 0:
                raise ParameterError(f"model '{self.model}' needs the options 'time_key' and 'horizon'")
            if not 2 <= self.intervals <= 500:
                raise ParameterError(f"option 'intervals' must be 2 to 500, found {self.intervals}")
        if self.exposure_key is not None and self.model not in COUNTS:
            raise ParameterError("option 'exposure_key' goes with the models poisson and negbin")
        if self.model == "km":
            if self.features or self.covariates:
                raise ParameterError(
                    "survival curves have arms ('group_key', 'groups'), no features; or use model 'cox'"
                )
            if bool(self.groups) != (self.group_key is not None):
                raise ParameterError("give both 'group_key' and 'groups', or neither for one curve of all donors")
            return
        design = self.design
        types = [f.name for f in design.all if f.kind == "share"]
        if types and not {*types} <= {*self.labels}:
            raise ParameterError("features 'share:TYPE' need the option 'labels' with all cell types, these among them")
        if len(self.labels) == 1 or len(set(self.labels)) != len(self.labels):
            raise ParameterError("option 'labels' needs at least two cell types, each once")
        for fit in design.fits if self.contrasts else ():
            for text in self.contrasts:
                weights_of(text, [design.columns[c] for c in fit])

    @property
    def survival(self) -> bool:
        return self.model in SURVIVAL

    @property
    def arms(self) -> tuple[str, ...]:
        return self.groups or ("all",)

    @property
    def design(self) -> Design:
        return Design.of(self.features, self.covariates, self.interactions, each=self.each)

    @property
    def typed(self) -> bool:
        return self.model != "km" and any(f.kind == "share" or f.within for f in self.design.all)


def model_outcome(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Relate an outcome of the donors of all sites to features of their cells.

    Parameters
    ----------
    adata
        Cells with the columns that the study names; raw counts where features are of genes.
    session
        This site's place in a study of `model-outcome`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.uns[key_added]["coefficients"]` : :class:`pandas.DataFrame`
        A row per regression and term: `coefficient`, `error`, `low`, `high`, `ratio`, `statistic`, `p`, `fdr`.
    `adata.uns[key_added]["contrasts"]`, `["calibration"]`, `["curves"]` : :class:`pandas.DataFrame`
        Tests of contrasts; observed and expected outcomes by predicted risk; survival by arm and time.
    `adata.uns[key_added]["summary"]` : :class:`str`
        JSON: donors, events, concordance, tests, notes, and what this site left out of its own.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    mine, left_out = donors_of(
        adata, options, session.thresholds(min_donors=options.min_donors, min_cells=options.min_cells)
    )
    session.admit_donors(answered_of(mine, options, params_of(session.sites, session.coordinator, options)))
    found: protocol.Modelled = session.run(protocol.site, params_of(session.sites, session.coordinator, options), mine)
    made = outcome_of(found, options)
    if excluded := [*left_out, *found.excluded]:
        made.result["excluded_here"] = excluded  # the other parties do not learn this
    made.adata = adata
    adata.uns[options.key_added] = {**drawn.tables(found, options), "summary": json.dumps(made.result)}
    return made


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and follow the fit."""
    return outcome_of(
        session.run(protocol.coordinator, params_of(session.sites, session.coordinator, options)), options
    )


def outcome_of(found: protocol.Modelled, options: Options) -> Outcome:
    return Outcome(None, drawn.summary(found, options), model=drawn.Modelled(**drawn.tables(found, options)))


def params_of(sites: tuple[Party, ...], coordinator: Party, options: Options) -> Params:
    curves = options.model == "km"
    return Params(
        sites,
        coordinator,
        options.model,
        () if curves else options.design.columns,
        () if curves else options.design.fits,
        options.intervals if options.survival else 0,
        options.arms if curves else (),
        options.min_donors,
    )


# ---- donors of a site ------------------------------------------------------------------------------------------------


def own_names(adata: AnnData, options: Options) -> list[str]:
    if options.names == "index":
        return [plain_name(str(name)) for name in adata.var_names]
    return gene_names(adata.var, options.names)


def outcome_column(adata: AnnData, options: Options, samples: Samples) -> F64:
    """A number for each donor, NaN where it is missing; 1 and 0 for an event."""
    if options.model in ("linear", *COUNTS):
        return numbers_of(adata, options.outcome_key, samples)
    values = column_of(adata, options.outcome_key, samples)
    known = [v for v in values if v is not None]
    if options.event:
        return np.array([np.nan if v is None else float(str(v) == options.event) for v in values])
    if not all(v in (0, 1) or str(v) in ("0", "1", "True", "False") for v in known):
        raise DataError(
            f"adata.obs[{options.outcome_key!r}] holds values other than 0 and 1; pass event= with the value that is "
            "the outcome"
        )
    return np.array([np.nan if v is None else float(str(v) in ("1", "1.0", "True")) for v in values])


def donors_of(adata: AnnData, options: Options, thresholds: Thresholds | None = None) -> tuple[Donors, list[str]]:
    """One row per donor that has everything, and sentences about those that have not."""
    thresholds = thresholds or Thresholds(min_cells=options.min_cells, min_donors=options.min_donors)
    samples = samples_of(adata, options.donor_key)
    y = outcome_column(adata, options, samples)
    n = len(y)
    whole, notes = samples.cells >= options.min_cells, []
    if few := int((~whole).sum()):
        notes.append(f"{few} donors have fewer than min_cells = {options.min_cells} cells, and are left out")
    x: F64 = np.zeros((n, 0))
    if options.model != "km":
        x = matrix_of(
            adata,
            options.design,
            samples,
            label_key=options.label_key,
            labels=options.labels,
            layer=options.layer,
            gene_names=own_names(adata, options),
            min_cells=options.min_cells,
        )
    there = np.isfinite(y) & np.isfinite(x).all(axis=1)
    interval: I64 | None = None
    if options.time_key is not None:
        time = numbers_of(adata, options.time_key, samples)
        if np.any(time[np.isfinite(time)] < 0):
            raise DataError(f"adata.obs[{options.time_key!r}] holds a time below 0")
        there &= np.isfinite(time)
        at = np.floor(np.nan_to_num(time) / options.horizon * options.intervals).astype(np.int64)
        y = np.where(time >= options.horizon, np.where(np.isfinite(y), 0.0, np.nan), y)
        interval = np.minimum(at, options.intervals - 1)
    exposure = None if options.exposure_key is None else numbers_of(adata, options.exposure_key, samples)
    if exposure is not None:
        there &= np.isfinite(exposure)
    arm: I64 | None = None
    if options.model == "km":
        arm = np.zeros(n, np.int64)
        if options.group_key is not None:
            place = {name: i for i, name in enumerate(options.groups)}
            arm = np.array([place.get(str(v), -1) for v in column_of(adata, options.group_key, samples)], np.int64)
    if missing := int((whole & ~there).sum()):
        notes.append(f"{missing} donors lack a feature, the outcome or its time, and are left out")
    at_all = np.flatnonzero(whole & there)

    def some(column: Any) -> Any:
        return None if column is None else column[at_all]

    ids = donor_ids(adata, samples.of_cell, samples.names)
    block = None if options.model == "km" else blocks_of(ids, whole & there, thresholds.min_donors)
    columns = (some(interval), some(exposure), some(arm), thresholds, some(block))
    names = tuple(ids[i] for i in at_all)
    return Donors(x[at_all], y[at_all], samples.cells[at_all], *columns, names), notes


def answered_of(mine: Donors, options: Options, params: Params) -> DonorTable:
    """What a run answers about which donors of this site, to be compared with earlier runs there."""
    protocol.check_site(params, mine)
    terms: dict[str, str] = {}
    if options.survival:
        shown = (options.horizon, options.intervals, options.event)
        terms[f"times '{options.time_key}' of '{options.outcome_key}'"] = json.dumps(shown)
    used: dict[str, F64] = {}
    levels: dict[str, F64 | I64] = {}
    spent: list[str] = []
    if options.model == "km":
        assert mine.arm is not None
        at, *_ = protocol.runs_of(params, mine)
        levels[f"arm {options.group_key}"], y = mine.arm[at], mine.y[at]
    else:
        ready = protocol.prepared(params, mine)
        at, y = ready.at, ready.y
        levels |= {c: mine.x[at, j] for j, c in enumerate(params.columns)}
        used |= {c: ready.x[:, j] for j, c in enumerate(params.columns)}
        about = [options.model, options.outcome_key, options.event, options.exposure_key]
        spent = [json.dumps([*about, c]) for c in params.columns]
    levels[f"outcome {options.outcome_key}"], used[f"outcome {options.outcome_key}"] = mine.y[at], y
    if mine.exposure is not None:
        used[f"exposure {options.exposure_key}"] = mine.exposure[at]
    names = tuple(mine.names[i] for i in at)
    # the extra variance of a negative binomial is chosen by all sites together, so each run has new weights
    return DonorTable(names, used, levels, terms, tuple(spent), again=options.model == "negbin")


def blocks_of(names: Sequence[str], there: Bits, least: int) -> I64:
    """Blocks of `least` donors or more by a hash of their names; -1 where one of the block is not there.

    Runs on the same donors that leave out some differ in whole blocks, whatever their features and min_donors.
    """
    order = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    size = BLOCK
    while size < least:  # a block for another `least` is a union of these, or a part of one
        size *= 2
    block, small = np.empty(len(names), np.int64), len(names) // BLOCK
    one = np.minimum(np.arange(len(names)) // BLOCK, max(small - 1, 0))
    block[order] = np.minimum(one // (size // BLOCK), max(small // (size // BLOCK) - 1, 0))
    block[np.isin(block, block[~there])] = -1
    return block


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these donors cannot take part; return what the user should know."""
    cells.donors(adata, options.donor_key)
    if options.model != "km" and any(f.genes for f in options.design.all):
        seen = cells.check_cells(adata, layer=options.layer)
        assert seen is not None
        if seen.kind != "counts":
            raise DataError(f"features of genes need raw counts, found {seen.kind} values; pass layer=")
        check_unique(own_names(adata, options), "Gene names")
    mine, notes = donors_of(adata, options)
    params = params_of((Party("here"), Party("there")), Party("coordinator"), options)
    side = protocol.Side(params, mine)
    if options.model in ("cox", "km", *COUNTS) and not mine.y.any():
        notes.append("no donor here has an event; this site adds donors at risk, and nothing to coefficients")
    return [*notes, *side.notes]


def files(outcome: Outcome) -> dict[str, bytes]:
    """The tables, for a spreadsheet."""
    if outcome.model is None:
        return {}
    named = {name: getattr(outcome.model, name) for name in drawn.TABLES}
    return {f"{name}.csv": table.to_csv(index=False).encode() for name, table in named.items() if len(table)}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    return drawn.figures(outcomes, options)


def reads(options: Options, site: str) -> tuple[str, ...]:
    wanted = ("layer", "donor_key", "outcome_key", "time_key", "exposure_key", "group_key")
    return (*wanted, "label_key") if options.typed else wanted


WORKFLOW = Workflow(
    name="model-outcome",
    summary="Relate outcomes of donors to features of their cells: survival, logistic, linear and count regression.",
    options=Options,
    modes=modes_of("model-outcome"),
    site=site,
    coordinator=coordinator,
    check=check,
    files=files,
    figures=figures,
    reads=reads,
    writes=("uns[{key_added!r}]",),
)
