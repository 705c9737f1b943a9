"""Keys, masks, shares and seeds: what would be read if one were left out, known, or used twice."""

import contextlib
import itertools
import os

import numpy as np
import pytest

from cloister.disclosure import constant
from cloister.errors import ProtocolAbort
from cloister.mpc.crypto import shamir
from cloister.mpc.crypto.agreement import KeyPair, agree, bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import expand
from cloister.mpc.parties import Party
from cloister.mpc.sums import (
    checked_sum,
    common_seed,
    pooled_queries,
    pooled_scaling,
    retry_without_dropouts,
    secure_sum,
)
from cloister.mpc.testing.lies import Lie, Stage
from cloister.papers import row_sums
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import Case, check_no_errors, dealt_seeds, run_protocol, values
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.fine_tune import training_terms
from cloister.workflows.shared_pca import shared_pca

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))


def recorded(draws):
    """Entropy of the operating system that keeps what every party drew, in order."""

    def of(party):
        draws[party] = []

        def draw(n):
            draws[party].append(os.urandom(n))
            return draws[party][-1]

        return Entropy(draw)

    return of


def same_people():
    """Identities that stay the same from run to run; everything else is new."""
    seeds = {}

    def of(party):
        first = [seeds.setdefault(party, os.urandom(32))]
        return Entropy(lambda n: first.pop() if first and n == 32 else os.urandom(n))

    return of


def staged(module, case, *, liar=None, roles=None, faults=(), entropy=None, timeout=3.0):
    stage = Stage(Lie("-", liar, "-") if liar else None)
    parts = {**module.roles(case.params), **(roles or {})}
    run = run_protocol(
        module,
        case,
        roles={p: stage.role(p, r) for p, r in parts.items()},
        faults=faults,
        entropy=entropy,
        timeout=timeout,
    )
    return run, stage


def summed(m=40):
    return Case(secure_sum.Params(SITES, HUB, m), {u: (np.zeros(m, np.uint64),) for u in SITES})


# ---- secure sum ------------------------------------------------------------------------------------------------------


def test_under_the_pairwise_pads_lies_a_mask_of_its_own_that_nobody_knows():
    """All other contributors together take off their pads; what is left has to hide x = 0, and differ every time."""
    left = []
    for _ in range(2):
        draws = {}
        run, stage = staged(secure_sum, summed(), entropy=recorded(draws))
        check_no_errors(run)
        run_id = stage.ids[A, "1"]
        keys = {u: stage.said[u, HUB, "secure_sum.Keys"][0] for u in SITES}
        pairs = {KeyPair(d).public: KeyPair(d) for u in SITES for d in draws[u] if len(d) == 32}
        private = {u: pairs[keys[u].s_pk] for u in SITES}
        y = stage.said[A, HUB, "secure_sum.MaskedInput"][0].y.copy()
        for v in (B, C):
            y += expand(agree(private[v], keys[A].s_pk, secure_sum.pair_context(run_id, "pad")), len(y))
        left.append(y)
    assert all(np.unique(y >> np.uint64(56)).size > 20 for y in left)
    assert not np.array_equal(*left)


def test_nobody_gives_both_shares_of_one_party():
    case = Case(secure_sum.Params((*SITES, Party("d"), Party("e")), HUB, 3), {})
    case = Case(case.params, {u: (np.zeros(3, np.uint64),) for u in case.params.contributors})
    run, stage = staged(secure_sum, case, faults=[Fault("kill", "d", HUB, "MaskedInput")])
    check_no_errors(run)
    answers = [m[0] for (_, _, name), m in stage.said.items() if name == "secure_sum.Unmask" and m]
    assert len(answers) == 4
    for answer in answers:
        assert set(answer.seed_shares) == set(case.params.contributors) - {"d"}
        assert set(answer.key_shares) == {"d"}


def test_fewer_than_t_shares_say_nothing_of_seed_or_key(monkeypatch):
    made, real = [], shamir.share

    def share(secret, threshold, points, entropy):
        made.append((secret, real(secret, threshold, points, entropy)))
        return made[-1][1]

    monkeypatch.setattr(shamir, "share", share)
    names = tuple(map(Party, "abcde"))
    case = Case(secure_sum.Params(names, HUB, 2), {u: (np.zeros(2, np.uint64),) for u in names})
    check_no_errors(run_protocol(secure_sum, case))
    assert len(made) == 10  # a key and a seed each
    for secret, shares in made:
        assert shamir.combine(dict(list(shares.items())[:3]), 3, 32) == secret
        for two in itertools.combinations(shares.items(), 2):
            with contextlib.suppress(ProtocolAbort):  # a number that is no secret of 32 bytes
                assert shamir.combine(dict(two), 2, 32) != secret


