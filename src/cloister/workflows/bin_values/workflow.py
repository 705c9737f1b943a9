"""Bin expression values by edges that all sites share (`bin-values`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.mpc.sums import pooled_quantiles
from cloister.papers import averaged_quantiles
from cloister.report.figures import COLOURS, QUIET, STYLES, canvas, log_scale, shown
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.common import common_genes
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option

if TYPE_CHECKING:
    from anndata import AnnData

MAX_BINS = 1024


@dataclass(frozen=True)
class Options:
    n_bins: int = option(51, "number of bins, including the zero bin; scGPT uses 51")
    layer: str | None = option(None, "layer to bin; X by default")
    key_added: str = option("binned", "name of the layer for the result")
    min_values: int = option(200, "minimum number of non-zero values at a site")
    donor_key: str | None = option(None, "column of obs with donor names; without it, thresholds count cells only")
    min_donors: int = option(
        3, "minimum number of a site's own donors behind each of its counts; needs donor_key", opens=True
    )
    min_count: int = option(
        10, "minimum number of a site's own values behind each of its counts, hardened mode", opens=True
    )

    def __post_init__(self) -> None:
        if not 3 <= self.n_bins <= MAX_BINS:
            raise ParameterError(f"option 'n_bins' must be between 3 and {MAX_BINS}, found {self.n_bins}")
        if self.min_values < 1:
            raise ParameterError(f"option 'min_values' must be at least 1, found {self.min_values}")
        if self.min_count < 2:
            raise ParameterError(f"option 'min_count' must be at least 2, found {self.min_count}")
        check_min_donors(self.min_donors)
        if not self.key_added or self.key_added == self.layer:
            raise ParameterError(
                f"option 'key_added' must name another layer than the one to bin, found {self.layer!r}"
            )


def bin_values(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Digitise expression values by bin edges that all sites of the study share.

    Parameters
    ----------
    adata
        Counts or log values, sparse or dense; zeros are kept as bin 0 and do not count.
    session
        This site's place in a study of `bin-values`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.layers[key_added]` : integer matrix
        0 for zeros, 1 … n_bins - 1 for the others; as sparse as the input. The edges are `n_bins - 1` quantiles of the
        non-zero values of all sites. Each value is first replaced by the mean of `min_count` neighbouring values of its
        site, from `min_donors` donors where named. A value that several edges are equal to goes to one of their
        bins at random, as in scGPT.
    `adata.uns["cloister"]["bin_edges"]` : array
        The shared edges.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    seen = cells.survey(adata, options.layer)
    names = [str(g) for g in adata.var_names]
    agreed = session.run(common_genes.site, common_genes.Params(session.sites, session.coordinator), seen.kind, names)
    if session.mode == "published":
        values = Values(adata, options.layer, _range(adata, options))
        own = np.concatenate([*values])
        edges = session.run(averaged_quantiles.site, averaged(session, options), own, int(adata.n_obs))
    else:
        values = Values(adata, options.layer)
        given = seen.table if options.donor_key is None and seen.table is not None else values.pieces(options.donor_key)
        own_least = session.thresholds(min_cells=options.min_count, min_donors=options.min_donors)
        edges = session.run(pooled_quantiles.site, pooled(session, options, agreed.kind), given, own_least)
    ties = int(session.rng("ties").integers(1 << 63))
    adata.layers[options.key_added] = cells.map_values(
        adata, lambda v, at: digitise(v, edges, spread(at, ties)), options.layer, np.int16
    )
    store = adata.uns.setdefault("cloister", {})
    store["bin_edges"] = edges
    store["genes_in_common"] = len(agreed.names)
    result: dict[str, Any] = {"bin_edges": [float(e) for e in edges]}
    if values.range is not None:
        result["values_of_too_few_donors"] = values.held  # they count, at the end of the range that enough donors reach
    return Outcome(adata, result)


@dataclass
class Values:
    """The non-zero values of some cells at a time, within a range."""

    adata: AnnData
    layer: str | None
    range: tuple[float, float] | None = None
    held: int = 0  # of the last pass: values beyond the range

    def pieces(self, donor_key: str | None) -> Iterator[F64 | tuple[F64, I64]]:
        """The values, each with its donor where donors are named."""
        if donor_key is None:
            yield from self
            return
        codes = cells.donor_codes(self.adata, donor_key)
        for rows, block in cells.chunks(self.adata, self.layer):
            there = block.data != 0
            yield block.data[there].astype(np.float64), np.repeat(codes[rows], np.diff(block.indptr))[there]

    def __iter__(self) -> Iterator[F64]:
        self.held = 0
        for values in cells.nonzero_values(self.adata, self.layer):
            if self.range is None:
                yield values
            else:
                within = np.clip(values, *self.range)
                self.held += int(np.count_nonzero(within != values))
                yield within


def _range(adata: AnnData, options: Options) -> tuple[float, float] | None:
    """Where donors are named: what lies beyond the values of `min_donors` of them counts as the last that does not.

    So no edge is a value that fewer persons have: at or beyond every edge are values of that many donors of one site.
    """
    if options.donor_key is None:
        return None
    return cells.common_range(adata, options.donor_key, options.min_donors, options.layer)


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and hand the edges out."""
    agreed = session.run(common_genes.coordinator, common_genes.Params(session.sites, session.coordinator))
    if session.mode == "published":
        edges = session.run(averaged_quantiles.coordinator, averaged(session, options))
    else:
        edges = session.run(pooled_quantiles.coordinator, pooled(session, options, agreed.kind))
    return Outcome(None, {"bin_edges": [float(e) for e in edges]})


