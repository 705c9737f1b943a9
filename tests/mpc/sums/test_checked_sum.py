from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.mpc.crypto import sum_tags
from cloister.mpc.parties import Party
from cloister.mpc.sums import checked_sum, secure_sum
from cloister.mpc.sums.checked_sum import Params
from cloister.mpc.testing import lies
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_lies,
    check_vectors,
    check_view,
    dealt_seeds,
    fixed_entropy,
    run_protocol,
    same_array,
    transcript,
    values,
)
from old_steps import linear_sum_tags, prime_sum_tags

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))
VECTORS = Path(__file__).parents[2] / "vectors" / "checked_sum.json"
SEEDS = dealt_seeds(SITES)


def signed(row):
    return np.array(row, dtype=np.int64).view(np.uint64)


def case(*rows):
    xs = [signed(row) for row in rows]
    seeds = dealt_seeds(SITES[: len(xs)])
    return Case(Params(SITES[: len(xs)], HUB, len(xs[0])), {u: (x, seeds[u]) for u, x in zip(SITES, xs, strict=False)})


FIRST, TWIN = case([1, 2], [3, -4], [5, 2**60]), case([0, 0], [7, 7], [-1, -1])


def test_ideal():
    check_ideal(checked_sum, [FIRST, TWIN, case([1], [2])], agree=same_array)


def test_vectors():
    check_vectors(checked_sum, FIRST, VECTORS)


def test_view():
    check_view(checked_sum, FIRST, TWIN)


def test_cost():
    check_cost(checked_sum, FIRST)


def test_a_site_that_stops_ends_the_run():
    def survived(run):
        same_array(values(run)[HUB], checked_sum.ideal(FIRST.params, {u: x for u, x in FIRST.inputs.items()})[HUB])

    messages = [("a", "hub", "checked_sum.Masked"), ("hub", "a", "checked_sum.Total")]
    check_abort(checked_sum, FIRST, survived=survived, messages=messages, kinds=["drop", "kill", "truncate"])


class Liar:
    """A channel that tells everybody the same wrong total."""

    def __init__(self, ch, change):
        self.ch, self.change = ch, change

    def __getattr__(self, name):
        return getattr(self.ch, name)

    def _changed(self, msg):
        return type(msg)(self.change(msg.z)) if isinstance(msg, checked_sum.Total | secure_sum.Total) else msg

    async def scatter(self, to, msg=None):
        await self.ch.scatter(to, self._changed(msg))

    async def broadcast(self, to, msg):
        await self.ch.broadcast(to, self._changed(msg))


@pytest.mark.parametrize("change", [1, 2**20, 2**62, 2**63])
def test_a_sum_that_the_coordinator_changed_for_all_is_noticed(change):
    async def coordinator(ch, params):
        return await checked_sum.coordinator(Liar(ch, lambda z: z + np.array([change, 0, 0, 0], np.uint64)), params)

    ended = run_protocol(checked_sum, FIRST, roles={HUB: coordinator}, timeout=5.0)
    assert {ended.errors[u].code for u in SITES} == {"changed"}


OLD_PRIME = linear_sum_tags.PRIME


def scaled(factor, prime, half):
    """The sum and its tag, both times a factor; the tag modulo its prime, as the coordinator would send it."""

    def change(z):
        words, (high, low) = z[:-2] * np.uint64(factor % 2**64), (int(w) for w in z[-2:])
        value = ((high << half) + low) * factor % prime
        return np.concatenate([words, np.array([value >> half, value & ((1 << half) - 1)], np.uint64)])

    return change


def one_word(added):
    def change(z):
        z = z.copy()
        z[1:2] += np.uint64(added % 2**64)  # arrays wrap
        return z

    return change


F1 = {
    "times 0": lambda prime, half: scaled(0, prime, half),
    "times -1": lambda prime, half: scaled(-1, prime, half),
    "times 2": lambda prime, half: scaled(2, prime, half),
    "plus the old prime": lambda prime, half: one_word(OLD_PRIME),
    "minus the old prime": lambda prime, half: one_word(-OLD_PRIME),
}