def shows(answer):
    """An aggregator that runs up to L8 and answers there as told; returns who unmasked."""

    async def hub(ch, params):
        U = params.contributors
        keys = await ch.gather(U, secure_sum.Keys)
        await ch.broadcast(U, secure_sum.Roster(keys))
        shares = await ch.gather(U, secure_sum.Shares)
        await ch.scatter({u: secure_sum.SharesFor({v: shares[v].sealed[u] for v in U if v != u}) for u in U})
        await ch.gather(U, secure_sum.MaskedInput, y=(params.length,))
        await ch.broadcast(U, secure_sum.Survivors(U))
        vouches = {v: m.signature for v, m in (await ch.gather(U, secure_sum.Vouch)).items()}
        for u in U:
            await ch.send(u, secure_sum.Vouches(answer(u, vouches)))
        return await ch.gather(U, secure_sum.Unmask)

    return hub


def unmasked(run):
    sent = {u: {e.name for e, _ in run.receipts[u].entries if e.kind == "sent"} for u in SITES}
    return [u for u in SITES if "secure_sum.Unmask" in sent[u]]


def test_ones_own_vouch_is_not_enough():
    run, _ = staged(secure_sum, summed(3), liar=HUB, roles={HUB: shows(lambda u, vouches: {u: vouches[u]})})
    assert {run.errors[u].code for u in SITES} == {"split-view"}
    assert not unmasked(run)


def test_anothers_vouch_under_ones_own_name_is_not_counted():
    other = {u: v for u, v in zip(SITES, (*SITES[1:], SITES[0]), strict=True)}
    run, _ = staged(secure_sum, summed(3), liar=HUB, roles={HUB: shows(lambda u, v: {**v, u: v[other[u]]})})
    assert {run.errors[u].code for u in SITES if not run.errors[u].heard} == {"signature"}
    assert not unmasked(run)


def test_a_vouch_of_another_run_is_not_taken():
    people, kept = same_people(), {}
    keeps, replays = shows(lambda u, v: kept.update(v) or v), shows(lambda u, v: {**kept, u: v[u]})
    run, _ = staged(secure_sum, summed(3), liar=HUB, entropy=people, roles={HUB: keeps})
    assert len(unmasked(run)) == 3
    run, _ = staged(secure_sum, summed(3), liar=HUB, entropy=people, roles={HUB: replays})
    assert {run.errors[u].code for u in SITES if not run.errors[u].heard} == {"signature"}
    assert not unmasked(run)


