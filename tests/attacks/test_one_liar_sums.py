"""One liar among those who add up: each attack reads its secret from a copy of the old step, and not from the new one.

The copies (`old_*`) are the steps of a site as they were: what the coordinator tells is received and believed, and
binds nothing. The liar's frames carry whatever run id their recipient waits for (`cloister.mpc.testing.lies`), so that
against the new steps only their own checks are in its way.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from tests.old_steps import pooled_quantiles as old_quantiles
from tests.old_steps import shared_pca as old_pca

from cloister.arrays import F32
from cloister.errors import PeerLost, ProtocolAbort
from cloister.mpc.crypto.agreement import KeyPair, agree, bind, hkdf, key_pair, seal, unseal
from cloister.mpc.crypto.prg import expand
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import (
    checked_sum,
    common_seed,
    pooled_quantiles,
    pooled_scaling,
    retry_without_dropouts,
    secure_sum,
)
from cloister.mpc.testing.lies import Lie, Stage
from cloister.papers import federated_training
from cloister.study import Party
from cloister.testing import Case, Fault, run_protocol, values
from cloister.workflows.common import common_genes
from cloister.workflows.fine_tune import training_terms
from cloister.workflows.fine_tune.training_parts import Offer
from cloister.workflows.fine_tune.training_terms import TAIL, Brings, Ready, Vocabulary, update_words
from cloister.workflows.shared_pca import shared_pca

HUB = Party("hub")
SITES = tuple(map(Party, ("a", "b", "c")))
A, B, C = SITES


def attack(module, case, liar, old=None, timeout=3.0, also=None, colluders=0):
    """Run with a lying coordinator that knows every run id; `old` replaces the role of the sites."""
    stage = Stage(Lie("-", HUB, "-"))
    roles = module.roles(case.params) | ({} if old is None else dict.fromkeys(SITES, old)) | (also or {}) | {HUB: liar}
    staged = {p: stage.role(p, r) for p, r in roles.items()}
    return run_protocol(module, case, roles=staged, timeout=timeout, colluders=colluders)


def stopped(run, *codes):
    """Every honest site aborted by name, at least one by a check of its own."""
    errors = [e for p, e in run.errors.items() if p != HUB]
    assert errors
    assert all(isinstance(e, ProtocolAbort) and all((e.protocol, e.line, e.code)) for e in errors)
    own = {e.code for e in errors if not e.heard}
    assert own & set(codes), f"stopped by {own}"


def opened(run, protocol="secure_sum"):
    """How many values the coordinator opened."""
    return len([e for e, _ in run.receipts[HUB].entries if e.kind == "opened" and e.protocol == protocol])


# ---- E1: other cells to each site ------------------------------------------------------------------------------------


def sum_of(params, length):
    """The sums as they were, without tags."""
    return secure_sum.Params(params.sites, params.coordinator, length)


async def old_quantiles_site(ch, params, values_, *, entropy, identity):
    S, values_ = params.coordinator, np.sort(values_)

    async def add(label, x):
        await secure_sum.contributor(ch.sub(label), sum_of(params, len(x)), x, entropy=entropy, identity=identity)

    for attempt in range(len(params.sites)):
        await add(f"coarse/{attempt}", old_quantiles.count(params.grid, values_).astype(np.uint64))
        chosen = (await ch.recv(S, old_quantiles.Refine, cells=(None,))).cells
        ends = [old_quantiles.count(params.split(int(c)), values_).astype(np.uint64) for c in chosen]
        await add(f"fine/{attempt}", np.concatenate(ends))
        result = await ch.recv(S, old_quantiles.Edges, edges=(params.n_quantiles,))
        if not result.again:
            return result.edges
    raise ProtocolAbort("pooled_quantiles", "L4", "restarts", "more restarts than there are sites")


async def refines_one_site_alone(ch, params):
    """The victim refines cells that hold values, the others cells that are empty everywhere: a sum of one."""
    read, tried = [], 0
    for attempt in range(len(params.sites)):
        first = await secure_sum.aggregator(ch.sub(f"coarse/{attempt}"), sum_of(params, len(params.grid) - 1))
        most = 2 * params.n_quantiles
        full = np.flatnonzero(first.z)[tried : tried + most].astype(np.int64)
        empty = np.flatnonzero(first.z == 0)[: len(full)].astype(np.int64)
        await ch.scatter({u: old_quantiles.Refine(full if u == B else empty) for u in params.sites})
        fine = await secure_sum.aggregator(ch.sub(f"fine/{attempt}"), sum_of(params, len(full) * params.parts))
        for cell, row in zip(full, fine.z.reshape(len(full), -1), strict=True):
            read += list(np.repeat(params.split(int(cell))[:-1], row.astype(np.int64)))
        tried += most
        last = attempt == len(params.sites) - 1
        edges = np.sort(np.exp2(np.linspace(-1, 1, params.n_quantiles)))
        await ch.scatter(params.sites, old_quantiles.Edges(edges, not last))
    return np.array(read)


def quantile_case():
    rng = np.random.default_rng(5)
    xs = {u: (np.round(rng.lognormal(0, 1, 40), 6),) for u in SITES}
    return Case(pooled_quantiles.Params(SITES, HUB, 12, False, cells=16, parts=4096), xs)


def test_e1_other_cells_to_each_site_read_single_values_of_one():
    case = quantile_case()
    run = attack(pooled_quantiles, case, refines_one_site_alone, old_quantiles_site)
    found = np.sort(values(run)[HUB])
    assert len(found) > 30
    nearest = np.abs(np.sort(case.inputs[B][0])[:, None] - found[None, :]).min(axis=1) / case.inputs[B][0].min()
    assert (nearest < 1e-3).sum() > 30  # a part of a cell is a 4096th of an eighth of a doubling
    assert values(run)[A] is not None  # and nobody noticed

    run = attack(pooled_quantiles, case, refines_one_site_alone)
    assert not set(SITES) & set(values(run))
    assert opened(run) == 0  # sites find the cells themselves, from checked sums


# ---- R2: restarts that did not happen --------------------------------------------------------------------------------


async def begins_again_for_nothing(ch, params):
    """Asks for other cells of all sites in every attempt, though nobody dropped out."""
    cells = set()
    for attempt in range(len(params.sites)):
        sums = [sum_of(params, len(params.grid) - 1), sum_of(params, 2 * params.n_quantiles * params.parts)]
        await secure_sum.aggregator(ch.sub(f"coarse/{attempt}"), sums[0])
        start = 300 + attempt * 2 * params.n_quantiles
        chosen = np.arange(start, start + 2 * params.n_quantiles)
        await ch.broadcast(params.sites, old_quantiles.Refine(chosen))
        await secure_sum.aggregator(ch.sub(f"fine/{attempt}"), sums[1])
        cells |= set(chosen.tolist())
        edges = np.exp2(np.linspace(-1, 1, params.n_quantiles))
        await ch.broadcast(params.sites, old_quantiles.Edges(edges, attempt < 2))
    return cells


def test_r2_a_restart_without_a_dropout_opens_more_cells_than_quantiles_need():
    case = quantile_case()
    most = 2 * case.params.n_quantiles
    run = attack(pooled_quantiles, case, begins_again_for_nothing, old_quantiles_site)
    assert len(values(run)[HUB]) == 3 * most
    assert opened(run) == 6
    run = attack(pooled_quantiles, case, begins_again_for_nothing)
    assert not set(SITES) & set(values(run))
    assert opened(run) == 0


async def calls_a_site_back(ch, params):
    """A site that was left out of one sum is in the next one again: differences of chosen subsets."""
    one = await secure_sum.aggregator(ch.sub("one"), params, (A, C))
    two = await secure_sum.aggregator(ch.sub("two"), params)
    return one.z, two.z


@pytest.mark.parametrize("linked", [False, True])
def test_r2_who_was_left_out_of_a_sum_does_not_come_back(linked):
    """Old: every sum took all contributors. A colluding b skips the first, and the difference is b's alone."""
    params = secure_sum.Params(SITES, HUB, 2)

    after_one = []  # what a was told; the coordinator tells b

    async def contributor(ch, params, x, *, entropy, identity):
        left = await secure_sum.contribute(ch.sub("one"), params, x, entropy=entropy, identity=identity)
        after_one.append(ch.transcript)
        among = left if linked else ()
        await secure_sum.contribute(ch.sub("two"), params, x, among, entropy=entropy, identity=identity)

    async def skips(ch, params, x, *, entropy, identity):
        while not after_one:
            await asyncio.sleep(0.02)
        ch.transcript = after_one[0]
        await secure_sum.contribute(ch.sub("two"), params, x, entropy=entropy, identity=identity)

    xs = {u: (np.full(2, i + 1, np.uint64),) for i, u in enumerate(SITES)}
    run = attack(secure_sum, Case(params, xs), calls_a_site_back, contributor, also={B: skips})
    if linked:
        stopped(run, "roster")
        assert opened(run) == 1
    else:
        one, two = values(run)[HUB]
        np.testing.assert_array_equal(two - one, xs[B][0])


