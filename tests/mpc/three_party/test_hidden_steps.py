"""Steps of verified sharing that hidden graphs need: bits as numbers, one-hot rows, sums, chains of products."""

from dataclasses import dataclass

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.mpc.crypto.replicated import Ring, word_matmul
from cloister.mpc.parties import Party
from cloister.mpc.three_party import packing
from cloister.mpc.three_party.verified import Verified
from cloister.testing import Case, check_no_errors, run_protocol, values

THREE = tuple(map(Party, ("a", "b", "c")))
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Params:
    what: str


class Steps:
    """A protocol of one step, played by three parties; every one returns what was opened."""

    NAME = "verified"
    __name__ = "cloister.mpc.three_party.verified"

    def __init__(self, step):
        self.step = step

    def roles(self, params):
        async def role(ch, params, x, *, entropy, identity):
            trio = await Verified.meet(ch.sub("three"), THREE, THREE, entropy=entropy, identity=identity)
            return await self.step(trio, x)

        return dict.fromkeys(THREE, role)


def play(step, x):
    run = run_protocol(Steps(step), Case(Params("step"), {p: (x,) for p in THREE}), timeout=20.0)
    check_no_errors(run)
    return next(v for v in values(run).values() if v is not None)


async def shared_bits(trio, planes):
    """XOR shares of public planes, none of whose components is 0."""
    ring = Ring(2)
    bits = np.unpackbits(planes.view(np.uint8), bitorder="little")
    parts = []
    for owner in THREE:
        mine = ring.encode(bits.astype(np.int64) if owner == THREE[0] else np.zeros_like(bits, np.int64))
        part = await trio.input(owner, mine if trio.ch.me == owner else None, bits.shape, ring)
        parts.append(await trio.check_small(part, owner, 1, line="V2"))
    total = parts[0] ^ parts[1] ^ parts[2]
    return total.reshape(*planes.shape)


@pytest.mark.parametrize("bits", [2, 13, 32, 43, 64])
def test_bits_become_numbers(bits):
    planes, ring = RNG.integers(0, 1 << 63, (3, 2), np.uint64), Ring(bits)

    async def step(trio, x):
        numbers = await trio.inject(await shared_bits(trio, x), ring)
        return await trio.open(numbers, numbers.shape, ring, to=THREE[0], protocol="verified", line="V14", what="bits")

    found = play(step, planes)
    wanted = np.unpackbits(planes.view(np.uint8).reshape(3, -1), axis=1, bitorder="little")
    np.testing.assert_array_equal(found & (2**bits - 1 if bits < 64 else -1), wanted)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 13, 100])
def test_one_hot_rows(count):
    numbers = RNG.integers(0, count, 64).astype(np.uint64)
    width = max(1, (count - 1).bit_length())

    async def step(trio, x):
        hot = await trio.one_hot(await shared_bits(trio, packing.planes_of(x, width)), count)
        return await trio.open_to(hot, hot.shape, to=THREE[1], protocol="verified", line="V4", what="rows")

    found = np.unpackbits(play(step, numbers).view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(found, (numbers[None] == np.arange(count, dtype=np.uint64)[:, None]))


def test_sums_of_xor_shared_numbers():
    x, y = (RNG.integers(0, 1 << 19, 64).astype(np.uint64) for _ in range(2))

    async def step(trio, given):
        one, two = [await shared_bits(trio, packing.planes_of(v, 20)) for v in given]
        total = await trio.add(one, two)
        return await trio.open_to(total, total.shape, to=THREE[2], protocol="verified", line="V4", what="sum")

    found = play(step, (x, y))
    np.testing.assert_array_equal(found, packing.planes_of(x + y, 20))


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("bits", [13, 43])
def test_a_chain_of_products(diagonal, bits):
    ring = Ring(bits)
    q = RNG.integers(0, 5, (6,) if diagonal else (6, 6))
    x = RNG.integers(0, 3, (6, 2))

    async def step(trio, given):
        q, x = given
        mine = trio.ch.me == THREE[0]
        shared = await trio.input(THREE[0], ring.encode(q) if mine else None, q.shape, ring)
        z = await trio.input(THREE[0], ring.encode(x) if mine else None, x.shape, ring)
        chain = trio.chain(shared, diagonal=diagonal)
        for _ in range(3):
            z = await chain.step(z)
        with pytest.raises(ParameterError, match="a chain of products must end"):
            await trio.proofs.verify()
        await chain.end()
        return await trio.open(z, z.shape, ring, to=THREE[0], protocol="verified", line="V3", what="product")

    matrix = np.diag(q) if diagonal else q
    np.testing.assert_array_equal(play(step, (q, x)), matrix @ matrix @ matrix @ x)


@pytest.mark.parametrize(("count", "bits"), [(1, 13), (64, 13), (65, 13), (1000, 13), (1000, 24), (10, 43), (640, 43)])
def test_words_travel_packed(count, bits):
    ring = Ring(bits)
    words = RNG.integers(0, 1 << 63, count, np.uint64).astype(ring.dtype)
    data = packing.packed(words, ring)
    assert data.size == packing.packed_size(count, ring) <= count * ring.size
    mask = ring.dtype.type((1 << bits) - 1)
    np.testing.assert_array_equal(packing.unpacked(data, ring, (count,)), words & mask)


def test_products_of_words():
    a, b = RNG.integers(0, 1 << 63, (5, 7), np.uint64), RNG.integers(0, 1 << 63, (7, 2), np.uint64)
    wanted = (a.astype(object) @ b.astype(object)) % (1 << 64)
    assert (word_matmul(a, b).astype(object) == wanted).all()