@pytest.mark.parametrize("module", [secure_sum, row_sums, common_seed], ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_key_of_another_run_is_not_taken(module):
    """Who once learned a site's old private key must not be able to bring it back."""
    people, old = same_people(), {}
    kind, roster, answer = {
        secure_sum: (secure_sum.Keys, secure_sum.Roster, secure_sum.Shares),
        row_sums: (row_sums.Key, row_sums.Keys, row_sums.MaskedRows),
        common_seed: (common_seed.Key, common_seed.Roster, common_seed.Parts),
    }[module]
    case = {
        secure_sum: summed(2),
        row_sums: Case(row_sums.Params(SITES, (1, 1, 1), HUB, 1), {u: (np.zeros((3, 1), np.uint64),) for u in SITES}),
        common_seed: Case(common_seed.Params(SITES, HUB), {}),
    }[module]

    async def hub(ch, params):
        at = ch.sub("attempt-0") if module is row_sums else ch
        keys = await at.gather(SITES, kind)
        told = {**keys, B: old.get(B, keys[B])}
        old.setdefault(B, keys[B])
        for u in SITES:
            await at.send(u, roster(keys if u == B else told))
        await at.gather((A, C), answer, **({"rows": (None, 1)} if module is row_sums else {}))

    staged(module, case, liar=HUB, entropy=people, roles={HUB: hub}, timeout=1.0)
    run, _ = staged(module, case, liar=HUB, entropy=people, roles={HUB: hub}, timeout=1.0)
    assert "signature" in {run.errors[u].code for u in (A, C) if not run.errors[u].heard}


def test_a_box_does_not_come_back_to_who_sealed_it():
    async def hub(ch, params):
        keys = await ch.gather(SITES, secure_sum.Keys)
        await ch.broadcast(SITES, secure_sum.Roster(keys))
        shares = await ch.gather(SITES, secure_sum.Shares)
        await ch.scatter({u: secure_sum.SharesFor(shares[u].sealed) for u in SITES})
        await ch.gather(SITES, secure_sum.MaskedInput, y=(params.length,))

    run, _ = staged(secure_sum, summed(2), liar=HUB, roles={HUB: hub}, timeout=1.0)
    assert {run.errors[u].code for u in SITES if not run.errors[u].heard} == {"shares"}


# ---- common seed -----------------------------------------------------------------------------------------------------


def test_the_coordinator_has_neither_the_seed_nor_its_parts():
    case = Case(common_seed.Params(SITES, HUB), {})
    run, stage = staged(common_seed, case)
    check_no_errors(run)
    secret, run_id = values(run)[A].secret, stage.ids[A, "1"]
    tags = {m[0].tag for (_, to, name), m in stage.said.items() if name == "common_seed.Confirm" and to == HUB}
    assert secret not in tags
    known = hkdf(bytes(96), bind("common_seed", run_id, *(u.encode() for u in SITES)))
    assert secret != known


def test_a_part_does_not_come_back_to_who_sealed_it():
    async def hub(ch, params):
        keys = await ch.gather(SITES, common_seed.Key)
        await ch.broadcast(SITES, common_seed.Roster(keys))
        parts = await ch.gather(SITES, common_seed.Parts)
        await ch.scatter({u: common_seed.PartsFor(parts[u].sealed) for u in SITES})
        await ch.gather(SITES, common_seed.Confirm)

    run, _ = staged(common_seed, Case(common_seed.Params(SITES, HUB), {}), liar=HUB, roles={HUB: hub}, timeout=1.0)
    assert {run.errors[u].code for u in SITES if not run.errors[u].heard} == {"parts"}


def test_who_has_no_part_in_the_seed_confirms_nothing():
    """Site c is left out at L4 and still confirms, by the word of the coordinator, with a signature of its own."""

    async def hub(ch, params):
        keys = await ch.gather(SITES, common_seed.Key)
        await ch.broadcast(SITES, common_seed.Roster(keys))
        parts = await ch.gather(SITES, common_seed.Parts)
        await ch.scatter({u: common_seed.PartsFor({v: parts[v].sealed[u]}) for u, v in ((A, B), (B, A))})
        confirms = await ch.gather((A, B), common_seed.Confirm)
        for u in (A, B):
            await ch.send(u, common_seed.Confirms({**confirms, C: confirms[u]}))

    run, _ = staged(common_seed, Case(common_seed.Params(SITES, HUB), {}), liar=HUB, roles={HUB: hub}, timeout=1.0)
    assert {run.errors[u].code for u in (A, B) if not run.errors[u].heard} == {"split-view"}


# ---- row sums, attempts ----------------------------------------------------------------------------------------------


def test_a_restart_uses_no_pad_again(monkeypatch):
    seeds = []
    real = row_sums.agree

    def kept(*args):
        seeds.append(real(*args))
        return seeds[-1]

    monkeypatch.setattr(row_sums, "agree", kept)
    case = Case(row_sums.Params(SITES, (1, 1, 1), HUB, 1), {u: (np.zeros((3, 1), np.uint64),) for u in SITES})
    run = run_protocol(row_sums, case, faults=[Fault("kill", "c", HUB, "MaskedRows")], timeout=2.0)
    check_no_errors(run)
    assert len(seeds) == 8  # six in the first attempt, two in the second; each pair has its seed at both ends
    assert len(set(seeds)) == 4


def test_rows_are_under_masks():
    case = Case(row_sums.Params(SITES, (5, 5, 5), HUB, 4), {u: (np.zeros((15, 4), np.uint64),) for u in SITES})
    run, stage = staged(row_sums, case)
    check_no_errors(run)
    for u in SITES:
        rows = stage.said[u, HUB, "row_sums.MaskedRows"][0].rows
        assert np.unique(rows).size == rows.size


class toy:
    @staticmethod
    def roles(params):
        return {HUB: None} | dict.fromkeys(SITES, None)


toy.__name__ = "toy"


def test_a_step_that_came_to_no_end_is_not_called_done():
    """The coordinator calls a list done for which the step did not run."""

    async def follows(ch, params):
        async def step(inner, sites):
            return sites

        return await retry_without_dropouts.follow(ch, HUB, step)

    async def hub(ch, params):
        await ch.broadcast(SITES, retry_without_dropouts.Go(SITES, done=False))
        for u in SITES:
            await retry_without_dropouts._scopes(ch, 0, SITES)[1].recv(u, retry_without_dropouts.Report)
        await ch.broadcast((A, B), retry_without_dropouts.Go((A, B), done=True))

    run = run_protocol(toy, Case((), {}), roles={HUB: hub} | dict.fromkeys(SITES, follows), timeout=1.0)
    assert {run.errors[u].code for u in (A, B)} == {"unexpected"}


# ---- checked sums, scaling, forests ----------------------------------------------------------------------------------


def test_every_sum_has_a_tag_key_of_its_own(monkeypatch):
    keys, real = [], checked_sum.tag_key

    def kept(seed, sites, length):
        keys.append(seed)
        return real(seed, sites, length)

    monkeypatch.setattr(checked_sum, "tag_key", kept)
    rng = np.random.default_rng(0)
    case = Case(pooled_scaling.Params(SITES, HUB, 1), {u: (rng.normal(size=(20, 1)),) for u in SITES})
    check_no_errors(run_protocol(pooled_scaling, case))
    assert len(keys) == 12  # four sums at three sites
    assert len(set(keys)) == 4


def test_a_sum_of_fewer_sites_than_agreed_ends_the_run():
    """The answers of the sites that are left are not those of all: nothing is sent, so that nobody can subtract."""
    seed = dealt_seeds((A, C))[A]

    class Ch:
        me, run_id = A, bytes(32)

        def sub(self, label):
            return self

        def claim(self, protocol):
            pass

        async def send(self, to, msg):
            sent.append(msg)

        def contribute(self, part, **said):
            return part.values

    sent = []
    asking = pooled_queries.Asking(Ch(), SITES, HUB, "test", seed, Entropy(), object())
    zeros = constant(np.zeros(2, np.uint64), "a test")
    with pytest.raises(ProtocolAbort, match="not of all sites"):
        pooled_queries.answer_plainly(asking.words([lambda: zeros], 2, line="L1", what="zeros"))
    assert not sent


def test_the_fractions_of_a_sum_do_not_tell_how_often_they_pass_one():
    x = np.full(50, 0.75)
    words = [shared_pca.split_sum(x, 3, Entropy()) for _ in range(2)]
    assert not np.array_equal(*words)
    assert np.unique(words[0][:50]).size > 40
    np.testing.assert_allclose(shared_pca.join_sum(words[0] + words[1]), 1.5)


class Watched(pooled_queries.Plain):
    """Adds up plainly, and keeps what was opened."""

    def __init__(self):
        super().__init__()
        self.opened = []

    async def total(self, parts, length, most, *, line, what):
        counts, coin = await super().total(parts, length, most, line=line, what=what)
        self.opened.append((line, counts, most))
        return counts, coin


def grown(**options):
    """A forest of two sites, the second with few rows; what was opened, and every site's rows in every step's nodes."""
    params = counted_forest.Params(SITES, HUB, **{"trees": 60, "sample": 64, "min_cells": 8} | options)
    rng = np.random.default_rng(3)
    X = rng.normal(size=(200, 3))
    held, watched, real = [], Watched(), counted_forest.Grown.ends

    def ends(own, grid, nodes, axes):
        part = real(own, grid, nodes, axes)
        held.append((own.sample.count(nodes), part.values))
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted_forest.Grown, "ends", ends)
        scaling = pooled_scaling.scaling_of(X)
        made = counted_forest.grow_plainly(params, scaling, [X[:170], X[170:]], bytes(range(32)), rng, totals=watched)
    return params, made, watched.opened, held


