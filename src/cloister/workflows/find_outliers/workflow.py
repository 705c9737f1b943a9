"""Find rows that are outliers among all sites' rows, not merely at their own (`find-outliers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.arrays import F64, Bits
from cloister.cells import genes
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models.disguise import disguise
from cloister.mpc.crypto.entropy import Entropy
from cloister.papers import masked_forest
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.find_outliers.figures import figures, plot_values
from cloister.workflows.modes import modes_of
from cloister.workflows.one_space import agree_on_space
from cloister.workflows.options import PAPER, check_min_donors, option

if TYPE_CHECKING:
    from anndata import AnnData

SAMPLE, SMALL = 512, 256  # rows of a tree; twice as many make up for ranges that leave out the outermost rows
SHARE = 0.05  # contamination where neither it nor a threshold is given
KEY = "outlier"
LEAST, MANY = 5, 3.0  # flags on one label from which it is warned: so many, and so many times the share of all rows


@dataclass(frozen=True)
class Options:
    use_rep: str | None = option(None, "key of obsm to use instead of X")
    layer: str | None = option(None, "layer to use instead of X")
    trees: int = option(100, "number of trees per forest")
    sample: int | None = option(
        None,
        f"number of rows per tree; by default {SAMPLE}, above {SMALL} at most half of all rows; published: {SMALL}",
    )
    forest: Literal["standard", "extended"] = option(
        "standard", "direction of splits: along columns (standard) or along random directions (extended)"
    )
    extension: int | None = option(
        None, "extended forest: number of columns per direction, less one; all columns by default"
    )
    repeats: int = option(1, "number of forests; the score is their mean")
    contamination: float | None = option(None, f"fraction of all rows to flag; {SHARE} if no threshold is given")
    threshold: float | None = option(None, "minimum score of a flagged row, instead of a fraction")
    impute: Literal["refuse", "mean"] = option(
        "refuse", "treatment of missing values: refuse them, or fill in the column's mean"
    )
    min_cells: int = option(
        10, "minimum number of a site's own rows behind each of its answers, hardened mode", opens=True
    )
    donor_key: str | None = option(None, "column of obs with donor names; without it, thresholds count cells only")
    min_donors: int = option(
        3, "minimum number of a site's own donors behind each of its answers; needs donor_key", opens=True
    )
    give: Literal["scores", "flags", "regions"] = option(
        "scores", "result that the principal server sends to sites", modes=PAPER
    )
    stretch: float = option(10.0, "largest stretch T of an axis by the mask", modes=PAPER)
    standardise: bool = option(
        default=False, help="bring columns to one scale first, as hardened mode always does", modes=PAPER
    )
    thin: float = option(0.0, "fraction of plain inliers that a site does not send", modes=PAPER)
    thin_below: float = option(
        0.5, "fraction of the site's lowest local scores that count as plain inliers", modes=PAPER
    )
    smote: float = option(0.0, "number of synthetic inliers that a site adds, as a fraction of its rows", modes=PAPER)

    key_bits: int = option(3072, "size of the Paillier keys, in bits", modes=PAPER)
    bound: float = option(float(2**30), "largest absolute value of a masked row", modes=PAPER)
    label_key: str | None = option(
        None, "column of obs with labels; a warning is printed if flags concentrate on one label", drawn=True
    )

    def __post_init__(self) -> None:
        if self.use_rep is not None and self.layer is not None:
            raise ParameterError("give either 'use_rep' or 'layer', not both")
        if self.contamination is not None and self.threshold is not None:
            raise ParameterError("give either 'contamination' or 'threshold', not both")
        ranges = (("trees", 1, 2000), ("sample", 8, 65536), ("repeats", 1, 25), ("min_cells", 2, 1000))
        for name, low, high in ranges:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ParameterError(f"option '{name}' must be from {low} to {high}, found {value}")
        if self.share is not None and not 0 < self.share < 0.5:
            raise ParameterError(f"option 'contamination' must lie between 0 and 0.5, found {self.contamination}")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ParameterError(f"option 'threshold' must lie between 0 and 1, found {self.threshold}")
        if self.extension is not None and self.extension < 1:
            raise ParameterError(f"option 'extension' must be at least 1, found {self.extension}")
        if not self.stretch > 1:
            raise ParameterError(f"option 'stretch' must be above 1, found {self.stretch}")
        check_min_donors(self.min_donors)
        if not 0 <= self.thin < 1 or not 0 <= self.smote <= 10:
            raise ParameterError("option 'thin' must be from 0 to 1, 'smote' from 0 to 10")
        if not 0 < self.thin_below <= 1:
            raise ParameterError(f"option 'thin_below' must be above 0 and at most 1, found {self.thin_below}")
        if not 3072 <= self.key_bits <= 8192 or self.key_bits % 8:
            raise ParameterError(f"option 'key_bits' must be a multiple of 8 from 3072 to 8192, found {self.key_bits}")
        if not 1 <= self.bound <= 2**50:
            raise ParameterError(f"option 'bound' must be from 1 to 2^50, found {self.bound:g}")

    @property
    def share(self) -> float | None:
        return self.contamination if self.contamination is not None or self.threshold is not None else SHARE


def find_outliers(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Score every row by how isolated it is among all sites' rows, and flag the outliers.

    Parameters
    ----------
    adata
        Rows (cells, samples) of numbers: `X`, a layer, or a key of `obsm`. Columns are matched by name.
    session
        This site's place in a study of `find-outliers`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obs["outlier_score"]` : float
        Isolation score in (0, 1), higher = more isolated. Not set where the published mode hands out flags or regions
        only, and missing for rows that `thin` kept back.
    `adata.obs["outlier"]` : bool
        Whether the row is flagged.
    `adata.uns["cloister"]["outlier_cut"]` : float
        The score from which rows are flagged (mean over repeats).
    `adata.uns["cloister"]["outlier_everyone"]` : array
        Published, `give="scores"`: the scores of all sites' rows, made-up ones too, ascending, without their owners.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    agree_on_space(session, options.use_rep, adata)
    names, X = table(adata, options)
    if session.mode == "published":
        scores, flags, cut, plain, everyone = _masked(session, options, names, X)
    else:
        everyone = None
        scores, flags, cut, plain = _counted(session, options, adata, names, X)
    if scores is not None:
        adata.obs[f"{KEY}_score"] = scores
    adata.obs[KEY] = flags
    store = adata.uns.setdefault("cloister", {})
    if cut is not None:
        store[f"{KEY}_cut"] = float(cut)
    if everyone is not None:
        store[f"{KEY}_everyone"] = everyone
    store[f"{KEY}_plot"] = plot_values(plain, scores, flags, options, session.rng("alone"))
    result: dict[str, Any] = {"rows": len(flags), "flagged": int(flags.sum())}
    result["flagged_alone"] = int(np.sum(store[f"{KEY}_plot"]["alone"]))
    if cut is not None:
        result["cut"] = float(cut)
    result |= by_label(adata, flags, options)
    return Outcome(adata, result)


def coordinator(session: Session, options: Options) -> Outcome:
    agree_on_space(session, options.use_rep)
    if session.mode == "published":
        seen = session.run(masked_forest.principal, published_params(session, options))
        return Outcome(None, {"rows": int(seen.scores.shape[1]), "flagged": int(seen.flags[0].sum())})
    outline = session.run(counted_forest.coordinator, hardened_params(session, options))
    return Outcome(None, {"ranges": sum(int((first <= last).sum()) for _, first, last in outline.ranges)})


def auxiliary(session: Session, options: Options) -> Outcome:
    if session.mode != "published":
        return Outcome()
    agree_on_space(session, options.use_rep)
    return Outcome(None, {"rows": session.run(masked_forest.auxiliary, published_params(session, options))})


def _counted(
    session: Session, options: Options, adata: AnnData, names: list[str], X: F64
) -> tuple[F64, Bits, float | None, F64]:
    donor = None if options.donor_key is None else cells.donor_codes(adata, options.donor_key)
    own = session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors)
    params, kind = hardened_params(session, options), _kind(adata, options)
    found = session.run(counted_forest.site, params, kind, names, X, donor, own)
    cuts = found.cuts if found.cuts is not None else np.full(options.repeats, float(options.threshold or 0.0))
    votes = (found.scores >= cuts[:, None]).sum(axis=0)
    return found.scores.mean(axis=0), 2 * votes > options.repeats, float(cuts.mean()), found.rows


def _masked(
    session: Session, options: Options, names: list[str], X: F64
) -> tuple[F64 | None, Bits, float | None, F64, F64 | None]:
    X = np.where(np.isfinite(X), X, np.nan_to_num(_column_means(X)))
    hidden = np.random.default_rng(list(Entropy().bytes(32)))  # all know the study's seed, and could tell made-up rows
    sent, mine = disguise(X, options.thin, options.smote, hidden, options.thin_below)
    found = session.run(masked_forest.client, published_params(session, options), names, sent)
    own = mine >= 0
    flags = np.zeros(len(X), bool)
    flags[mine[own]] = 2 * found.flags.sum(axis=0)[own] > options.repeats
    spread = X.std(axis=0)
    plain = (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    if found.scores is None:
        return None, flags, options.threshold, plain, None
    scores = np.full(len(X), np.nan)
    scores[mine[own]] = found.scores.mean(axis=0)[own]
    assert found.everyone is not None
    return scores, flags, options.threshold or found.cut, plain, np.sort(found.everyone.mean(axis=0))


def by_label(adata: AnnData, flags: Bits, options: Options) -> dict[str, Any]:
    """How many rows of each label are flagged; a warning where they are a kind of cell rather than outliers."""
    if options.label_key is None:
        return {}
    labels = adata.obs[options.label_key]
    counts = {str(n): (int(flags[(labels == n).to_numpy()].sum()), int((labels == n).sum())) for n in labels.unique()}
    counts = {name: (hit, rows) for name, (hit, rows) in counts.items() if rows}
    share, made = flags.mean(), {"flagged_per_label": {name: hit for name, (hit, _) in counts.items()}}
    often = {name: hit / rows for name, (hit, rows) in counts.items() if hit >= LEAST and hit > MANY * share * rows}
    if not often:
        return made
    worst = max(often, key=lambda name: often[name])
    return made | {
        "warning": f"{often[worst]:.0%} of the rows labelled '{worst}' are flagged, and {share:.0%} of all rows:"
        " this may be a rare kind and not outliers; look at them before they are dropped"
    }


def _column_means(X: F64) -> F64:
    there = np.isfinite(X)
    mean: F64 = np.where(there, X, 0.0).sum(axis=0) / np.maximum(there.sum(axis=0), 1)
    return mean


def hardened_params(session: Session, options: Options) -> counted_forest.Params:
    return counted_forest.Params(
        session.sites,
        session.coordinator,
        trees=options.trees,
        sample=SAMPLE if options.sample is None else options.sample,
        forest=options.forest,
        extension=options.extension,
        min_cells=options.min_cells,
        min_donors=options.min_donors,
        by_donor=options.donor_key is not None,
        repeats=options.repeats,
        contamination=options.share,
    )


def published_params(session: Session, options: Options) -> masked_forest.Params:
    return masked_forest.Params(
        session.sites,
        session.coordinator,
        session.study.auxiliaries[0],
        trees=options.trees,
        sample=SMALL if options.sample is None else options.sample,
        forest=options.forest,
        extension=options.extension,
        stretch=options.stretch,
        repeats=options.repeats,
        give=options.give,
        contamination=options.share,
        threshold=options.threshold,
        standardise=options.standardise,
        key_bits=options.key_bits,
        bound=options.bound,
    )


def table(adata: AnnData, options: Options) -> tuple[list[str], F64]:
    """Column names, and the rows as one dense table with NaN where a value is missing."""
    if options.use_rep not in (None, "X"):
        if options.use_rep not in adata.obsm:
            raise DataError(
                f"adata.obsm[{options.use_rep!r}] is missing; there is {', '.join(map(repr, adata.obsm)) or 'none'}."
                " Compute it, or pass one of these as use_rep="
            )
        found = adata.obsm[options.use_rep]
        names = [f"{options.use_rep}:{i + 1}" for i in range(found.shape[1])] if np.ndim(found) == 2 else []
    else:
        if options.layer is not None and options.layer not in adata.layers:
            there = ", ".join(map(repr, cells.layer_names(adata))) or "none"
            raise DataError(f"adata.layers[{options.layer!r}] is missing; there is {there}")
        found = adata.X if options.layer is None else adata.layers[options.layer]
        names = [str(n) for n in adata.var_names]
        if found is None:
            raise DataError("adata.X is missing; put the values there, or pass layer= or use_rep=")
    if found.shape[0] * max(1, len(names)) * 8 > cells.DENSE_LIMIT:
        raise DataError(
            f"{found.shape[0]} rows x {len(names)} columns are too many to be made dense; "
            "reduce them to some components (`shared-pca`) and pass use_rep="
        )
    found = found[:] if adata.isbacked or cells.is_on_disk(found) else found
    dense = np.asarray(found.toarray() if hasattr(found, "toarray") else found)
    if dense.ndim != 2 or 0 in dense.shape or dense.dtype.kind not in "biuf":
        raise DataError(f"expected a table of numbers, one row each, found shape {dense.shape} of {dense.dtype}")
    return names, dense.astype(np.float64)


def _kind(adata: AnnData, options: Options) -> str:
    """Sparse expression says whether it is counts or log values, so that a mix is refused; other tables are tables."""
    sparse = options.use_rep in (None, "X") and getattr(adata.X, "format", "") in ("csr", "csc")
    return cells.expression_kind(adata, options.layer) if sparse else "table"


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these rows cannot be scored; return what the user should know."""
    cells.check_donors(adata, options.donor_key, options.min_donors)
    if adata.n_obs < options.min_cells:
        raise DataError(
            f"{adata.n_obs} rows, fewer than min_cells = {options.min_cells}: sums over so few come close to single "
            "rows; leave this site out of the study"
        )
    if options.label_key is not None and options.label_key not in adata.obs:
        raise DataError(f"adata.obs[{options.label_key!r}] is missing; pass the column with the labels as label_key=")
    names, X = table(adata, options)
    genes.check_unique(names, "Column names")
    missing = int(np.isnan(X).sum())
    if np.isinf(X).any():
        raise DataError(f"{int(np.isinf(X).sum())} values are infinite; remove these rows, or make them missing")
    if missing and options.impute == "refuse":
        bad = [n for n, gone in zip(names, np.isnan(X).sum(axis=0), strict=True) if gone]
        raise DataError(
            f"{missing} values are missing, in {len(bad)} columns ({', '.join(map(repr, bad[:3]))}"
            f"{', ...' if len(bad) > 3 else ''}); fill them, drop these rows, or pass impute='mean'"
        )
    notes = []
    with np.errstate(invalid="ignore"):
        flat = [n for n, s in zip(names, np.ptp(np.nan_to_num(X), axis=0), strict=True) if s == 0]
    if flat and len(X) > 1:
        notes.append(
            f"{len(flat)} columns have one value here ({', '.join(map(repr, flat[:3]))}): they isolate nothing"
        )
    if len(X) < X.shape[1]:
        notes.append(f"{len(X)} rows and {X.shape[1]} columns: few rows for this number of columns; consider use_rep=")
    if missing:
        notes.append(f"{missing} missing values are taken as the column's mean")
    if options.min_cells < 5:
        notes.append(f"min_cells={options.min_cells}: answers about so few rows come close to single rows")
    return notes


WORKFLOW = Workflow(
    name="find-outliers",
    summary="Score and flag rows that are isolated among all sites' rows.",
    options=Options,
    modes=modes_of("find-outliers"),
    site=site,
    coordinator=coordinator,
    auxiliary=auxiliary,
    check=check,
    writes=("obs['outlier']", "obs['outlier_score']"),
    figures=figures,
    retired={
        "drop": "select rows afterwards: adata[~adata.obs['outlier']]",
        "min_count": "it is called min_cells",
    },
)
