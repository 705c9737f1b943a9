"""Slots that are turned, and the keys that lead back from a turned one."""

import numpy as np
import pytest

pytest.importorskip("numba")

from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import rotations, scheme

P, E = scheme.SMALL, Entropy()
TOKENS, LIFT = 8, 40  # a switching key's noise is 2^39 in a slot


@pytest.fixture(scope="module")
def sides():
    key, seed = scheme.OwnerKey(P, E), E.bytes(32)
    ev = scheme.Evaluator(P, key.b, key.seed)
    ev.accept(key.switching(3, seed, E, TOKENS), seed)
    x = np.random.default_rng(0).uniform(-1, 1, (2, TOKENS, P.slots // TOKENS))
    c = ev.expand(key.encrypt(rotations.spread(x, P.degree), seed, E), seed)
    return key, ev, x, ev.combine([(1 << LIFT, c)])


def read(key, ct, scale=P.scale * 2.0**LIFT):
    return key.read(ct, scale, P.slots)[:, rotations.slots(P.degree, TOKENS)]


def under(ev, moved, number):
    split = ev.zeros(len(moved), 3, moved.shape[2])
    split[:, 0], split[:, 2] = moved[:, 0], moved[:, 1]
    return ev.switched(split, (number,))


def test_every_slot_belongs_to_one_token_of_one_sample():
    assert sorted(rotations.slots(P.degree, TOKENS).reshape(-1)) == list(range(P.slots))


@pytest.mark.parametrize("r", rotations.Turns(TOKENS).every)
def test_a_turn_brings_the_tokens_behind(sides, r):
    key, ev, x, c = sides
    moved, T = ev.turned(c, TOKENS, r), rotations.Turns(TOKENS)
    found = read(key, under(ev, moved, T.key(r)))
    assert np.abs(found - np.roll(x, -r, axis=1)).max() < 0.05
    assert np.abs(read(key, moved)).max() > 1e3  # under s it is nothing: the key turned with it
    wrong = T.key(next(t for t in T.every if t != r))
    assert np.abs(read(key, under(ev, moved, wrong))).max() > 1e3


def test_products_of_turned_ciphertexts_are_switched_by_the_key_of_both(sides):
    key, ev, x, _ = sides
    r, T = 3, rotations.Turns(TOKENS)
    short = ev.expand(key.encrypt(rotations.spread(x, P.degree), bytes(32), E), bytes(32))
    one, other = ev.combine([(1 << 20, short)]), ev.turned(ev.combine([(1 << 19, short)]), TOKENS, r)
    halves = [ev.zeros(2, 2, P.count) for _ in range(2)]
    for half, into in enumerate(halves):
        into[:, 0] = other[:, half]
    low, high = (ev.products(one, into)[:, :2] for into in halves)
    whole = np.concatenate([low, high], axis=1)  # under 1, s, σ(s), s·σ(s)
    found = read(key, ev.switched(whole, (T.key(r), T.key(r, times_s=True))), P.scale**2 * 2.0**39)
    assert np.abs(found - x * np.roll(x, -r, axis=1)).max() < 0.05


def test_there_are_keys_for_a_step_of_every_size():
    for tokens in (2, 4, 8, 64, 256):
        T = rotations.Turns(tokens)
        assert {(a + b) % tokens for a in T.small for b in T.large} == set(range(tokens))
        assert all(1 << i in T.every for i in range(tokens.bit_length() - 1))
        numbers = [T.key(r, times_s=both) for r in T.every for both in (False, True)]
        assert sorted(numbers) == list(range(1, 1 + T.count))
    assert rotations.Turns(1).count == 0
    with pytest.raises(ParameterError, match="1, 2, 4, 8"):
        rotations.Turns(65)


def test_keys_that_were_not_given_are_missed(sides):
    _, ev, _, c = sides
    with pytest.raises(ParameterError, match="no switching keys"):
        under(ev, c, 1 + rotations.Turns(TOKENS).count)
    with pytest.raises(ParameterError, match="no switching keys"):
        ev.switched(ev.zeros(1, 4, P.count), (0,))