def test_no_number_of_rows_is_opened():
    """A count of rows in a leaf has a complement; a yes or no of each site has none."""
    _, (outline, _), opened, _ = grown()
    assert {line for line, _, _ in opened} == {"L5"}
    assert len(opened) == len(outline.ranges)
    assert max(int(counts.max()) for _, counts, _ in opened) == 2  # sites, of nodes with some hundreds of rows
    assert {most for _, _, most in opened} == {len(SITES)}


def test_a_site_answers_no_about_a_node_with_fewer_than_t_of_its_rows():
    params, _, _, held = grown()
    rows, answers = (np.concatenate(x) for x in zip(*held, strict=True))
    few = rows < params.min_cells
    assert few.any()
    assert not answers[few].any()
    assert answers[~few].any()
    below = np.concatenate([r for r, _ in held[2:]])  # the first two are the roots, at both sites
    assert (below >= params.min_cells).any()
    fell = (below > 0) & (below < params.min_cells)
    roots = np.concatenate([r for r, _ in held[:2]])
    assert ((roots > 0) & (roots < params.min_cells)).any()
    assert not fell.any()  # rows of such a node leave the tree


def test_a_tree_holds_a_sample_that_nobody_else_can_guess(monkeypatch):
    states, real = [], counted_forest.sample_rows

    def kept(params, Z, rows, rng, donor):
        states.append(str(rng.bit_generator.state))
        return real(params, Z, rows, rng, donor)

    monkeypatch.setattr(counted_forest, "sample_rows", kept)
    rng = np.random.default_rng(1)
    case = Case(
        counted_forest.Params(SITES, HUB, trees=2, sample=32, min_cells=4),
        {u: ("table", ["x", "y"], rng.normal(size=(20, 2))) for u in SITES},
    )
    check_no_errors(run_protocol(counted_forest, case))
    assert len(set(states)) == 3
    params = counted_forest.Params(SITES, HUB, trees=50, sample=64, min_cells=8)
    sample = real(params, rng.normal(size=(640, 2)), 640, rng)
    roots = np.arange(50) * counted_forest.iforest.places(counted_forest.iforest.depth_limit(64))
    assert 50 < sample.count(roots).mean() < 80  # 64 of 640


