"""Distances, graphs, labels and terms under sharing: one thing is wrong, and whoever checks it names the line."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nacl")

from liars import answers, liar, own_aborts

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.replicated import Ring
from cloister.mpc.sums import common_seed, retry_without_dropouts
from cloister.mpc.three_party import verified
from cloister.mpc.three_party.verified import Verified
from cloister.papers.hamming import hamming_mpc, oblivious_transfer, secure_hamming
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol
from cloister.workflows.map_labels import mapping_terms
from cloister.workflows.propagate_labels import (
    chosen_settings,
    point_roster,
    private_graph,
    private_propagation,
    propagation_terms,
    shared_scores,
)
from cloister.workflows.propagate_labels.shared_codes import SharedCodes, ring_of

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
STRANGER = Party("x")
NOWHERE = SimpleNamespace(me=A)  # a channel on which nothing can be sent


def refused(code, check, *args):
    with pytest.raises(ProtocolAbort) as e:
        check(*args)
    assert e.value.code == code
    assert e.value.line


# ---- roster of points ------------------------------------------------------------------------------------------------


def roster(names=(("p", "q"), ("p", "q"), ("p",)), count=5):
    inputs = {u: (count, 4, own, bytes(32)) for u, own in zip(SITES, names, strict=True)}
    return Case(point_roster.Params(SITES, HUB), inputs)


def test_a_site_that_is_on_no_list_has_no_points():
    roster = point_roster.Roster((A, B), (3, 5), ())
    assert roster.size(B) == 5
    refused("roster", roster.size, HUB)


@pytest.mark.parametrize("raw", [b"\xff", b"no list", b"{}", b'{"p": 1}', b"[1]", b'["p", null]', b'"pq"'])
def test_names_that_are_no_list_of_names(raw):
    assert point_roster.unpack_names(b'["p", "q"]  ', A) == ["p", "q"]
    refused("malformed", point_roster.unpack_names, raw, A)


@pytest.mark.parametrize(
    ("one", "code"),
    [((5, 3), "width"), ((0, 4), "malformed"), ((-1, 4), "malformed"), ((5, 0), "width")],
)
def test_widths_with_one_thing_wrong(one, code):
    good = {u: point_roster.Points(5, 4, b"") for u in SITES}
    point_roster.check_widths(good)
    refused(code, point_roster.check_widths, good | {B: point_roster.Points(*one, b"")})
    refused("malformed", point_roster.check_widths, dict.fromkeys(SITES, point_roster.Points(5, 0, b"")))


LISTS = [
    (lambda points: {u: p for u, p in points.items() if u != A}, "roster"),
    (lambda points: {A: points[A]}, "roster"),
    (lambda points: points | {STRANGER: points[B]}, "roster"),
    (lambda points: points | {A: replace(points[A], count=6)}, "roster"),
    (lambda points: points | {B: replace(points[B], count=0)}, "malformed"),
]


@pytest.mark.parametrize(("change", "code"), LISTS)
def test_a_list_of_points_with_one_thing_wrong(change, code):
    found = answers(point_roster, roster(), HUB, point_roster.AllPoints, lambda m: replace(m, points=change(m.points)))
    assert found[A] == ("point_roster", "L2", code)


def test_the_server_checks_what_a_site_says_of_its_points():
    found = answers(point_roster, roster(), B, point_roster.Points, lambda m: replace(m, count=0))
    assert found[HUB] == ("point_roster", "L2", "malformed")


def test_sites_whose_names_do_not_go_together():
    run = run_protocol(point_roster, roster(names=(("T cell", "q"), ("t cell", "q"), ())), timeout=10.0)
    assert {own_aborts(run)[u] for u in SITES} == {("point_roster", "L3", "spelling")}


# ---- scores and settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{A: 16}, {B: 8}, {B: -16}, {STRANGER: 16}, "short"])
def test_rounded_numbers_with_one_thing_wrong(wrong):
    good = {A: 32, B: 16, C: 0}
    assert shared_scores.check_rounded(SITES, good, A, 20) == good
    told = {A: 32, B: 16} if wrong == "short" else good | wrong
    refused("mismatch", shared_scores.check_rounded, SITES, told, A, 20)


def test_scores_of_no_labels_at_all():
    refused("no-labels", shared_scores.check_rounded, SITES, dict.fromkeys(SITES, 0), A, 0)
    none = np.zeros((6, 0), np.int32)
    inputs = {HUB: (dict.fromkeys(SITES, none),)} | dict.fromkeys(SITES, (np.zeros(0, np.int64),))
    run = run_protocol(shared_scores, Case(shared_scores.Params(SITES, (2, 2, 2), HUB, 2), inputs), timeout=10.0)
    assert own_aborts(run) == dict.fromkeys((HUB, *SITES), ("shared_scores", "C1", "no-labels"))


@pytest.mark.parametrize("where", ["right", "tested"])
def test_hits_that_cannot_be(where):
    usual = chosen_settings.Setting(3, 1.0, 0.9, balance=False)
    params = chosen_settings.Params(SITES, HUB, 256, usual, 2)
    total, counts = np.full((len(params.settings) + 1, 2), 9, np.uint64), np.array([9, 9])
    assert chosen_settings.best(params, total.reshape(-1), counts).accuracy == 1.0
    total[4 if where == "right" else -1, 1] = 10
    refused("mismatch", chosen_settings.best, params, total.reshape(-1), counts)


# ---- graphs ----------------------------------------------------------------------------------------------------------

CODES = np.arange(16, dtype=np.uint8).reshape(2, 8)


@pytest.mark.parametrize("row", [[3, -1], [3, 65 << 3], [3, 3], [3, 0], [3, 7]])
def test_opened_keys_that_are_no_graph(row):
    """Six points of 64 bits: a key is the distance, and three bits for the neighbour."""
    params = private_graph.Params(SITES, (2, 2, 2), 64, HUB, 2)
    keys = np.array([[(i + 1) % 6, (i + 2) % 6] for i in range(6)])
    assert private_graph.check_keys(params, keys, "private_graph") is keys
    keys[0] = row
    refused("malformed", private_graph.check_keys, params, keys, "private_graph")


@pytest.mark.parametrize("wrong", [{"sites": (A, A, B)}, {"sizes": (2, 0, 2)}, {"bits": 60}, {"server": A}])
@pytest.mark.parametrize("module", [hamming_mpc, secure_hamming, private_graph])
def test_parameters_with_one_thing_wrong(module, wrong):
    good = {"sites": SITES, "sizes": (2, 2, 2), "bits": 64, "server": HUB}
    more = {"n_neighbors": 2} if module is private_graph else {}
    module.Params(**good, **more)
    with pytest.raises(ParameterError):
        module.Params(**good | wrong, **more)


def test_an_engine_that_there_is_not():
    with pytest.raises(ParameterError, match="magic"):
        private_graph.Params(SITES, (2, 2, 2), 64, HUB, 2, "magic")


@pytest.mark.parametrize("codes", [CODES[:1], CODES[:, :4], CODES.astype(np.int64)])
@pytest.mark.parametrize("engine", ["mpc", "ot"])
def test_other_codes_than_agreed_are_refused_before_anything_is_sent(codes, engine):
    words = SITES, (2, 2, 2), 64, HUB
    keys = {"entropy": None, "identity": None}
    for role in (
        private_graph.pair_shares(NOWHERE, private_graph.Params(*words, 2, engine), codes, None),
        secure_hamming.site(NOWHERE, secure_hamming.Params(*words, engine), codes, **keys),
        hamming_mpc.site(NOWHERE, hamming_mpc.Params(*words), codes, **keys),
    ):
        with pytest.raises(ParameterError, match="2 codes of 8 bytes"):
            asyncio.run(role)


# ---- distances -------------------------------------------------------------------------------------------------------


def distances(module, **options):
    return Case(module.Params(SITES, (2, 2, 2), 64, HUB, **options), dict.fromkeys(SITES, (CODES,)))


@pytest.mark.parametrize("wrong", [[[0, 65], [65, 0]], [[0, 3], [4, 0]], [[1, 3], [3, 0]]])
def test_own_distances_with_one_thing_wrong(wrong):
    ring = ring_of(64)

    def check(table):
        return hamming_mpc.own_distances(ring, ring.to_bytes(np.array(table, ring.dtype)), 2, 64, "M4")

    assert check([[0, 3], [3, 0]]).tolist() == [[0, 3], [3, 0]]
    refused("malformed", check, wrong)


def test_a_computing_party_that_shifts_what_is_opened(monkeypatch):
    summand = SharedCodes.summand

    def shifted(self, rows, columns):
        z = summand(self, rows, columns)
        return z + z.dtype.type(self._trio.ch.me == A and 66)

    monkeypatch.setattr(SharedCodes, "summand", shifted)
    run = run_protocol(hamming_mpc, distances(hamming_mpc), timeout=10.0)
    assert own_aborts(run)[HUB] == ("hamming_mpc", "M3", "malformed")


def test_a_site_that_shifts_its_share_of_the_distances():
    ring = ring_of(64)

    def shifted(m):
        return replace(m, data=ring.to_bytes(ring.from_bytes(m.data, (2, 2)) + ring.dtype.type(66)))

    found = answers(secure_hamming, distances(secure_hamming, engine="ot"), A, secure_hamming.Share, shifted)
    assert found[HUB] == ("secure_hamming", "H4", "malformed")


# ---- oblivious transfer ----------------------------------------------------------------------------------------------


def transfers():
    params = oblivious_transfer.Params(A, B, 8, 2)
    return Case(params, {A: (np.ones((8, 2), np.uint16),), B: (np.ones(8, np.uint8),)})


def test_other_numbers_of_transfers_than_multiples_of_eight():
    with pytest.raises(ParameterError, match="multiples of 8"):
        asyncio.run(oblivious_transfer.Sender.transfer(SimpleNamespace(), np.ones((7, 2), np.uint16)))


@pytest.mark.parametrize(
    ("kind", "change", "line"),
    [
        (oblivious_transfer.BaseReplies, lambda m: replace(m, points=m.points[:-1]), "O2"),
        (oblivious_transfer.BaseReplies, lambda m: replace(m, points=(*m.points, m.points[0])), "O2"),
        (oblivious_transfer.Challenge, lambda m: replace(m, seed=b""), "O3"),
        (oblivious_transfer.Challenge, lambda m: replace(m, seed=bytes(33)), "O3"),
    ],
)
def test_what_a_lying_sender_says_of_its_transfers(kind, change, line):
    found = answers(oblivious_transfer, transfers(), A, kind, change)
    assert found == {B: ("oblivious_transfer", line, "malformed")}


# ---- terms of a mapping ----------------------------------------------------------------------------------------------

ASK = Party("ask")


def holding(rows=5, norm=3.0, names=("p", "q"), rounded=64):
    return mapping_terms.LocalInput(4, rows, rounded, norm, names)


def mapping(**holdings):
    params = mapping_terms.Params(HUB, ASK, (A, B), (ASK, A, B), 3)
    given = {ASK: holding(names=()), A: holding(), B: holding()} | {Party(p): h for p, h in holdings.items()}
    return Case(params, {p: (h,) for p, h in given.items()})


TOLD = mapping_terms.Announced({ASK: 4, A: 4, B: 4}, {ASK: 64, A: 64, B: 64}, ("p", "q"))


@pytest.mark.parametrize("change", [{"widths": {ASK: 4, A: 4}}, {"rows": TOLD.rows | {STRANGER: 64}}])
def test_terms_of_other_owners(change):
    params = mapping().params
    assert mapping_terms.terms(params, TOLD, 1.0).rows == (64, 64)
    refused("roster", mapping_terms.terms, params, replace(TOLD, **change), 1.0)


@pytest.mark.parametrize(
    "change", [{"widths": TOLD.widths | {A: 5}}, {"rows": TOLD.rows | {A: 128}}, {"rows": {B: 64}}, {"names": ("p",)}]
)
def test_a_coordinator_that_repeats_another_announcement(change):
    mapping_terms.check_told(TOLD, A, holding())
    refused("mismatch", mapping_terms.check_told, replace(TOLD, **change), A, holding())


def test_an_owner_checks_what_the_coordinator_repeats():
    case, kind = mapping(), mapping_terms.Announced
    found = answers(mapping_terms, case, HUB, kind, lambda m: replace(m, rows=m.rows | {A: 128}))
    assert found[A] == ("mapping_terms", "T2", "mismatch")


def test_owners_that_do_not_go_together():
    run = run_protocol(mapping_terms, mapping(a=holding(norm=3e-4)), timeout=10.0)
    assert own_aborts(run)[A] == ("mapping_terms", "T3", "norms-apart")
    run = run_protocol(mapping_terms, mapping(b=holding(names=("P", "q"))), timeout=10.0)
    assert own_aborts(run)[HUB] == ("mapping_terms", "T1", "spelling")


def test_a_count_of_references_that_is_none():
    """2^47, twice, is nothing in a ring of 48 bits: it would make k out of fewer."""
    run = run_protocol(mapping_terms, mapping(b=holding(rows=1 << 46, rounded=1 << 46)), timeout=10.0)
    assert ("verified", "T4", "mismatch") in own_aborts(run).values()


# ---- verified words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "x"), [(B, np.zeros(2, np.uint64)), (A, None), (A, np.zeros(3, np.uint64)), (A, np.zeros(2, np.int64))]
)
def test_an_input_that_is_not_the_owners_or_not_as_agreed(owner, x):
    me = SimpleNamespace(ch=NOWHERE)
    with pytest.raises(ParameterError, match="input"):
        asyncio.run(verified.Verified.input(me, owner, x, (2,), Ring(64)))


def products_are_zero(engine=Verified):
    """Three parties share 1 and 2, and show that no bit is in both; b computes with another engine, perhaps."""

    async def role(ch, params, *, entropy, identity):
        trio = await (engine if ch.me == B else Verified).meet(ch, SITES, entropy=entropy, identity=identity)
        one, two = (trio.public(np.array([[word]], np.uint64)) for word in (1, 2))
        await trio.check_zero(await trio.gate(one, two), "L7", "a bit is in both, or")

    return SimpleNamespace(__name__="products_are_zero", roles=lambda params: dict.fromkeys(SITES, role))


def test_a_lie_in_a_gate_is_found_before_its_word_is_compared():
    """Where the others stop would tell the liar whether its lie went through, which depends on what they hold."""
    case = Case(mapping().params, {})
    check_no_errors(run_protocol(products_are_zero(), case))

    def flip(z):
        z ^= np.uint64(1)

    engine, lied = liar("gate", 0, flip)
    found = own_aborts(run_protocol(products_are_zero(engine), case, timeout=10.0), B)
    assert lied
    assert found
    assert all(protocol == "verified" and line.startswith("V") for protocol, line, _ in found.values())


# ---- propagation -----------------------------------------------------------------------------------------------------


def propagation(labelled=(A, B, C), **options):
    """Two far groups of three points at every site; a label for each, or none."""
    rng = np.random.default_rng(0)
    vectors = np.concatenate([rng.normal(5, 1, (3, 4)), rng.normal(-5, 1, (3, 4))])
    labels = ["p", None, None, "q", None, None]
    params = propagation_terms.Params(SITES, HUB, **{"bits": 64, "n_neighbors": 2} | options)
    return Case(params, {u: (vectors, labels if u in labelled else [None] * 6) for u in SITES})


def test_the_server_too_refuses_more_neighbours_than_points(monkeypatch):
    """Before a graph is begun, and by itself; three sites have told of six points each."""

    async def nothing(*args):
        pass

    async def told(*args):
        return point_roster.Roster(SITES, (6, 6, 6), ())

    monkeypatch.setattr(common_seed, "coordinator", nothing)
    monkeypatch.setattr(point_roster, "server", told)
    ch = SimpleNamespace(me=HUB, sub=lambda name: None)
    assert asyncio.run(propagation_terms.open_study(ch, propagation(n_neighbors=17).params)).sites == SITES
    with pytest.raises(ParameterError, match="only 18 points"):
        asyncio.run(propagation_terms.open_study(ch, propagation(n_neighbors=18).params))


@pytest.mark.parametrize("classes", [3, 1])
def test_a_site_that_counts_other_classes(classes):
    found = answers(
        private_propagation, propagation(), A, propagation_terms.Labelled, lambda m: replace(m, classes=classes)
    )
    assert found[HUB] == ("propagation_terms", "L12", "mismatch")


def test_the_only_site_with_labels_is_gone_before_the_scores(monkeypatch):
    """The server names it before it tells anybody of scores."""
    case, lead = propagation(labelled=(C,)), retry_without_dropouts.lead

    async def without_c(ch, sites, least, step):
        return await lead(ch, tuple(u for u in sites if u != C or "scores" not in ch.scope), least, step)

    monkeypatch.setattr(retry_without_dropouts, "lead", without_c)
    found = own_aborts(run_protocol(private_propagation, case, timeout=10.0))
    assert found[HUB] == ("propagation_terms", "L12", "no-labels")
