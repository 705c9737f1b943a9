"""One party's turn, without a network."""

import numpy as np
import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.deploy import party
from cloister.deploy.kit import Kit
from cloister.deploy.party import Turn
from cloister.deploy.provision import provision
from cloister.errors import RefusedError
from cloister.rehearsal.run import Run
from cloister.session import Outcome
from cloister.study import Step, Study

pytest.importorskip("nvflare")


def test_a_party_logs_what_is_weak_about_its_study_before_it_meets_anybody(tmp_path, caplog, monkeypatch):
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site"}
    study = Study("two", "bin-values", parties, mode="published", network={"host": "localhost", "port": 8102})
    turn = Turn(Kit.open(provision(study, tmp_path)["basel"]), "00" * 16, lambda *_: b"")

    def nobody():
        assert "two sites only" in caplog.text
        assert "published" in caplog.text
        raise OSError("no network here")

    monkeypatch.setattr(turn.link, "start", nobody)
    ended = turn.take()
    assert (ended.status, ended.error["type"]) == ("aborted", "OSError")


def test_labels_that_an_earlier_step_made_are_compared_with_those_of_earlier_runs(tmp_path, monkeypatch):
    """One cell moves to another cluster from run to run. The step that would sum by cluster does not begin."""
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
    steps = (
        Step("cluster-cells", options={"use_rep": "X_pca"}, name="clusters"),
        Step("find-markers", options={"label_key": "cluster"}, name="markers"),
    )
    study = Study("two", "", parties, network={"host": "localhost", "port": 8102}, steps=steps)
    kit = Kit.open(provision(study, tmp_path)["basel"])
    cells = demo_sites()["basel"]
    cells.obsm["X_pca"] = np.zeros((cells.n_obs, 3))
    write_cells(cells, kit.path / "cells.h5ad")
    kit.approve("Ann")
    monkeypatch.setattr(party, "take_part", lambda *parts, **rest: parts[4]())
    turn, policy = Turn(kit, "00" * 16, lambda *_: b""), kit.policy()
    monkeypatch.setattr(turn, "_save", lambda *_: None)
    first, second = kit.study.parts
    labels = np.where(np.arange(cells.n_obs) < 100, "0", "1")
    for moved in (0, 0, 1, 10):
        turn._run_part(policy, Run(first), [], tmp_path)
        clustered = cells.copy()
        clustered.obs["cluster"] = np.roll(labels, moved)
        done = Run(first, outcomes={kit.me: Outcome(clustered)})
        if moved == 1:
            with pytest.raises(RefusedError, match="2 cell.s. have another 'cluster'"):
                turn._run_part(policy, Run(second), [done], tmp_path)
        else:
            assert turn._run_part(policy, Run(second), [done], tmp_path) is clustered
