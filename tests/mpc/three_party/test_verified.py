"""One liar among three: every kind of lie, by everyone who can tell it, is caught before anything wrong is opened."""

import functools

import numpy as np
import pytest
from knn_cases import ASK, agree, case
from liars import counting, forger, liar, play, replaced

from cloister.errors import ProtocolAbort
from cloister.mpc.parties import Party
from cloister.mpc.three_party import verification
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.map_labels import private_knn, verified_knn

THREE = tuple(map(Party, ("ask", "basel", "lugano")))


def small(seed=3, m=40, rows=(120, 100), **options):
    c = case(m=m, rows=rows, dims=5, labels=4, seed=seed, pads=0, k=5, **options)
    return Case(verified_knn.Params(c.params), c.inputs)


CASE = small()
RIGHT = verified_knn.ideal(CASE.params, CASE.inputs)[ASK]
CLEAN, OPENED = play(verified_knn, CASE)


def is_prefix(found, clean):
    """Whether what was opened is what an honest run opens, as far as it went."""
    return len(found) <= len(clean) and all(np.array_equal(a, b) for a, b in zip(found, clean, strict=False))


@functools.cache
def counted(party):
    """How many values of each kind a party has in an honest run."""
    engine, seen = counting()
    play(verified_knn, CASE, party, engine)
    return seen


def check_caught(party, engine, lied, c=CASE):
    """Someone honest rejects, no honest party finishes with a wrong result, and nothing wrong is opened."""
    run, opened = play(verified_knn, c, party, engine)
    assert lied, "nothing was said that could be changed"
    honest = [p for p in THREE if p != party]
    rejected = [e for p, e in run.errors.items() if p in honest and isinstance(e, ProtocolAbort)]
    assert any(e.protocol == "verified" for e in rejected), f"{lied}: {run.errors}"
    assert party == ASK or ASK not in run.outcomes
    for p in honest:
        assert is_prefix(opened[p], OPENED[p]), "something else was opened than in an honest run"
    return run


def test_an_honest_run_is_right():
    check_no_errors(CLEAN)
    agree(values(CLEAN)[ASK], RIGHT)
    assert len(OPENED[ASK]) > 2


def bit(z):
    z.reshape(-1)[0] ^= z.dtype.type(1)


def last_bit(z):
    z.reshape(-1)[-1] ^= z.dtype.type(1)


def plus(z):
    z[0, 3] += z.dtype.type(1)


def top(z):
    z[0, 3] += z.dtype.type(1 << 39)


def pull(z):
    """One reference nearer to all queries, as in the attack on `replicated`."""
    z[:, 17] -= z.dtype.type(1 << 36)


def swap(z):
    z[0, [1, 2]] = z[0, [2, 1]]


def twice(z):
    z[0, 1] = z[0, 2]


def other_order(z):
    z[2] = np.roll(z[2], 1)


COMPUTED = [
    ("product", 1, plus),
    ("product", 1, top),
    ("product", 1, pull),
    ("product", 0, bit),  # the squares of L3
    ("gate", 0, bit),
    ("gate", 30, bit),  # bits of the keys
    ("gate", 60, bit),  # comparisons
    ("gate", -1, bit),  # the vote
    ("hop", 0, bit),
    ("hop", 1, bit),
    ("hop", 0, swap),
    ("hop", 1, twice),
    ("hop", 0, other_order),
]


def by_everyone(lies):
    """Each lie by one party in turn; by the two others in the long tests."""
    for number, lie in enumerate(lies):
        for rank, party in enumerate(THREE):
            yield pytest.param(party, *lie, marks=[] if rank == number % 3 else [pytest.mark.slow])


@pytest.mark.parametrize(("party", "kind", "at", "change"), list(by_everyone(COMPUTED)))
def test_wrong_steps_are_caught(party, kind, at, change):
    if at < 0:
        at += counted(party)[kind]
    check_caught(party, *liar(kind, at, change))


@pytest.mark.parametrize("change", [plus, top, pull])
def test_wrong_bits_of_the_sum_are_caught(change):
    check_caught(ASK, *liar("sum", 2, change))  # the third: those of the keys


SAID = ["Coin", "Seed", "Halves", "Coefficients", "Point", "Folded", "Open"]


