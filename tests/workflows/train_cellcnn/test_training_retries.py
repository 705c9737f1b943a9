"""A resumed training repeats refreshes and openings; what is repeated is masked and flooded anew, and counted."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent))

from collective import HUB, entropy, names, secrets, size
from test_encrypted_training import CONFIG, LARGE, batches, case_with_stores, params

from cloister.errors import ParameterError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.threshold_ckks import collective_refresh, threshold_decrypt
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import check_no_errors, run_protocol, values
from cloister.workflows.train_cellcnn import encrypted_training, key_store
from cloister.workflows.train_cellcnn.key_store import KeyStore

SITE = names(3)[1]
RETRIES = 900  # of a share with errors of deviation 3.2: their mean rounds to zero at all coefficients


def record(monkeypatch):
    """What `SITE` computes in every run: (c1, h) of refreshes and of openings."""
    seen = {"refresh": [], "open": []}
    shares, share = collective_refresh.shares, threshold_decrypt.share

    def refreshes(ch, p, secret, maps, c1s, zero, e):
        hs, gs = shares(ch, p, secret, maps, c1s, zero, e)
        if ch.me == SITE:
            seen["refresh"] += [(c1.copy(), h.copy()) for c1, h in zip(c1s, hs, strict=True)]
        return hs, gs

    def opens(p, secret, c1, e):
        h = share(p, secret, c1, e)
        seen["open"].append((c1.copy(), h.copy()))
        return h

    monkeypatch.setattr(collective_refresh, "shares", refreshes)
    monkeypatch.setattr(threshold_decrypt, "share", opens)
    return seen


@pytest.mark.parametrize(
    ("message", "nth", "counted"),
    [
        pytest.param("collective_refresh.Share", 1, 0, marks=pytest.mark.slow),  # the second refresh of the first step
        pytest.param("threshold_decrypt.Share", 0, 2, marks=pytest.mark.slow),  # the norm of the trained model
        ("threshold_decrypt.Share", 1, 3),  # its weights
    ],
)
def test_a_site_killed_between_computing_and_sending_a_share(tmp_path, monkeypatch, message, nth, counted):
    p = params(dataclasses.replace(CONFIG, steps=1), ring=LARGE, open_model=True)
    data, seen = batches(p.config), record(monkeypatch)
    fault = Fault("kill", SITE, "hub", message, nth=nth)
    broken = run_protocol(encrypted_training, case_with_stores(tmp_path, p, data), faults=[fault], timeout=6)
    assert SITE not in broken.outcomes
    assert KeyStore(tmp_path, SITE).openings == counted  # before the share is sent
    first = {kind: list(found) for kind, found in seen.items()}
    for found in seen.values():
        found.clear()
    again = run_protocol(encrypted_training, case_with_stores(tmp_path, p, data), timeout=120)
    check_no_errors(again)
    resumed = message != "collective_refresh.Share"  # else there is no checkpoint yet, and keys are new
    assert KeyStore(tmp_path, SITE).openings == (counted if resumed else 0) + 3  # checks, norm, weights
    opened = [c1 for c1, _ in first["open"]]
    assert not any(np.array_equal(a, b) for a in opened for b, _ in seen["open"])  # no ciphertext is opened twice
    pairs = [(a, h, b, k) for a, h in first["refresh"] for b, k in seen["refresh"]]
    twice = [(h, k) for a, h, b, k in pairs if a.any() and np.array_equal(a, b)]  # that of public weights is zero
    assert bool(twice) == resumed  # [A], [W ⊙ W], [V ⊙ V]: the same ciphertext is refreshed in both runs
    r = ckks.context(p.ckks).ring
    base = float(np.prod([float(q) for q in r.primes[: p.ckks.base]]))
    for h, k in twice:
        assert size(r, r.subtract(h.copy(), k)) > base / 8  # of the full modulus: fresh uniform masks
    twin = cellcnn.train(p.config, [data[i] for i in names(3)])
    np.testing.assert_allclose(values(again)[HUB].weights.W, twin.W, atol=2e-3)


def test_shares_without_masks_give_the_key_to_who_has_them_repeated_and_masked_ones_do_not():
    """The attack on retries: the mean over many shares of one ciphertext loses its errors, and c1 is known."""
    ring = ckks.Parameters(4096, base=2, base_bits=30, levels=1, per_level=1, level_bits=20, special_bits=20)
    c, k, own = ckks.context(ring), ring.base, secrets(ring, 3)
    r, secret, e = c.ring, own[SITE], entropy("retries")
    c1 = r.uniform(e.prg(), k)
    inverse = np.stack(
        [np.array([pow(int(x), -1, q) for x in row], np.uint64) for row, q in zip(c1, r.primes, strict=False)]
    )

    def key_from(share):
        """Σ of many shares / how many, rounded, divided by c1."""
        reference, total = share(), np.zeros(ring.degree)
        for _ in range(RETRIES):
            high, low = r.lift(r.backward(r.subtract(share(), reference)))
            total += np.rint(high) + low
        mean = np.rint(total / RETRIES)
        if np.abs(mean).max() > 2.0**40:
            return None
        exact = r.add(reference.copy(), r.forward(r.of_small(mean.astype(np.int64), k)))
        found = r.zeros(k)
        return r.add_product(found, exact, inverse)

    def bare():
        return r.add_product(r.error(e.prg(), k), c1, secret.ntt)

    def masked():
        keys = {p: e.bytes(32) for p in names(3) if p != SITE}  # fresh pairwise masks in every run
        return collective_refresh.ZeroShares(ring, SITE, keys).add_to(bare())

    np.testing.assert_array_equal(key_from(bare), secret.ntt[:k])
    assert key_from(masked) is None


def test_runs_that_use_a_key_share_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(key_store, "RUNS", 3)
    store = KeyStore(tmp_path, SITE)
    for _ in range(3):
        store.begin_run()
    with pytest.raises(ParameterError, match="3 runs have used the key share"):
        KeyStore(tmp_path, SITE).begin_run()
