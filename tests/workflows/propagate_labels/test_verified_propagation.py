"""Propagation over a hidden graph: what one malicious party sends instead is detected before anything is opened."""

import numpy as np
import pytest
from liars import counting, liar, play

from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.study import Party
from cloister.testing import Case, check_no_errors, check_view, run_protocol, values
from cloister.workflows.propagate_labels import verified_propagation
from cloister.workflows.propagate_labels.propagation_terms import Params

WALKS = verified_propagation.settings(Params((Party("a"), Party("b")), Party("hub"), n_neighbors=3))
RING = verified_propagation.ring_of_walks(WALKS, 30).bits
HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "lugano", "vienna", "zurich")))


def case(sizes=(9, 8, 7), classes=3, seed=0, **options):
    rng = np.random.default_rng(seed)
    inputs = {}
    for u, n in zip(SITES, sizes, strict=False):
        labels = [f"type {c}" if rng.random() < 0.5 else None for c in rng.integers(0, classes, n)]
        inputs[u] = (rng.normal(size=(n, 4)), labels)
    for c in range(classes):
        inputs[SITES[0]][1][c] = f"type {c}"
    return Case(Params(SITES[: len(sizes)], HUB, **{"bits": 64, "n_neighbors": 3, **options}), inputs)


def bit(z):
    z.reshape(-1)[0] ^= z.dtype.type(1)


def top(z):
    z.reshape(-1)[-1] ^= z.dtype.type(1 << 30) if z.dtype == np.uint64 else z.dtype.type(1)


def highest(z):
    """The highest bit of a ring of the scores, 39 to 44 bits."""
    z.reshape(-1)[0] ^= z.dtype.type(1 << (RING - 1))


def plus_one(z):
    z[...] += z.dtype.type(1)


def nothing(z):
    z[...] = 0


def negative(z):
    z[...] = -z


def double(z):
    z[...] *= z.dtype.type(2)


LIES = [
    ("product", 0, bit),
    ("chain", 0, bit),
    ("chain", 1, top),
    ("chain", -1, bit),
    ("chain", 2, nothing),
    ("chain", 3, negative),
    ("chain", 4, double),
    ("gate", 3, bit),
    ("gate", -1, bit),
    ("hop", 1, bit),
    ("Number", 0, bit),
    ("Number", 1, nothing),
    ("Number", -1, double),
    ("number", 0, bit),
    ("number", 0, highest),
    ("number", 1, highest),
    ("number", 2, plus_one),
    ("number", -1, negative),
    ("Product", -1, bit),  # the correction of a chain
    ("Halves", -1, bit),
    ("Open", -1, bit),
]


def by_everyone(lies):
    for number, lie in enumerate(lies):
        for rank, party in enumerate(SITES[:3]):
            yield pytest.param(party, *lie, marks=[] if rank == number % 3 else [pytest.mark.slow])


@pytest.mark.parametrize(("party", "kind", "at", "change"), list(by_everyone(LIES)))
def test_one_wrong_word_of_a_computing_party_is_detected(party, kind, at, change):
    c = case((9, 8, 7, 6))
    if at < 0:
        engine, seen = counting()
        play(verified_propagation, c, party, engine)
        at += seen[kind]
    engine, lied = liar(kind, at, change)
    run, _ = play(verified_propagation, c, party, engine)
    assert lied
    assert any(isinstance(e, ProtocolAbort) and e.protocol == "verified" for p, e in run.errors.items() if p != party)
    clean, _ = play(verified_propagation, c)
    check_no_errors(clean)
    for p, found in values(run).items():  # an opening to one site may come before a wrong one to another
        if p not in (party, HUB):
            np.testing.assert_array_equal(found.label, values(clean)[p].label)


@pytest.mark.parametrize(("sizes", "party"), [((9, 8, 7), "lugano"), ((6, 5, 6, 5), "zurich"), ((9, 8), "basel")])
@pytest.mark.parametrize("value", [2, 1 << 6, -1])
def test_codes_that_are_not_bits_are_detected(sizes, party, value, monkeypatch):
    """Other words than bits make distances wrap, so that neighbours depend on single bits of the others' codes."""
    c, codes = case(sizes), graph.codes
    mine, unpack = {}, np.unpackbits

    def packed(vectors, planes):
        found = codes(vectors, planes)
        if vectors is c.inputs[Party(party)][0]:
            mine["codes"] = found
        return found

    def bent(x, **options):
        bits = unpack(x, **options)
        if x is mine.get("codes"):
            bits = bits.astype(np.int64)
            bits[0, 0] = value
            bits = bits.view(np.uint64)
        return bits

    monkeypatch.setattr(graph, "codes", packed)
    monkeypatch.setattr(np, "unpackbits", bent)
    run = run_protocol(verified_propagation, c, timeout=10.0)
    monkeypatch.undo()
    assert not {p for p in run.outcomes if p != party}
    assert any(isinstance(e, ProtocolAbort) and e.protocol == "verified" for p, e in run.errors.items() if p != party)


