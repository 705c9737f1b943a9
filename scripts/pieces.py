"""Fill the pieces of kept pages that are made from the code: options, and who learns what.

    python scripts/pieces.py            writes them; `make format` does it too
    python scripts/pieces.py --check    fails if a page says something else than the code (tests/test_pages.py)

A piece stands between `<!-- made: KIND WORDS -->` and `<!-- /made -->`:

    options WORKFLOW [NAME ...]   its options, or only those named, with their defaults
    parameters FUNCTION           the parameters of a public function, from its docstring
    learns WORKFLOW               who learns what, in short, one column per mode
    learns                        the same for every workflow and mode
    summary WORKFLOW              who learns what in its first mode
    demo [WORKFLOW ...]           alone, together and pooled in hardened mode, ranges over runs (benchmarks/demo.py)
    arguments                     the pages of docs/security, by their titles
    malicious                     what one malicious coordinator or site learns beyond that, by hardened protocol
    lies                          what became of every lie of one party, by protocol (benchmarks/logs)
    claims                        scripts/claims.toml: claim, tests against the published and the hardened step, mutants
    mutants                       security mutants by protocol, and why those that live may (benchmarks/logs)
    printed NAME                  what a benchmark printed, kept as benchmarks/logs/NAME.txt
    rings                         estimated security of every lattice ring in use (scripts/lattice_security.py)
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloister
from cloister import protocols, workflows
from cloister.workflows.modes import LEAVES, STAYS, TOGETHER
from cloister.workflows.options import listed_options, options_in

ROOT = Path(__file__).parents[1]
PIECE = re.compile(r"^<!-- made: ([^>]*?) -->\n.*?^<!-- /made -->$", flags=re.DOTALL | re.MULTILINE)
MALICIOUS = re.compile(r"(?:one |a )?(?:lying|malicious) (\w[\w ]*)")
CENTER = ("coordinator", "aggregator", "server", "provider")  # whoever adds up, as the protocol calls it
MEASURED = {  # what the demo measures, for a reader who has not read the workflow's page
    "bin-values": "values in the bin of the pooled quantiles",
    "quality-control": "area under the curve of planted doublets",
    "choose-genes": "of the 300 genes that pooled cells choose",
    "shared-pca": "smallest cosine with the pooled space",
    "cluster-cells": "NMI of clusters with cell types",
    "find-markers": "of the 50 top markers of pooled cells",
    "shared-map": "of 15 nearest cells, nearest on the map",
    "model-outcome": "standard error of the planted effect; smaller is better",
    "find-programs": "cosine with the pooled programs",
    "integrate": "neighbours from other hospitals, as a fraction of a random mixture",
    "find-outliers": "AUROC of cells of a planted clone",
    "map-labels": "accuracy at a hospital without labels",
    "propagate-labels": "accuracy on unlabelled cells",
    "fine-tune": "accuracy on held-out cells, neural network",
    "train-classifier": "accuracy on held-out cells, linear model",
    "compare-groups": "planted genes found, of 20, FDR 5 %",
    "train-cellcnn": "new donors classified correctly",
    "adapt-model": "accuracy on held-out cells, hidden encoder",
}
PAGE_OF = {"predict-cellcnn": "train-cellcnn", "serve-model": "adapt-model"}  # two workflows on one page


def pages() -> list[Path]:
    """Every page that is kept and may hold a piece."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with every piece as the code has it now."""

    def piece(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        return f"<!-- made: {found[1]} -->\n{KINDS[kind](*words)}\n<!-- /made -->"

    return PIECE.sub(piece, text)


def modes(name: str) -> tuple[str, ...]:
    return tuple(workflows.get(name).modes)


def may_run(name: str, mode: str) -> dict[str, str]:
    """Protocols that a mode may run, its own first, each with its `Reveals`."""
    return {name: protocols.section(name, "Reveals") for name in workflows.get(name).mode(mode).protocols}


def learns(name: str, mode: str) -> list[tuple[str, str]]:
    """Who learns what in one mode, in short."""
    return [(who, " ".join(what.split()).rstrip(".")) for who, what in workflows.learns(name, mode)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(head), *others])


def shown(default: Any) -> str:
    """A default as it is typed: on, off, none, a number, a word."""
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == () or default == "":
        return "–"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def choice(default: Any, hint: Any) -> str:
    """A default, and after it what else may be chosen, where the choice is of words."""
    ways = [hint, *typing.get_args(hint)]
    words = next((typing.get_args(way) for way in ways if typing.get_origin(way) is typing.Literal), ())
    others = [str(word) for word in words if word != default]
    return f"{shown(default)}; or {', '.join(others)}" if others else shown(default)


