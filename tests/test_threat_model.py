"""docs/threat-model.md against the code: every workflow and mode has its row, every protocol its table."""

import re
import runpy
from pathlib import Path

import pytest

from cloister import protocols, workflows

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "threat_model.py"))
MODES = [(name, mode) for name in workflows.SHIPPED for mode in workflows.get(name).modes]


def test_the_generated_half_is_what_the_code_says():
    assert SCRIPT["page"]() == PAGE, "run: python scripts/threat_model.py"


def rows():
    table = re.search(r"<!-- collusions -->\n(.*?)<!-- /collusions -->", PAGE, flags=re.DOTALL)[1]
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in table.strip().splitlines()[2:]]


def test_every_workflow_and_mode_has_one_full_row():
    found = rows()
    assert sorted((r[0].strip(" `"), r[1]) for r in found) == sorted(MODES)
    assert {len(r) for r in found} == {7}
    assert all(c for r in found for c in r)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_every_protocol_that_a_workflow_runs_has_a_row_in_security(name, mode):
    protocol = workflows.get(name).modes[mode].protocols[0]
    assert f"| `{protocol}`" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCRIPT["protocol_names"]())
def test_every_protocol_is_on_the_page(name):
    assert f"### {name}\n" in PAGE or f"`{name}`" in PAGE


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_reveals_of_every_protocol_that_runs_are_there_word_for_word(name, mode):
    plain = " ".join(re.sub(r"\\\||[|:]", " ", PAGE).split())
    for protocol in workflows.get(name).modes[mode].protocols:
        text = protocols.section(protocol, "Reveals")
        assert f"### {protocol}\n" in PAGE
        for who, what in SCRIPT["entries"](text):
            for part in (who, what):
                assert " ".join(re.sub(r"[|:]", " ", part).split()) in plain


def test_pairs_go_on_over_lines_and_collusions_get_their_own_row():
    text = "coordinator : z. With k colluding sites: the sum\n    over the others.\nsite : nothing."
    assert list(SCRIPT["entries"](text)) == [
        ("coordinator", "z."),
        ("coordinator, with k colluding sites", "the sum over the others."),
        ("site", "nothing."),
    ]
