from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.replicated import Ring, index_bits
from cloister.mpc.parties import Party
from cloister.mpc.three_party import replicated, selection
from cloister.mpc.three_party.replicated import Trio, join
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import Case, check_no_errors, fixed_entropy, run_protocol, transcript, values

TRIO = tuple(map(Party, ("ann", "ben", "cat")))
ANN, BEN, CAT = TRIO
DAN = Party("dan")  # gives inputs and gets results, computes nothing


@dataclass(frozen=True)
class Params:
    name: str = "game"


def game(script, inputs=None, others=(DAN,), **options):
    """Play `script(trio, x)` at three computing parties and `others`; x is what the party holds."""

    async def role(ch, params, x, *, entropy, identity):
        trio = await Trio.meet(ch, TRIO, others, entropy=entropy, identity=identity)
        return await script(trio, x)

    members = (*TRIO, *others)
    module = SimpleNamespace(__name__="replicated", roles=lambda _: dict.fromkeys(members, role))
    case = Case(Params(), {p: ((inputs or {}).get(p),) for p in members})
    return run_protocol(module, case, **options)


def result(script, inputs=None, others=(DAN,), at=ANN):
    run = game(script, inputs, others)
    check_no_errors(run)
    return values(run)[at]


async def shown(trio, x, ring=None, shape=None, to=ANN):
    ring, shape = (x.ring, x.shape) if x is not None else (ring, shape)
    return await trio.open(x, shape, ring, to=to, protocol="test", line="T1", what="result")


async def shown_bits(trio, x):
    return await trio.open_bits(x, protocol="test", line="T1", what="bits")


def integers(ring, shape, seed, share=1):
    reach = max(1, (1 << (ring.bits - 1)) // share - 1)
    return np.random.default_rng(seed).integers(-reach, reach, shape, dtype=np.int64, endpoint=True)


WIDTHS = st.sampled_from([3, 4, 7, 8, 17, 31, 32, 33, 40, 44, 63, 64])


@settings(max_examples=12, deadline=None)
@given(bits=WIDTHS, owner=st.sampled_from([*TRIO, DAN]), to=st.sampled_from([*TRIO, DAN]), seed=st.integers(0, 999))
def test_input_and_open(bits, owner, to, seed):
    ring, x = Ring(bits), integers(Ring(bits), (3, 5), seed)

    async def script(trio, mine):
        shared = await trio.input(owner, mine, (3, 5), ring)
        return await shown(trio, shared, ring, (3, 5), to)

    run = game(script, {owner: ring.encode(x)})
    check_no_errors(run)
    got = values(run)
    np.testing.assert_array_equal(got.pop(to), x)
    assert set(got.values()) == {None}


@settings(max_examples=15, deadline=None)
@given(bits=WIDTHS, n=st.integers(1, 40), seed=st.integers(0, 999))
def test_arithmetic_against_plain(bits, n, seed):
    """Add, multiply, compare, equal, low bits, injection: all of it on one pair of vectors."""
    ring = Ring(bits)
    x, y = integers(ring, (n,), seed, share=2), integers(ring, (n,), seed + 1, share=2)
    y[: n // 3] = x[: n // 3]
    low = min(3, bits)

    async def script(trio, mine):
        a = await trio.input(ANN, mine if trio.ch.me == ANN else None, (n,), ring)
        b = await trio.input(DAN, mine if trio.ch.me == DAN else None, (n,), ring)
        if a is None:
            return None
        less, same = await trio.less(a, b), await trio.equal(a, b)
        few = await trio.low_bits(a, low)
        small = Ring(5)
        out = [
            await shown_bits(trio, less),
            await shown_bits(trio, same),
            [await shown_bits(trio, few[i]) for i in range(low)],
            await shown_bits(trio, await trio.both(less, trio.flip(same))),
        ]
        numbers = await trio.inject(less, (n,), small)
        out += [await shown(trio, z) for z in (a + b, await trio.mul(a, b), a.times(-3), numbers)]
        return out

    less, same, few, both, total, product, triple, numbers = result(script, {ANN: ring.encode(x), DAN: ring.encode(y)})
    np.testing.assert_array_equal(less, x < y)
    np.testing.assert_array_equal(same, x == y)
    np.testing.assert_array_equal(few, [(x >> i) & 1 for i in range(low)])
    np.testing.assert_array_equal(both, x < y)
    np.testing.assert_array_equal(total, x + y)

    def wrap(z):
        half = 1 << (bits - 1)
        return [(int(v) + half) % (2 * half) - half for v in z]

    np.testing.assert_array_equal(product, wrap(x.astype(object) * y.astype(object)))
    np.testing.assert_array_equal(triple, wrap(x.astype(object) * -3))
    np.testing.assert_array_equal(numbers, x < y)


@pytest.mark.parametrize("bits", [9, 32, 41])
@pytest.mark.parametrize("n", [1, 13])
def test_the_deep_and_the_shallow_circuit_agree(bits, n, monkeypatch):
    ring = Ring(bits)
    x = integers(ring, (n,), bits)
    x[0] = 0

    async def script(trio, mine):
        a = await trio.input(BEN, mine, (n,), ring)
        return None if a is None else await shown_bits(trio, await trio.negative(a))

    for deep in (0, 1 << 20):
        monkeypatch.setattr(replicated, "DEEP", deep)
        np.testing.assert_array_equal(result(script, {BEN: ring.encode(x)}), x < 0)


@pytest.mark.parametrize("bits", [31, 40, 64])
def test_matmul(bits):
    ring = Ring(bits)
    x, y = integers(ring, (4, 9), 1), integers(ring, (9, 5), 2)

    async def script(trio, mine):
        a = await trio.input(CAT, mine if trio.ch.me == CAT else None, x.shape, ring)
        b = await trio.input(DAN, mine if trio.ch.me == DAN else None, y.shape, ring)
        return None if a is None else await shown(trio, await trio.matmul(a, b))

    found = result(script, {CAT: ring.encode(x), DAN: ring.encode(y)})
    exact = x.astype(object) @ y.astype(object)
    assert ((found.astype(object) - exact) % (1 << bits) == 0).all()


@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 19), values_=st.integers(1, 9), seed=st.integers(0, 999))
def test_onehot_takes_the_first_of_equals(n, values_, seed):
    ring = Ring(12)
    x = np.random.default_rng(seed).integers(0, values_, (4, n))

    async def script(trio, mine):
        a = await trio.input(ANN, mine, x.shape, ring)
        if a is None:
            return None
        found = [*await trio.onehot_min(a), *await trio.onehot_max(a)]
        return [await shown(trio, z) for z in found]

    low, at_low, high, at_high = result(script, {ANN: ring.encode(x)})
    np.testing.assert_array_equal(low, x.min(1))
    np.testing.assert_array_equal(high, x.max(1))
    np.testing.assert_array_equal(at_low, np.eye(n, dtype=int)[x.argmin(1)])
    np.testing.assert_array_equal(at_high, np.eye(n, dtype=int)[x.argmax(1)])


