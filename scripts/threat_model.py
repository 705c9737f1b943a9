"""Write the generated half of docs/threat-model.md from the `Reveals` of the protocol files.

    python scripts/threat_model.py            writes it
    python scripts/threat_model.py --check    says whether the page is what the code says (tests/test_threat_model.py)

Above the mark the page is written by hand; below it stands one table per protocol: who, alone or together with whom,
learns what. Nothing is shortened.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cloister import protocols, workflows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "threat-model.md"
MARK = "<!-- from here on written by scripts/threat_model.py -->"
TOGETHER = re.compile(r"(?:Together with|With) ([^:;.]{1,60}): ")


def protocol_names() -> list[str]:
    return sorted(protocols.names())


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
    """Everything below the mark."""
    lines = [
        "",
        "## Which protocols run",
        "",
        "The first is the mode's own; the others run on the way, or under some of its options.",
        "",
        "| workflow | mode | protocols |",
        "|---|---|---|",
    ]
    silent = {name for name in protocol_names() if not protocols.section(name, "Reveals")}
    for name in workflows.SHIPPED:
        found = workflows.get(name)
        for mode, declared in found.modes.items():
            links = ", ".join(f"[`{p}`](#{p})" for p in declared.protocols)
            lines.append(f"| `{name}` | {mode} | {links} |")
    listed = ", ".join(f"`{name}`" for name in sorted(silent))
    lines += ["", f"Files without a `Reveals`, since they are local steps or parts of another file: {listed}.", ""]
    lines += ["## Protocol by protocol", "", "In the words of the protocol files; a test holds the two together.", ""]
    for name in protocol_names():
        if name in silent:
            continue
        title = " ".join(protocols.docstring(name).split("\n\n")[0].split())
        lines += [f"### {name}", "", title, "", "| who | learns |", "|---|---|"]
        lines += [f"| {cell(who)} | {cell(what)} |" for who, what in entries(protocols.section(name, "Reveals"))]
        lines += ["", f"*Assumes:* {' '.join(protocols.section(name, 'Assumes').split())}", ""]
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def page() -> str:
    """The page as it should be."""
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return head + MARK + "\n" + generated()


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(page() != PAGE.read_text(encoding="utf-8") and "run: python scripts/threat_model.py")
    PAGE.write_text(page(), encoding="utf-8")
