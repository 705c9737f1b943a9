"""The threat-model page that `make docs` builds, and docs/security/who_learns_what.md, against the code."""

import re
import runpy
from pathlib import Path

import pytest

from cloister import workflows

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "threat_model.py"))
PAGE = SCRIPT["page"]()
KEPT = (ROOT / "docs" / "security" / "who_learns_what.md").read_text(encoding="utf-8")
MODES = [(name, mode) for name in workflows.SHIPPED for mode in SCRIPT["modes"](name)]


@pytest.mark.parametrize("page", [PAGE, KEPT], ids=["threat-model", "who_learns_what"])
def test_every_workflow_and_mode_has_one_full_row(page):
    rows = [
        [cell.strip() for cell in row.strip("|").split(" | ")] for row in re.findall(r"^\| `[\w-]+` \| .*$", page, re.M)
    ]
    rows = [row for row in rows if len(row) == 5]
    assert sorted((row[0].strip("`"), row[1]) for row in rows) == sorted(MODES)
    assert all(cell for row in rows for cell in row)
    assert all(row[2] != "–" and row[3] for row in rows)


def test_every_protocol_that_says_who_learns_what_is_on_the_page():
    names = SCRIPT["telling"]()
    assert {"secure_sum", "private_knn", "encrypted_training"} <= set(names)
    for name in names:
        assert f"### {name}\n" in PAGE


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_reveals_of_every_protocol_that_runs_are_there_word_for_word(name, mode):
    plain = " ".join(re.sub(r"\\\||[|:]", " ", PAGE).split())
    for protocol, text in SCRIPT["may_run"](name, mode).items():
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
