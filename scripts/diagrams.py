"""Mermaid diagrams as SVG, for pages that load no script: the little of Mermaid that our pages use.

    sequenceDiagram   participant x as name, x->>y: text, Note over x,y: text, loop text … end
    flowchart LR      A[text] --> B[text] --> …

A line that is none of these is an error, so a page cannot lose a step. Lines and letters take the colour of the text
around them, in light and in dark; a reader hears all steps in order.
"""

from __future__ import annotations

import html
import re
import textwrap

WIDTH, LETTER, LINE = 760, 6.4, 16  # pixels: of a drawing, of a letter, of a line of text


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
