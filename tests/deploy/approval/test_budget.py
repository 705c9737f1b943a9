"""A budget over all studies on the same cells: charged before a run, refused by name when spent."""

import dataclasses
import json
import shutil
import threading

import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.deploy.approval import accounting, budget
from cloister.deploy.approval.budget import Budget, cost_of
from cloister.deploy.kit import Kit
from cloister.errors import ParameterError, RefusedError
from cloister.study import Step, Study, format_study, parse_study

pytest.importorskip("nvflare")
from cloister.deploy.provision import provision

PARTIES = {"hub": "coordinator", "a": "site", "b": "site", "c": "site"}
STUDY = Study("bins", "bin-values", PARTIES, network={"host": "localhost", "port": 18780})
NOISE = {"dp_noise": 4.0}
NOISY = dataclasses.replace(STUDY, workflow="fine-tune", parameters=NOISE)
TWO = dataclasses.replace(STUDY, workflow="", steps=(Step("bin-values"), Step("shared-pca")))


@pytest.fixture(autouse=True)
def known_epsilon(monkeypatch):
    """What the accountants say is their own test's business; here ε of n runs is 4 √n."""
    monkeypatch.setattr(
        "cloister.workflows.fine_tune.workflow.privacy_budget", lambda noise, delta, sums: 4.0 if noise else 0.0
    )

    def compose(releases, delta, earlier, runs):
        return accounting.Total(4.0 * len(releases) ** 0.5 + earlier, delta, "cell", runs, "test")

    monkeypatch.setattr(accounting, "compose", compose)


@pytest.mark.parametrize(("study", "cost"), [
    (STUDY, {"runs": 1, "queries": 1, "epsilon": 0.0}),
    (TWO, {"runs": 1, "queries": 2, "epsilon": 0.0}),
    (NOISY, {"runs": 1, "queries": 1, "epsilon": 4.0}),
])  # fmt: skip
def test_what_a_run_takes(study, cost):
    assert cost_of(study) == cost


@pytest.mark.parametrize(("allowed", "study", "times", "says"), [
    ({"runs": 2}, STUDY, 2, "allows 2 runs on these cells over all studies, 2 are spent"),
    ({"queries": 5}, TWO, 2, "allows 5 queries .*4 are spent and with this run it would be 6"),
    ({"epsilon": 7.5}, NOISY, 3, "allows 7.5 epsilon .*6.9282 are spent and with this run it would be 8"),
    ({"epsilon": 0}, NOISY, 0, "allows 0 epsilon"),
])  # fmt: skip
def test_what_is_spent_is_refused_by_name(tmp_path, allowed, study, times, says):
    purse = Budget(tmp_path / "budget.json", allowed, "a")
    for _ in range(times):
        purse.charge("cells", study, cost_of(study))
    with pytest.raises(RefusedError, match=says) as e:
        purse.charge("cells", study, cost_of(study))
    assert e.value.code == "refused"
    before = purse.spent("cells")
    purse.charge("other cells", STUDY, cost_of(STUDY))
    assert purse.spent("cells") == before


def test_without_noise_nothing_of_epsilon_is_spent(tmp_path):
    purse = Budget(tmp_path / "budget.json", {"epsilon": 0}, "a")
    purse.charge("cells", STUDY, cost_of(STUDY))
    assert purse.spent("cells") == {"runs": 1, "queries": 1, "epsilon": 0.0}


def test_runs_of_earlier_versions_count_linearly(tmp_path):
    """Their ε is on record, and not their noise."""
    old = {"when": "2026-01-01", "study": "old", "digest": "00", "runs": 1, "queries": 1, "epsilon": 3.0}
    text = json.dumps({"cells": {"runs": 1, "queries": 1, "epsilon": 3.0, "history": [old]}})
    (tmp_path / "budget.json").write_text(text)
    purse = Budget(tmp_path / "budget.json", {"epsilon": 10}, "a")
    assert purse.spent("cells")["epsilon"] == 3.0
    purse.charge("cells", NOISY, cost_of(NOISY))
    assert purse.spent("cells")["epsilon"] == 7.0
    assert (purse.privacy("cells").runs, purse.privacy("cells", NOISY).epsilon) == (2, 3 + 4 * 2**0.5)