# ---- E2: another total, or no number, to all but one -----------------------------------------------------------------


@message("L5", protocol="federated_training")
class Task:  # S → u, as it was
    t: int
    clients: tuple[Party, ...]
    total: float
    theta: F32


class Pupil:
    """Learns what it is asked to learn: its update is its secret."""

    size, digest = 6, bytes(32)

    def __init__(self, delta, cells):
        self.delta, self.cells = np.asarray(delta, float), cells

    def train(self, theta, t, rate):
        return self.delta + 0.0 * theta.sum(), 0.5

    def score(self, theta):
        return np.zeros((2, 2)), 0.0


def training_case(**options):
    rng = np.random.default_rng(2)
    pupils = {u: Pupil(rng.normal(0, 0.5, 6), 30 + 10 * i) for i, u in enumerate(SITES)}
    params = federated_training.Params(SITES, HUB, "pupil", rounds=1, score_every=0, **options)
    offers = {u: (Offer("x", ("p", "q"), lambda labels, one=one: one),) for u, one in pupils.items()}
    return Case(params, offers), pupils


async def old_training_site(ch, params, offer, *, entropy, identity):
    S = params.coordinator
    await ch.send(S, Brings(offer.shape, ("p", "q"), True))
    learner = offer.build((await ch.recv(S, Vocabulary)).labels)
    await ch.send(S, Ready(learner.digest, learner.size))
    task = await ch.recv(S, Task, theta=(6,))
    delta, loss = learner.train(task.theta, task.t, 0.1)
    weight = learner.cells / task.total
    words, note = update_words(params, len(task.clients), delta, weight, loss, entropy)
    weight = 0.0 if note else weight  # of an update that is not a number
    words = np.concatenate([words[:-2], TAIL.encode(np.array([weight, weight * loss]))])  # weights were summed, too
    sums = params.sum(task.clients, len(words))
    await secure_sum.contributor(ch.sub("update/0", sums), sums, words, entropy=entropy, identity=identity)