@pytest.mark.parametrize("attack", F1)
def test_f1_a_scaled_sum_with_its_scaled_tag_is_changed(attack):
    """Finding F1: the old linear tags accept the attack at every site; the affine tags name it."""
    xs = [x for x, _ in FIRST.inputs.values()]
    true = np.sum(xs, axis=0, dtype=np.uint64)

    def coordinator(step, change):
        return lambda ch, params: step.coordinator(Liar(ch, change), params)

    old = F1[attack](OLD_PRIME, linear_sum_tags.HALF)
    roles = dict.fromkeys(SITES, linear_sum_tags.site) | {HUB: coordinator(linear_sum_tags, old)}
    ended = run_protocol(checked_sum, FIRST, roles=roles, timeout=5.0)
    assert not ended.errors
    for u in SITES:
        assert not np.array_equal(values(ended)[u], true)

    new = F1[attack](sum_tags.MODULUS, sum_tags.HALF)
    ended = run_protocol(checked_sum, FIRST, roles={HUB: coordinator(checked_sum, new)}, timeout=5.0)
    assert {ended.errors[u].code for u in SITES} == {"changed"}
    assert not set(SITES) & set(values(ended))


class Divider:
    """A channel of a coordinator that publishes another multiple of the sum, with its tag, to each site."""

    def __init__(self, ch, factors, prime, half):
        self.ch, self.factors, self.prime, self.half = ch, factors, prime, half

    def __getattr__(self, name):
        return getattr(self.ch, name)

    async def broadcast(self, to, msg):
        if not isinstance(msg, checked_sum.Total):
            return await self.ch.broadcast(to, msg)
        for u in to:
            await self.ch.send(u, checked_sum.Total(scaled(self.factors[u], self.prime, self.half)(msg.z)))


def test_f1_three_sites_cannot_finish_with_three_sums():
    """Up to 5a0c885 each site accepted another multiple of the sum, so three sites finished with three models."""
    factors = dict(zip(SITES, (1, 2, -1), strict=True))

    def coordinator(step, prime, half):
        return lambda ch, params: step.coordinator(Divider(ch, factors, prime, half), params)

    old = coordinator(linear_sum_tags, OLD_PRIME, linear_sum_tags.HALF)
    roles = dict.fromkeys(SITES, linear_sum_tags.site) | {HUB: old}
    found = values(run_protocol(checked_sum, FIRST, roles=roles, timeout=5.0))
    assert len({found[u].tobytes() for u in SITES}) == 3

    roles = {HUB: coordinator(checked_sum, sum_tags.MODULUS, sum_tags.HALF)}
    ended = run_protocol(checked_sum, FIRST, roles=roles, timeout=5.0)
    assert {ended.errors[u].code for u in SITES[1:]} == {"changed"}
    assert not set(SITES[1:]) & set(values(ended))


def test_sums_and_tags_of_another_run_are_changed():
    """A pair (z, t) that was valid in an earlier run, replayed by the coordinator."""
    earlier = []

    def coordinator(change):
        return lambda ch, params: checked_sum.coordinator(Liar(ch, change), params)

    def keep(z):
        earlier.append(z)
        return z

    assert not run_protocol(checked_sum, TWIN, roles={HUB: coordinator(keep)}).errors
    ended = run_protocol(checked_sum, FIRST, roles={HUB: coordinator(lambda z: earlier[0])}, timeout=5.0)
    assert {ended.errors[u].code for u in SITES} == {"changed"}


def test_a_site_with_a_wrong_tag_ends_the_run_for_all():
    """One malicious site can spoil a sum. It cannot make the others accept different ones."""

    async def malicious(ch, params, x, seed):
        return await checked_sum.site(ch, params, x, replace(seed, secret=bytes(32)))

    ended = run_protocol(checked_sum, FIRST, roles={SITES[0]: malicious}, timeout=5.0)
    assert {ended.errors[u].code for u in SITES[1:]} == {"changed"}


def outcome(step, malicious, who):
    """Whether a run ends well in which the malicious site c adds these tag words, and `who` alone holds a one."""
    rows = [[int(u == who), 5] for u in SITES[:2]] + [[0, 0]]
    roles = dict.fromkeys(SITES, step.site) | {HUB: step.coordinator, SITES[2]: malicious}
    return not run_protocol(checked_sum, case(*rows), roles=roles, timeout=5.0, entropy=fixed_entropy("carry")).errors


