"""Print the papers' tables with our column: `make tables`.

Their numbers stand in benchmarks/papers.toml; ours are read from the tables of our own pages, where the command behind
each stands, so that there is one place for a figure. `--check` fails if a page has no such cell any more.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def cells(page: str) -> list[dict[str, list[list[str]]]]:
    """Every Markdown table of a page: its header and its rows."""
    found: list[dict[str, Any]] = []
    inside = False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        row = [c.strip().replace("**", "") for c in line.strip().strip("|").split("|")]
        if not inside:
            found.append({"head": row, "rows": []})
        elif not all(set(c) <= set("-: ") for c in row):
            found[-1]["rows"].append(row)
        inside = True
    return found


def find(page: str, row: str, column: str) -> str | None:
    """The first cell whose row is called so, or else begins with these words, or else holds them."""

    def holds(text: str, part: str) -> bool:
        return re.search(rf"\b{re.escape(part)}", text) is not None

    for fits_row, fits in ((str.__eq__, str.startswith), (str.startswith, str.startswith), (holds, holds)):
        for table in cells(page):
            for i, head in enumerate(table["head"][1:], 1):
                for found in table["rows"]:
                    if fits_row(found[0], row) and fits(head, column) and i < len(found) and found[i]:
                        return found[i]
    return None


def resolve(text: str, missing: list[str]) -> str:
    """A number of the paper's as it stands; a place in our pages as what stands there."""
    if " | " not in text:
        return text
    page, row, column = text.split(" | ")
    found = find(page, row, column)
    if found is None:
        missing.append(text)
    return found or "–"


def tables(missing: list[str]) -> list[tuple[str, str, list[list[str]]]]:
    """Title, note and rows of every table, the header among them."""
    made = []
    for table in tomllib.loads((ROOT / "benchmarks" / "papers.toml").read_text(encoding="utf-8"))["table"]:
        rows = {name: [resolve(c, missing) for c in cells] for name, cells in table.get("rows", {}).items()}
        if each := table.get("each"):
            rows = {r: [resolve(f"{each['page']} | {r} | {c}", missing) for c in each["columns"]] for r in each["rows"]}
        lines = [["", *table["columns"]], *([name, *cells] for name, cells in rows.items())]
        made.append((table["title"], table["note"], lines))
    return made


def main() -> int:
    missing: list[str] = []
    for title, note, rows in tables(missing):
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        print(f"\n{title}\n{'=' * len(title)}")
        for row in rows:
            print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
        print(note)
    for place in missing:
        print(f"not found: {place}", file=sys.stderr)
    return 1 if missing and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