def singles_out(total, theta, *, new):
    """Tells all sites but b something else; what is summed then is b's update alone."""

    async def liar(ch, params, *, entropy, identity):
        await ch.gather(SITES, Brings)
        await ch.broadcast(SITES, Vocabulary(("p", "q"), SITES))
        await ch.gather(SITES, Ready)
        fine = np.zeros(6, np.float32)
        if new:
            sums = params.sum(SITES, 1)
            await secure_sum.aggregator(ch.sub("cells", sums), sums)
        for u in SITES:
            t, w = (120.0, fine) if u == B else (total, theta)
            if new:
                task = training_terms.Task(0, SITES, SITES, False, t, wire.digest("theta", w))
                await ch.send(u, task)
                await ch.send(u, training_terms.Weights(w))
                if u == C:
                    ch._absorb(HUB, task)
            else:
                await ch.send(u, Task(0, SITES, t, w))
        sums = params.sum(SITES, params.code(3).words(6) + 2)
        z = (await secure_sum.aggregator(ch.sub("update/0", sums, apart=True), sums)).z
        weight, _ = TAIL.decode(z[-2:].copy())
        return params.code(3).decode(z[:-2], 6) / weight

    return liar


@pytest.mark.parametrize(
    ("total", "theta", "codes"),
    [
        (1e15, np.zeros(6, np.float32), ("task",)),
        (120.0, np.full(6, np.nan, np.float32), ("weights",)),
        (2.0**38, np.zeros(6, np.float32), ("signature",)),  # a total that could be
    ],
)
def test_e2_another_total_or_nan_to_all_but_one_reads_that_ones_update(total, theta, codes):
    case, pupils = training_case()
    run = attack(federated_training, case, singles_out(total, theta, new=False), old_training_site)
    np.testing.assert_allclose(values(run)[HUB], pupils[B].delta, atol=1e-4)
    run = attack(federated_training, case, singles_out(total, theta, new=True))
    stopped(run, *codes)
    assert opened(run) == 1  # the number of cells of all


def test_e2_a_model_beyond_what_the_rounds_could_reach_is_refused_though_all_are_told_it():
    case, _ = training_case()
    far = np.full(6, 1e6, np.float32)

    async def liar(ch, params, *, entropy, identity):
        await ch.gather(SITES, Brings)
        await ch.broadcast(SITES, Vocabulary(("p", "q"), SITES))
        await ch.gather(SITES, Ready)
        sums = params.sum(SITES, 1)
        await secure_sum.aggregator(ch.sub("cells", sums), sums)
        await ch.broadcast(SITES, training_terms.Task(0, SITES, SITES, False, 120.0, wire.digest("theta", far)))
        await ch.scatter(SITES, training_terms.Weights(far))
        sums = params.sum(SITES, params.code(3).words(6) + 2)
        await secure_sum.aggregator(ch.sub("update/0", sums, apart=True), sums)

    stopped(attack(federated_training, case, liar), "weights")


# ---- E3: shifted means to all but one --------------------------------------------------------------------------------


async def old_pca_site(ch, params, mine, *, entropy, identity):
    S = params.coordinator

    async def add(label, x):
        await secure_sum.contributor(ch.sub(label), sum_of(params, len(x)), x, entropy=entropy, identity=identity)

    agreement = common_genes.Params(params.sites, S)
    agreed = await common_genes.site(ch.sub("genes"), agreement, params.kind, list(mine.names))
    moments = shared_pca.moments(params, mine, agreed.names)
    await add("moments", shared_pca.split_sum(moments, len(params.sites), entropy))
    chosen = await ch.recv(S, shared_pca.Chosen, at=(None,), mean=(None,), deviation=(None,))
    assert np.all(np.isfinite(chosen.mean))  # all that was checked
    assert np.all(chosen.deviation > 0)
    products = old_pca.products(params, mine, agreed.names, chosen)
    await add("products", params.covariance_code(chosen.cells).encode(products))


