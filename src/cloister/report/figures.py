"""Figures for the report, all in one style: points by label, confusion, histograms, a matrix, curves.

Each function returns a `Figure`, which is what a workflow's `figures(outcomes, options)` returns a list of: a title, a
sentence for those who cannot see it, and the PNG. `draw_points` and `draw_heatmap` draw on a canvas that is there
already, for `cloister.pl`. Colours are told apart by colour-blind readers, and lines by their
style too. matplotlib is the extra `report`; without it the page says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from cloister.errors import MissingExtra

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9", "#5B3A9B", "#8C2D04", "#4D4D4D", "#7A9A01")
STYLES = ("-", "--", "-.", ":")
MARKS = "o^sDvP*X<>"
QUIET = "#9aa3a5"
MOST_POINTS, MOST_LABELS, LAYERS = 5000, 20, 8
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#535c66",
    "axes.grid": True,
    "grid.color": "#e6e8e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a label may hold a dollar sign
    "figure.facecolor": "white",
}


class Figure(TypedDict):
    """What a workflow's `figures` returns a list of."""

    title: str
    alt: str  # what the figure shows, for who cannot see it
    png: bytes


@functools.cache
def _paper() -> Any:
    """The class of a figure that a notebook shows, whether pyplot was imported or not."""
    from matplotlib.figure import Figure as Plain

    class Paper(Plain):
        def _repr_png_(self) -> bytes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
                return png_of(self)

    return Paper


def png_of(paper: Any, dpi: int = 130) -> bytes:
    out = io.BytesIO()
    paper.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


class Canvas:
    """A figure to draw on; `done` makes it a PNG."""

    def __init__(self, panels: int = 1, width: float = 5.2, height: float = 3.6, rows: int = 1) -> None:
        self.paper = _paper()(figsize=(width, height), layout="constrained")
        self.axes: list[Any] = list(np.ravel(self.paper.subplots(rows, panels, squeeze=False)))

    @property
    def axis(self) -> Any:
        return self.axes[0]

    def done(self, title: str, alt: str, *, dpi: int = 130) -> Figure:
        return Figure(title=title, alt=alt, png=png_of(self.paper, dpi))


@contextlib.contextmanager
def canvas(panels: int = 1, width: float = 5.2, height: float = 3.6, rows: int = 1) -> Iterator[Canvas]:
    """Draw in the house style: `with canvas() as c: c.axis.plot(...); return c.done(title, alt)`."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "report") from None
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        yield Canvas(panels, width, height, rows)


def shown(label: object, most: int = 28) -> str:
    """A label short enough for a legend; a leading underscore would hide it."""
    text = " ".join(str(label).split()) or "(none)"
    text = text if len(text) <= most else text[: most - 1] + "…"
    return f" {text}" if text.startswith("_") else text


def log_scale(axis: Any, which: str = "y") -> None:
    """A logarithmic axis with plain numbers; the usual powers of ten would need the letters we do not parse."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"{which}axis").set_major_formatter("{x:g}")
    getattr(axis, f"{which}axis").set_minor_formatter("")


def tone(place: int) -> tuple[str, str]:
    """Colour and mark of the label at this place: ten colours, then lighter ones, then darker ones."""
    colour, again = COLOURS[place % len(COLOURS)], place // len(COLOURS)
    mark = MARKS[again % len(MARKS)]
    if again:
        parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
        parts = [(3 * v + 2 * 255) // 5 if again % 2 else v * 3 // 5 for v in parts]
        colour = "#" + "".join(f"{v:02X}" for v in parts)
    return colour, mark


def legend_beside(axis: Any, **how: Any) -> None:
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, **how)


def _legend(axis: Any, n: int) -> None:
    if n > 1:
        legend_beside(axis)


def some_points(n: int, most: int = MOST_POINTS) -> Any:
    """Places of at most so many points, the same each time."""
    return np.sort(np.random.default_rng(0).permutation(n)[:most])


def draw_points(axis: Any, points: Any, names: Any, places: Mapping[str, int], *, size: float = 7.0) -> None:
    """Points of each label in its colour, legend in the order of `places`; a place below 0 is grey.

    Points are drawn in several layers, so that the last label does not cover the others.
    """
    for layer, some in enumerate(np.array_split(np.random.default_rng(1).permutation(len(points)), LAYERS)):
        for i, (kind, place) in enumerate(places.items()):
            here = some[names[some] == kind]
            colour, mark = tone(place) if place >= 0 else (QUIET, MARKS[0])
            label = shown(kind) if layer == 0 and i < MOST_LABELS else None
            axis.scatter(points[here, 0], points[here, 1], s=size, c=colour, marker=mark, lw=0, alpha=0.75, label=label)
    axis.set(xticks=[], yticks=[])
    axis.grid(visible=False)


