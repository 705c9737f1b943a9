"""Drawings as SVG, for pages that load no script: the little of Mermaid that our pages use, and a picture of the code.

    sequenceDiagram   participant x as name, x->>y: text, Note over x,y: text, loop text … end
    flowchart LR      A[text] --> B[text] --> …

A line that is none of these is an error, so a page cannot lose a step. Lines and letters take the colour of the text
around them, in light and in dark; a reader hears all steps in order.

    python scripts/diagrams.py      draws docs/figures/architecture.svg from `WAY`, function by function

Every function in `WAY` must exist (tests/test_architecture.py).
"""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path

WIDTH, LETTER, LINE = 760, 6.4, 16  # pixels: of a drawing, of a letter, of a line of text
PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "architecture.svg"

Step = tuple[str, str]  # a function under `cloister`, and what it does
REHEARSAL, SITE = "cloister rehearse map-labels", "cloister site KIT, on FLARE"
WAY: tuple[
    tuple[str, tuple[Step, ...], tuple[Step, ...]], ...
] = (  # title; left and right, or both where right is empty
    (
        "start",
        (
            ("cli.rehearse.rehearse", "options, files, notes about who learns what"),
            ("rehearsal.rehearsal.plan", "the study: these sites, a coordinator"),
            ("workflows.check_plan", "mode and options against the dataclass"),
            ("cells.files.open_cells", "each .h5ad, a large one left on disk; a child process tries it first"),
            ("rehearsal.rehearsal.run_parties", "a thread, a mailbox and a key for every party"),
        ),
        (
            ("deploy.start.start_party", "opens the kit: key, study, policy"),
            ("deploy.carrier.serve", "FLARE, in a confined process without keys or cells"),
            ("deploy.invitation.Invitation.check", "signed by the coordinator, fresh, never seen before"),
            ("deploy.run.main", "a process for this run, if the policy allows it"),
            ("deploy.party.Turn.take", "a key with every party; then cells.files.open_cells on its own file"),
        ),
    ),
    (
        "one party's turn",
        (
            ("session.take_part", "a receipt begins; whatever happens, it is signed at the end"),
            ("workflows.Workflow.part", "by role; a site's cells are checked once, before anything is sent"),
            ("workflows.map_labels.workflow.site", "asks, or offers its labelled cells; others assist"),
            ("cells.tables.embedding", "obsm[use_rep] as numbers; from here on no AnnData"),
            ("mpc.session.Session.run", "agree with everyone on the parameters' hash, then one role to its end"),
            (
                "workflows.map_labels.mapping_terms.owner",
                "sizes rounded up, label names, the largest norm under sharing",
            ),
            ("workflows.map_labels.verified_knn.querier", "and holder, helper: shares, distances, k nearest, the vote"),
            (
                "mpc.net.channel.Channel.send",
                "mpc.net.wire packs the frame, receipts notes name, size and hash",
            ),
        ),
        (),
    ),
    (
        "carried",
        (
            ("mpc.net.memory_transport.MemoryLink.post", "the frame as it is"),
            ("mpc.net.memory_transport.Wires.carry", "to the other thread; tests lose and cut frames here"),
        ),
        (
            ("deploy.link.SealedLink.post", "sealed for the one party it is for"),
            ("deploy.pipe.Pipe.post", "to the service, and on to the carrier"),
            ("deploy.relay.Relay.work", "over mutual TLS to the coordinator, which passes it on"),
        ),
    ),
    (
        "received, and written",
        (
            ("mpc.net.mailbox.Mailbox.put", "in order, within bounds; the peer's await goes on"),
            ("cells.labels.write_labels", "obs['mapped'] at the asking site, and nowhere else"),
            ("mpc.net.receipts.Receipt.close", "the chain is signed with the party's key"),
            ("rehearsal.results.save_run", "cells, receipts and figures, whole or not at all"),
        ),
        (),
    ),
)


def draw(source: str) -> str:
    """One diagram as a block of HTML without an empty line."""
    lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    kind = lines[0]
    if kind == "sequenceDiagram":
        parts, height, steps = _sequence(lines[1:])
    elif kind == "flowchart LR":
        parts, height, steps = _flow(lines[1:])
    else:
        raise ValueError(f"diagrams of kind '{kind}' are not drawn")
    title = f"<title>{html.escape('; '.join(steps))}</title>"
    box = f'<svg viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join(['<div class="diagram">', box, title, *parts, "</svg>", "</div>"])