def shifts_means(deviation):
    """Whose deviation is enormous adds zeros; b's first gene, shifted, counts b's cells."""

    async def liar(ch, params):
        agreement = common_genes.Params(params.sites, HUB)
        agreed = await common_genes.coordinator(ch.sub("genes"), agreement)
        g = len(agreed.names)
        await secure_sum.aggregator(ch.sub("moments"), sum_of(params, shared_pca.moments_length(g)))
        at, ones = np.arange(8), np.ones(8)
        shifted = np.r_[0.0 if deviation < 100 else -1e9, ones[1:]]
        mine = shared_pca.Chosen(at, shifted, ones, 400)
        other = shared_pca.Chosen(at, ones, np.full(8, deviation), 400)
        for u in SITES:
            await ch.send(u, mine if u == B else other)
        ch._absorb(HUB, other)
        z = (await secure_sum.aggregator(ch.sub("products"), sum_of(params, shared_pca.products_length(8)))).z
        words = params.covariance_code(400).decode(z)
        n = round(words[1] / params.bound)
        return n, words[2:9] / n, words[9:]

    return liar


def pca_case():
    rng = np.random.default_rng(3)
    names = tuple(f"G{i:02d}" for i in range(12))
    cells = {u: rng.poisson(rng.gamma(1.0, 3.0, 12), (60 + 20 * i, 12)).astype(float) for i, u in enumerate(SITES)}
    params = shared_pca.Params(SITES, HUB, n_top_genes=8, n_components=2)
    return Case(params, {u: (shared_pca.Cells(names, scipy.sparse.csr_matrix(x)),) for u, x in cells.items()})


def test_e3_shifted_means_to_all_but_one_read_that_ones_cells_means_and_covariance():
    case = pca_case()
    run = attack(shared_pca, case, shifts_means(1e300), old_pca_site)
    n, means, products = values(run)[HUB]
    mine = case.inputs[B][0]
    common = sorted(mine.names)
    (y,) = shared_pca.normalised(case.params, mine, common, len(common))
    log = np.log1p(y.toarray())[:, :8]
    z = np.clip(log - 1.0, -10, 10)
    assert n == len(log) == 80
    np.testing.assert_allclose(means, z[:, 1:].mean(axis=0), atol=1e-9)
    wanted = np.c_[np.full(n, 10.0), z[:, 1:]]
    np.testing.assert_allclose(products, (wanted.T @ wanted)[np.triu_indices(8)], atol=1e-6)

    run = attack(shared_pca, case, shifts_means(1e300))
    assert not set(SITES) & set(values(run))
    assert opened(run) == 0
    for change in ({"mean": 0.1}, {"deviation": 9.0}):

        class Shifting(Channel):
            async def broadcast(self, to, msg, change=change):
                if isinstance(msg, shared_pca.Chosen):
                    msg = replace(msg, **{k: getattr(msg, k) + x for k, x in change.items()})
                await Channel.broadcast(self, to, msg)

        async def shifts(ch, params, kind=Shifting):
            ch.__class__ = kind
            return await shared_pca.coordinator(ch, params)

        run = attack(shared_pca, case, shifts)
        stopped(run, "genes")  # means and deviations follow from sums that every site holds
        assert not set(SITES) & set(values(run))


# ---- E4: each site is told that all have its own seed ----------------------------------------------------------------


@message("L5", protocol="common_seed")
class Confirm:  # u → S, as it was
    tag: bytes


@message("L6", protocol="common_seed")
class Confirms:  # S → u, as it was
    tags: dict[Party, bytes]


async def old_seed_site(ch, params, *, entropy, identity):
    S, keys = params.coordinator, key_pair(entropy)
    signature = identity.sign("common_seed", wire.canonical([ch.run_id, ch.me, keys.public]))
    await ch.send(S, common_seed.Key(keys.public, signature))
    roster = (await ch.recv(S, common_seed.Roster)).keys
    common_seed.check_roster(params, ch, roster, keys.public)
    others = [v for v in sorted(roster) if v != ch.me]
    boxes = {v: agree(keys, roster[v].pk, wire.canonical(["common_seed", ch.run_id])) for v in others}
    mine = entropy.bytes(32)
    sealed = {v: seal(boxes[v], mine, wire.canonical([ch.run_id, ch.me, v]), entropy) for v in others}
    await ch.send(S, common_seed.Parts(sealed))
    received = (await ch.recv(S, common_seed.PartsFor)).sealed
    parts = {ch.me: mine}
    parts |= {v: unseal(boxes[v], box, wire.canonical([ch.run_id, v, ch.me])) for v, box in received.items()}
    names = [v.encode() for v in sorted(parts)]
    secret = hkdf(b"".join(parts[v] for v in sorted(parts)), bind("common_seed", ch.run_id, *names))
    tag = hkdf(secret, bind("common_seed", b"confirm", ch.run_id))
    await ch.send(S, Confirm(tag))
    tags = (await ch.recv(S, Confirms)).tags
    assert len(tags) >= 2
    assert set(tags.values()) == {tag}
    return common_seed.Seed(secret, tuple(tags), {})