def test_axes_and_cuts_come_from_the_secret_and_the_coin():
    """With the same answers: another secret, another coin or another purpose gives other numbers."""
    drawn = {
        counted_forest.Geometry(bytes([i]) * 32, np.arange(2)).rng(purpose, coin).random()
        for i in range(4)
        for purpose in ("axes", "cuts")
        for coin in (b"", b"heads", b"tails")
    }
    assert len(drawn) == 24
    forests = [
        counted_forest.grow_plainly(
            counted_forest.Params(SITES, HUB, trees=20, sample=64, min_cells=8),
            pooled_scaling.scaling_of(X := np.random.default_rng(3).normal(size=(60, 3))),
            [X],
            bytes([i]) * 32,
            np.random.default_rng(0),
        )[1]
        for i in range(2)
    ]
    columns = [f.steps[0].axes.columns for f in forests]
    assert not np.array_equal(*columns)
    assert not np.allclose(*(f.steps[0].cut for f in forests))


def test_extended_trees_leave_a_third_out():
    extended = counted_forest.Params(SITES, HUB, forest="extended")
    assert extended.size(90) <= 60
    assert extended.size(10_000) == extended.sample


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_the_fewest_survivors_bring_all_of_the_noise():
    """z = 1, C = 1, five clients: three may be left, so each adds a third of the variance, whatever its update."""
    params = training_terms.Params(SITES, HUB, "m", weighting="plain", score_every=0, noise=1.0, clip=1.0)
    words = [training_terms.update_words(params, 5, np.zeros(4000), 1.0, 7.0, Entropy())[0] for _ in range(3)]
    noise = sum(params.code(5).decode(w[:-2], 4000) for w in words)
    assert 0.92 < noise.std() < 1.08  # 4000 draws: 1.1 % at one standard deviation
    tail = training_terms.TAIL.decode(words[0][-2:].copy())
    np.testing.assert_allclose(tail, [1.0, 0.0])  # a weight of one, and no loss


def test_an_update_is_clipped_before_noise_and_who_has_none_weighs_as_much():
    params = training_terms.Params(SITES, HUB, "m", weighting="plain", score_every=0, noise=1e-6, clip=1.0)
    words, _ = training_terms.update_words(params, 3, np.full(100, 50.0), 1.0, 0.0, Entropy())
    assert np.linalg.norm(params.code(3).decode(words[:-2], 100)) < 1.001
    words, _ = training_terms.update_words(params, 3, np.full(100, np.nan), 1.0, 0.0, Entropy())
    assert training_terms.TAIL.decode(words[-2:].copy())[0] == 1.0