def test_many_at_once_spend_no_more_than_there_is(tmp_path):
    refused = []

    def ask():
        try:
            Budget(tmp_path / "budget.json", {"runs": 5}, "a").charge("cells", STUDY, cost_of(STUDY))
        except RefusedError as e:
            refused.append(e)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    kept = json.loads((tmp_path / "budget.json").read_text())["cells"]
    assert (kept["runs"], len(kept["history"])) == (5, 5)


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": {"runs": -3, "queries": 0, "epsilon": 0}}', '{"cells": {}}'])
def test_a_damaged_file_allows_nothing(tmp_path, text):
    (tmp_path / "budget.json").write_text(text)
    with pytest.raises(ParameterError, match="nobody knows what was spent"):
        Budget(tmp_path / "budget.json", {}, "a").charge("cells", STUDY, cost_of(STUDY))


def test_two_kits_of_two_studies_share_one_budget(tmp_path):
    first, kits = provision(STUDY, tmp_path / "kits")["a"], []
    for name in ("one", "two"):
        path = shutil.copytree(first, tmp_path / name)
        (path / "study.toml").write_text((path / "study.toml").read_text().replace('"bins"', f'"{name}"'))
        write_cells(demo_sites()["basel"], path / "cells.h5ad")
        kit = Kit.open(path)
        text = kit.policy_file.read_text().replace('file = "budget.json"', f'file = "{tmp_path / "shared.json"}"')
        kit.policy_file.write_text(text.replace("runs = 100", "runs = 2"))
        kit.approve()
        kits.append(kit)
    for kit in kits:
        kit.count_run(kit.policy())
    with pytest.raises(RefusedError, match="allows 2 runs on these cells over all studies, 2 are spent"):
        kits[0].check_limits(kits[0].policy())  # what the service asks before it starts a process
    with pytest.raises(RefusedError, match="over all studies"):
        kits[1].count_run(kits[1].policy())
    assert kits[0].runs_so_far() == {"study": 1, "bin-values": 1}
    changed = demo_sites()["basel"]
    changed.obs_names = [f"new{i}" for i in range(changed.n_obs)]
    write_cells(changed, kits[0].path / "cells.h5ad")
    kits[0].approve()
    kits[0].count_run(kits[0].policy())  # other cells, as far as anybody can tell


@pytest.mark.parametrize(("line", "says"), [
    ("runs = -1", "'runs' must be a number"),
    ("runs = 1.5", "'runs' must be a number"),
    ("epsilon = inf", "'epsilon' must be a number"),
    ("epsilon = true", "'epsilon' must be a number"),
    ("file = 3", "'file' must be a path"),
    ("weeks = 2", "unknown key 'weeks'"),
])  # fmt: skip
def test_wrong_lines_are_named(line, says):
    import tomllib

    with pytest.raises(ParameterError, match=says):
        budget.read_budget(tomllib.loads(line))


def test_the_study_file_cannot_say_it():
    with pytest.raises(ParameterError, match="unknown key 'budget'"):
        parse_study(format_study(STUDY) + "\n[budget]\nruns = 9\n")


def test_query_cells_count_by_identity_key_over_all_studies(tmp_path):
    """F7: seven runs under seven names asked about 26,000 synthetic cells; runs were counted, cells were not."""
    mine = Budget(tmp_path / "budget.json", budget.read_budget({}), "a")
    key, other = b"k" * 32, b"o" * 32
    for name in ("lugano", "other-name", "third"):
        mine.charge_queries(key, 6_000, name)
    with pytest.raises(RefusedError, match="labels 20000 cells for one querier .* used 18000 and requests 3714 more"):
        mine.charge_queries(key, 3_714, "fourth")
    mine.charge_queries(other, 20_000, "basel")
    with pytest.raises(RefusedError, match="-5 cells; expected 0 or more"):
        mine.charge_queries(key, -5, "lugano")
    with pytest.raises(RefusedError, match="'third' used 6000 and requests 15000"):
        mine.charge_queries(b"n" * 32, 15_000, "third")  # a new key of a known party
    mine.charge("matrix", STUDY, cost_of(STUDY))  # both live in one file
    assert (mine.queried(key), mine.queried(other)) == (18_000, 20_000)


def test_concurrent_queries_cannot_overspend(tmp_path):
    mine, refused = Budget(tmp_path / "budget.json", budget.read_budget({"query_cells": 50}), "a"), []

    def query():
        try:
            mine.charge_queries(b"k" * 32, 10, "b")
        except RefusedError:
            refused.append(1)

    threads = [threading.Thread(target=query) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(refused), mine.queried(b"k" * 32)) == (7, 50)