@pytest.mark.parametrize(
    ("party", "kind", "change"), list(by_everyone([(k, c) for k in SAID for c in (bit, last_bit)]))
)
def test_wrong_words_of_a_proof_are_caught(party, kind, change):
    seen = counted(party)
    if not seen[kind]:
        assert (kind, party) == ("Coin", ASK)  # the coin is for it
        return
    check_caught(party, *liar(kind, seen[kind] // 2, change))


def test_a_wrong_word_of_the_result_is_caught():
    lugano = THREE[2]
    check_caught(lugano, *liar("Open", counted(lugano)["Open"] - 1, bit))


@pytest.mark.parametrize(("rank", "levels"), [(0, 1), (1, 2), (2, 9)])
def test_a_forged_proof_is_caught(rank, levels):
    engine, folding, lied = forger(rank, levels)
    with replaced((verification, "Folding", folding)):
        check_caught(THREE[rank], engine, lied)
    assert "coefficient" in lied


@pytest.mark.parametrize("rank", range(3))
def test_only_the_points_stand_in_the_way_of_a_forger(rank):
    """Who knew the points in advance would pass: the checks are what the proof says, and the coins do the work."""
    engine, folding, _ = forger(rank, 0)
    with replaced((verification, "Folding", folding)):
        play(verified_knn, CASE, THREE[rank], engine)
    engine, folding, lied = forger(rank, 1, folding.seen)
    with replaced((verification, "Folding", folding)):
        run, _ = play(verified_knn, CASE, THREE[rank], engine)
    assert "coefficient" in lied
    assert not [e for e in run.errors.values() if isinstance(e, ProtocolAbort) and e.line == "V11"]


@pytest.mark.parametrize("beyond", [1 << 45, 1 << 62, "edge"])
def test_queries_outside_the_bound_are_caught(beyond, monkeypatch):
    """`private_knn` computes with any row: products wrap and tell low bits of references. L3 lets none pass."""
    terms = CASE.params.terms
    pad = verified_knn.pad

    def outside(x, rows):
        rows_of_mine = pad(x, rows)
        if rows == terms.queries:
            rows_of_mine[3] = 0
            rows_of_mine[3, 1] = terms.norm + 1 if beyond == "edge" else beyond
        return rows_of_mine

    monkeypatch.setattr(verified_knn, "pad", outside)
    run = run_protocol(verified_knn, CASE, timeout=20.0)
    assert ASK not in run.outcomes
    assert {(e.protocol, e.line) for p, e in run.errors.items() if p != ASK} == {("verified", "L3")}


def test_queries_at_the_edge_of_the_bound_pass(monkeypatch):
    terms = CASE.params.terms
    pad = verified_knn.pad

    def edge(x, rows):
        rows_of_mine = pad(x, rows)
        if rows == terms.queries:
            rows_of_mine[:] = 0
            rows_of_mine[:, 0] = terms.norm
        return rows_of_mine

    monkeypatch.setattr(verified_knn, "pad", edge)
    check_no_errors(run_protocol(verified_knn, CASE, timeout=20.0))


@pytest.mark.parametrize(("party", "at"), [("zurich", 0), ("zurich", 1), ("zurich", 3), ("vienna", 2)])
def test_an_owner_that_gives_two_parties_different_words_is_caught(party, at):
    """A site that does not compute sends rows to two of the three, then its weights to the same two."""
    engine, lied = liar("Input", at, last_bit)
    run, opened = play(verified_knn, small(m=6, rows=(14, 13, 12, 11)), Party(party), engine)
    assert lied
    assert ("verified", "V2") in {(e.protocol, e.line) for p, e in run.errors.items() if p != party}
    assert not opened


def test_a_site_reads_labels_of_named_references_from_the_old_protocol_and_is_caught_in_the_new(monkeypatch):
    """S1: the querier computes, and pulls the reference of its choice to all its queries."""
    c = case(m=8, rows=(40, 33), dims=5, labels=4, seed=3, pads=0, k=1)
    truth = np.concatenate([c.inputs[s][1] for s in c.params.sites])[10:18]
    original = private_knn.Trio.matmul_summand

    def bent(self, x, y):
        z = original(self, x, y)
        if self.ch.me == ASK and y.shape[1] == 40:  # the first site's references
            z[np.arange(8), np.arange(10, 18)] -= z.dtype.type(1 << 38)
        return z

    monkeypatch.setattr(private_knn.Trio, "matmul_summand", bent)
    old = run_protocol(private_knn, c, timeout=20.0)
    check_no_errors(old)
    np.testing.assert_array_equal(values(old)[ASK].labels, truth)

    def pull_named(z):
        z[np.arange(8), np.arange(10, 18)] -= z.dtype.type(1 << 38)

    new = Case(verified_knn.Params(c.params), c.inputs)
    engine, lied = liar("product", 1, pull_named)
    run, opened = play(verified_knn, new, ASK, engine)
    assert lied
    assert not opened["basel"]
    assert ASK not in run.outcomes


def test_whether_a_lie_is_caught_does_not_depend_on_what_is_compared():
    """The same lie in the same place, where it would change the outcome and where it would not."""
    ends = set()
    for seed in range(6):
        engine, lied = liar("gate", 60, bit)
        run, _ = play(verified_knn, small(seed=seed), Party("basel"), engine)
        assert lied
        ends.add(tuple(sorted((p, e.line) for p, e in run.errors.items() if p != "basel" and e.protocol == "verified")))
    assert len(ends) == 1


def random_lie(rng):
    """One bit of one thing that a random party computes or says."""
    party = THREE[rng.integers(3)]
    seen = counted(party)
    kinds = sorted(k for k in seen if k not in ("Input", "Verdict"))
    kind = kinds[rng.integers(len(kinds))]
    at, place, which = int(rng.integers(seen[kind])), rng.random(), int(rng.integers(40))

    def flip(z):
        flat = z.reshape(-1)
        flat[int(place * flat.size)] ^= z.dtype.type(1 << which % (8 * z.dtype.itemsize))

    return party, kind, *liar(kind, at, flip)


def check_random_lies(count, seed):
    rng = np.random.default_rng(seed)
    harmless = 0
    for _ in range(count):
        party, kind, engine, lied = random_lie(rng)
        run, opened = play(verified_knn, CASE, party, engine)
        assert lied, kind
        for p in THREE:
            assert p == party or is_prefix(opened[p], OPENED[p]), f"{kind} of {party}"
        if ASK in run.outcomes and party != ASK:
            agree(values(run)[ASK], RIGHT)
        honest = [e for p, e in run.errors.items() if p != party]
        assert all(isinstance(e, ProtocolAbort) for e in honest)
        harmless += not honest
    return harmless


def test_random_lies():
    assert check_random_lies(12, 7) <= 3
