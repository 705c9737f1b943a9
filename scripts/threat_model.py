"""The half of the threat-model page that is made from the code; `make docs` puts it below docs/threat-model.md.

    python scripts/threat_model.py      prints it

First every workflow and mode in short, then which protocols run, then one table per protocol in the words of its
`Reveals`: who, alone or together with whom, learns what. Nothing is shortened.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cloister import protocols, workflows

sys.path.insert(0, str(Path(__file__).parent))
from pieces import learns_of_all, may_run, modes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "threat-model.md"
TOGETHER = re.compile(r"(?:Together with|With) ([^:;.]{1,60}): ")


def telling() -> list[str]:
    """The protocol files that say who learns what; others are local steps, or parts of another file."""
    return [name for name in sorted(protocols.names()) if protocols.section(name, "Reveals")]


def entries(reveals: str) -> Iterator[tuple[str, str]]:
    """The `who : what` pairs of a section; a pair goes on over indented lines."""
    pairs: list[list[str]] = []
    for line in reveals.splitlines():
        starts = re.match(r"(\S.*?) : (.*)", line) if line[:1].strip() else None
        if starts:
            pairs.append([starts[1], starts[2]])
        elif pairs:
            pairs[-1][1] += " " + line.strip()
        else:
            pairs.append(["everyone", line.strip()])
    for who, what in pairs:
        yield from split(who, what)


def split(who: str, what: str) -> Iterator[tuple[str, str]]:
    """Sentences that begin with a collusion get a row of their own."""
    rows: list[tuple[str, list[str]]] = [(who, [])]
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z])", what):
        together = TOGETHER.match(sentence)
        if together:
            rows.append((f"{who}, with {together[1]}", [sentence[together.end() :]]))
        else:
            rows[0][1].append(sentence)
    for name, sentences in rows:
        if sentences:
            yield name, " ".join(sentences)


def generated() -> str:
    """Everything below the page that is kept."""
    lines = ["", "## Workflow by workflow", "", learns_of_all(), ""]
    lines += ["`embed` sends nothing.", "", "## Which protocols run", ""]
    lines += ["The first is the mode's own; the others run on the way, or under some of its options.", ""]
    lines += ["| workflow | mode | protocols |", "|---|---|---|"]
    for name in workflows.SHIPPED:
        for mode in modes(name):
            links = ", ".join(f"[`{protocol}`](#{protocol})" for protocol in may_run(name, mode))
            lines.append(f"| `{name}` | {mode} | {links} |")
    lines += ["", "## Protocol by protocol", "", "In the words of the protocol files.", ""]
    for name in telling():
        title = " ".join(protocols.docstring(name).split("\n\n")[0].split())
        lines += [f"### {name}", "", title, "", "| who | learns |", "|---|---|"]
        lines += [f"| {cell(who)} | {cell(what)} |" for who, what in entries(protocols.section(name, "Reveals"))]
        lines += ["", f"*Assumes:* {' '.join(protocols.section(name, 'Assumes').split())}", ""]
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def page() -> str:
    """The whole page, as `make docs` builds it."""
    return PAGE.read_text(encoding="utf-8") + generated()


if __name__ == "__main__":
    print(generated())