def options_table(name: str, *only: str) -> str:
    options = workflows.get(name).options
    fields, hints = {f.name: f for f in listed_options(options)}, typing.get_type_hints(options)
    usual = {f.name for f in options_in(options, modes(name)[0])}
    rows = []
    for key in only or tuple(fields):
        rows.append(
            (f"`{key}`", choice(fields[key].default, hints[key]), only_in(fields[key]) + fields[key].metadata["help"])
        )
    made = table(("option", "default", "meaning"), rows)
    left = len(usual - set(only)) if only else 0
    others = len(fields) - len(usual)
    more = [f"{left} more" if left else "", f"{others} of other modes" if only and others else ""]
    return made + (f"\n\n{', '.join(filter(None, more))}: `cloister explain {name}`." if any(more) else "")


def only_in(field: dataclasses.Field[Any]) -> str:
    return f"mode {' and '.join(field.metadata['modes'])} only: " if field.metadata["modes"] else ""


def parameters_table(name: str) -> str:
    """What the docstring of a function of `cloister` says about its keywords."""
    function = getattr(cloister, name)
    section = (inspect.getdoc(function) or "").partition("Parameters\n----------\n")[2].partition("\n\n")[0]
    rows = []
    for key, text in re.findall(r"^(\w+)\n((?:    .*\n?)+)", section, flags=re.MULTILINE):
        parameter = inspect.signature(function).parameters[key]
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            rows.append((f"`{key}`", shown(parameter.default), " ".join(text.split())))
    return table(("option", "default", "meaning"), rows)


def learns_table(*names: str) -> str:
    return learns_of(*names) if names else learns_of_all()


def learns_of(name: str) -> str:
    """One workflow: a row per party, a column per mode. What leaves split or encrypted stands in SECURITY.md."""
    told = {mode: {who: what for who, what in learns(name, mode) if who != LEAVES} for mode in modes(name)}
    whos = sorted(dict.fromkeys(who for rows in told.values() for who in rows), key=lambda who: who == TOGETHER)
    rows = []
    for who in whos:
        first, *others = (pairs.get(who, "–") for pairs in told.values())
        rows.append((who, first, *("the same" if what == first != "–" else what for what in others)))
    return table(("", *told), rows)


def summary(name: str) -> str:
    rows = [(who, what) for who, what in learns(name, modes(name)[0])]
    return table(("", f"`{name}`, mode {modes(name)[0]}"), rows)


def learns_of_all() -> str:
    """Every workflow and mode: what stays, what is learned, what comes of collusion."""
    rows = []
    for name in workflows.SHIPPED:
        for mode in modes(name):
            pairs = learns(name, mode)
            of = dict(pairs)
            stays = ". *Leaves*: ".join(of[who] for who in (STAYS, LEAVES) if who in of)
            rows.append((f"`{name}`", mode, stays, learned_by(pairs), of.get(TOGETHER, "–")))
    return table(("workflow", "mode", "stays at its site", "is learned by", "if parties collude"), rows)


def learned_by(pairs: Sequence[tuple[str, str]]) -> str:
    """Who learns what beside what stays and what a collusion adds, in one cell."""
    return ". ".join(f"*{short(who)}*: {what}" for who, what in pairs if who not in (STAYS, LEAVES, TOGETHER))


def short(who: str) -> str:
    return who.removesuffix(" learns").removeprefix("The ").lower() if who.endswith(" learns") else who.lower()


def demo_table(*names: str) -> str:
    """Hardened rows of all stored runs of the demo; a range where runs differ."""
    runs = json.loads((ROOT / "benchmarks" / "logs" / "demo.json").read_text(encoding="utf-8"))["runs"]
    found: dict[str, dict[str, list[str]]] = {}
    for row in (row for run in runs for row in run if row["mode"] == "hardened"):
        for column in ("alone", "together", "pooled"):
            found.setdefault(row["workflow"], {}).setdefault(column, []).append(str(row[column]))
    links = "docs/" if names else "../"
    rows = [
        (f"[`{name}`]({links}{name}.md)", MEASURED[name], *(spread(values) for values in found[name].values()))
        for name in names or found
    ]
    return table(("workflow", "measured, hardened mode", "alone", "together", "pooled"), rows)


def spread(values: Sequence[str]) -> str:
    """One value, or the smallest and the largest."""
    ordered = sorted(dict.fromkeys(values), key=lambda value: float(value.rstrip("%")))
    if len(ordered) == 1:
        return ordered[0].replace("%", " %")
    return f"{ordered[0].rstrip('%')} to {ordered[-1].replace('%', ' %')}"


def arguments() -> str:
    """Every page of docs/security but the list itself."""
    pages = sorted(p for p in (ROOT / "docs" / "security").glob("*.md") if p.stem != "index")
    return "\n".join(f"- [{p.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}]({p.name})" for p in pages)


