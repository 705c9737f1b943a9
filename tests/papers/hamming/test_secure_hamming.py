"""The three engines, the matrix they give the server, and the graph that hides it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ParameterError
from cloister.models import graph
from cloister.mpc.crypto.replicated import Ring
from cloister.papers.hamming import hamming_he, hamming_mpc, hamming_ot, secure_hamming
from cloister.papers.hamming.pair_distances import ENGINES
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    same_array,
    values,
)
from cloister.workflows.propagate_labels import private_graph
from cloister.workflows.propagate_labels.shared_codes import computing, ring_of

HUB = Party("hub")
VECTORS = Path(__file__).parents[2] / "vectors"
A, B = Party("ann"), Party("ben")


def codes(n, bits, seed):
    """Random codes, with duplicates, antipodes and all-zero ones among them."""
    x = np.random.default_rng(seed).integers(0, 256, (n, bits // 8), dtype=np.uint8)
    if n > 3:
        x[1], x[2], x[3] = x[0], ~x[0], 0
    return x


def case(module, sizes=(5, 4, 6), bits=64, seed=0, **options):
    names = tuple(Party(f"site-{i}") for i in range(len(sizes)))
    params = module.Params(names, tuple(sizes), bits, HUB, **options)
    return Case(params, {u: (codes(n, bits, seed + i),) for i, (u, n) in enumerate(zip(names, sizes, strict=True))})


def pair(module, sizes=(3, 4), bits=64, seed=0):
    params = module.Params(A, B, *sizes, bits)
    return Case(params, {A: (codes(sizes[0], bits, seed),), B: (codes(sizes[1], bits, seed + 1),)})


def check_pair(c, run):
    H = graph.hamming(c.inputs[A][0], c.inputs[B][0])
    got = values(run)
    if {A, B} <= got.keys():
        ring = ring_of(c.params.bits)
        np.testing.assert_array_equal(ring.decode(got[A] + got[B].T), H)


def check_run(module, c, **options):
    run = run_protocol(module, c, **options)
    check_no_errors(run)
    wanted = module.ideal(c.params, {u: x[0] for u, x in c.inputs.items()})
    for u, found in values(run).items():
        same_array(found, wanted[u])
    return run


# ---- ideal -----------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    bits=st.sampled_from([64, 136, 512]),
    seed=st.integers(0, 99),
    engine=st.sampled_from(["mpc", "ot"]),
)
def test_distances_and_graph(sizes, bits, seed, engine):
    check_run(secure_hamming, case(secure_hamming, sizes, bits, seed, engine=engine))
    k = min(3, sum(sizes) - 1)
    check_run(private_graph, case(private_graph, sizes, bits, seed, engine=engine, n_neighbors=k))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [(4, 5), (4, 3, 5)])
def test_all_engines_return_the_same_matrix_and_graph(engine, sizes):
    check_run(secure_hamming, case(secure_hamming, sizes, 256, engine=engine))
    check_run(private_graph, case(private_graph, sizes, 256, engine=engine, n_neighbors=3))


@pytest.mark.parametrize("bits", [4096, 16384])
def test_many_bits(bits):
    for module in (hamming_ot, hamming_he):
        c = pair(module, (2, 5), bits)
        run = run_protocol(module, c)
        check_no_errors(run)
        check_pair(c, run)
    check_run(hamming_mpc, case(hamming_mpc, (5, 4), bits))


def test_rows_in_several_blocks(monkeypatch):
    monkeypatch.setattr(private_graph, "BLOCK", 40)
    monkeypatch.setattr(hamming_mpc, "BLOCK", 12)
    check_run(private_graph, case(private_graph, (5, 4, 6), n_neighbors=14))
    check_run(hamming_mpc, case(hamming_mpc, (5, 4, 6)))


def test_transfers_in_several_batches(monkeypatch):
    monkeypatch.setattr(hamming_ot, "BATCH", 1)
    c = pair(hamming_ot, (4, 6))
    run = run_protocol(hamming_ot, c)
    check_no_errors(run)
    check_pair(c, run)


def test_ties_go_to_the_smaller_index():
    c = case(private_graph, (6, 5), 64, n_neighbors=4)
    for x in c.inputs.values():
        x[0][:] = 7  # all points equal
    found = values(check_run(private_graph, c))[HUB]
    np.testing.assert_array_equal(found[0] & 15, [1, 2, 3, 4])
    np.testing.assert_array_equal(found[10] & 15, [0, 1, 2, 3])


# ---- view, cost, abort -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [hamming_ot, hamming_he])
def test_pairs_cost_and_view(module):
    check_cost(module, pair(module, (3, 9), 512))
    check_cost(module, pair(module, (5, 2), 512))
    check_view(module, pair(module, seed=1), pair(module, seed=2))


@pytest.mark.parametrize("sizes", [(5, 6), (5, 4, 6), (5, 4, 6, 3, 2)])
def test_cost_of_three_parties(sizes):
    check_cost(hamming_mpc, case(hamming_mpc, sizes, 512))


@pytest.mark.parametrize("engine", ["mpc", "ot", "he"])
@pytest.mark.parametrize("sizes", [(5, 6), (5, 4, 6)])
def test_cost_of_distances_and_of_the_graph(engine, sizes):
    check_cost(secure_hamming, case(secure_hamming, sizes, 512, engine=engine))
    check_cost(private_graph, case(private_graph, sizes, 512, engine=engine, n_neighbors=3))


def test_views_do_not_depend_on_the_codes():
    for module, options in ((hamming_mpc, {}), (secure_hamming, {"engine": "ot"})):
        check_view(module, case(module, seed=1, **options), case(module, seed=2, **options))


def test_the_graph_sends_the_same_messages_until_the_comparisons():
    """How many comparisons a selection takes is random (see `selection`); what comes before is not."""
    seen = []
    for seed in (1, 2):
        run = check_run(private_graph, case(private_graph, seed=seed, n_neighbors=3))
        rows = [(e.name, e.to, e.bytes) for e, _ in run.receipts["site-0"].entries if e.kind == "sent"]
        names = [r[0] for r in rows]
        seen.append(rows[: names.index("replicated.OpenAll")])
    assert seen[0] == seen[1]


@pytest.mark.slow
@pytest.mark.parametrize("module", [hamming_ot, hamming_he])
@pytest.mark.parametrize("kind", ["drop", "truncate", "kill"])
def test_pairs_abort(module, kind):
    c = pair(module, (2, 3))
    check_abort(module, c, survived=lambda run: check_pair(c, run), kinds=[kind], timeout=1.0)


@pytest.mark.parametrize(
    "kind", ["drop", *(pytest.param(k, marks=pytest.mark.slow) for k in ("swap", "truncate", "kill"))]
)
def test_three_parties_abort(kind):
    c = case(hamming_mpc, (2, 2))
    messages = [
        ("site-0", "site-1", "replicated.Input"),
        ("site-1", "hub", "replicated.Reshare"),
        ("site-1", "hub", "hamming_mpc.OwnDistances"),
        ("hub", "site-0", "replicated.Key"),
    ]

    def right(run):
        same_array(values(run)[HUB], hamming_mpc.ideal(c.params, {u: x[0] for u, x in c.inputs.items()})[HUB])

    check_abort(hamming_mpc, c, survived=right, kinds=[kind], timeout=1.0, messages=messages)


@pytest.mark.parametrize("module", [hamming_mpc, private_graph, hamming_ot])
def test_vectors(module):
    """Not for `hamming_he`: SEAL draws its noise from the operating system."""
    options = {"n_neighbors": 2} if module is private_graph else {}
    c = pair(hamming_ot, (1, 2)) if module is hamming_ot else case(module, (2, 3, 2), **options)
    check_vectors(module, c, VECTORS / f"{module.__name__.rpartition('.')[2]}.json")


# ---- hiding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [hamming_ot, hamming_he])
def test_a_share_by_itself_is_uniform(module):
    """The same codes, many runs: every residue modulo 2^κ is as likely as any other. Without masks it is a constant."""
    ring = ring_of(64)
    c = pair(module, (40, 40))
    for party in (A, B):
        run = run_protocol(module, c)
        check_no_errors(run)
        share = values(run)[party].astype(np.uint64) & np.uint64((1 << ring.bits) - 1)
        counts = np.bincount((share >> np.uint64(ring.bits - 4)).astype(int).ravel(), minlength=16)
        expected = share.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 80  # df 15: P < 1e-10
    H = graph.hamming(c.inputs[A][0], c.inputs[B][0])
    plain = np.bincount(H.ravel() >> (ring.bits - 4), minlength=16)
    assert ((plain - expected) ** 2 / expected).sum() > 1000


def test_the_graph_opens_only_k_distances_per_row():
    c = case(private_graph, (5, 4, 6), n_neighbors=2)
    run = check_run(private_graph, c)
    opened = [e for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened"]
    assert {(e.what if hasattr(e, "what") else e.name) for e in opened} == {
        "order of shuffled entries",
        "2 nearest neighbours of 15 points",
    }
    assert {e.to for e in opened if "nearest" in e.name} == {HUB}


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "bits", "options"),
    [((4,), 64, {}), ((4, 0), 64, {}), ((4, 4), 60, {}), ((4, 4), 64, {"engine": "magic"}), ((4, 4, 4), 0, {})],
)
def test_bad_parameters(sizes, bits, options):
    with pytest.raises(ParameterError):
        case(secure_hamming, sizes, bits, **options)


def test_more_neighbours_than_points():
    with pytest.raises(ParameterError, match="lower n_neighbors"):
        case(private_graph, (3, 3), n_neighbors=6)


def test_who_computes():
    two, three = (A, B), (A, B, Party("cat"))
    assert computing(two, HUB) == (A, B, HUB)
    assert computing((*three, Party("dan")), HUB) == three
    assert ring_of(4096) == Ring(14)
