"""Openings and answered donors are counted once, whoever asks at the same moment and in whichever study."""

import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("numba")

from cloister.errors import DataError, ParameterError, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.parameters import OPENINGS
from cloister.mpc.crypto.entropy import Entropy
from cloister.study import Party
from cloister.workflows.common.query_ledger import entries_of
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, choose_ring
from cloister.workflows.train_cellcnn.key_store import KeyStore, donor_budget
from cloister.workflows.train_cellcnn.training_keys import Keys
from old_steps import opening_counter, prediction_query

BASEL, VIENNA = Party("basel"), Party("vienna")


def loaded(folder):
    store = KeyStore(folder, BASEL)
    return Keys(b"keys", None, None, {}, None, store, store.openings)


def spend_all(keys):
    spent = 0
    while True:
        try:
            keys.spend(1)
        except ParameterError:
            return spent
        spent += 1


# ---- N5: openings ----------------------------------------------------------------------------------------------------


def test_n5_five_loads_spent_five_budgets_and_spend_one_now(tmp_path):
    old = [opening_counter.OldKeys(tmp_path / "openings") for _ in range(5)]
    assert sum(map(spend_all, old)) == 5 * OPENINGS  # 320 of 64
    new = [loaded(tmp_path / "new") for _ in range(5)]
    assert sum(map(spend_all, new)) == OPENINGS
    assert KeyStore(tmp_path / "new", BASEL).openings == OPENINGS


def test_n5_threads_cannot_spend_more_than_is_allowed(tmp_path):
    keys, spent = [loaded(tmp_path) for _ in range(8)], []
    threads = [threading.Thread(target=lambda k=k: spent.append(spend_all(k))) for k in keys]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(spent) == OPENINGS


SPEND = """
import sys
from cloister.errors import ParameterError
from cloister.workflows.train_cellcnn.key_store import KeyStore
from cloister.study import Party
store, spent = KeyStore(sys.argv[1], Party("basel")), 0
sys.stdin.readline()
while True:
    try:
        store.spend(1, int(sys.argv[2]))
    except ParameterError:
        break
    spent += 1
print(spent)
"""


def test_n5_processes_cannot_spend_more_than_is_allowed(tmp_path):
    command = [sys.executable, "-c", SPEND, str(tmp_path), str(OPENINGS)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    for p in running:  # all have loaded before any begins
        p.stdin.write("go\n")
        p.stdin.flush()
    assert sum(int(p.communicate(timeout=120)[0]) for p in running) == OPENINGS
    assert KeyStore(tmp_path, BASEL).openings == OPENINGS


def test_the_count_is_on_disk_before_spend_returns_and_survives_a_refusal(tmp_path):
    store = KeyStore(tmp_path, BASEL)
    assert store.spend(3, 8) == 3
    with pytest.raises(ParameterError, match="3 results were opened with these keys, 6 more would be beyond 8"):
        store.spend(6, 8)
    assert KeyStore(tmp_path, BASEL).openings == 3
    assert (tmp_path / BASEL / "answers.json").stat().st_mode & 0o077 == 0


def test_the_count_of_an_earlier_version_goes_on(tmp_path):
    store = KeyStore(tmp_path, BASEL)
    (tmp_path / BASEL / "openings").write_text("62")
    assert store.openings == 62
    with pytest.raises(ParameterError):
        store.spend(3, OPENINGS)
    assert store.spend(2, OPENINGS) == 64


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"openings": -1, "donors": {}}', '{"openings": 0, "donors": {"basel": -3}}', "no"]
)
def test_a_damaged_count_ends_the_use_of_the_keys(tmp_path, text):
    store = KeyStore(tmp_path, BASEL)
    (tmp_path / BASEL / "answers.json").write_text(text)
    with pytest.raises(DataError, match="damaged"):
        store.spend(1, OPENINGS)


# ---- N7: donors ------------------------------------------------------------------------------------------------------

MARKERS = 38
CONFIG = cellcnn.Config(markers=MARKERS, filters=8, classes=2, batch=40, steps=20)