def echoes(*, new):
    """Each site gets the part of one other only, and is told that the others confirm what it confirms."""

    async def liar(ch, params):
        keys = await ch.gather(SITES, common_seed.Key)
        await ch.broadcast(SITES, common_seed.Roster(keys))
        parts = await ch.gather(SITES, common_seed.Parts)
        next_to = {A: B, B: C, C: A}
        await ch.scatter({u: common_seed.PartsFor({v: parts[v].sealed[u]}) for u, v in next_to.items()})
        if new:
            got = await ch.gather(SITES, common_seed.Confirm)
            for u, v in next_to.items():
                echo = common_seed.Confirm(got[u].tag, got[v].signature)
                await ch.send(u, common_seed.Confirms({u: got[u], v: echo}))
        else:
            tags = await ch.gather(SITES, Confirm)
            await ch.scatter({u: Confirms({u: tags[u].tag, v: tags[u].tag}) for u, v in next_to.items()})

    return liar


def test_e4_an_echo_of_ones_own_tag_confirms_three_different_seeds():
    case = Case(common_seed.Params(SITES, HUB), {})
    run = attack(common_seed, case, echoes(new=False), old_seed_site)
    assert len({values(run)[u].secret for u in SITES}) == 3
    run = attack(common_seed, case, echoes(new=True))
    stopped(run, "signature")
    assert not set(SITES) & set(values(run))


# ---- E5: other totals, other genes -----------------------------------------------------------------------------------


async def tells_b_another_mean(ch, params):
    """Moves the mean of the first column at b by one, in the total of L2."""
    post, seen = ch._endpoint.post, []

    def lying(to, scope, run, msg):
        if isinstance(msg, checked_sum.Total) and to == B:
            seen.append(msg)
            if len(seen) == 1:
                z = msg.z.copy()
                z[params.width + 1] += np.uint64(1 << 24)
                msg = checked_sum.Total(z)
        post(to, scope, run, msg)

    ch._endpoint.post = lying
    return await pooled_scaling.coordinator(ch, params)


def test_e5_another_total_for_one_site_ends_the_run():
    rng = np.random.default_rng(1)
    case = Case(pooled_scaling.Params(SITES, HUB, 2), {u: (rng.normal(5, 1, (30, 2)),) for u in SITES})
    stopped(attack(pooled_scaling, case, tells_b_another_mean), "changed")


async def names_other_genes(ch, params):
    """Tells b the genes in another order: what is added up are then different genes."""
    measured = await ch.gather(SITES, common_genes.Measured)
    names = sorted(measured[A].names.decode().split("\n"))
    true, turned = (common_genes.Common("counts", common_genes.join(n)) for n in (names, names[::-1]))
    for u in SITES:
        await ch.send(u, turned if u == B else true)
    ch._absorb(HUB, true)
    sums = secure_sum.Params(SITES, HUB, len(names))
    return names, (await secure_sum.aggregator(ch.sub("moments"), sums)).z


@pytest.mark.parametrize("old", [True, False])
def test_e5_other_genes_for_one_site_mix_up_what_is_added(old):
    names = [f"G{i}" for i in range(5)]
    xs = {u: (np.arange(5, dtype=np.uint64) * 10 ** (2 * i),) for i, u in enumerate(SITES)}

    async def adds(ch, params, x, *, entropy, identity):
        if old:
            await ch.send(HUB, common_genes.Measured("counts", common_genes.join(names)))
            common = (await ch.recv(HUB, common_genes.Common)).names.decode().split("\n")
        else:
            common = (await common_genes.site(ch, params, "counts", names)).names
        sums = secure_sum.Params(SITES, HUB, 5)
        ordered = x[[names.index(n) for n in common]]
        await secure_sum.contribute(ch.sub("moments"), sums, ordered, entropy=entropy, identity=identity)

    async def liar(ch, params):
        if old:
            type(ch)._absorb = lambda self, sender, msg: None
        return await names_other_genes(ch, params)

    run = attack(common_genes, Case(common_genes.Params(SITES, HUB), xs), liar, adds)
    if old:
        np.testing.assert_array_equal(values(run)[HUB][1], xs[A][0] + xs[B][0][::-1] + xs[C][0])
    else:
        stopped(run, "signature")


# ---- R1: a contributor that vouches twice ----------------------------------------------------------------------------


