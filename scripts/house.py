"""How large the package is: lines of src, files per folder, the largest modules and functions, words per page.

python scripts/house.py                       the working tree
python scripts/house.py 754d8c9               a commit
python scripts/house.py 754d8c9 main          two, side by side
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
SHOWN = 10  # of the largest modules and functions; there is no limit, a module is one concept
PAGES = re.compile(r"(README|SECURITY|CONTRIBUTING|CHANGELOG)\.md|docs/[^/]+\.md|docs/measured/[^/]+\.md")
GUIDES = re.compile(r"(README|SECURITY|CONTRIBUTING)\.md|docs/[^/]+\.md")  # what a reader is meant to read
MEASURED = re.compile(r"docs/measured/[^/]+\.md")
MADE = re.compile(r"<!-- made:.*?<!-- /made -->", flags=re.DOTALL)  # tables that scripts/pieces.py fills


@dataclass
class House:
    lines: int = 0
    modules: dict[str, int] = field(default_factory=dict)
    folders: Counter[str] = field(default_factory=Counter)
    functions: dict[str, int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)  # words outside generated tables


def read(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of src and every page, of a commit or of the working tree."""
    names = git("ls-tree", "-r", "--name-only", commit).splitlines() if commit else git("ls-files").splitlines()
    for name in names:
        if (name.startswith("src/") and name.endswith(".py")) or PAGES.fullmatch(name):
            if commit:
                yield name, git("show", f"{commit}:{name}")
            elif (ROOT / name).exists():
                yield name, (ROOT / name).read_text(encoding="utf-8")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def measure(commit: str | None) -> House:
    house = House()
    for name, text in read(commit):
        if name.endswith(".md"):
            house.words[name] = len(text.split())
            house.written[name] = len(MADE.sub("", text).split())
            continue
        short = name.removeprefix("src/cloister/")
        house.modules[short] = len(text.splitlines())
        house.lines += house.modules[short]
        house.folders[str(PurePosixPath(short).parent)] += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                house.functions[f"{short}: {node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    return house


def rows(house: House) -> dict[str, int]:
    """The figures that are compared."""
    return {
        "lines of src": house.lines,
        "modules": len(house.modules),
        "functions": len(house.functions),
        "lines of the largest module": max(house.modules.values(), default=0),
        "lines of the longest function": max(house.functions.values(), default=0),
        "words of README, SECURITY, CONTRIBUTING and guides": sum(
            n for name, n in house.words.items() if GUIDES.fullmatch(name)
        ),
        "words of all pages": sum(house.words.values()),
    }


def total(words: dict[str, int], pages: re.Pattern[str]) -> int:
    return sum(n for name, n in words.items() if pages.fullmatch(name))


def table(title: str, columns: list[dict[str, int]], least: int = 0, most: int | None = None) -> None:
    """Names and one number per tree, largest first by the last one that has it."""
    names = {name for column in columns for name, n in column.items() if n > least}
    ordered = sorted(names, key=lambda name: ([-c.get(name, 0) for c in reversed(columns)], name))[:most]
    if ordered:
        print(f"\n{title}")
    for name in ordered:
        print("  " + "".join(f"{column.get(name, '–'):>9}" for column in columns) + f"   {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", help="none for the working tree, or one or two commits")
    commits = parser.parse_args().commits[:2] or [None]
    houses = [measure(commit) for commit in commits]
    figures = [rows(house) for house in houses]
    for name in figures[0]:
        told = "".join(f"{column[name]:>9}" for column in figures)
        print(told + (f"{figures[1][name] - figures[0][name]:>+9}" if len(figures) == 2 else "") + f"   {name}")
    table("largest modules", [h.modules for h in houses], most=SHOWN)
    table("longest functions", [h.functions for h in houses], most=SHOWN)
    table("files per folder of src/cloister", [dict(h.folders) for h in houses])
    table("words per page", [h.words for h in houses])


if __name__ == "__main__":
    main()
