"""The page about a distillation: losses, accuracy before and after, and where every value lies in its interval."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from cloister import files
from cloister.errors import DiskError, MissingExtra
from cloister.models.polynomial import Row
from cloister.provider.distil import Distilled, Settings
from cloister.report.figures import COLOURS, MARKS, STYLES, Figure, canvas, curves, heatmap, log_scale, shown
from cloister.report.parts import Html, count, document, facts, pictures, table, tag, value

KINDS = {  # in the order of the circuit
    "root": ("variances", "variances, of their unit"),
    "units": ("linear layers", "queries, keys, values, hidden units"),
    "scores": ("scores", "attention scores"),
    "division": ("denominators", "denominators, of their unit"),
    "sums": ("weighted sums", "weighted sums"),
    "activations": ("activations", "activations"),
}
BY_RATIO = ("root", "division")  # intervals whose ends are apart by a factor


def write_page(path: str | Path, made: Distilled, settings: Settings, title: str) -> Path:
    """Write one self-contained page; it appears complete or not at all."""
    try:
        return files.write(path, page_text(made, settings, title))
    except OSError as e:
        raise DiskError(f"{path} cannot be written ({e.strerror or type(e).__name__})") from None


def page_text(made: Distilled, settings: Settings, title: str) -> str:
    badge = ("refused", "badge bad") if made.refusal else ("within its intervals", "badge good")
    lead = "A ViT's student of sums and products, and how near it is to its teacher."
    header = tag("header", tag("h1", title, " ", tag("span", badge[0], class_=badge[1])), tag("p", lead, class_="lead"))
    links = {"figures": "Figures", "accuracy": "Before and after", "ranges": "Intervals", "settings": "Settings"}
    nav = tag("nav", tag("ul", *(tag("li", tag("a", v, href=f"#{k}")) for k, v in links.items())),
              aria_label="On this page")  # fmt: skip
    refused = tag("div", tag("p", tag("strong", "Refused: "), f"{made.refusal}."), class_="box bad")
    main = tag(
        "main",
        refused if made.refusal else None,
        tag("section", tag("h2", "Figures", id="figures"), _figures(made)),
        tag("section", tag("h2", "Before and after", id="accuracy"), _judged(made)),
        tag("section", tag("h2", "Intervals", id="ranges"), _ranges(made)),
        tag("section", tag("h2", "Settings", id="settings"), _settings(made, settings)),
        id="main",
        tabindex="-1",
    )
    return document(title, header, nav, main)


def _figures(made: Distilled) -> Html:
    try:
        return pictures(draw(made))
    except MissingExtra as e:
        return tag("div", tag("p", str(e)), class_="box warn")


def draw(made: Distilled) -> list[Figure]:
    """Curves of each stage with the parts of its loss, accuracy, and how much of its interval each value uses."""
    out = []
    for stage, name in (("layers", "Stage 1: layers"), ("prediction", "Stage 2: prediction")):
        parts = {k.partition(": ")[2] or "all": v for k, v in made.curves.items() if k.partition(":")[0] == stage}
        if parts:
            out.append(_stage(parts, name))
    if "teacher" in made.curves:
        tuned = {"cross-entropy and penalty": made.curves["teacher"]}
        out.append(curves(tuned, title="The teacher, tuned within the intervals", xlabel="epoch", ylabel="loss"))
    judged = made.accuracy or made.agreement
    if judged:
        out.append(_bars(judged, "right" if made.accuracy else "as the teacher"))
    if made.rows:
        out.append(_used(made.rows))
    return out


def _stage(parts: dict[str, list[float]], title: str) -> Figure:
    """The parts of a loss by epoch, each a line; sizes differ, so the axis is logarithmic."""
    with canvas() as c:
        for i, (name, ys) in enumerate(parts.items()):
            style, width = ("-", 2.4) if name == "all" else (STYLES[i % 4], 1.6)
            xs, above = np.arange(1, len(ys) + 1), np.maximum(ys, 1e-8)
            c.axis.plot(xs, above, ls=style, lw=width, marker=MARKS[i], ms=4, color=COLOURS[i], label=shown(name))
        log_scale(c.axis)
        c.axis.set(xlabel="epoch", ylabel="loss")
        c.axis.xaxis.get_major_locator().set_params(integer=True)
        c.axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)
        ends = ", ".join(f"{n} from {ys[0]:.3g} to {ys[-1]:.3g}" for n, ys in parts.items())
        return c.done(title, f"Loss by epoch: {ends}.")


def _bars(judged: dict[str, float], what: str) -> Figure:
    with canvas(width=6.4, height=1.0 + 0.4 * len(judged)) as c:
        names = list(judged)[::-1]
        c.axis.barh(range(len(names)), [judged[n] for n in names], color="#0072B2", height=0.6)
        for i, n in enumerate(names):
            c.axis.text(judged[n], i, f" {judged[n]:.1%}", va="center", fontsize=9)
        c.axis.set(xlim=(0, 1.15), xlabel=f"share of kept images {what}")
        c.axis.set_yticks(range(len(names)), names)
        c.axis.grid(visible=False)
        told = ", ".join(f"{n} {v:.1%}" for n, v in judged.items())
        return c.done("Before and after", f"Share of kept images {what}: {told}.")


def _used(rows: list[Row]) -> Figure:
    """0: in the middle of the interval; 1: at an end of it; above: outside."""
    kinds = [k for k in KINDS if any(r.what == k and math.isfinite(r.most) for r in rows)]
    blocks = sorted({r.block for r in rows})
    matrix = np.full((len(kinds), len(blocks)), np.nan)
    for r in rows:
        if r.what in kinds:
            matrix[kinds.index(r.what), blocks.index(r.block)] = used(r)
    worst = max((used(r) for r in rows if r.what in kinds), default=0.0)
    alt = f"How near to an end of its interval each kind of value comes, by block; at most {worst:.2f} of the way."
    matrix, title = np.clip(np.nan_to_num(matrix, nan=2.0), 0, 2), "How much of its interval each value uses"
    names = [KINDS[k][0] for k in kinds]
    return heatmap(matrix, names, blocks, low=0.0, high=1.0, title=title, rows="", columns="block", alt=alt)


def used(r: Row) -> float:
    ends = (r.least, r.most, r.low, r.high)
    if r.what in BY_RATIO:
        ends = tuple(math.log(max(v, 1e-12)) for v in ends)  # type: ignore[assignment]
    least, most, low, high = ends
    middle, half = (least + most) / 2, (most - least) / 2
    return max(high - middle, middle - low) / half


def _judged(made: Distilled) -> Html:
    names = list(dict.fromkeys([*made.accuracy, *made.agreement]))
    rows = [(n, _share(made.accuracy.get(n)), _share(made.agreement.get(n))) for n in names]
    kept = made.facts.get("kept for judging", 0)
    caption = f"On {count(int(kept), 'image')} kept for it"
    return table(caption, ("model", "right", "as the teacher"), rows)


def _share(x: float | None) -> str:
    return "–" if x is None else f"{100 * x:.1f} %"


def _ranges(made: Distilled) -> Html:
    if not made.rows:
        return tag("p", "Values were too far outside to be measured; see above.", class_="quiet")
    rows: list[tuple[Any, ...]] = [
        (r.block, KINDS[r.what][1], f"{r.low:.3g}", f"{r.high:.3g}", *(_end(v) for v in (r.least, r.most)),
         "inside" if r.inside else tag("strong", "outside"))
        for r in made.rows
    ]  # fmt: skip
    columns = ("block", "what", "smallest", "largest", "from", "to", "")
    caption = (
        f"Values on all {count(int(made.facts.get('images', 0)), 'image')}, and the interval of each approximation"
    )
    return table(caption, columns, rows)


def _end(x: float) -> str:
    return f"{x:.3g}" if math.isfinite(x) else "–"  # any value will do


def _settings(made: Distilled, settings: Settings) -> Html:
    given = {k.replace("_", " "): v for k, v in dataclasses.asdict(settings).items()}
    told = {k: v for k, v in made.facts.items() if k != "card"} | {"inputs": made.facts.get("card")}
    return facts((k, value(list(v) if isinstance(v, tuple) else v)) for k, v in (told | given).items())