async def smallest(trio, x, k):
    """As entry · 2^b + column."""
    return await trio.smallest_k(trio.product(x, trio.constant(np.ones(x.shape, int), x.ring)), x.ring, k)


@pytest.mark.parametrize(("n", "k", "distinct"), [(1, 1, 9), (7, 7, 3), (20, 3, 1), (90, 5, 1000), (400, 10, 30)])
def test_smallest_k(n, k, distinct):
    ring = Ring(20)
    x = np.random.default_rng(n).integers(-distinct, distinct, (6, n))

    async def script(trio, mine):
        a = await trio.input(DAN, mine, x.shape, ring)
        return None if a is None else await shown(trio, await smallest(trio, a, k))

    found = result(script, {DAN: ring.encode(x)})
    order = np.argsort(x, axis=1, kind="stable")[:, :k]  # of equal ones the earlier
    np.testing.assert_array_equal(found, (np.take_along_axis(x, order, axis=1) << index_bits(n)) + order)


def opened(x, k, seed=0):
    """What the three open to choose the k smallest of every row: places i, j and whether i comes first, per step."""
    ring, seen = Ring(20), []

    async def script(trio, mine):
        a = await trio.input(DAN, mine, x.shape, ring)
        if a is None:
            return
        original = trio.open_bits

        async def spy(bits, **words):
            seen.append(await original(bits, **words))
            return seen[-1]

        if trio.rank == 0:
            trio.open_bits = spy
        await smallest(trio, a, k)

    check_no_errors(game(script, {DAN: ring.encode(x)}, entropy=fixed_entropy(f"opened {seed}")))
    return seen