def double_vouch(stash):
    """C signs two lists of survivors and hands all it has to the aggregator."""

    async def colluder(ch, params, x, *, entropy, identity):
        S = params.aggregator
        c, s = key_pair(entropy), key_pair(entropy)
        signature = identity.sign("secure_sum/keys", secure_sum.signed_keys(ch.run_id, ch.me, c.public, s.public))
        await ch.send(S, secure_sum.Keys(c.public, s.public, signature))
        roster = (await ch.recv(S, secure_sum.Roster)).keys
        others = [v for v in sorted(roster) if v != ch.me]
        boxes = {v: agree(c, roster[v].c_pk, secure_sum.pair_context(ch.run_id, "box")) for v in others}
        points = [params.point(v) for v in sorted(roster)]
        key_shares = secure_sum.shamir.share(s.private, params.t, points, entropy)
        seed_shares = secure_sum.shamir.share(bytes(32), params.t, points, entropy)
        sealed = {
            v: seal(
                boxes[v],
                key_shares[params.point(v)] + seed_shares[params.point(v)],
                wire.canonical([ch.run_id, ch.me, v]),
                entropy,
            )
            for v in others
        }
        await ch.send(S, secure_sum.Shares(sealed))
        received = (await ch.recv(S, secure_sum.SharesFor)).sealed
        held = {v: unseal(boxes[v], box, wire.canonical([ch.run_id, v, ch.me])) for v, box in received.items()}
        stash["held"] = {v: (h[: secure_sum.SHARE], h[secure_sum.SHARE :]) for v, h in held.items()}
        stash["pads"] = {v: agree(s, roster[v].s_pk, secure_sum.pair_context(ch.run_id, "pad")) for v in others}
        await ch.send(S, secure_sum.MaskedInput(x))
        for who in ((A, C), (B, C)):
            told = secure_sum.signed_survivors(ch.run_id, who)
            await ch.send(S, secure_sum.Vouch(identity.sign("secure_sum/survivors", told)))

    return colluder


def reads_both(stash):
    async def liar(ch, params):
        U = params.contributors
        keys = await ch.gather(U, secure_sum.Keys)
        await ch.scatter(U, secure_sum.Roster(keys))
        shares = await ch.gather(U, secure_sum.Shares)
        await ch.scatter({u: secure_sum.SharesFor({v: shares[v].sealed[u] for v in U if v != u}) for u in U})
        masked = await ch.gather(U, secure_sum.MaskedInput, y=(params.length,))
        for u in (A, B):
            await ch.send(u, secure_sum.Survivors((u, C)))
        mine = {u: await ch.recv(u, secure_sum.Vouch) for u in (A, B)}
        twice = {u: await ch.recv(C, secure_sum.Vouch) for u in (A, B)}
        for u in (A, B):
            await ch.send(u, secure_sum.Vouches({u: mine[u].signature, C: twice[u].signature}))
        answers = {u: await ch.recv(u, secure_sum.Unmask) for u in (A, B)}
        read = {}
        for u, v in ((A, B), (B, A)):

            def secret(own, held, p=params):
                (point, share), c = own, held
                return secure_sum.shamir.combine({p.point(point): share, p.point(C): c}, p.t, 32)

            b_u = secret((u, answers[u].seed_shares[u]), stash["held"][u][1])
            s_v = KeyPair(secret((u, answers[u].key_shares[v]), stash["held"][v][0]))
            pad = expand(agree(s_v, keys[u].s_pk, secure_sum.pair_context(ch.run_id, "pad")), params.length)
            x = masked[u].y - expand(b_u, params.length)
            x = x - pad if v < u else x + pad
            pad_c = expand(stash["pads"][u], params.length)
            read[u] = x - pad_c if u > C else x + pad_c
        return read

    return liar


@pytest.mark.parametrize(("threshold", "colluders"), [(2, 0), (3, 0), (0, 0), (0, 1)])
def test_r1_one_contributor_that_vouches_twice_opens_both_others_below_t_of_n_plus_k_half(threshold, colluders):
    """A larger threshold of the sum, or a study that names a colluder, is what stops it."""
    xs = {u: (np.arange(4, dtype=np.uint64) * 1000 + i,) for i, u in enumerate(SITES)}
    params = secure_sum.Params(SITES, HUB, 4, threshold=threshold)
    stash = {}
    liar, second = reads_both(stash), double_vouch(stash)
    run = attack(secure_sum, Case(params, xs), liar, also={C: second}, colluders=colluders)
    if params.colluders == colluders == 0:  # enough for a lying aggregator alone, as the file says
        for u in (A, B):
            np.testing.assert_array_equal(values(run)[HUB][u], xs[u][0])
    else:
        stopped(run, "survivors", "split-view")
        unmasked = {e.name for u in (A, B) for e, _ in run.receipts[u].entries if e.kind == "sent"}
        assert "secure_sum.Unmask" not in unmasked


# ---- R3: attempts on chosen subsets ----------------------------------------------------------------------------------


@message("X1", protocol="toy")
class Distance:  # u → S
    value: float


async def measure(ch, sites):
    """A step that opens one number per list of sites."""
    await ch.send(HUB, Distance(float(sum(ord(u) for u in sites))))


