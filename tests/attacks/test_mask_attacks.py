"""Attacks on the masks of checked sums: exchanged keys, keys of another run, reflected boxes, masks used twice."""

from collections import Counter

import numpy as np
import pytest

from cloister.errors import CloisterError
from cloister.models.harmony import Settings
from cloister.mpc.crypto.agreement import Identity, agree, key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.sums import checked_sum, common_seed
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.integrate import pooled_harmony
from cloister.workflows.integrate.harmony_steps import Cells, Params

HUB = Party("hub")
A, B, C = SITES = tuple(map(Party, "abc"))
SEED = Case(common_seed.Params(SITES, HUB, everyone=True), {})


def roster_changed(change):
    """A coordinator that shows each site other keys of the rest, and goes on as far as it can."""

    async def coordinator(ch, params):
        keys = await ch.gather(params.sites, common_seed.Key)
        await ch.scatter({u: common_seed.Roster(change(ch, u, dict(keys))) for u in keys})
        await ch.gather(params.sites, common_seed.Parts)

    return coordinator


def own_keys(ch, u, keys):
    """In the middle: the coordinator's own key for everybody else, signed by an identity of its own."""
    stranger = Identity.create(Entropy())
    for v in set(keys) - {u}:
        pk = key_pair(Entropy()).public
        signature = stranger.sign(common_seed.NAME, wire.canonical([ch.run_id, v, pk]))
        keys[v] = common_seed.Key(pk, signature)
    return keys


def swapped(ch, u, keys):
    """Two sites' keys under each other's name, with the signatures of their owners."""
    v, w = (p for p in SITES if p != u)
    return keys | {v: keys[w], w: keys[v]}


@pytest.mark.parametrize("change", [own_keys, swapped])
def test_a_coordinator_cannot_exchange_the_keys_of_others(change):
    run = run_protocol(common_seed, SEED, roles={HUB: roster_changed(change)}, timeout=2.0)
    assert {run.errors[u].code for u in SITES} == {"signature"}


def test_signed_keys_of_another_run_are_rejected():
    """Whoever has read a site's old private key would be in the middle of every later run."""
    kept = {}

    def keep(ch, u, keys):
        kept.update(keys)
        return keys

    run_protocol(common_seed, SEED, roles={HUB: roster_changed(keep)}, timeout=2.0)

    def old(ch, u, keys):
        return {v: keys[v] if v == u else kept[v] for v in keys}

    run = run_protocol(common_seed, SEED, roles={HUB: roster_changed(old)}, timeout=2.0)
    assert {run.errors[u].code for u in SITES} == {"signature"}


def test_a_box_that_comes_back_to_its_sender_is_not_the_others_part():
    """Both directions have one key; the direction is authenticated."""

    async def reflects(ch, params):
        keys = await ch.gather(params.sites, common_seed.Key)
        await ch.broadcast(keys, common_seed.Roster(keys))
        parts = await ch.gather(params.sites, common_seed.Parts)
        await ch.scatter({u: common_seed.PartsFor(dict(parts[u].sealed)) for u in parts})

    run = run_protocol(common_seed, SEED, roles={HUB: reflects}, timeout=2.0)
    assert {run.errors[u].code for u in SITES} == {"parts"}


def test_a_twin_of_a_key_gives_other_masks():
    """X25519 ignores the highest bit, so a malicious site can sign a twin of another's key as its own."""
    u, v = key_pair(Entropy()), key_pair(Entropy())
    twin = v.public[:31] + bytes([v.public[31] ^ 0x80])
    assert twin != v.public  # passes the check that no key stands there twice
    assert agree(u, v.public, b"pair") == agree(v, u.public, b"pair")
    assert agree(u, twin, b"pair") != agree(u, v.public, b"pair")  # the keys themselves are bound


def test_no_mask_and_no_tag_key_is_used_twice(monkeypatch):
    """All masks of two whole runs on the same cells: each has two owners in one sum, and no other use."""
    used, where = Counter(), {}
    pads, keys = checked_sum.add_pads, checked_sum.tag_key

    def counted(y, u, seeds, *, wide):
        used.update(seeds.values())
        for v, secret in seeds.items():
            where.setdefault(secret, set()).add(frozenset((u, v)))
        pads(y, u, seeds, wide=wide)

    def tagged(key, summands, length):
        used[key] += 1
        return keys(key, summands, length)

    monkeypatch.setattr(checked_sum, "add_pads", counted)
    monkeypatch.setattr(checked_sum, "tag_key", tagged)
    rng = np.random.default_rng(0)
    params = Params(SITES, HUB, "X_a", Settings(clusters=2, rounds=1, updates=1, sweeps=1))
    cells = {u: (Cells(rng.normal(size=(50, 2)) + 3, np.zeros(50, np.int64), None, "ab"),) for u in SITES}
    sums = 0
    for _ in range(2):
        run = run_protocol(pooled_harmony, Case(params, cells))
        check_no_errors(run)
        sums += values(run)[A].sums
    masks, tags = {k for k in used if k in where}, {k for k in used if k not in where}
    assert all(len(pair) == 1 for pair in where.values())
    assert {used[k] for k in masks} == {2}  # its two owners, once each
    assert {used[k] for k in tags} == {3}  # every site, once
    assert len(tags) == sums
    assert len(masks) == 3 * sums  # one for each pair


def test_a_second_sum_with_the_same_channel_sends_nothing():
    """Two vectors under the same masks would give their difference."""
    sent = []

    async def twice(ch, params, x, seed):
        await checked_sum.site(ch, params, x, seed)
        try:
            await checked_sum.site(ch, params, x + np.uint64(1), seed)
        except CloisterError as e:
            sent.append(str(e))
            raise

    secrets = {frozenset(p): Entropy().bytes(32) for p in ((A, B), (A, C), (B, C))}
    xi = Entropy().bytes(32)
    inputs = {}
    for u in SITES:
        pairs = {v: secrets[frozenset((u, v))] for v in SITES if v != u}
        inputs[u] = (np.arange(3, dtype=np.uint64), common_seed.Seed(xi, SITES, pairs))
    run_protocol(checked_sum, Case(checked_sum.Params(SITES, HUB, 3), inputs), roles=dict.fromkeys(SITES, twice))
    assert len(sent) == 3
    assert all("a second checked_sum" in text for text in sent)