@pytest.mark.parametrize("party", ["basel", "zurich"])
@pytest.mark.parametrize("value", [2, -1, "two"])
def test_labels_that_are_not_labels_are_detected(party, value, monkeypatch):
    """A row with two ones, or with another number than one, weighs more than a label."""
    c, one_hot = case((9, 8, 7, 6)), graph.one_hot
    y = verified_propagation.propagation_terms.label_codes(c.inputs[Party(party)][1], ("type 0", "type 1", "type 2"))

    def bent(labels, n_classes):
        rows = one_hot(labels, n_classes)
        if np.array_equal(labels, y):
            rows[0] = 1 if value == "two" else value
        return rows

    monkeypatch.setattr(graph, "one_hot", bent)
    run = run_protocol(verified_propagation, c, timeout=10.0)
    monkeypatch.undo()
    assert not {p for p in run.outcomes if p != party}


def test_points_of_others_are_charged_before_codes_are_shared():
    c, spent = case((9, 8, 7)), []

    def charge(party, count):
        spent.append((party, count))
        if party == SITES[2]:
            raise ParameterError("the budget is spent")

    c.inputs[SITES[0]] = (*c.inputs[SITES[0]], charge)
    run = run_protocol(verified_propagation, c, timeout=5.0)
    assert spent == [(SITES[1], 8), (SITES[2], 7)]
    assert isinstance(run.errors[SITES[0]], ParameterError)
    assert SITES[0] not in run.outcomes
    assert not [e for e, _ in run.receipts[SITES[0]].entries if e.kind == "sent" and e.protocol == "verified"]


def test_view_does_not_depend_on_points_or_labels():
    """Same sizes and class names, other points and labels: messages of the same kinds, sizes and order."""
    first, second = case(seed=1), case(seed=1)
    for u, (v, labels) in second.inputs.items():
        swapped = [{"type 0": "type 1", "type 1": "type 0"}.get(n, n) for n in labels]
        second.inputs[u] = (v[::-1] * 3, swapped)
    check_view(verified_propagation, first, second)


def test_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(verified_propagation, "BLOCK", 100)
    c = case((9, 8, 7))
    seeds, made = [], graph.hyperplanes
    monkeypatch.setattr(graph, "hyperplanes", lambda seed, *a: (seeds.append(seed), made(seed, *a))[1])
    run = run_protocol(verified_propagation, c)
    check_no_errors(run)
    ideal = verified_propagation.ideal(c.params, c.inputs, seeds[0])
    for u in c.params.sites:
        np.testing.assert_array_equal(values(run)[u].label, ideal[u].label)
        np.testing.assert_array_equal(values(run)[u].scores, ideal[u].scores)


@pytest.mark.parametrize("party", ["basel", "zurich"])
def test_labels_behind_the_points_of_a_site_do_not_count(party, monkeypatch):
    """Words of planes have room for 64 points. Labels there would count as labelled points in H6."""
    c, give, share = case((9, 8, 7, 6)), verified_propagation.Verified.input, verified_propagation._share_labels
    planes = {}

    async def more(self, owner, x, shape, ring):
        if x is not None and owner == party and shape == (3, 64):
            x = x.copy()
            x[0, 40:] = 1
        return await give(self, owner, x, shape, ring)

    async def watched(trio, plan, y):
        planes[trio.rank] = found = await share(trio, plan, y)
        return found

    monkeypatch.setattr(verified_propagation.Verified, "input", more)
    monkeypatch.setattr(verified_propagation, "_share_labels", watched)
    run = run_protocol(verified_propagation, c, timeout=10.0)
    check_no_errors(run)
    opened = planes[0].a ^ planes[1].a ^ planes[2].a
    assert not (opened >> np.uint64(9)).any()


def test_every_site_charges_every_other():
    c, spent = case((9, 8, 7)), {}
    for u in SITES[:3]:
        c.inputs[u] = (*c.inputs[u], lambda v, n, u=u: spent.__setitem__((u, v), n))
    check_no_errors(run_protocol(verified_propagation, c))
    sizes = dict(zip(SITES, (9, 8, 7), strict=False))
    assert spent == {(u, v): sizes[v] for u in sizes for v in sizes if u != v}