def answered(X, M, rng):
    """The ideal functionality with the noise that the flood leaves in an answer."""
    error = Layout(CONFIG, choose_ring(CONFIG, 3), 3).answer_error
    return X @ M + rng.normal(0, error, (len(X), M.shape[1]))


def test_n7_as_many_donors_as_markers_determine_the_model_and_half_of_them_do_not(tmp_path):
    rng = np.random.default_rng(5)
    M = rng.normal(0, 0.5, (MARKERS, 2))
    prediction_query.check_at_querier(MARKERS)  # the old step allows it, in one default run
    prediction_query.check_at_holder(MARKERS)
    X = 8 * np.eye(MARKERS)
    known = np.linalg.solve(X, answered(X, M, rng))
    assert np.abs(known - M).max() < 1e-3
    account = KeyStore(tmp_path, BASEL).account((VIENNA,), MARKERS)
    with pytest.raises(RefusedError, match="38 donors determine a model of 38 markers"):
        account.charge(MARKERS)
    account.charge(donor_budget(MARKERS))  # what is left to the attacker
    few = X[: donor_budget(MARKERS)]
    known = np.linalg.lstsq(few, answered(few, M, rng), rcond=None)[0]
    assert np.abs(known - M)[donor_budget(MARKERS) :].max() > 0.5  # nothing of the other markers
    np.testing.assert_allclose(known[: donor_budget(MARKERS)], M[: donor_budget(MARKERS)], atol=1e-3)  # all of these


def test_n7_donors_count_over_studies_by_identity_key_and_by_name(tmp_path):
    key, other = (Identity.create(Entropy()).public for _ in range(2))

    def account(keys, name):
        return KeyStore(tmp_path, BASEL).account(entries_of(keys, name), MARKERS)

    account({VIENNA: key}, VIENNA).charge(10)
    with pytest.raises(RefusedError, match="10 donors of the querying site"):
        account({Party("wien"): key}, Party("wien")).charge(10)  # another study, another name, the same key
    with pytest.raises(RefusedError):
        account({VIENNA: other}, VIENNA).charge(10)  # the same name with a new key
    with pytest.raises(RefusedError):
        account({}, VIENNA).check(10)
    account({Party("graz"): other}, Party("graz")).charge(19)  # another party has a budget of its own
    account({Party("wien"): key}, Party("wien")).charge(9)
    with pytest.raises(RefusedError):
        account({VIENNA: key}, VIENNA).charge(1)


def test_n7_runs_at_the_same_moment_share_one_budget(tmp_path):
    refused = []

    def ask():
        try:
            KeyStore(tmp_path, BASEL).account((VIENNA,), MARKERS).charge(8)
        except RefusedError:
            refused.append(1)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(refused) == 4  # 16 of 19 are spent


def test_n7_a_model_that_is_trained_anew_in_the_same_folder_keeps_the_count(tmp_path):
    """Batches follow from the study's seed: new keys, the same weights."""
    store = KeyStore(tmp_path, BASEL)
    store.account((VIENNA,), MARKERS).charge(19)
    store.spend(5, OPENINGS)
    store.begin_run()
    store.put_public(ckks.PublicKey(np.zeros((1, 4), np.uint64), np.zeros((1, 4), np.uint64)), None)
    assert store.openings == 0
    with pytest.raises(RefusedError, match="19 donors"):
        store.account((VIENNA,), MARKERS).charge(1)


def test_n7_only_the_sites_own_consent_goes_beyond_the_budget_and_still_counts(tmp_path):
    store = KeyStore(tmp_path, BASEL)
    store.account((VIENNA,), MARKERS, unbounded=True).charge(100)
    with pytest.raises(RefusedError, match="100 donors"):
        store.account((VIENNA,), MARKERS).charge(1)
    store.spend(4, OPENINGS)
    assert store.openings == 4  # both counts are in one file
    with pytest.raises(RefusedError, match="100 donors"):
        store.account((VIENNA,), MARKERS).check(1)
