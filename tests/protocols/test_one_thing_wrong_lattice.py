"""Under a collective key: one message is wrong, or one holder is told something else, and who checks it names the line.

A holder that is told something else than the auditor would answer for a polynomial that nobody has checked.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("seal")
sys.path.insert(0, str(Path(__file__).parents[1] / "mpc" / "threshold_ckks"))

from collective import HUB, SMALL, names, own, secrets, size
from liars import answers
from test_collective_lies import audit_case
from test_collective_opening import BIG, FRESH, MAPS, decrypt_case, polynomials, refresh_case, scaled, switch_case

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.threshold_ckks import (
    collective_audit,
    collective_refresh,
    collective_relin,
    collective_rotation,
    key_switch,
    threshold_decrypt,
)
from cloister.testing import Case

FIRST, SECOND, THIRD = names(3)
C = ckks.context(SMALL)


def shifted(packed, k):
    """The same polynomial, but for one number."""
    x = C.unpack(packed, k)
    x[0, 0] ^= np.uint64(1)
    return C.pack(x)


def keys(module, **options):
    return Case(module.Params(names(3), HUB, SMALL, **options), own(secrets(SMALL, 3)))


TOLD = {  # module, case, and what the aggregator tells the third holder in place of what the others get
    "relin, L2": (
        collective_relin,
        lambda: keys(collective_relin),
        collective_relin.Firsts,
        lambda m: replace(m, h=shifted(m.h, len(C.primes))),
    ),
    "relin, L4": (
        collective_relin,
        lambda: keys(collective_relin),
        collective_relin.Seconds,
        lambda m: replace(m, f=shifted(m.f, len(C.primes))),
    ),
    "rotation": (
        collective_rotation,
        lambda: keys(collective_rotation, steps=(1,)),
        collective_rotation.Rotation,
        lambda m: replace(m, b=shifted(m.b, len(C.primes))),
    ),
    "decryption": (
        threshold_decrypt,
        decrypt_case,
        threshold_decrypt.Opened,
        lambda m: replace(m, m=shifted(m.m, SMALL.base)),
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_holder_that_is_told_something_else_than_the_auditor(name):
    module, case, kind, change = TOLD[name]
    found = answers(module, case(), HUB, kind, change, 0, only_to=THIRD)
    assert found == {FIRST: ("collective_audit", "L2", "told")}


MALFORMED = {  # module, case, liar, message, change; who stops, and at which line
    "audit, seed": (
        collective_audit,
        audit_case,
        FIRST,
        collective_audit.Challenge,
        lambda m: replace(m, seed=m.seed[:31]),
        (SECOND, "L1"),
    ),
    "refresh, pair key": (
        collective_refresh,
        refresh_case,
        FIRST,
        collective_refresh.PairKey,
        lambda m: replace(m, key=m.key[:16]),
        (SECOND, "L1"),
    ),
    "refresh, request": (
        collective_refresh,
        refresh_case,
        HUB,
        collective_refresh.Request,
        lambda m: replace(m, c1=m.c1[:-1]),
        (SECOND, "L2"),
    ),
    "refresh, share h": (
        collective_refresh,
        refresh_case,
        SECOND,
        collective_refresh.Share,
        lambda m: replace(m, h=m.h[:-1]),
        (HUB, "L3"),
    ),
    "refresh, work": (
        collective_refresh,
        refresh_case,
        HUB,
        collective_refresh.Work,
        lambda m: replace(m, c0=m.c0[:-1]),
        (FIRST, "L4"),
    ),
    "switch, seed": (
        key_switch,
        switch_case,
        SECOND,
        key_switch.OwnKey,
        lambda m: replace(m, seed=m.seed[:31]),
        (FIRST, "L2"),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_is_named(name):
    module, case, liar, kind, change, (who, line) = MALFORMED[name]
    found = answers(module, case(), liar, kind, change)
    assert found[who] == (module.NAME, line, "malformed")


# ---- parameters and maps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holders", [(FIRST,), (FIRST, FIRST), (FIRST, HUB)])
def test_holders_with_one_thing_wrong(holders):
    collective_audit.Params((FIRST, SECOND), HUB, SMALL)
    with pytest.raises(ParameterError, match="at least two holders"):
        collective_audit.Params(holders, HUB, SMALL)


def test_a_key_switch_is_refused_where_flooding_would_drown_the_message():
    with pytest.raises(ParameterError, match="larger scale"):
        key_switch.Params(names(3), SECOND, SMALL, SMALL.base, SMALL.scale, FRESH)


def test_an_aggregator_with_other_slot_maps_asks_for_nothing():
    with pytest.raises(ParameterError, match="slot maps"):
        asyncio.run(collective_refresh.aggregator(SimpleNamespace(me=HUB), refresh_case().params, [], MAPS[::-1]))


def test_an_answer_to_a_querier_is_flooded():
    """With a public key of zeros, what is left of h_i beside c1·s_i is its flood."""
    params, secret = key_switch.Params(names(3), SECOND, SMALL, SMALL.base, BIG, FRESH), secrets(SMALL, 1)[FIRST]
    c1 = polynomials(scaled())[1]
    none = C.ring.zeros(SMALL.base)
    h, _ = key_switch.switched(
        params,
        secret,
        c1,
        ckks.PublicKey(none, none),
        collective_refresh.ZeroShares(SMALL, FIRST, {}),
        Entropy(),
    )
    left = C.ring.add_product(h.copy(), c1, secret.ntt, sign=-1)
    assert 2.0 ** (params.flood_bits - 3) < size(C.ring, left) < 2.0 ** (params.flood_bits + 3)