LAWS = {
    "all equal": lambda shape: np.zeros(shape, int),
    "ascending": lambda shape: np.broadcast_to(np.arange(shape[1]), shape).copy(),
    "few values": lambda shape: np.random.default_rng(0).integers(0, 3, shape),
    "mostly padding": lambda shape: np.where(np.arange(shape[1]) < 3, np.arange(shape[1]), 1000) * np.ones(shape, int),
}


@pytest.mark.parametrize("law", LAWS)
def test_what_is_opened_does_not_depend_on_the_values(law):
    """Rows of five in uniformly random order: each of the 120 orders as often, whether entries are equal or not."""
    shape = (6000, 5)
    (bits,) = opened(LAWS[law](shape), 1)
    first = bits.reshape(shape[0], 10)  # [i comes before j] for the ten pairs of places
    codes = np.unique(first @ (1 << np.arange(10)), return_counts=True)[1]
    assert len(codes) == 120
    assert ((codes - 50) ** 2 / 50).sum() < 204  # chi-square with 119 degrees of freedom: P = 1e-6


def test_how_much_is_opened_does_not_depend_on_the_values():
    """Long rows, where earlier outcomes choose what is compared next: the same law of how many comparisons."""
    shape = (200, 120)
    counts = {law: [sum(map(len, opened(make(shape), 5, seed))) for seed in range(4)] for law, make in LAWS.items()}
    spread = np.sqrt(np.mean([np.var(c, ddof=1) for c in counts.values()]))
    means = [np.mean(c) for c in counts.values()]
    assert max(means) - min(means) < 5 * spread


def test_no_party_can_follow_an_entry_through_the_shuffle():
    """Where the smallest entry lands is uniform, also given the two permutations that a party knows."""
    ring, n, rows = Ring(16), 4, 600
    x = np.tile(np.arange(n), (rows, 1))
    seen = {}

    async def script(trio, mine):
        a = await trio.input(DAN, mine, x.shape, ring)
        if a is None:
            return
        z = trio.product(a, trio.constant(np.ones(x.shape, int), ring))
        split = await trio.shuffle(z, ring)
        seen[trio.rank] = split.word

    check_no_errors(game(script, {DAN: ring.encode(x)}))
    np.testing.assert_array_equal(ring.decode(seen[1]), ring.decode(seen[2]))
    order = ring.decode(seen[0] + seen[1])
    np.testing.assert_array_equal(np.sort(order, axis=1), x)
    counts = np.bincount(order.argmin(1), minlength=n)
    assert ((counts - rows / n) ** 2 / (rows / n)).sum() < 45  # chi-square, df 3, P < 1e-9


def test_the_view_of_one_party_is_uniform_whatever_the_input():
    ring = Ring(32)

    def view(x):
        seen = {}

        async def script(trio, mine):
            a = await trio.input(DAN, mine, x.shape, ring)
            if a is not None:
                seen[trio.rank] = np.concatenate([a.a, a.b, (await trio.mul(a, a)).b])

        check_no_errors(game(script, {DAN: ring.encode(x)}))
        return seen

    for x in (np.zeros(4000, int), np.full(4000, 77777)):
        for words in view(x).values():
            counts = np.bincount((words >> np.uint32(24)).astype(int), minlength=256)
            expected = words.size / 256
            assert ((counts - expected) ** 2 / expected).sum() < 426  # df 255, P < 1e-10


def test_frames_carry_no_share_in_the_clear():
    """Who carries the frames sees neither seeds nor components: the sum of all that is sent gives nothing away."""
    ring, x = Ring(32), np.arange(50)
    parts, frames = [], {}

    async def script(trio, mine):
        send = trio.ch.send

        async def spy(to, msg):
            frames.setdefault(type(msg).__name__, []).append(getattr(msg, "data", np.zeros(0, np.uint8)).copy())
            await send(to, msg)

        trio.ch.send = spy
        a = await trio.input(ANN, mine, x.shape, ring)
        if a is None:
            return None
        z = await trio.mul(a, trio.constant(np.ones(50, int), ring))
        parts.append(z.a)
        return await shown(trio, z)

    result(script, {ANN: ring.encode(x)})
    np.testing.assert_array_equal(ring.decode(sum(parts)), x)  # the summands do add up to the secret ...
    sent = [ring.from_bytes(d, (50,)) for d in frames["Reshare"]]
    assert len(sent) == 3
    assert (ring.decode(sum(sent)) != x).mean() > 0.9  # ... what is on the wire does not


