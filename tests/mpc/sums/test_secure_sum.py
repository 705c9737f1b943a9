from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto import shamir
from cloister.mpc.parties import Party
from cloister.mpc.sums import secure_sum
from cloister.mpc.sums.secure_sum import Params
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "secure_sum.json"
HUB = Party("hub")


def case(n=3, m=5, seed=0, **options):
    rng = np.random.default_rng(seed)
    names = tuple(Party(f"site-{i:02d}") for i in range(n))
    inputs = {u: (rng.integers(0, 2**64, m, dtype=np.uint64),) for u in names}
    return Case(Params(names, HUB, m, **options), inputs)


def agree(found, ideal):
    if ideal is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found.z, ideal)


def check_sum(c, run):
    """The aggregator's sum is the sum over exactly the survivors it names."""
    found = values(run)[HUB]
    assert len(found.survivors) >= c.params.t
    wanted = np.sum([c.inputs[u][0] for u in found.survivors], axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(found.z, wanted)
    return found


@settings(max_examples=12, deadline=None)
@given(n=st.integers(2, 6), m=st.integers(1, 40), seed=st.integers(0, 2**20), to_all=st.booleans())
def test_ideal(n, m, seed, to_all):
    check_ideal(secure_sum, [case(n, m, seed, to_all=to_all)], agree=agree)


def test_vectors():
    check_vectors(secure_sum, case(), VECTORS)


def test_view_does_not_depend_on_the_inputs():
    check_view(secure_sum, case(seed=1), case(seed=2))


def test_cost():
    check_cost(secure_sum, case(n=4, m=1000))
    check_cost(secure_sum, case(n=3, m=10, to_all=True))


@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate", "swap", "truncate", "kill"])
def test_abort_or_survive(kind):
    c = case(n=3)
    # one link and the coordinator's answers on it: the other links are alike
    messages = [(s, to, n) for s, to, n in all_messages(c) if "site-01" in (s, to)]
    assert check_abort(secure_sum, c, survived=lambda run: check_sum(c, run), kinds=[kind], messages=messages) >= 10


def all_messages(c):
    run = run_protocol(secure_sum, c)
    return sorted({(p, e.to, e.name) for p, r in run.receipts.items() for e, _ in r.entries if e.kind == "sent"})


@pytest.mark.parametrize("name", ["Keys", "Shares", "MaskedInput", "Vouch", "Unmask"])
@pytest.mark.parametrize("n", [3, 5, 20])
def test_exact_with_as_many_dropped_as_the_threshold_allows(n, name):
    c = case(n=n, m=7)
    gone = [u for u in c.params.contributors][: n - c.params.t]
    run = run_protocol(secure_sum, c, faults=[Fault("kill", u, HUB, name) for u in gone], timeout=2.0)
    check_no_errors(run)
    found = check_sum(c, run)
    late = name in ("Vouch", "Unmask")  # these died after their input was in
    assert set(found.survivors) == set(c.params.contributors) - (set() if late else set(gone))


def test_one_too_many_dropped_is_a_named_abort_at_everyone():
    c = case(n=5)
    gone = c.params.contributors[:3]
    run = run_protocol(secure_sum, c, faults=[Fault("kill", u, HUB, "MaskedInput") for u in gone], timeout=1.0)
    assert run.errors.keys() == {HUB, *c.params.contributors[3:]}
    assert {(e.protocol, e.code) for e in run.errors.values()} == {("secure_sum", "too-few")}


async def moves_a_key(ch, params, x, among=(), *, entropy, identity):
    """Follows the protocol, and moves its share of the dropped one's key so that all shares give another key."""
    send = ch.send

    async def altered(to, msg):
        if isinstance(msg, secure_sum.Unmask):
            answer = shamir._weights((1, 2, 3), 0)[0]  # what my share counts for, with those of the second and third
            step = 8 * pow(answer, -1, shamir.PRIME)  # X25519 leaves the last three bits out
            for v, share in msg.key_shares.items():
                moved = (int.from_bytes(share, "big") + step) % shamir.PRIME
                msg = replace(msg, key_shares={v: moved.to_bytes(shamir.SHARE_BYTES, "big")})
        await send(to, msg)

    ch.send = altered
    return await secure_sum.contributor(ch, params, x, among, entropy=entropy, identity=identity)


def test_shares_of_another_key_than_the_dropped_one_had_are_noticed():
    c = case(n=4)
    first, *_, last = c.params.contributors
    gone = [Fault("kill", last, HUB, "MaskedInput")]
    run = run_protocol(secure_sum, c, roles={first: moves_a_key}, faults=gone, timeout=2.0)
    assert (run.errors[HUB].line, run.errors[HUB].code) == ("L10", "shares")
    assert "do not give its key" in str(run.errors[HUB]), "they lie on one polynomial, and give 32 bytes"


# ---- a lying aggregator ----------------------------------------------------------------------------------------------


async def split_view(ch, params):
    """Tells one contributor that another dropped, and the rest that nobody did: the attack that L7 and L8 stop."""
    from cloister.mpc.sums.secure_sum import (
        Keys,
        MaskedInput,
        Roster,
        Shares,
        SharesFor,
        Survivors,
        Vouch,
        Vouches,
    )

    U = params.contributors
    keys = await ch.gather(U, Keys)
    await ch.scatter(U, Roster(keys))
    shares = await ch.gather(U, Shares)
    await ch.scatter({u: SharesFor({v: shares[v].sealed[u] for v in U if v != u}) for u in U})
    await ch.gather(U, MaskedInput, y=(params.length,))
    victim = U[-1]
    lists = {u: U if i % 2 else tuple(v for v in U if v != victim) for i, u in enumerate(U[:-1])} | {victim: U}
    await ch.scatter({u: Survivors(lists[u]) for u in U})
    vouches = await ch.gather(U, Vouch)
    await ch.scatter(U, Vouches({v: m.signature for v, m in vouches.items()}))
    return await ch.gather(U, secure_sum.Unmask)


def test_split_view_of_the_survivors_is_detected():
    c = case(n=4)
    run = run_protocol(secure_sum, c, roles={HUB: split_view}, timeout=2.0)
    codes = {u: e.code for u, e in run.errors.items() if u != HUB}
    assert codes, "some contributor must notice"
    assert set(codes.values()) <= {"signature", "split-view"}
    unmasked = [p for p, r in run.receipts.items() if any(e.name == "secure_sum.Unmask" for e, _ in r.entries)]
    assert unmasked == []


async def asks_twice(ch, params):
    """An honest run, then a second list of survivors in the hope of a second answer."""
    result = await secure_sum.aggregator(ch, params)
    fewer = params.contributors[:-1]
    await ch.scatter(fewer, secure_sum.Survivors(fewer))
    try:
        await ch.gather(fewer, secure_sum.Vouch)
    except ProtocolAbort as e:
        return result, e.code
    return result, "answered"


def test_a_second_unmask_request_is_not_answered():
    c = case(n=3)
    run = run_protocol(secure_sum, c, roles={HUB: asks_twice}, timeout=1.0)
    assert values(run)[HUB][1] in ("finished", "timeout")
    for u in c.params.contributors:
        sent = [e.name for e, _ in run.receipts[u].entries]
        assert sent.count("secure_sum.Unmask") == 1


def test_a_replayed_unmask_is_refused():
    c = case(n=3)
    run = run_protocol(secure_sum, c, faults=[Fault("duplicate", "site-01", "hub", "Vouch")], timeout=1.0)
    assert run.errors[HUB].code == "replay"


async def swaps_keys(ch, params):
    """Puts keys of its own in place of a contributor's: a person in the middle."""
    from cloister.mpc.crypto.agreement import key_pair
    from cloister.mpc.crypto.entropy import Entropy

    keys = await ch.gather(params.contributors, secure_sum.Keys)
    first = params.contributors[0]
    mine = secure_sum.Keys(key_pair(Entropy()).public, key_pair(Entropy()).public, keys[first].signature)
    await ch.scatter(params.contributors, secure_sum.Roster({**keys, first: mine}))
    await ch.gather(params.contributors, secure_sum.Shares)


def test_swapped_keys_are_refused():
    c = case(n=3)
    run = run_protocol(secure_sum, c, roles={HUB: swaps_keys}, timeout=1.0)
    assert {run.errors[u].code for u in c.params.contributors} == {"roster", "signature"}


# ---- the view of the aggregator --------------------------------------------------------------------------------------


def masked_inputs(x, runs, mask=None):
    """What the aggregator sees of the first contributor in many runs with the same input."""
    seen = []
    for _ in range(runs):
        c = case(n=3, m=len(x))
        c.inputs[c.params.contributors[0]] = (x,)
        if mask is not None:
            seen.append(mask(x))
            continue
        keep = {}

        async def watching(ch, params, keep=keep):
            gather = ch.gather

            async def spy(senders, kind, **kw):
                got = await gather(senders, kind, **kw)
                if kind is secure_sum.MaskedInput:
                    keep.update({u: m.y for u, m in got.items()})
                return got

            ch.gather = spy
            return await secure_sum.aggregator(ch, params)

        check_no_errors(run_protocol(secure_sum, c, roles={HUB: watching}))
        seen.append(keep[c.params.contributors[0]])
    return np.concatenate(seen)


def independence(views):
    """Chi-square statistics (df 255) of the top byte under each input; the same law for every input if it hides."""
    stats = []
    for v in views:
        counts = np.bincount((v >> np.uint64(56)).astype(int), minlength=256)
        expected = len(v) / 256
        stats.append(float(((counts - expected) ** 2 / expected).sum()))
    return stats


def test_the_aggregators_view_is_independent_of_the_input_and_a_gaussian_mask_would_not_be():
    m = 4000
    inputs = [np.zeros(m, dtype=np.uint64), np.full(m, 2**63, dtype=np.uint64)]
    limit = 360.0  # df 255: P(chi2 > 360) < 1e-5
    assert max(independence([masked_inputs(x, 3) for x in inputs])) < limit

    rng = np.random.default_rng(0)

    def gaussian(x):
        return x + np.round(rng.normal(0, 2.0**60, len(x))).astype(np.int64).astype(np.uint64)

    assert min(independence([masked_inputs(x, 3, gaussian) for x in inputs])) > limit


@pytest.mark.parametrize(
    ("contributors", "options"),
    [
        (("a",), {}),
        (("a", "a"), {}),
        (("a", "hub"), {}),
        (("a", "b", "c"), {"threshold": 1}),
        (("a", "b"), {"length": 0}),
    ],
)
def test_bad_parameters(contributors, options):
    with pytest.raises(ParameterError):
        Params(tuple(map(Party, contributors)), HUB, **{"length": 3, **options})