def embedding(
    points: Any, labels: Sequence[object], *, title: str, about: str = "Cells", order: Sequence[str] = ()
) -> Figure:
    """Cells in two dimensions, coloured by label; the first two columns of `points`, at most 5000 of them.

    Two figures with the same `order` of labels have the same colours; by default the most frequent label comes first.
    """
    points, names = np.asarray(points, dtype=float), np.asarray([str(x) for x in labels])
    keep = some_points(len(points))
    kinds, sizes = np.unique(names, return_counts=True)
    by_size = np.argsort(-sizes, kind="stable")
    kinds, sizes = kinds[by_size], sizes[by_size]
    places = {kind: i for i, kind in enumerate(dict.fromkeys([*order, *kinds.tolist()]))}
    with canvas(width=5.6, height=3.8) as c:
        draw_points(c.axis, points[keep], names[keep], {kind: places[kind] for kind in kinds.tolist()})
        c.axis.set(xlabel="dimension 1", ylabel="dimension 2")
        legend_beside(c.axis, markerscale=2.5)
        most = ", ".join(f"{k} ({s:,})" for k, s in zip(kinds[:5], sizes[:5], strict=True))
        more = f" and {len(kinds) - 5} more" if len(kinds) > 5 else ""
        return c.done(title, f"{about} in two dimensions, coloured by {len(kinds)} labels: {most}{more}.")


