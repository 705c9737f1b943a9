"""Build the documentation: `make docs` → build/site. Nothing in it is fetched from elsewhere; broken links fail.

The pages are docs/*.md. Beside them stand

    SECURITY.md, ...       from the top of the repository
    notebooks/*.md         from the notebooks, with the outputs they keep
    reference.md           every public name of `cloister`
    commands.md            what `cloister VERB --help` prints
    options.md             every option of every workflow
    benchmarks.md          what `make bench` kept
    threat-model.md        the kept page, and below it what every protocol says under `Reveals`

Everything is laid out in build/docs first, where links that are right on GitHub are made right for the site, and
diagrams in Mermaid become drawings (scripts/diagrams.py): Mermaid itself would need a script from elsewhere.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cloister import workflows

sys.path.insert(0, str(Path(__file__).parent))
import bench
import pieces
import threat_model
from diagrams import draw

ROOT = Path(__file__).parents[1]
DOCS, STAGE, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
TOP = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
HOW_TO = (
    *(
        "atlas",
        "plots",
        "deploy",
        "bin-values",
        "quality-control",
        "choose-genes",
        "shared-pca",
        "integrate",
        "embed",
        "cluster-cells",
        "find-markers",
        "shared-map",
    ),
    *("find-outliers", "compare-groups"),
    "model-outcome",
    "find-programs",
    *("train-classifier", "map-labels", "propagate-labels", "fine-tune"),
)
REFERENCE = ("reference", "commands", "options", "threat-model", "benchmarks", "CHANGELOG")
EXPLANATION = ("SECURITY", "architecture", "papers", "claims", "CONTRIBUTING")
KINDS = {  # of public names, in the order of the page
    "Run a workflow": ("rehearse", "Run", "Series", "Study", "Step", "Receipt"),
    "Files and demo data": (
        *("read_cells", "write_cells", "demo_sites", "demo_donors", "demo_rows", "demo_cohort", "demo_outcomes"),
    ),
}
MADE_HERE = {  # words of kept pages about what is only on the site, and the links that they become
    "Python, the command line, all options, and the quick benchmarks (pages that `make docs` makes)": (
        "[Python](reference.md), [the command line](commands.md), [all options](options.md), and the"
        " [quick benchmarks](benchmarks.md)"
    ),
}
CSS = """\
@media (min-width: 74em) and (max-width: 82em), (min-width: 90em) { .content { width: 52em } }
.diagram { overflow-x: auto; margin: 1em 0 }
.diagram svg { min-width: 36em; width: 100%; height: auto; font-size: 13px }
.diagram text { fill: currentColor }
.diagram text.head { font-weight: 600 }
.diagram .wire, .diagram .pole, .diagram .loop { fill: none; stroke: currentColor }
.diagram .tip { fill: currentColor }
.diagram .pole { opacity: 0.3 }
.diagram .loop { stroke-dasharray: 5 4; opacity: 0.7 }
.diagram rect.head { fill: var(--color-background-secondary); stroke: var(--color-background-border) }
.diagram rect.note { fill: var(--color-background-primary); stroke: currentColor; stroke-opacity: 0.35 }
table { display: block; overflow-x: auto; font-size: 0.85em }
pre.output { border-left: 3px solid var(--color-brand-primary); padding-left: 0.8em; font-size: 0.82em }
img { max-width: 100% }
"""


def build() -> int:
    """Lay the pages out and run Sphinx; warnings are errors."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = ["sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "-c", ROOT / "scripts" / "sphinx"]
    command += ["-D", f"html_static_path={STAGE / '_static'}", STAGE, SITE]
    done = subprocess.run([str(Path(sys.executable).parent / command[0]), *map(str, command[1:])])
    if done.returncode == 0:
        print(f"open {SITE / 'index.html'}")
    return done.returncode


def stage() -> None:
    """Lay out everything that Sphinx reads."""
    shutil.rmtree(STAGE, ignore_errors=True)
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in TOP}
    for path in sorted(
        [*DOCS.glob("*.md"), *DOCS.glob("measured/*.md"), *DOCS.glob("decisions/*.md"), *DOCS.glob("security/*.md")]
    ):
        pages[path.relative_to(DOCS).as_posix()] = path.read_text(encoding="utf-8")
    for path in sorted(DOCS.glob("notebooks/*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = notebook_page(path)
    pages |= {"reference.md": reference_page(), "commands.md": commands_page(), "options.md": options_page()}
    pages |= {"benchmarks.md": benchmarks_page(), "threat-model.md": threat_model.page()}
    pages["index.md"] += contents([name.removesuffix(".md") for name in pages])
    for name, text in pages.items():
        path = STAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(for_the_site(name, text), encoding="utf-8")
    shutil.copytree(DOCS / "figures", STAGE / "figures")
    (STAGE / "_static").mkdir()
    (STAGE / "_static" / "pages.css").write_text(CSS, encoding="utf-8")
    for path in DOCS.glob("notebooks/*.ipynb"):
        shutil.copyfile(path, STAGE / "_static" / path.name)


def for_the_site(name: str, text: str) -> str:
    """Make links that are right on GitHub right on the site."""
    up, names = "../" * name.count("/"), "|".join(map(re.escape, TOP))
    if name in TOP:
        text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(rf"\]\((?:\.\./)+({names})", rf"]({up}\1", text)
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|benchmarks|src|scripts|NOTICE)[^)]*\)", r"\1", text)
    text = re.sub(r"(\]\([\w./-]*)\.ipynb\)", r"\1.md)", text)
    for words, links in MADE_HERE.items():
        text = text.replace(words, links)
    return re.sub(r"^```mermaid\n(.*?)^```$", lambda m: draw(m[1]), text, flags=re.DOTALL | re.MULTILINE)


