"""Three-party sharing and transfers: what leaves a party is masked even where all values are zero."""

from types import SimpleNamespace

import numpy as np
import pytest

from cloister.mpc.crypto import oblivious_transfer
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring
from cloister.mpc.parties import Party
from cloister.mpc.three_party.replicated import Bits, Trio
from cloister.testing import Case, check_no_errors, run_protocol, values

TRIO = tuple(map(Party, ("ann", "ben", "cat")))
RING = Ring(32)


def play(script):
    async def role(ch, params, *, entropy, identity):
        return await script(await Trio.meet(ch, TRIO, (), entropy=entropy, identity=identity))

    module = SimpleNamespace(__name__="replicated", roles=lambda _: dict.fromkeys(TRIO, role))
    run = run_protocol(module, Case(0, {}))
    check_no_errors(run)
    return values(run)


async def product(trio):
    zero = trio.constant(np.zeros((8, 8), np.int64), RING)
    made = await trio.mul(zero, zero)
    return made.a, made.b


async def matrix_product(trio):
    zero = trio.constant(np.zeros((8, 8), np.int64), RING)
    made = await trio.matmul(zero, zero)
    return made.a, made.b


async def conjunction(trio):
    zero = Bits(512, np.zeros(64, np.uint8), np.zeros(64, np.uint8))
    made = await trio.both(zero, zero)
    return made.a, made.b


@pytest.mark.parametrize("script", [product, matrix_product, conjunction])
def test_shares_of_zero_times_zero_are_random(script):
    """Unmasked, the summands of a product of zeros are zeros, and tell the two parties that get them so."""
    found = play(script)
    for a, b in found.values():
        assert np.unique(a).size > 40
        assert np.unique(b).size > 40
    assert not np.any(np.bitwise_xor.reduce([x[0] for x in found.values()])) or script is not conjunction


def test_no_two_replies_of_a_transfer_share_a_scalar():
    pytest.importorskip("nacl")
    sender = oblivious_transfer.BaseSender(Entropy())
    for choices in (np.zeros(32, np.uint8), np.ones(32, np.uint8)):
        replies, keys = oblivious_transfer.base_receive(sender.point, choices, b"context", Entropy())
        assert len(set(replies)) == 32
        assert len(set(keys)) == 32