def test_whether_a_site_with_a_wrong_tag_ends_the_run_does_not_depend_on_who_holds_what():
    """z is the same in both runs. With words that carry, the abort of the old step shows which site holds the one."""

    async def old(ch, params, x, seed, *, entropy, identity):
        key = prime_sum_tags.key_of(ch, params, seed.secret)
        low = [sum(int(key.tag(signed([int(u == who), 5]), u)[1]) for u in range(2)) for who in range(2)]
        for more in range(1000):  # of its own input, which moves its tag: wrap for one of the two cases only
            x = signed([0, more])
            t = (key.beta[2] + prime_sum_tags.exact(key.alpha, x)) % prime_sum_tags.PRIME
            c = -t % (1 << 44)
            c += (1 << 44) * (c <= min(low))
            if min(low) < c <= max(low):
                break
        else:
            raise AssertionError("no threshold between the two cases")
        words = np.array([(t + c) >> 44, -c % 2**64], np.uint64)
        words = np.concatenate([x, words])
        opened = await secure_sum.contributor(
            ch, prime_sum_tags.sums(params), words, entropy=entropy, identity=identity
        )
        return opened.z[:2]

    async def new(ch, params, x, seed):
        key = checked_sum.key_of(params, ch.run_id, seed)
        words = np.concatenate([x, sum_tags.tag(x, key, 2) + np.array([high, low], np.uint64)])
        await ch.send(HUB, checked_sum.Masked(checked_sum.masked(params, ch.run_id, ch.me, words, seed)))
        return (await ch.recv_broadcast(HUB, checked_sum.Total, z=(params.words,))).z[:2]

    assert {outcome(prime_sum_tags, old, u) for u in SITES[:2]} == {True, False}
    for high, low in [(0, 0), (0, 1), (1, 0), (2**63, 0), (0, 2**63), (2**64 - 1, 2**44)]:
        assert {outcome(checked_sum, new, u) for u in SITES[:2]} == {(high, low) == (0, 0)}


def test_a_key_is_not_used_for_two_sums():
    """Two sums under one key give α to the coordinator, (t' - t) / (z' - z), and with it a tag for any sum."""

    async def twice(ch, params, x, seed):
        await checked_sum.site(ch, params, x, seed)
        return await checked_sum.site(ch, params, x + np.uint64(1), seed)

    async def coordinator(ch, params):
        await checked_sum.coordinator(ch, params)
        return await checked_sum.coordinator(ch, params)

    ended = run_protocol(checked_sum, FIRST, roles=dict.fromkeys(SITES, twice) | {HUB: coordinator}, timeout=5.0)
    assert {type(ended.errors[u]) for u in SITES} == {ParameterError}


def test_a_sum_that_wraps_ends_the_run():
    ended = run_protocol(checked_sum, case([2**62], [2**62], [1]), timeout=5.0)
    assert {ended.errors[u].code for u in SITES} == {"changed"}


def test_the_secure_sum_alone_takes_it():
    """The same lie where sums are not checked: every site goes on with what the coordinator chose."""
    params = secure_sum.Params(SITES, HUB, 2, to_all=True)
    inputs = {u: (x,) for u, (x, _) in FIRST.inputs.items()}

    async def aggregator(ch, params):
        return await secure_sum.aggregator(Liar(ch, lambda z: z + np.array([1000, 0], np.uint64)), params)

    ended = run_protocol(secure_sum, Case(params, inputs), roles={HUB: aggregator}, timeout=5.0)
    assert not ended.errors
    assert {int(values(ended)[u].z[0]) for u in SITES} == {1009}