def malicious_table() -> str:
    """Rows on malicious parties in `Reveals` of the protocols of hardened modes, which is where they are written."""
    used: dict[str, list[str]] = {}
    for name in workflows.SHIPPED:
        for protocol in may_run(name, "hardened") if "hardened" in modes(name) else ():
            used.setdefault(protocol, []).append(name)
    rows = []
    for protocol, names in used.items():
        cells = {"center": "–", "site": "–"}
        for whos, what in pairs_of(protocols.section(protocol, "Reveals")):
            for who in re.split(r", (?=(?:one )?(?:lying|malicious))", whos):
                if found := MALICIOUS.fullmatch(who):
                    text = " ".join(what.split()).rstrip(".")
                    named = "" if found[1] in ("coordinator", "site") else f"*{found[1]}*: "
                    cells["center" if found[1] in CENTER else "site"] = named + text
        if set(cells.values()) != {"–"}:
            rows.append((f"`{protocol}`", ", ".join(f"`{n}`" for n in names), cells["center"], cells["site"]))
    return table(("protocol", "runs in", "a malicious coordinator learns", "one malicious site learns"), rows)


def pairs_of(reveals: str) -> list[tuple[str, str]]:
    """The `who : what` pairs of a section; a pair continues over indented lines."""
    pairs: list[tuple[str, str]] = []
    for line in reveals.splitlines():
        starts = re.match(r"(\S.*?) : (.*)", line) if line[:1].strip() else None
        if starts:
            pairs.append((starts[1], starts[2]))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]} {line.strip()}")
    return pairs


def lies_table() -> str:
    """What `benchmarks/lies.py` found."""
    path = ROOT / "benchmarks" / "logs" / "lies.json"
    if not path.exists():
        return "Not run on this code yet."
    found = json.loads(path.read_text(encoding="utf-8"))
    counts = ("tried", "aborted", "right", "assumed")
    rows = [(f"`{name}`", *(str(row.get(key, "–")) for key in counts), row["error"]) for name, row in found.items()]
    sums = [sum(row.get(key, 0) for row in found.values()) for key in counts]
    rows.append(("**all**", *map(str, sums), ""))
    return table(("protocol", "lies tried", "named abort", "right result", "not noticed, as it says", "error"), rows)


def mutants_table() -> str:
    """What `mutants.py` found, by file; then those that no behaviour noticed."""
    log = (ROOT / "benchmarks" / "logs" / "mutants.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in log]
    reasons = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text(encoding="utf-8"))["reasons"]

    def counted(name: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
        killed, waiting = sum(bool(r["killed"]) for r in rows), sum(r["killed"] is None for r in rows)
        return name, *map(str, (len(rows), killed, len(rows) - killed - waiting, waiting))

    files = dict.fromkeys(row["file"] for row in found)
    rows = [counted(f"`{file}`", [r for r in found if r["file"] == file]) for file in files]
    whole = table(("file", "mutants", "killed by behaviour", "alive", "not run"), [*rows, counted("**all**", found)])
    alive = [(f"`{r['mutant']}`", reasons.get(r["mutant"], "**none**")) for r in found if r["killed"] == ""]
    return whole + ("\n\n" + table(("alive", "why it may be"), alive) if alive else "")


def claims_table() -> str:
    """Every claim with its tests, and how many mutants of its files a test noticed."""
    claims = tomllib.loads((ROOT / "scripts" / "claims.toml").read_text(encoding="utf-8"))["claim"]
    log = (ROOT / "benchmarks" / "logs" / "mutants.jsonl").read_text(encoding="utf-8").splitlines()
    tried = [json.loads(line) for line in log]

    def tests(names: Sequence[str]) -> str:
        return "<br>".join(f"[`{n.partition('::')[2]}`](../{n.partition('::')[0]})" for n in names) or "–"

    def noticed(files: Sequence[str]) -> str:
        rows = [row for row in tried if row["file"] in files]
        return f"{sum(bool(row['killed']) for row in rows)} of {len(rows)}" if rows else "–"

    rows = [
        (f"`{c['workflow']}`: {c['claim']}", tests(c["published"]), tests(c["hardened"]), noticed(c["mutants"]))
        for c in claims
    ]
    head = ("claim", "attack succeeds on the published step", "attack fails on the hardened step", "mutants")
    return table(head, rows).replace("&lt;br>", "<br>")


def printed(name: str) -> str:
    """What a benchmark printed, as it is."""
    path = ROOT / "benchmarks" / "logs" / f"{name}.txt"
    if not path.exists():
        return "Not run on this code yet."
    return f"```text\n{path.read_text(encoding='utf-8').strip()}\n```"


def rings_table() -> str:
    sys.path.insert(0, str(ROOT / "scripts"))
    from lattice_security import table

    return table()


KINDS = {
    "options": options_table,
    "parameters": parameters_table,
    "learns": learns_table,
    "summary": summary,
    "demo": demo_table,
    "arguments": arguments,
    "malicious": malicious_table,
    "lies": lies_table,
    "claims": claims_table,
    "mutants": mutants_table,
    "printed": printed,
    "rings": rings_table,
}


def main() -> int:
    stale = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(path)
            if "--check" not in sys.argv[1:]:
                path.write_text(filled(text), encoding="utf-8")
    if "--check" in sys.argv[1:] and stale:
        sys.exit(f"{', '.join(p.name for p in stale)}: run python scripts/pieces.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
