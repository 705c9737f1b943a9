"""Errors and masks of key shares and ciphertexts: who divides reads the secret, unless each of them is there."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent))

from collective import HUB, SMALL, encrypt, names, own, public, secrets, size
from test_collective_opening import switch_case

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.testing.lies import Stage
from cloister.mpc.threshold_ckks import collective_key, collective_relin, key_switch
from cloister.testing import Case, check_no_errors, run_protocol

C = ckks.context(SMALL)
R = C.ring
LARGE = 2.0**40  # no error, and no ternary polynomial, comes near it; a uniform one is far above


def quotient(x, a):
    """x / a, place by place in NTT form."""
    made = np.empty_like(x)
    for j, q in enumerate(C.primes[: len(x)]):
        inverse = [pow(int(v), q - 2, q) for v in a[j]]
        made[j] = [int(v) * w % q for v, w in zip(x[j], inverse, strict=True)]
    return made


def negative(x):
    return R.subtract(np.zeros_like(x), x)


def played(module, case):
    stage = Stage()
    run = run_protocol(module, case, roles={p: stage.role(p, r) for p, r in module.roles(case.params).items()})
    check_no_errors(run)
    return stage


def test_a_share_of_the_public_key_has_an_error_and_cannot_be_divided():
    shares = secrets(SMALL, 3)
    site = names(3)[0]
    stage = played(collective_key, Case(collective_key.Params(names(3), HUB, SMALL), own(shares)))
    k = SMALL.top
    b = C.unpack(stage.said[site, HUB, "collective_key.KeyShare"][0].b, k)
    a = ckks.common(SMALL, stage.ids[site, "1"], "public", k)
    assert 0 < size(R, R.add_product(b.copy(), a, shares[site].ntt[:k])) < 100
    assert size(R, quotient(negative(b), a)) > LARGE


def test_shares_of_the_relinearisation_key_have_errors_and_cannot_be_divided():
    shares = secrets(SMALL, 3)
    site = names(3)[0]
    stage = played(collective_relin, Case(collective_relin.Params(names(3), HUB, SMALL), own(shares)))
    K, s = len(C.primes), shares[site].ntt
    for d in range(SMALL.digits):
        first = stage.said[site, HUB, "collective_relin.First"][d]
        sums = stage.said[HUB, site, "collective_relin.Firsts"][d]
        f = C.unpack(stage.said[site, HUB, "collective_relin.Second"][d].f, K)
        h, g, H, G = (C.unpack(x, K) for x in (first.h, first.g, sums.h, sums.g))
        a = ckks.common(SMALL, stage.ids[site, "1"], f"relin/{d}", K)
        assert 0 < size(R, R.add_product(g.copy(), a, s, sign=-1)) < 100
        masked = R.subtract(h.copy(), C.bases.known_share(np.zeros_like(h), s, d))  # -u a + e
        assert size(R, masked) > LARGE  # u is not zero
        assert size(R, quotient(negative(masked), a)) > LARGE  # nor can it be divided out
        rest = R.add_product(f.copy(), s, H, sign=-1)  # (u - s) G + e
        assert size(R, quotient(rest, G)) > LARGE


def test_an_answer_to_a_querier_is_rerandomised_under_its_key():
    case = switch_case()
    stage = played(key_switch, case)
    answers = [m[0] for (_, _, name), m in stage.said.items() if name == "key_switch.Share" and m]
    assert answers
    for answer in answers:
        assert size(R, C.unpack(answer.g, case.params.primes)) > LARGE  # u a + e, and not e alone


def test_a_ciphertext_has_noise_of_its_own_and_cannot_be_divided():
    shares = secrets(SMALL, 3)
    key = public(SMALL, shares)
    total = np.zeros_like(shares[names(3)[0]].ntt)
    for s in shares.values():
        R.add(total, s.ntt)
    c0, c1 = C.raw(encrypt(SMALL, shares, [0.0]))[0]
    k = len(c1)
    assert size(R, c1) > LARGE
    assert size(R, quotient(c1, key.a[:k])) > LARGE  # u would be ternary
    assert 1000 < size(R, R.add_product(c0.copy(), c1, total[:k])) < LARGE  # e0 + u e + e1 s
