"""One liar among aggregator and holders: whoever lies in whichever message, the others end alike or by name."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent))

from collective import HUB, SMALL, names, secrets, whole
from test_collective_keys import agree as fits
from test_collective_keys import case as key_case
from test_collective_opening import ASKER, decrypt_case, outsider_case, plain, refresh_case, switch_case

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.threshold_ckks import (
    collective_audit,
    collective_key,
    collective_refresh,
    collective_relin,
    collective_rotation,
    key_switch,
    threshold_decrypt,
)
from cloister.mpc.threshold_ckks.collective_audit import AuditLog
from cloister.testing import Case, check_lies, run_protocol

SHARES = secrets(SMALL, 3, "a")


def same_key(lie, values):
    """All honest parties that finished hold one key; if the aggregator lied, the right one."""
    found = {p: v for p, v in values.items() if v is not None}
    assert len({v.b.tobytes() for v in found.values()}) <= 1
    if lie.liar == HUB and found:
        r, key = ckks.context(SMALL).ring, next(iter(found.values()))
        if isinstance(key, ckks.PublicKey):
            left = r.add_product(key.b.copy(), key.a, whole(SMALL, SHARES))
            assert np.abs(r.lift(r.backward(left))[0]).max() < 200


LIARS = (HUB, *names(2))  # the aggregator, the auditor and the masker


def test_lies_about_the_public_key():
    cases = [key_case(collective_key, seed="a"), key_case(collective_key, seed="b")]
    done = check_lies(collective_key, cases, right=same_key, liars=LIARS)
    assert done.aborted >= 9


@pytest.mark.slow
def test_lies_about_the_relinearisation_key():
    done = check_lies(collective_relin, [key_case(collective_relin, seed="a")], right=same_key, liars=LIARS)
    assert done.tried >= 12
    assert done.aborted == done.tried


def same_rotation_keys(lie, values):
    """One set of keys at all that finished; if the aggregator lied, those of the sites' shares."""
    found = [v for v in values.values() if v is not None]
    for keys in found[1:]:
        assert all(np.array_equal(keys[k].b, found[0][k].b) for k in found[0])
    if lie.liar == HUB and found:
        fits(found[0], whole(SMALL, SHARES))


@pytest.mark.parametrize("letters", ["b", pytest.param("acdef", marks=pytest.mark.slow)])
def test_lies_about_rotation_keys(letters):
    case = key_case(collective_rotation, seed="a")
    liars = LIARS[:2] if letters == "b" else LIARS
    done = check_lies(
        collective_rotation, [case], right=same_rotation_keys, liars=liars, only=lambda lie: lie.letter in letters
    )
    assert done.tried >= 2
    assert done.aborted >= 1


def right_slots(lie, values):
    """What an aggregator's lie left to open is what there was; a holder's own share may shift it, for all alike."""
    found = [v for v in values.values() if v is not None]
    assert all(np.array_equal(v, found[0]) for v in found)
    if lie.liar == HUB:
        for v in found:
            np.testing.assert_allclose(v, plain(), atol=1e-6)


def test_lies_about_an_opening():
    done = check_lies(threshold_decrypt, [decrypt_case()], right=right_slots, liars=LIARS)
    assert done.tried >= 8


def test_lies_about_a_key_switch():
    """A holder's lie shifts the answer, or ends it; the querier's own lies are its own business."""
    assert check_lies(key_switch, [switch_case()], right=lambda lie, values: None).tried >= 6


def test_lies_about_a_key_switch_to_an_outsider():
    """Holders learn nothing, whoever lies; what a lying querier sends as its key changes what it reads, and no more."""

    def nothing_at_holders(lie, found):
        assert {v is None for p, v in found.items() if p != ASKER} <= {True}

    assert check_lies(key_switch, [outsider_case()], right=nothing_at_holders, liars=(ASKER, *names(2))).tried >= 6


def same_outputs(lie, values):
    c = ckks.context(SMALL)
    found = [[c.raw(ct)[0] for ct in v] for v in values.values() if v is not None]
    for made in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(made, found[0], strict=True))


@pytest.mark.slow
def test_lies_about_a_refresh():
    done = check_lies(collective_refresh, [refresh_case()], right=same_outputs, liars=LIARS)
    assert done.tried >= 10


def audit_case(seed=0, wrong=False):
    r, rng = ckks.context(SMALL).ring, np.random.default_rng(seed)
    books = {p: AuditLog() for p in names(3)}
    for k in (2, 3):
        shares = [np.stack([rng.integers(0, q, SMALL.degree, dtype=np.uint64) for q in r.primes[:k]]) for _ in names(3)]
        total = r.zeros(k)
        for p, share in zip(names(3), shares, strict=True):
            books[p].sent(share)
            r.add(total, share)
        books[names(3)[0]].total(total)
    if wrong:
        books[names(3)[0]].totals[1][1, 77] ^= np.uint64(1)
    return Case(collective_audit.Params(names(3), HUB, SMALL), {p: (b,) for p, b in books.items()})


def test_an_audit_passes_right_sums_and_no_others():
    run = run_protocol(collective_audit, audit_case())
    assert not run.errors
    run = run_protocol(collective_audit, audit_case(wrong=True), timeout=5)
    assert {run.errors[p].code for p in names(3)} == {"sum"}
    other = audit_case()
    other.inputs[names(3)[2]][0].heard(b"something else")
    run = run_protocol(collective_audit, other, timeout=5)
    assert {run.errors[p].code for p in names(3)} == {"told"}