def test_a_site_without_a_key_for_every_other_site_sends_nothing():
    """The masks would not cancel; with one key missing at both ends, the sum would be of fewer sites."""
    seeds = {
        u: replace(seed, pairs={v: k for v, k in seed.pairs.items() if v != SITES[2]}) for u, seed in SEEDS.items()
    }
    lacking = Case(FIRST.params, {u: (x, seeds[u]) for u, (x, _) in FIRST.inputs.items()})
    ended = run_protocol(checked_sum, lacking, timeout=5.0)
    assert {ended.errors[u].code for u in SITES[:2]} == {"sites"}
    assert "checked_sum.Masked" not in {name for u in SITES[:2] for name, *_ in transcript(ended)[u]}


def masked_words(run_id, u, x, seeds=SEEDS):
    """What the coordinator receives of u for this vector, the tag aside."""
    words = np.concatenate([signed(x), np.zeros(2, np.uint64)])
    return checked_sum.masked(FIRST.params, run_id, u, words, seeds[u])[:2]


def test_masks_cancel_in_the_sum_of_all_sites_and_in_no_other():
    ys = [masked_words(b"one", u, [1, -2]) for u in SITES]
    same_array(np.sum(ys, axis=0, dtype=np.uint64), signed([3, -6]))
    for some in ([0], [0, 1], [1, 2]):
        assert not np.array_equal(
            np.sum([ys[i] for i in some], axis=0, dtype=np.uint64), signed([len(some), -2 * len(some)])
        )


def test_f_replay_masks_of_two_sums_differ_so_that_no_difference_of_messages_is_a_difference_of_inputs():
    """An attack on masks that depend on the keys alone: the coordinator subtracts two messages of one site."""
    for u in SITES:
        first, second = masked_words(b"one", u, [5, 0]), masked_words(b"two", u, [9, 0])
        assert not np.array_equal(second - first, signed([4, 0]))
    again = [masked_words(b"one", u, [9, 0]) - masked_words(b"one", u, [5, 0]) for u in SITES]
    for difference in again:  # what a second sum under one id would show: `Channel.claim` rejects it
        same_array(difference, signed([4, 0]))


def test_a_coordinator_that_leaves_out_a_site_or_adds_one_twice_ends_the_run():
    for factors in ((1, 1, 0), (2, 1, 1), (-1, 1, 1)):

        async def coordinator(ch, params, factors=factors):
            inputs = await ch.gather(params.sites, checked_sum.Masked, y=(params.words,))
            total = np.sum(
                [np.uint64(f % 2**64) * m.y for f, m in zip(factors, inputs.values(), strict=True)],
                axis=0,
                dtype=np.uint64,
            )
            await ch.broadcast(params.sites, checked_sum.Total(total))

        ended = run_protocol(checked_sum, FIRST, roles={HUB: coordinator}, timeout=5.0)
        assert {ended.errors[u].code for u in SITES} == {"changed"}


def scaled_with_its_tag(msg, factor):
    """For `check_lies`: a sum as the strongest coordinator would scale it."""
    if isinstance(msg, checked_sum.Total):
        return checked_sum.Total(scaled(factor, sum_tags.MODULUS, sum_tags.HALF)(msg.z))
    return lies.scaled(msg, factor)


def right_sum(lie, ended):
    """The sum of all inputs; of a malicious site, with whatever it contributed itself."""
    xs = {u: x for u, (x, _) in lie.case.inputs.items()}
    for value in ended.values():
        if lie.liar == HUB or lie.letter == "j":
            same_array(value, np.sum(list(xs.values()), axis=0, dtype=np.uint64))
        else:
            assert value.shape == (FIRST.params.length,)
    assert len({value.tobytes() for value in ended.values()}) <= 1


def test_one_malicious_party():
    found = check_lies(checked_sum, [FIRST, TWIN], right=right_sum, scale=scaled_with_its_tag, full=True)
    assert found.tried > 20
    assert found.aborted > 10
    assert found.right >= 1


def test_a_malicious_coordinator_cannot_change_the_sum_by_any_lie_about_it():
    """Every change, factor, prime and replay of the published sum."""
    about_the_sum = {"only": lambda lie: lie.liar == HUB and lie.name == "checked_sum.Total", "full": True}
    found = check_lies(checked_sum, [FIRST, TWIN], right=right_sum, scale=scaled_with_its_tag, **about_the_sum)
    assert found.tried > 15
    assert found.aborted >= found.tried - 1  # a sum sent twice is read once