def contents(pages: list[str]) -> str:
    """The side bar: tutorial, how-to, reference, explanation. A page that nobody put anywhere is a how-to."""
    notebooks = [p for p in pages if p.startswith("notebooks/")]
    decisions = [p for p in pages if p.startswith("decisions/")]
    measured = [p for p in pages if p.startswith("measured/")]
    arguments = [p for p in pages if p.startswith("security/")]
    named = {"index", "tutorial", *HOW_TO, *REFERENCE, *EXPLANATION, *notebooks, *decisions, *measured, *arguments}
    parts = {
        "Tutorial": ["tutorial", *notebooks],
        "How-to": [*HOW_TO, *(p for p in pages if p not in named)],
        "Reference": [*REFERENCE],
        "Measured": measured,
        "Security arguments": arguments,
        "Explanation": [*EXPLANATION, *decisions],
    }
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"
        for title, names in parts.items()
    )


# ---- pages -----------------------------------------------------------------------------------------------------------


def notebook_page(path: Path) -> str:
    """A notebook as Markdown; figures go into the page itself."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```py\n{text}\n```")
        parts += [shown for out in cell["outputs"] if (shown := output(out))]
    link = f'<p><a href="../_static/{path.name}" download>Download this page as a notebook</a></p>'
    return "\n\n".join([*parts[:1], link, *parts[1:]]) + "\n"


def output(out: dict[str, Any]) -> str:
    data = out.get("data", {})
    if "image/png" in data:
        png = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="figure drawn by the code above" src="data:image/png;base64,{png}">'
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        return "\n".join(line for line in table.splitlines() if line.strip())
    text = "".join(out.get("text", data.get("text/plain", "")))
    return f'<pre class="output">{html.escape(text.strip())}</pre>' if text.strip() else ""


def reference_page() -> str:
    import inspect

    import cloister
    from cloister import pp, tl

    listed = {"Party", *(name for names in KINDS.values() for name in names)}
    kinds = {**KINDS, "At a site, inside a study": tuple(n for n in cloister._PUBLIC if n not in listed)}
    lines = ["# Python", "", "The public names of `cloister`; everything else may change without notice.", ""]
    for title, names in kinds.items():
        lines += [f"## {title}", "", "```{eval-rst}"]
        for name in names:
            what = "class" if inspect.isclass(getattr(cloister, name)) else "function"
            lines += [f".. auto{what}:: cloister.{name}"]
            lines += ["   :members:", "   :undoc-members:", ""] if what == "class" else [""]
        lines += ["```", ""]
    lines += ["## Figures", "", "```{eval-rst}", ".. automodule:: cloister.pl", "   :members:"]
    lines += ["```", "", "## Workflows under scanpy's names", "", "| name | workflow |", "|---|---|"]
    for module in (pp, tl):
        lines += [f"| `{module.__name__}.{name}` | `cloister.{to}` |" for name, to in module.NAMES.items()]
    return "\n".join([*lines, ""])


def options_page() -> str:
    lines = ["# Options", "", "The same names in Python, on the command line (`--n-bins 51`) and in `study.toml`.", ""]
    for name in workflows.SHIPPED:
        lines += [f"## {name}", "", workflows.get(name).summary, "", pieces.options_table(name), ""]
    return "\n".join(lines)


def benchmarks_page() -> str:
    kept = ROOT / "benchmarks" / "logs" / "quick.json"
    return bench.page(json.loads(kept.read_text(encoding="utf-8")), ROOT / "benchmarks")


def commands_page() -> str:
    """Help texts, as a terminal of 80 columns shows them."""
    from cloister.cli.main import app

    verbs = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    lines = ["# Command line", ""]
    for verb in ("", *verbs):
        command = [str(Path(sys.executable).parent / "cloister"), *verb.split(), "--help"]
        text = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
        rows = [line.rstrip() for line in text.strip("\n").splitlines()]
        lines += [f"## cloister {verb}".rstrip(), "", "```text", *rows, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--out"]:
        SITE = Path(sys.argv[2]).resolve()
    sys.exit(build())