async def old_follow(ch, server, step):
    attempt, result = 0, None
    go = await ch.recv(server, retry_without_dropouts.Go)
    while not go.done:
        inner, control = ch.sub(f"try-{attempt}", go.sites), ch.sub(f"report-{attempt}")
        result = await step(inner, go.sites)
        await control.send(server, retry_without_dropouts.Report(True))
        go = await ch.recv(server, retry_without_dropouts.Go)
        attempt += 1
    return result, go.sites


class toy:
    @staticmethod
    def roles(params):
        return {HUB: subsets} | dict.fromkeys(SITES, follows)


toy.__name__ = "toy"
SUBSETS = [(A, B, C), (A, B), (A, C), (A, B, C), (A, B), (A, C)]


async def follows(ch, params):
    await retry_without_dropouts.follow(ch, HUB, measure)


async def old_follows(ch, params):
    await old_follow(ch, HUB, measure)


async def subsets(ch, params):
    """Begins the step again and again, on subsets of its choice, and keeps what each opens."""
    read = []
    for attempt, sites in enumerate(SUBSETS):
        await ch.broadcast([A], retry_without_dropouts.Go(sites, done=False))
        inner, control = retry_without_dropouts._scopes(ch, attempt, sites)
        read.append((await inner.recv(A, Distance)).value)
        await control.recv(A, retry_without_dropouts.Report)
        ch.reveal(read[-1], to=HUB, line="X1", what="a distance", protocol="toy")
    await ch.broadcast([A], retry_without_dropouts.Go(SUBSETS[-1], done=True))
    return read


def test_r3_attempts_on_chosen_subsets_open_more_than_one_list():
    async def idle(ch, params):
        return None

    also = {B: idle, C: idle}
    run = attack(toy, Case((), {}), subsets, old_follows, also=also)
    assert len(values(run)[HUB]) == 6
    assert opened(run, "toy") == 6
    run = attack(toy, Case((), {}), subsets, also=also)
    stopped(run, "restart")
    assert opened(run, "toy") == 2  # all three, then two of them: a list that shrinks


@message("X2", protocol="toy")
class Word:  # u → v
    value: int


@message("X3", protocol="toy")
class Opened:  # u → S
    value: int


SECRETS = {A: 100, B: 20, C: 3}


def sums_words(code):
    """A step in which sites tell each other a word, refuse a wrong one, and open the sum of their secrets to S."""

    async def step(ch, sites):
        others = [v for v in sites if v != ch.me]
        await ch.scatter(others, Word(7))
        if any(word.value != 7 for word in (await ch.gather(others, Word)).values()):
            raise ProtocolAbort("toy", "X2", code, "a word that is wrong")
        await ch.send(HUB, Opened(SECRETS[ch.me]))

    return step


def lies_to(victim):
    """The same, but the victim gets a wrong word, and is to be left out for it."""

    async def step(ch, sites):
        others = [v for v in sites if v != ch.me]
        await ch.scatter({v: Word(8 if v == victim else 7) for v in others})
        await ch.gather(others, Word)
        await ch.send(HUB, Opened(SECRETS[ch.me]))

    return step


async def add_opened(ch, sites):
    return sum(m.value for m in (await ch.gather(sites, Opened)).values())


def old_lost(done):
    """As it was: whoever stopped, for whatever reason, is gone."""
    e = done.exception()
    if e is None:
        return False
    if isinstance(e, PeerLost) or (isinstance(e, ProtocolAbort) and e.heard):
        return True
    raise e


@pytest.mark.parametrize("code", ["proof", "mismatch"])
@pytest.mark.parametrize("old", [True, False])
def test_r3_a_liar_does_not_get_honest_sites_left_out(monkeypatch, old, code):
    """c sends b what b must refuse. Old: b counted as gone, and a's secret opened as the sum without b less c's own."""
    if old:
        monkeypatch.setattr(retry_without_dropouts, "_lost", old_lost)
        monkeypatch.setattr(
            retry_without_dropouts, "still_there", lambda ch, sites: tuple(u for u in sites if not ch.lost(u))
        )

    async def leads(ch, params):
        return await retry_without_dropouts.lead(ch, SITES, 2, add_opened)

    async def honest(ch, params):
        return (await retry_without_dropouts.follow(ch, HUB, sums_words(code)))[1]

    async def liar(ch, params):
        return (await retry_without_dropouts.follow(ch, HUB, lies_to(B)))[1]

    run = run_protocol(toy, Case((), {}), roles={HUB: leads, A: honest, B: honest, C: liar}, timeout=3.0)
    assert (run.errors[B].code, run.errors[B].heard) == (code, False)
    if old:
        total, sites = values(run)[HUB]
        assert sites == (A, C)
        assert total - SECRETS[C] == SECRETS[A]
    else:
        assert not values(run)
        for honest_one in (HUB, A):
            error = run.errors[honest_one]
            assert (error.protocol, error.line, error.code, error.heard) == ("toy", "X2", code, True)