def averaged(session: Session, options: Options) -> averaged_quantiles.Params:
    return averaged_quantiles.Params(session.sites, session.coordinator, options.n_bins - 1)


def pooled(session: Session, options: Options, kind: str) -> pooled_quantiles.Params:
    whole = kind == "counts"
    return pooled_quantiles.Params(
        session.sites, session.coordinator, options.n_bins - 1, whole, options.min_count, min_donors=options.min_donors
    )


def digitise(values: F64, edges: F64, shares: F64) -> I64:
    """Bins of non-zero values: 1 … len(edges); what lies below the first edge counts as in the first bin.

    Where several edges are equal, as on counts, a value that equals them belongs to all of their bins. It goes to the
    one that its share in [0, 1) points at, so that bins are filled evenly; scGPT's `binning` draws it in the same way.
    """
    whole = values.astype(np.int32) if len(values) and values.min() >= 0 and values.max() < len(values) else None
    if whole is not None and np.array_equal(whole, values):  # counts: one search for each number, not for each value
        first, equal = _bins_of(np.arange(int(whole.max()) + 1.0), edges)
        first, equal = first[whole], equal[whole]
    else:
        first, equal = _bins_of(values, edges)
    bins: I64 = first + (shares * equal).astype(np.int64)
    return bins


def _bins_of(values: F64, edges: F64) -> tuple[I64, I64]:
    """The first bin of each value, and how many bins it has to choose from."""
    last = np.searchsorted(edges, values, side="right")
    before = np.searchsorted(edges, edges, side="left")[np.maximum(last - 1, 0)]
    equal = np.where((last > 0) & (edges[np.maximum(last - 1, 0)] == values), last - before, 1)
    first = last + 1 - equal
    top = len(edges)
    return np.clip(first, 1, top), np.minimum(equal, top + 1 - np.clip(first, 1, top))


def spread(at: U64, seed: int) -> F64:
    """A number in [0, 1) for every place in a matrix, however the matrix is cut: splitmix64 of place and seed."""
    z = (at + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    shares: F64 = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return shares


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot be binned; return what the user should know."""
    cells.check_donors(adata, options.donor_key, options.min_donors)
    seen = cells.check_cells(adata, layer=options.layer)
    assert seen is not None
    if not isinstance(adata.uns.get("cloister", {}), MutableMapping):
        raise DataError("adata.uns['cloister'] is taken by something else; rename or remove it")
    stored = seen.nonzero
    if stored < options.min_values:
        raise DataError(
            f"{stored} non-zero values, fewer than {options.min_values}: quantiles of so few give them away;"
            " leave this site out, or lower min_values= if all agree"
        )
    return []


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """Values per bin, and the edges, at each site against all sites together, from a sample of the cells here."""
    sites = {p: o.adata for p, o in sorted(outcomes.items()) if o.adata is not None}
    if not sites:
        return []
    values = {p: cells.sample_values(a, options.layer) for p, a in sites.items()}
    edges = np.asarray(next(iter(sites.values())).uns["cloister"]["bin_edges"])
    together = np.concatenate([*values.values()])
    n = len(edges)

    def share(v: Any) -> Any:
        return np.bincount(digitise(v, edges, spread(np.arange(len(v), dtype=np.uint64), 0)), minlength=n + 1)[
            1:
        ] / len(v)

    with canvas() as c:
        c.axis.bar(np.arange(1, n + 1), share(together), width=0.9, color=QUIET, label="all sites")
        for i, (p, v) in enumerate(values.items()):
            at = np.flatnonzero(filled := share(v))
            c.axis.plot(
                at + 1, filled[at], marker="o^sDvP*X"[i % 8], ls="", ms=4.5, c=COLOURS[i % len(COLOURS)], label=shown(p)
            )
        c.axis.set(xlabel="bin", ylabel="share of the non-zero values")
        c.axis.legend()
        empty = int(np.sum(share(together) == 0))
        alt = (
            f"Share of the non-zero values in each of {n} bins: bars for all sites together, points for each of"
            f" {len(sites)} sites. {empty} bins are empty, because values tie."
        )
        first = c.done("Values per bin", alt)
    levels = np.linspace(0, 1, n)
    with canvas() as c:
        c.axis.plot(levels, np.quantile(together, levels), lw=7, c="#d5d9d7", label="all values in one place")
        for i, (p, v) in enumerate(values.items()):
            colour, style = COLOURS[i % len(COLOURS)], STYLES[1 + i % 3]
            c.axis.plot(levels, np.quantile(v, levels), lw=1.3, ls=style, c=colour, label=f"{shown(p)} alone")
        c.axis.plot(levels, edges, lw=1.8, c="#1d2329", label="shared edges")
        c.axis.set(xlabel="quantile", ylabel="edge")
        log_scale(c.axis)
        c.axis.legend()
        off = float(np.max(np.abs(edges - np.quantile(together, levels)) / edges))
        alt = (
            f"The {n} shared bin edges against the quantiles of all values in one place and of each site alone. The"
            f" shared edges differ from those of all values by at most {off:.2%}."
        )
        second = c.done("Bin edges: shared, pooled and alone", alt)
    return [first, second]


WORKFLOW = Workflow(
    name="bin-values",
    summary="Digitise expression values by bin edges that all sites share.",
    options=Options,
    modes=modes_of("bin-values"),
    site=site,
    coordinator=coordinator,
    check=check,
    writes=("layers[{key_added!r}]",),
    figures=figures,
)
