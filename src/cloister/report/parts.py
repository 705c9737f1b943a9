"""Parts of the report: HTML that is escaped by construction, tables, numbers for people, and two drawings in SVG.

    tag("p", "1 < 2", class_="note")      →  <p class="note">1 &lt; 2</p>

Texts are escaped when they become part of a tag; only what `tag` itself made (`Html`) is taken as it is. The drawings
place things sideways in percent and up-down in pixels, so they fit a phone and a desk without scaling their letters.
"""

from __future__ import annotations

import base64
import html
import re
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from cloister._version import __version__
from cloister.rehearsal.record import Abort, Flow
from cloister.study import Study

NUMBER = re.compile(r"–|-?\d[\d.,]*(e[+-]?\d+)?( ?(%|[kMGT]?B|ms|s|min))?")
MOST_NAMES = 8
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
WIDE = 1.65  # figures wider than this times their height get a row of their own
VOID = {"meta", "img", "br", "link", "input"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")  # and texts turned backwards


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def escape(x: object) -> Html:
    return x if isinstance(x, Html) else Html(html.escape(CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(x))))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(escape(between).join(escape(p) for p in parts if p is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` stands for class, `_` for `-`; None leaves an attribute or a child out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{escape(value)}"')
    if name in VOID:
        return Html(f"<{' '.join(words)}>")
    return Html(f"<{' '.join(words)}>{join(children)}</{name}>")


def document(title: str, *content: object) -> str:
    """A whole page around a header, links and `main` with the id "main"; style inside, and nothing leaves it."""
    style = (resources.files("cloister") / "data" / "report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(style)),
    )
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    footer = tag(
        "footer", tag("p", f"Written by Cloister {__version__} on {date}. This page loads nothing and runs nothing.")
    )
    skip = tag("a", "Skip to the results", href="#main", class_="skip")
    return f"<!doctype html>\n{tag('html', head, tag('body', skip, *content, footer), lang='en')}\n"


def pictures(figures: Iterable[Any]) -> Html:
    """Figures with `title`, `alt` and `png`, inside the page; wide ones have a row of their own."""
    shown = []
    for figure in figures:
        source = "data:image/png;base64," + base64.b64encode(figure["png"]).decode()
        picture = tag("img", src=source, alt=figure["alt"] or figure["title"])
        across, high = (int.from_bytes(figure["png"][i : i + 4]) for i in (16, 20))
        wide = across > max(850, WIDE * high)
        if wide:  # stays readable on a phone
            picture = tag("div", picture, class_="scroll", role="region", aria_label=figure["title"], tabindex="0")
        shown.append(tag("figure", tag("figcaption", figure["title"]), picture, class_="wide" if wide else None))
    return tag("div", *shown, class_="figures")


# ---- numbers for people ----------------------------------------------------------------------------------------------


def size(n: float) -> str:
    """1234567 → `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.95 or (unit == "B" and n < 1000):
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def seconds(s: float) -> str:
    if s < 0.9995:
        return f"{s * 1000:.0f} ms"
    return f"{s:.1f} s" if s < 120 else f"{s / 60:.1f} min"


def count(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def names(parties: Iterable[str]) -> str:
    """`basel, lugano and vienna`; of very many the first, and how many more."""
    all_of_them = list(parties)
    if len(all_of_them) > MOST_NAMES:
        all_of_them = [*all_of_them[: MOST_NAMES - 2], f"{len(all_of_them) - MOST_NAMES + 2} more"]
    return " and ".join(filter(None, [", ".join(all_of_them[:-1]), *all_of_them[-1:]])) or "nobody"


def value(x: Any, column: str = "") -> str:
    """A cell of a table: short, and never Python's own spelling of things."""
    if x is None:
        return "–"
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, int | float):
        if re.search(r"(\b|_)bytes(\b|_)", column):
            return size(x)
        if re.search(r"(\b|_)seconds(\b|_)", column):
            return seconds(x)
        return f"{x:,}" if isinstance(x, int) else f"{x:.4g}"
    if isinstance(x, list | tuple):
        if x and all(isinstance(row, list | tuple) and len(row) == len(x[0]) > 0 for row in x):
            return f"{len(x):,} × {len(x[0]):,} numbers" if _numbers(x) else f"{len(x):,} rows of {len(x[0]):,}"
        if len(x) > 8:
            return f"{value(x[:3], column)} … {value(x[-2:], column)} ({len(x):,} in all)"
        between = "; " if any(isinstance(v, dict) for v in x) else ", "
        return between.join(value(v, column) for v in x) or "none"
    if isinstance(x, dict):
        between = ", " if column == "" else "; "
        return between.join(f"{k}: {value(v, f'{column} {k}')}" for k, v in x.items()) or "none"
    return str(x)


def _numbers(rows: Sequence[Sequence[Any]]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for row in rows for v in row)


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """Titles and what belongs to them."""
    return tag("dl", *(join((tag("dt", title), tag("dd", text))) for title, text in rows), class_="meta")


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, hide: bool = False) -> Html:
    """A table with caption and scopes, in a box of its own that scrolls sideways if it must."""
    rows = [
        [cell if isinstance(cell, Html) else value(cell, c) for c, cell in zip(columns, r, strict=True)] for r in rows
    ]
    numeric = [bool(rows) and all(NUMBER.fullmatch(str(r[i])) is not None for r in rows) for i in range(len(columns))]
    head = [tag("th", c, scope="col", class_="n" if num else None) for c, num in zip(columns, numeric, strict=True)]
    body = []
    for row in rows:
        first = tag("th", row[0], scope="row")
        rest = (tag("td", c, class_="n" if n else None) for c, n in zip(row[1:], numeric[1:], strict=True))
        body.append(tag("tr", first, *rest))
    whole = tag(
        "table",
        tag("caption", caption, class_="hidden" if hide else None),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
    )
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")


# ---- drawings --------------------------------------------------------------------------------------------------------

MOST_LIFELINES, MOST_ROWS = 9, 60
ROW, BAND, TOP = 44, 34, 34  # pixels


def lifelines(study: Study) -> dict[str, str]:
    """Party → the lifeline it is drawn on: its own, or that of its role where there are too many."""
    order = [*study.sites, study.coordinator, *study.auxiliaries]
    if len(order) <= MOST_LIFELINES:
        return {p: p for p in order}
    return {p: f"{len(study.sites)} sites" if p in study.sites else p for p in order}


def sequence(study: Study, flows: Sequence[Flow], abort: Abort | None, *, title: str) -> Html:
    """Who sent what to whom, from top to bottom; what repeats is drawn once."""
    line_of = lifelines(study)
    lines = list(dict.fromkeys(line_of.values()))
    x = {name: 100 * (i + 0.5) / len(lines) for i, name in enumerate(lines)}
    y, parts, protocol = TOP, [], None
    for flow in flows[:MOST_ROWS]:
        if flow.protocol != protocol:
            protocol = flow.protocol
            parts.append(_band(y, _file_of(protocol), "band"))
            y += BAND
        parts.append(_row(y, flow, line_of, x))
        y += ROW
    if len(flows) > MOST_ROWS:
        parts.append(_band(y, f"and {len(flows) - MOST_ROWS} more kinds of messages, in the table below", "band"))
        y += BAND
    if abort is not None:
        parts.append(_band(y, f"run aborted: {abort.protocol} {abort.line}, {abort.code}", "band stop"))
        y += BAND
    height = y + 8
    poles = [
        join(
            (
                _text(f"{at:.2f}%", 14, name, "who", anchor="middle"),
                tag("line", x1=f"{at:.2f}%", x2=f"{at:.2f}%", y1=TOP - 10, y2=height, class_="pole"),
            )
        )
        for name, at in x.items()
    ]
    drawing = tag(
        "svg",
        tag("title", title),
        *poles,
        *parts,
        role="img",
        width="100%",
        height=height,
        class_="sequence",
        style=f"min-width:{max(290, 76 * len(lines))}px",
    )
    return tag("div", drawing, class_="scroll", role="region", aria_label=title, tabindex="0")


def _file_of(protocol: str) -> str:
    return "greetings before each part" if protocol == "channel" else f"{protocol}.py"


def _band(y: float, label: str, kind: str) -> Html:
    box = tag("rect", x="0", y=y + 4, width="100%", height=BAND - 10, rx=5, class_=kind)
    return join((box, _text("8", y + 21, label, "label" if kind == "band" else "label stop")))


def _text(x: str, y: float, label: str, kind: str, anchor: str = "start") -> Html:
    return tag("text", label, x=x, y=y, class_=kind, text_anchor=anchor)


def _right(y: float, label: str, shift: int) -> Html:
    """Text that ends at the right edge, moved by some pixels."""
    return tag("svg", _text(str(shift), y, label, "how", anchor="end"), x="100%", overflow="visible")


def _row(y: float, flow: Flow, line_of: dict[str, str], x: dict[str, float]) -> Html:
    """One kind of message: a dot where it is sent, an arrowhead where it arrives, a diamond where both happen."""
    senders = {line_of[s] for s, _ in flow.pairs if s in line_of}
    receivers = {line_of[t] for _, t in flow.pairs if t in line_of}
    messages = sum(n for n, _ in flow.pairs.values())
    total = sum(b for _, b in flow.pairs.values())
    middle = y + 29
    ends = [x[p] for p in senders | receivers]
    parts = [
        _text("8", y + 16, f"{flow.line}  {flow.name.rpartition('.')[2]}", "what"),
        _right(y + 16, f"{messages:,} × {size(total / max(messages, 1))}", -8),
    ]
    if ends:
        parts.append(tag("line", x1=f"{min(ends):.2f}%", x2=f"{max(ends):.2f}%", y1=middle, y2=middle, class_="wire"))
    centre = sum(x[p] for p in senders) / max(len(senders), 1)
    for p in sorted(senders | receivers, key=lambda p: x[p]):
        if p in senders and p in receivers:
            shape = "M-6 0L0 -6L6 0L0 6z"
        elif p in senders:
            shape = "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
        else:
            shape = "M-1 0l-10 -5.5v11z" if x[p] > centre else "M1 0l10 -5.5v11z"
        mark = tag("path", d=shape, class_="mark")
        parts.append(tag("svg", mark, x=f"{x[p]:.2f}%", y=middle, overflow="visible"))
    return tag("g", *parts)


def bars(title: str, rows: Sequence[tuple[str, float, float | None, str]], *, empty: str) -> Html:
    """Horizontal bars: label, length, an inner length or None, and the number as text."""
    most = max((r[1] for r in rows), default=0.0)
    if not most:
        return tag("figure", tag("figcaption", title), tag("p", empty, class_="quiet"))
    parts = []
    for i, (label, length, inner, shown) in enumerate(rows):
        y = i * 40
        parts += [
            _text("0", y + 14, label, "who left"),
            _right(y + 14, shown, 0),
            tag("rect", x="0", y=y + 20, width="100%", height=10, rx=5, class_="track"),
            tag("rect", x="0", y=y + 20, width=f"{max(100 * length / most, 0.6):.2f}%", height=10, rx=5, class_="bar"),
        ]
        if inner is not None:
            width = f"{max(100 * min(inner, length) / most, 0.4):.2f}%"
            parts.append(tag("rect", x="0", y=y + 20, width=width, height=10, rx=5, class_="inner"))
    spoken = f"{title}: " + "; ".join(f"{r[0]} {r[3]}" for r in rows)
    drawing = tag("svg", tag("title", spoken), *parts, role="img", width="100%", height=40 * len(rows), class_="bars")
    return tag("figure", tag("figcaption", title), drawing)