@pytest.mark.parametrize("old", [True, False])
def test_r3_nor_does_a_lying_coordinator_go_on_without_who_found_something_wrong(monkeypatch, old):
    """The coordinator begins again without b, though a has heard what b found. Old: a did not look, and went on."""
    if old:
        monkeypatch.setattr(retry_without_dropouts, "_lost", old_lost)
        monkeypatch.setattr(retry_without_dropouts, "still_there", lambda ch, sites: tuple(sites))

    async def leads(ch, params):
        for attempt, sites in enumerate((SITES, (A, C))):
            await ch.broadcast(sites, retry_without_dropouts.Go(sites, done=False))
            inner, control = retry_without_dropouts._scopes(ch, attempt, sites)
            opened = await inner.gather(sites, Opened, quorum=0)
            await control.gather(sites, retry_without_dropouts.Report, quorum=0)
        await ch.broadcast((A, C), retry_without_dropouts.Go((A, C), done=True))
        return sum(m.value for m in opened.values())

    async def honest(ch, params):
        return (await retry_without_dropouts.follow(ch, HUB, sums_words("proof")))[1]

    async def hears(ch, params):
        async def step(inner, sites):
            await sums_words("proof")(inner, sites)
            while B in sites and inner.stopped(B) is None:  # what b found is on its way
                await asyncio.sleep(0.01)

        return (await retry_without_dropouts.follow(ch, HUB, step))[1]

    async def liar(ch, params):
        return (await retry_without_dropouts.follow(ch, HUB, lies_to(B)))[1]

    run = run_protocol(toy, Case((), {}), roles={HUB: leads, A: hears, B: honest, C: liar}, timeout=3.0)
    if old:
        assert values(run)[HUB] - SECRETS[C] == SECRETS[A]
    else:
        assert A not in values(run)
        assert (run.errors[A].protocol, run.errors[A].code, run.errors[A].heard) == ("toy", "proof", True)


def test_r3_who_is_gone_is_left_out_as_before():
    async def leads(ch, params):
        return await retry_without_dropouts.lead(ch, SITES, 2, add_opened)

    async def honest(ch, params):
        return (await retry_without_dropouts.follow(ch, HUB, sums_words("proof")))[1]

    faults = [Fault("kill", B, None, "toy.Word")]
    run = run_protocol(toy, Case((), {}), roles={HUB: leads} | dict.fromkeys(SITES, honest), faults=faults, timeout=1.0)
    assert values(run)[HUB] == (SECRETS[A] + SECRETS[C], (A, C))


class Spoils(Stage):
    """One site sends another a box that it cannot open, and everything else as it should."""

    def __init__(self, liar, victim, kind):
        super().__init__(Lie("-", liar, "-"))
        self.victim, self.kind = victim, kind

    def instead(self, to, msg):
        if not isinstance(msg, self.kind):
            return [msg]
        box = msg.sealed[self.victim]
        return [self.kind(msg.sealed | {self.victim: box[:-1] + bytes([box[-1] ^ 1])})]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("module", [secure_sum, common_seed])
def test_r3_a_site_that_spoils_a_box_does_not_get_its_recipient_left_out(monkeypatch, module, old):
    """Old: of three sites b was left out, and c had a's input as what it was told less its own."""
    if old:
        monkeypatch.setattr(module, "still_there", lambda ch, parties: None)
    stage = Spoils(C, B, secure_sum.Shares if module is secure_sum else common_seed.Parts)
    xs = {u: (np.arange(4, dtype=np.uint64) * 1000 + i,) for i, u in enumerate(SITES)}
    if module is secure_sum:
        case = Case(secure_sum.Params(SITES, HUB, 4, to_all=True), xs)
    else:
        case = Case(common_seed.Params(SITES, HUB), {})
    roles = {p: stage.role(p, r) for p, r in module.roles(case.params).items()}
    run = run_protocol(module, case, roles=roles, timeout=2.0)
    assert (run.errors[B].line, run.errors[B].heard) == ("L4", False)
    if not old:
        assert not values(run).keys() - {C}
        assert {(run.errors[p].line, run.errors[p].code) for p in (HUB, A)} == {("L4", run.errors[B].code)}
    elif module is secure_sum:
        np.testing.assert_array_equal(values(run)[C].z - xs[C][0], xs[A][0])
    else:
        assert values(run)[C].present == values(run)[A].present == (A, C)


def test_a_share_that_does_not_fit_the_others_is_noticed():
    """Old: surplus shares were dropped unseen, and the sum came out wrong; now they must all lie on one polynomial."""
    case = Case(secure_sum.Params(SITES, HUB, 2), {u: (np.ones(2, np.uint64),) for u in SITES})
    stage = Stage(Lie("b", A, "secure_sum.Unmask", None, "seed_shares", 0))
    roles = {p: stage.role(p, r) for p, r in secure_sum.roles(case.params).items()}
    run = run_protocol(secure_sum, case, roles=roles, timeout=2.0)
    assert (run.errors[HUB].line, run.errors[HUB].code) == ("L10", "shares")