def test_large_arrays_travel_in_parts(monkeypatch):
    monkeypatch.setattr(replicated, "PART", 7)
    ring, x = Ring(40), integers(Ring(40), (5, 4), 3)

    async def script(trio, mine):
        a = await trio.input(DAN, mine, x.shape, ring)
        return await shown(trio, None if a is None else a + a - a, ring, x.shape, DAN)

    run = game(script, {DAN: ring.encode(x)})
    check_no_errors(run)
    np.testing.assert_array_equal(values(run)[DAN], x)
    assert len([r for r in transcript(run)[DAN] if r[0] == "replicated.Input"]) > 20


def test_a_party_is_lost_by_name():
    async def script(trio, mine):
        a = await trio.input(ANN, mine, (4,), Ring(16))
        return None if a is None else await shown(trio, await trio.mul(a, a))

    inputs = {ANN: Ring(16).encode(np.arange(4))}
    run = game(script, inputs, timeout=1.0, faults=[Fault("kill", "ben", None, "Reshare")])
    assert isinstance(run.errors[ANN], ProtocolAbort)
    assert (run.errors[ANN].protocol, run.errors[ANN].line) == ("replicated", "R3")
    run = game(script, inputs, timeout=1.0, faults=[Fault("truncate", "cat", None, "Reshare")])
    assert any(e.code == "malformed" for e in run.errors.values())


def test_bad_calls():
    async def two_owners(trio, mine):
        return await trio.input(ANN, np.zeros(3, np.uint32), (3,), Ring(16))

    run = game(two_owners, {})
    assert any(isinstance(e, ParameterError) and "owner" in str(e) for e in run.errors.values())

    async def wrong_shape(trio, mine):
        return await trio.input(ANN, mine, (3,), Ring(16))

    run = game(wrong_shape, {ANN: np.zeros(4, np.uint32)}, timeout=1.0)
    assert isinstance(run.errors[ANN], ParameterError)
    with pytest.raises(ParameterError, match="cannot grow"):
        replicated.Shared(Ring(8), np.zeros(1, np.uint32), np.zeros(1, np.uint32)).to(Ring(9))


def test_join_and_shrink():
    ring = Ring(40)
    x = integers(ring, (2, 3), 0)

    async def script(trio, mine):
        a = await trio.input(ANN, mine, x.shape, ring)
        if a is None:
            return None
        return [await shown(trio, z) for z in (join([a, a], axis=1), a.to(Ring(10)), a.sum(1), a[:, ::-1])]

    wide, low, total, flipped = result(script, {ANN: ring.encode(x)})
    np.testing.assert_array_equal(wide, np.concatenate([x, x], axis=1))
    np.testing.assert_array_equal(low, (x + 512) % 1024 - 512)
    np.testing.assert_array_equal(flipped, x[:, ::-1])
    np.testing.assert_array_equal(total, ring.decode(ring.encode(x).sum(1, dtype=np.uint64)))


# ---- the public part of selection ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), n=st.integers(1, 700), k=st.integers(1, 12), seed=st.integers(0, 999))
def test_selection_finds_the_smallest(rows, n, k, seed):
    import asyncio

    k = min(k, n)
    x = np.argsort(np.random.default_rng(seed).random((rows, n)), axis=1)
    flat, count = x.ravel(), [0]

    async def less(i, j):
        assert (i // n == j // n).all()
        count[0] += i.size
        return (flat[i] < flat[j]).astype(np.uint8)

    place = asyncio.run(selection.smallest(less, rows, n, k))
    np.testing.assert_array_equal(flat[place], np.tile(np.arange(k), (rows, 1)))
    assert count[0] <= rows * max(n * (n - 1) / 2, 1)


def test_selection_needs_little_more_than_one_comparison_per_entry():
    import asyncio

    rows, n, k = 60, 6000, 10
    flat, count = np.argsort(np.random.default_rng(1).random((rows, n)), axis=1).ravel(), [0, 0]

    async def less(i, j):
        count[0] += i.size
        count[1] += 1
        return (flat[i] < flat[j]).astype(np.uint8)

    asyncio.run(selection.smallest(less, rows, n, k))
    assert count[0] < 1.45 * rows * n
    assert count[1] < 16
