"""`make docs`: the pages build without a warning, and fetch nothing from elsewhere.

CI runs `make docs` for itself, so that building them all again is slow; what these pages hold is checked nightly.
"""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built beside the repository's own build folder, so that a running `make docs` is left alone."""
    script = runpy.run_path(str(ROOT / "scripts" / "docs.py"))
    folder = tmp_path_factory.mktemp("site")
    script["build"].__globals__.update(STAGE=folder / "docs", SITE=folder / "site")
    assert script["build"]() == 0
    return folder / "site"


@pytest.mark.slow
def test_every_page_is_there_and_nothing_is_fetched(site):
    pages = {p.relative_to(site).as_posix(): p.read_text(encoding="utf-8") for p in site.rglob("*.html")}
    for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"), *ROOT.glob("docs/notebooks/*.ipynb")]:
        assert path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages
    assert {"SECURITY.html", "CHANGELOG.html", "CONTRIBUTING.html", "reference.html", "commands.html"} <= set(pages)
    assert {"options.html", "benchmarks.html"} <= set(pages)
    for name, text in pages.items():
        found = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"(https?:[^\"]*)", text)
        found += re.findall(r"<link[^>]+(?:stylesheet|icon)[^>]+href=\"(https?:[^\"]*)", text)
        assert not found, f"{name} fetches {found[0]}"


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    import cloister

    text = (site / "reference.html").read_text(encoding="utf-8")
    for name in set(cloister._PUBLIC) - {"Party"}:
        assert f'id="cloister.{name}"' in text, name


def test_a_broken_link_fails(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "docs.py"))
    script["build"].__globals__.update(STAGE=tmp_path / "docs", SITE=tmp_path / "site")

    def stage():
        (tmp_path / "docs" / "_static").mkdir(parents=True)
        (tmp_path / "docs" / "index.md").write_text("# Page\n\n[nowhere](nowhere.md)\n")

    script["build"].__globals__.update(stage=stage)
    assert script["build"]() != 0


def test_diagrams_are_drawn_with_every_step_and_nothing_unknown():
    script = runpy.run_path(str(ROOT / "scripts" / "diagrams.py"))
    told = "sequenceDiagram\nparticipant u as every <site>\nparticipant S as hub\nu->>S: L1 a\nloop n\nS->>u: L2\nend\n"
    drawn = script["draw"](told + "Note over u,S: both\n")
    assert drawn.count('class="wire"') == 2
    assert "every &lt;site&gt; to hub: L1 a; repeated, n; hub to every &lt;site&gt;: L2; end of n" in drawn
    assert "\n\n" not in drawn
    assert script["draw"]("flowchart LR\nA[one] --> B[two]").count('class="wire"') == 1
    for wrong in ("pie", "sequenceDiagram\nalt x", "flowchart LR\nA[one] --- B[two]"):
        with pytest.raises(ValueError, match="not drawn"):
            script["draw"](wrong)


@pytest.mark.slow
def test_every_diagram_of_a_page_is_drawn(site):
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/measured/*.md")]:
        wanted = page.read_text(encoding="utf-8").count("```mermaid")
        text = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        assert text.count('<div class="diagram">') == wanted, page.name
        assert "sequenceDiagram" not in text
