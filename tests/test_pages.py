"""The workflow pages: one order for all, a picture of a result, and pieces that are what the code says."""

import re
import runpy
from pathlib import Path

import pytest

from cloister import workflows

ROOT = Path(__file__).parents[1]
PIECES = runpy.run_path(str(ROOT / "scripts" / "pieces.py"))
NAMES = sorted({PIECES["PAGE_OF"].get(name, name) for name in workflows.SHIPPED} | {"embed"})
ORDER = ["What it does", "The call", "Options", "Who learns what", "Limits", "Figures"]
ROWS = ["quality", "cost", "scale", "best peer", "largest caveat"]


def text_of(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PIECES["pages"](), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pieces_say_what_the_code_says(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- made:") == text.count("<!-- /made -->") == len(PIECES["PIECE"].findall(text))
    assert PIECES["filled"](text) == text, "run: python scripts/pieces.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_begins_with_its_picture_and_keeps_the_order(name):
    text = text_of(name)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == ORDER
    picture = re.match(r"# .*\n\n!\[([^\]]{20,})\]\((figures/[\w-]+\.png)\)\n", text)
    assert picture, "title, picture with a description"
    assert (ROOT / "docs" / picture[2]).read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^\| ([a-z ]+) \| ", text.partition("## Figures")[2], flags=re.MULTILINE)
    assert rows == ROWS


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"embed"}))
def test_a_page_has_its_pieces_and_leads_to_what_was_measured(name):
    text = text_of(name)
    assert f"<!-- made: options {name}" in text
    assert f"<!-- made: learns {name} -->" in text
    assert f"](measured/{name}.md)" in text


def test_every_picture_is_drawn_by_the_script():
    drawn = set(runpy.run_path(str(ROOT / "scripts" / "figures.py"))["PICTURES"])
    assert drawn == set(NAMES)


def test_the_figure_of_the_readme_is_drawn_from_the_stored_runs():
    script = runpy.run_path(str(ROOT / "scripts" / "together.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["draw"](), "run: python scripts/together.py"


def test_a_stale_piece_is_found():
    stale = "<!-- made: options bin-values -->\n| an | older | table |\n<!-- /made -->"
    assert "`n_bins` | 51" in PIECES["filled"](stale)
