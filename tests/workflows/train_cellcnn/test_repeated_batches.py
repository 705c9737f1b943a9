"""Attacks that have honest sites evaluate one batch twice, and subtract: what differs is amplified at will."""

import dataclasses
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent))

from collective import HUB
from test_encrypted_training import CONFIG, LARGE, PARTIES, batches
from test_training_check import SAMPLE, one_copy, read_out

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.threshold_ckks import collective_refresh
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import Case, check_no_errors, run_protocol
from cloister.workflows.train_cellcnn import encrypted_training, training_check
from cloister.workflows.train_cellcnn.key_store import KeyStore

AUDITOR, HONEST = PARTIES[:2]


class Subtracting:
    """The auditor: it shifts one copy by less than the tolerance, in a step that is run again, and subtracts [Z]."""

    def __init__(self, monkeypatch, params, size, amplify):
        self.p, self.c, self.size, self.amplify = params, ckks.context(params.ckks), size, amplify
        self.again, self.step, self.Z = False, 0, []
        self._shift(monkeypatch)
        self._record(monkeypatch)
        self._submit(monkeypatch)
        resumable = encrypted_training.resumable

        def fewer(p, store):  # the attacker says that its last state was lost
            steps = resumable(p, store)
            return steps[-1:] if store is not None and AUDITOR in store._own.name else steps

        monkeypatch.setattr(encrypted_training, "resumable", fewer)

    def _shift(self, monkeypatch):
        shares = collective_refresh.shares

        def deviating(ch, params, secret, maps, c1s, zero, entropy):
            hs, gs = shares(ch, params, secret, maps, c1s, zero, entropy)
            if self.again and ch.me == AUDITOR and ch.scope.endswith("1/product"):
                table = one_copy(self.p.layout, self.size)
                self.c.ring.add(gs[0], self.c.encode(table, len(gs[0]), self.p.ckks.scale).residues)
            return hs, gs

        monkeypatch.setattr(collective_refresh, "shares", deviating)

    def _record(self, monkeypatch):
        refresh = encrypted_training.Site.refresh

        async def recorded(site, ch, name, *rest):
            out = await refresh(site, ch, name, *rest)
            if name == "gradient" and ch.me == AUDITOR and ch.scope.endswith("2/gradient"):
                self.Z = out
            return out

        monkeypatch.setattr(encrypted_training.Site, "refresh", recorded)

    def _submit(self, monkeypatch):
        made = encrypted_training.gradient_ciphers

        def submitted(c, L, model, X, Y, *rest):
            raws, pads = made(c, L, model, X, Y, *rest)
            if self.again and not X.any():
                self.step += 1  # steps 1, 2, 3 are run
                config, parties = self.p.config, len(self.p.holders)
                whole = config.batch * parties // config.filters  # as much as is averaged
                factor = {1: 0, 2: -whole, 3: whole * self.amplify}[self.step]
                for raw, z in zip(raws, self.Z, strict=True):
                    old, _ = c.raw(c.drop(z, self.p.ckks.base))
                    for part in (0, 1):
                        for row in range(len(raw[part])):
                            c.ring.add_multiple(raw[part], old[part], factor, row)
            return raws, pads

        monkeypatch.setattr(encrypted_training, "gradient_ciphers", submitted)


def case_of(folder, p, data):
    stores = {i: KeyStore(folder, i) for i in (HUB, *p.holders)}
    return Case(p, {HUB: (stores[HUB],)} | {i: (*data[i], stores[i]) for i in p.holders})


@pytest.mark.parametrize("checked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_that_ran_again_showed_one_input_through_a_shift_below_every_tolerance(tmp_path, monkeypatch, checked):
    """The same batch at the same model but for one copy: the difference is that sample's, and can be scaled.

    A site that gave a gradient of a model does not go back behind it, so that model is not made again.
    """
    config = dataclasses.replace(CONFIG, markers=8, steps=4, momentum=0.0)
    p = encrypted_training.Params(PARTIES[:2], HUB, LARGE, config, open_model=True)
    data = batches(config)
    data[AUDITOR][0][:] = 0
    data = {i: data[i] for i in p.holders}
    size = training_check.copies(p).tolerance / p.ckks.scale / 2**20
    attack = Subtracting(monkeypatch, p, size, int(2**8 / size))
    if not checked:
        monkeypatch.setattr(KeyStore, "forget_before", lambda *_: None)
    fault = Fault("kill", AUDITOR, HUB, "collective_refresh.Share", nth=7)  # the update of the third step
    run_protocol(encrypted_training, case_of(tmp_path, p, data), faults=[fault], timeout=8)
    assert attack.Z
    assert KeyStore(tmp_path, HUB).steps(p.tag) == (2, 1)
    assert KeyStore(tmp_path, HONEST).steps(p.tag) == ((2,) if checked else (2, 1))
    attack.again = True
    if checked:  # the run goes on from step 2, or begins anew, with other keys: the stored [Z] is worth nothing
        assert encrypted_training.resumable(p, KeyStore(tmp_path, HONEST)) == (2,)
        return
    run = run_protocol(encrypted_training, case_of(tmp_path, p, data), timeout=120)
    check_no_errors(run)  # and no check notices
    X = data[HONEST][0][2]
    assert read_out(run, config, X[SAMPLE]) > 0.995
    assert max(read_out(run, config, x) for i, x in enumerate(X) if i != SAMPLE) < 0.8


def test_a_state_that_was_given_up_is_not_gone_back_to(tmp_path):
    store, c = KeyStore(tmp_path, HONEST), ckks.context(LARGE)
    for step in (1, 2):
        store.put_state(c, b"tag", step, {})
    store.forget_before(b"tag", 1)
    store.forget_before(b"other", 2)
    assert store.steps(b"tag") == (2, 1)
    store.forget_before(b"tag", 2)
    assert store.steps(b"tag") == (2,)
    store.put_state(c, b"tag", 3, {})
    assert store.steps(b"tag") == (3, 2)
