"""One party's turn, without a network."""

import pytest

from cloister.deploy.kit import Kit
from cloister.deploy.party import Turn
from cloister.deploy.provision import provision
from cloister.study import Study

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