def _text(x: float, y: float, words: str, *, wide: float, anchor: str = "middle", kind: str = "") -> tuple[str, int]:
    """Text in lines of at most `wide` pixels, the first at y; and how many lines."""
    rows = textwrap.wrap(words, max(12, int(wide / LETTER)), break_long_words=False) or [""]
    spans = "".join(
        f'<tspan x="{x:g}" dy="{LINE if i else 0}">{html.escape(row)}</tspan>' for i, row in enumerate(rows)
    )
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{"".join(spans)}</text>', len(rows)


def _rect(x: float, y: float, wide: float, high: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="5" class="{kind}"/>'


def _sequence(lines: list[str]) -> tuple[list[str], float, list[str]]:
    names: dict[str, str] = {}
    steps: list[tuple[str, ...]] = []
    for line in lines:
        if m := re.fullmatch(r"participant (\w+) as (.+)", line):
            names[m[1]] = m[2]
        elif m := re.fullmatch(r"(\w+)->>(\w+): (.+)", line):
            steps.append(("sends", *m.groups()))
        elif m := re.fullmatch(r"Note over ([\w,]+): (.+)", line):
            steps.append(("note", *m.groups()))
        elif m := re.fullmatch(r"loop (.+)", line):
            steps.append(("loop", m[1]))
        elif line == "end":
            steps.append(("end",))
        else:
            raise ValueError(f"'{line}' is not drawn")
    gap = WIDTH / len(names)
    x = {name: gap * (i + 0.5) for i, name in enumerate(names)}
    heads, said = [], [", ".join(names.values())]
    rows = 1
    for name, label in names.items():
        drawn, n = _text(x[name], 22, label, wide=gap - 24, kind="head")
        heads.append(drawn)
        rows = max(rows, n)
    top = y = 14 + rows * LINE + 8
    boxes = [_rect(x[name] - gap / 2 + 6, 4, gap - 12, top - 8, "head") for name in names]
    parts: list[str] = []
    loops: list[tuple[float, str]] = []
    for step in steps:
        if step[0] == "sends":
            _, a, b, words = step
            middle, wide = (x[a] + x[b]) / 2, abs(x[a] - x[b])
            drawn, n = _text(middle, y + 20, words, wide=wide - 16)
            y += 20 + n * LINE
            tip = 9 if x[b] < x[a] else -9
            arrow = f"M{x[b]:g} {y - 8:g}l{tip} -5v10z"
            parts.append(drawn)
            parts.append(f'<path d="M{x[a]:g} {y - 8:g}H{x[b]:g}" class="wire"/><path d="{arrow}" class="tip"/>')
            said.append(f"{names[a]} to {names[b]}: {words}")
        elif step[0] == "note":
            at = [x[name] for name in step[1].split(",")]
            left, wide = min(at) - gap / 2 + 16, max(at) - min(at) + gap - 32
            drawn, n = _text(left + wide / 2, y + 24, step[2], wide=wide - 12)
            parts += [_rect(left, y + 8, wide, n * LINE + 8, "note"), drawn]
            y += n * LINE + 20
            said.append(f"{' and '.join(names[name] for name in step[1].split(','))}: {step[2]}")
        elif step[0] == "loop":
            loops.append((y + 4, step[1]))
            parts.append(_text(16, y + 20, f"repeat: {step[1]}", wide=WIDTH - 32, anchor="start", kind="head")[0])
            y += 24
            said.append(f"repeated, {step[1]}")
        else:
            began, words = loops.pop()
            y += 6
            parts.append(_rect(6, began, WIDTH - 12, y - began, "loop"))
            said.append(f"end of {words}")
            y += 4
    height = y + 12
    poles = [f'<path d="M{at:g} {top - 4:g}V{height:g}" class="pole"/>' for at in x.values()]
    return [*poles, *boxes, *heads, *parts], height, said


def _flow(lines: list[str]) -> tuple[list[str], float, list[str]]:
    whole = " ".join(lines)
    labels = re.findall(r"\w+\[([^\]]+)\]", whole)
    if re.sub(r"\w+\[[^\]]+\]", "", whole).replace("-->", "").strip() or whole.count("-->") != len(labels) - 1:
        raise ValueError(f"'{whole}' is not drawn")
    gap = WIDTH / len(labels)
    made = [_text(gap * (i + 0.5) - 8, 0, label, wide=gap - 36) for i, label in enumerate(labels)]
    most = max(n for _, n in made)
    high = most * LINE + 20
    parts = []
    for i, label in enumerate(labels):
        middle, n = gap * (i + 0.5) - 8, made[i][1]
        first = 4 + high / 2 - (n - 1) * LINE / 2 + 4
        parts += [_rect(gap * i + 2, 4, gap - 20, high, "head"), _text(middle, first, label, wide=gap - 36)[0]]
        if i:
            end = gap * i + 1
            parts.append(f'<path d="M{end - 19:g} {4 + high / 2:g}H{end:g}" class="wire"/>')
            parts.append(f'<path d="M{end:g} {4 + high / 2:g}l-8 -5v10z" class="tip"/>')
    return parts, high + 8, labels


# ---- the picture of the code -----------------------------------------------------------------------------------------

STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1d2329 }
.name { font: 600 13px ui-monospace, monospace }
.lane { font-weight: 600; font-size: 15px }
.stage { fill: #6b747c; font-style: italic }
.box { fill: #f4f6f6; stroke: #c3c9cb }
.both { fill: #e7f0f7; stroke: #9fbdd3 }
.wire { fill: none; stroke: #535c66 }
.tip { fill: #535c66 }
"""
BOARD, BOX, GAP, EDGE = 980, 46, 16, 16  # pixels: width, height of a step, between two steps, at the sides


def way() -> str:
    """The picture of `WAY`: one file in, one result out, on two ways that share their middle."""
    half = (BOARD - 3 * EDGE) / 2
    left, right, middle = EDGE, 2 * EDGE + half, (BOARD - half - 160) / 2
    parts = [_label(left + half / 2, 24, REHEARSAL, "lane"), _label(right + half / 2, 24, SITE, "lane")]
    ends: list[tuple[float, float]] = []  # where the arrows into the next stage begin
    y = 40.0
    for title, first, second in WAY:
        parts.append(_label(EDGE, y + 12, title, "stage", anchor="start"))
        y += 20
        lanes = [(left, half, first, "box"), (right, half, second, "box")] if second else []
        lanes = lanes or [(middle, half + 160, first, "both")]
        parts += [_arrow(x, y_end, x, y) for x, y_end in ends]
        ends = []
        bottom = y
        for at, wide, steps, kind in lanes:
            below = y
            for i, (name, what) in enumerate(steps):
                if i:
                    parts.append(_arrow(at + wide / 2, below - GAP, at + wide / 2, below))
                parts += [_step(at, below, wide, name, what, kind)]
                below += BOX + GAP
            bottom = max(bottom, below)
            ends.append((at + wide / 2, below - GAP))
        if not second:  # the next stage has two lanes again, or none
            ends = [(x, ends[0][1]) for x in (left + half / 2, right + half / 2)]
        y = bottom
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {BOARD} {y:g}" role="img">'
    spoken = "; ".join(f"{name}: {what}" for _, a, b in WAY for name, what in (*a, *b))
    frame = f'<rect width="{BOARD}" height="{y:g}" fill="white"/>'
    return "\n".join(
        [head, f"<title>{html.escape(spoken)}</title>", f"<style>{STYLE}</style>", frame, *parts, "</svg>", ""]
    )


def _label(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{html.escape(words)}</text>'


def _step(x: float, y: float, wide: float, name: str, what: str, kind: str) -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{BOX}" rx="6" class="{kind}"/>'
    return box + _label(x + wide / 2, y + 19, name, "name") + _label(x + wide / 2, y + 37, what, "")


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<path d="M{x:g} {y:g}L{to_x:g} {to_y - 6:g}" class="wire"/>'
        f'<path d="M{to_x:g} {to_y:g}l-5 -8h10z" class="tip"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(way(), encoding="utf-8")