def confusion(truth: Sequence[object], found: Sequence[object], *, title: str, rows: str, columns: str) -> Figure:
    """How often each label `columns` was given to a cell of label `rows`, as shares of the row."""
    truth_names, found_names = np.asarray([str(x) for x in truth]), np.asarray([str(x) for x in found])
    kinds = np.unique(np.concatenate([truth_names, found_names]))
    at = {k: i for i, k in enumerate(kinds)}
    counts = np.zeros((len(kinds), len(kinds)))
    np.add.at(counts, ([at[k] for k in truth_names], [at[k] for k in found_names]), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    agreed = float(np.mean(truth_names == found_names)) if len(truth_names) else 0.0
    off = counts - np.diag(np.diag(counts))
    i, j = np.unravel_index(int(np.argmax(off)), off.shape)
    worst = f" Most often confused: {kinds[i]} taken for {kinds[j]}, {int(off[i, j]):,} times." if off.any() else ""
    alt = f"{rows} against {columns} for {len(truth_names):,} cells; {agreed:.1%} agree.{worst}"
    return heatmap(
        shares, list(kinds), list(kinds), title=title, rows=rows, columns=columns, alt=alt, low=0.0, high=1.0
    )


def heatmap(
    matrix: Any,
    row_names: Sequence[object],
    column_names: Sequence[object],
    *,
    title: str,
    rows: str,
    columns: str,
    alt: str,
    low: float | None = None,
    high: float | None = None,
) -> Figure:
    """A matrix as colours: sequential from `low`, or blue-white-red around zero where values have both signs."""
    matrix = np.asarray(matrix, dtype=float)
    with canvas(1, *heatmap_size(*matrix.shape)) as c:
        draw_heatmap(c, matrix, row_names, column_names, rows=rows, columns=columns, low=low, high=high)
        return c.done(title, alt)


def heatmap_size(n: int, m: int) -> tuple[float, float]:
    return min(2.8 + 0.3 * m, 7.5), min(1.8 + 0.28 * n, 7.0)


def draw_heatmap(
    c: Canvas,
    matrix: Any,
    row_names: Sequence[object],
    column_names: Sequence[object],
    *,
    rows: str,
    columns: str,
    low: float | None = None,
    high: float | None = None,
    bar: str = "",
) -> None:
    """Draw `heatmap` on a canvas; `bar` names the colours."""
    signed = low is None and bool((matrix < 0).any())
    reach = float(np.nanmax(np.abs(matrix))) if matrix.size else 1.0
    low, high = (-reach, reach) if signed else (low if low is not None else 0.0, high if high is not None else reach)
    n, m = matrix.shape
    drawn = c.axis.imshow(matrix, cmap="RdBu_r" if signed else "Blues", vmin=low, vmax=high, aspect="auto")
    for kind, labels, name in (("x", column_names, columns), ("y", row_names, rows)):
        step = max(1, len(labels) // 40)
        ticks = range(0, len(labels), step)
        angle = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if kind == "x" else {}
        getattr(c.axis, f"set_{kind}ticks")(ticks, [shown(labels[i], 22) for i in ticks], fontsize=8, **angle)
        getattr(c.axis, f"set_{kind}label")(name)
    c.axis.grid(visible=False)
    if max(n, m) <= 14:
        for i in range(n):
            for j in range(m):
                dark = abs(matrix[i, j]) > (0.6 * reach if signed else low + 0.6 * (high - low))
                text = f"{matrix[i, j]:.2f}" if matrix[i, j] else "0"
                c.axis.text(j, i, text, ha="center", va="center", fontsize=7, c="w" if dark else "k")
    c.paper.colorbar(drawn, ax=c.axis, shrink=0.8, label=bar)


def draw_violins(axis: Any, parts: Mapping[str, Any], colours: Sequence[int], *, log: bool = False) -> None:
    """Draw the distribution of values for each name, with a line at its median; `log` values are of base ten."""
    from matplotlib.ticker import MaxNLocator

    for i, (values, colour) in enumerate(zip(parts.values(), colours, strict=True)):
        if len(np.unique(values)) > 1:
            body = axis.violinplot(values, [i], widths=0.8, showextrema=False)["bodies"][0]
            body.set(facecolor=tone(colour)[0], edgecolor=tone(colour)[0], alpha=0.65)
        if len(values):
            axis.hlines(np.median(values), i - 0.25, i + 0.25, color="#1d2329", lw=1.5)
    if log:
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(lambda v, _: f"{10**v:,.0f}")
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if len(parts) > 4 else {}
    axis.set_xticks(range(len(parts)), [shown(k, 18) for k in parts], **turned)
    axis.grid(visible=False, axis="x")


def histograms(
    values: Mapping[str, Any],
    *,
    title: str,
    xlabel: str,
    alt: str = "",
    bins: int = 30,
    marks: Mapping[str, float] | None = None,
    within: tuple[float, float] | None = None,
) -> Figure:
    """Distributions over each other, each summing to one; `marks` are vertical lines with a name.

    Bins span all values, or the range in `within`, which has to hold them.
    """
    arrays = {name: np.asarray(v, dtype=float) for name, v in values.items()}
    arrays = {name: v[np.isfinite(v)] for name, v in arrays.items()}
    every = np.concatenate([*arrays.values()]) if arrays else np.zeros(0)
    edges = np.histogram_bin_edges(every, bins, within)
    with canvas() as c:
        for i, (name, v) in enumerate(arrays.items()):
            share = np.histogram(v, edges)[0] / max(len(v), 1)
            c.axis.stairs(share, edges, lw=1.8, color=COLOURS[i % len(COLOURS)], ls=STYLES[i % 4], label=shown(name))
        for i, (name, x) in enumerate((marks or {}).items()):
            c.axis.axvline(x, color="#1d2329", ls=STYLES[(i + 1) % 4], lw=1, label=shown(name))
        c.axis.set(xlabel=xlabel, ylabel="share of the values")
        _legend(c.axis, len(arrays) + len(marks or {}))
        middle = ", ".join(f"{n}: {np.median(v):.3g}" for n, v in arrays.items() if len(v))
        return c.done(title, alt or f"Distributions of {xlabel}. Medians: {middle}.")


def curves(values: Mapping[str, Any], *, title: str, xlabel: str, ylabel: str, alt: str = "", start: int = 1) -> Figure:
    """One line per name against 1, 2, 3, … (or from another `start` on): training curves."""
    with canvas() as c:
        for i, (name, ys) in enumerate(values.items()):
            xs = np.arange(start, start + len(ys))
            mark = MARKS[i % len(MARKS)] if len(ys) <= 25 else None
            c.axis.plot(
                xs, ys, lw=1.8, ms=4, marker=mark, color=COLOURS[i % len(COLOURS)], ls=STYLES[i % 4], label=shown(name)
            )
        c.axis.set(xlabel=xlabel, ylabel=ylabel)
        c.axis.xaxis.get_major_locator().set_params(integer=True)
        _legend(c.axis, len(values))
        ends = ", ".join(f"{n} from {float(v[0]):.3g} to {float(v[-1]):.3g}" for n, v in values.items() if len(v))
        return c.done(title, alt or f"{ylabel} by {xlabel}: {ends}.")
