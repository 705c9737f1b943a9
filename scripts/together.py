"""The README's figure, docs/figures/together.svg, from benchmarks/logs/demo.json: alone, together, pooled; a receipt.

python scripts/together.py          draws it (tests/test_pages.py checks that it is current)
"""

from __future__ import annotations

import html
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG = ROOT / "benchmarks" / "logs" / "demo.json"
PICTURE = ROOT / "docs" / "figures" / "together.svg"
ROWS = (  # workflow, what is measured; all in percent
    ("train-classifier", "accuracy of cell types"),
    ("map-labels", "accuracy of mapped labels"),
    ("propagate-labels", "accuracy, few labels known"),
    ("integrate", "mixing of hospitals"),
)
COLUMNS = (("alone", "#9aa5b1"), ("together", "#1f6feb"), ("pooled", "#cfd8e3"))
RECEIPT = (
    "basel.receipt.json",
    "every message that left Basel: name, recipient, bytes, SHA-256",
    "every value that was opened, and to whom",
    "hash chain, signed with Basel's key",
)
STYLE = (
    "text { font: 13px sans-serif; fill: #1c2733 } .small { font-size: 11px; fill: #52606d }"
    " .head { font-weight: bold } .mono { font: 12px monospace } .box { fill: #ffffff; stroke: #9aa5b1 }"
    " .page { fill: #f7f9fb; stroke: #e1e7ed }"
    " .link { stroke: #1f6feb; fill: none; stroke-width: 1.5 } .engine { fill: #e8f0fe; stroke: #1f6feb }"
)
WIDTH, HEIGHT = 880, 330


def median_of(runs: list[list[dict[str, Any]]], workflow: str, column: str) -> float:
    """The median over runs of one figure of the hardened mode, in percent."""
    rows = [row for run in runs for row in run if (row["workflow"], row["mode"]) == (workflow, "hardened")]
    return statistics.median(float(str(row[column]).rstrip("%")) for row in rows)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def rect(x: float, y: float, wide: float, high: float, kind: str = "", fill: str = "") -> str:
    how = f'class="{kind}"' if kind else f'fill="{fill}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="4" {how}/>'


def hospitals() -> list[str]:
    parts = [text(24, 34, "Cells stay in each hospital", "head")]
    for i, name in enumerate(("Basel", "Lugano", "Vienna")):
        y = 52 + 62 * i
        parts += [
            rect(24, y, 130, 46, "box"),
            text(36, y + 20, name),
            text(36, y + 36, "AnnData, 1,920 cells", "small"),
        ]
        parts.append(f'<path class="link" d="M154 {y + 23} L232 137"/>')
    parts += [rect(232, 92, 128, 90, "engine"), text(296, 120, "Cloister", "head", "middle")]
    for i, words in enumerate(("secure sums", "three-party shares", "threshold CKKS")):
        parts.append(text(296, 139 + 15 * i, words, "small", "middle"))
    return [*parts, '<path class="link" d="M360 137 L408 137"/>']


def bars(runs: list[list[dict[str, Any]]]) -> list[str]:
    parts = [text(420, 34, "alone → together ≈ pooled", "head")]
    for i, (name, fill) in enumerate(COLUMNS):
        parts += [rect(640 + 78 * i, 24, 12, 12, fill=fill), text(657 + 78 * i, 34, name, "small")]
    for i, (workflow, about) in enumerate(ROWS):
        y = 56 + 48 * i
        parts += [text(420, y + 12, workflow), text(420, y + 27, about, "small")]
        for j, (column, fill) in enumerate(COLUMNS):
            value = median_of(runs, workflow, column)
            parts.append(rect(600, y + 12 * j, value * 2.1, 10, fill=fill))
            parts.append(text(605 + value * 2.1, y + 9 + 12 * j, f"{value:.0f} %", "small"))
    return parts


def receipt() -> list[str]:
    parts = [rect(24, 252, 832, 60, "box"), text(40, 276, RECEIPT[0], "mono"), text(40, 296, "signed receipt", "small")]
    for i, words in enumerate(RECEIPT[1:]):
        parts.append(text(230, 270 + 16 * i, "✓ " + words, "small"))
    return [*parts, text(842, 287, "$ cloister receipt FILE --verify", "mono", "end")]


def draw() -> str:
    runs = json.loads(LOG.read_text(encoding="utf-8"))["runs"]
    shown = "; ".join(
        f"{name}: " + ", ".join(f"{column} {median_of(runs, name, column):.0f} %" for column, _ in COLUMNS)
        for name, _ in ROWS
    )
    spoken = f"Three hospitals compute with Cloister. {shown}. Each hospital has a signed receipt."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    parts = [rect(1, 1, WIDTH - 2, HEIGHT - 2, "page"), *hospitals(), *bars(runs), *receipt()]
    return "\n".join([head, f"<title>{html.escape(spoken)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
