"""The sixth question: it has to find the holes that a toy protocol has, and none where there is none."""

import dataclasses
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from cloister.arrays import F64, U64
from cloister.disclosure import Rows
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums import secure_sum
from cloister.mpc.sums.signatures import check_signed
from cloister.mpc.testing import lies
from cloister.mpc.testing.lies import Lie, Stage, all_lies, borrowed, changes, one_of_each
from cloister.testing import Case, check_lies, check_no_errors, run_protocol, values

HUB, A, B, C = map(Party, ("hub", "a", "b", "c"))
SITES = (A, B, C)


@message("L1", protocol="toy")
class Value:  # S → u
    x: float
    signature: bytes


@message("L2", protocol="toy")
class Echo:  # u → S, and S → u
    x: float
    signature: bytes


@dataclass(frozen=True)
class Params:
    compared: bool = True


async def hub(ch, params, x, *, identity):
    """Tells all sites one number; they compare, by signatures that the hub hands round."""
    await ch.scatter(SITES, Value(x, b"-"))
    echoes = await ch.gather(SITES, Echo)
    for u in SITES:
        for v in SITES:
            if v != u:
                await ch.send(u, echoes[v])
    return x


async def site(ch, params, *, identity):
    x = (await ch.recv(HUB, Value)).x
    await ch.send(HUB, Echo(x, identity.sign("toy", repr((x, str(ch.me))).encode())))
    for v in SITES:
        if v != ch.me:
            echo = await ch.recv(HUB, Echo)
            if params.compared:
                check_signed(ch, v, "toy", repr((x, str(v))).encode(), echo.signature, protocol="toy", line="L2")
    return x


def toy(doc=""):
    roles = {HUB: hub} | dict.fromkeys(SITES, site)
    return SimpleNamespace(__name__="toy", __doc__=doc, roles=lambda params: roles)


def right(lie, values):
    """All honest parties hold one number; it is the hub's, unless the hub lied."""
    assert len(set(map(repr, values.values()))) <= 1
    if lie.liar != HUB:
        assert set(values.values()) <= {4.0}


def test_a_protocol_that_compares_withstands_every_lie_about_its_value():
    found = check_lies(toy(), [Case(Params(), {HUB: (4.0,)})], right=right, full=True)
    assert found.tried > 15
    assert found.aborted > 8
    assert found.right > 1
    assert found.tried == found.aborted + found.right


def test_a_split_view_that_nobody_compares_is_found():
    case = Case(Params(compared=False), {HUB: (4.0,)})
    with pytest.raises(AssertionError):
        check_lies(toy(), [case], right=right, full=True, only=lambda lie: lie.letter == "a")


def test_an_assumption_must_stand_in_the_docstring_and_excuses_only_that_role():
    case = Case(Params(compared=False), {HUB: (4.0,)})
    with pytest.raises(AssertionError, match="does not say under Assumes"):
        check_lies(toy(), [case], right=right, assumes={"hub": "a"})
    said = toy("Lies that it does not withstand: (a) of the\n    hub.")
    only = {"only": lambda lie: lie.letter == "a", "full": True}
    assert check_lies(said, [case], right=right, assumes={"hub": "a"}, **only).assumed > 0


def test_an_abort_that_depends_on_the_input_of_an_honest_party_is_found():
    async def curious(ch, params, x):
        await ch.scatter(SITES, Value(1.0, b"-"))
        return [(await ch.recv(u, Echo)).x for u in SITES]

    async def touchy(ch, params, limit):
        told = (await ch.recv(HUB, Value)).x
        if told > limit:
            raise ProtocolAbort("toy", "L1", "too-large", "beyond what this site has")
        await ch.send(HUB, Echo(0.0, b"-"))

    roles = {HUB: curious} | dict.fromkeys(SITES, touchy)
    module = SimpleNamespace(__name__="toy", __doc__="", roles=lambda params: roles)
    cases = [Case(Params(), {HUB: (0,)} | dict.fromkeys(SITES, (limit,))) for limit in (1.5, 2.5)]
    with pytest.raises(AssertionError, match="depends on their inputs"):
        check_lies(module, cases, right=lambda lie, values: None, full=True)


def test_an_error_without_a_place_is_found():
    async def careless(ch, params, *, identity):
        if (await ch.recv(HUB, Value)).x != 4.0:
            raise DataError("something else was expected")
        await ch.send(HUB, Echo(4.0, b"-"))
        for _ in range(2):
            await ch.recv(HUB, Echo)

    module = SimpleNamespace(
        __name__="toy", __doc__="", roles=lambda params: {HUB: hub} | dict.fromkeys(SITES, careless)
    )
    with pytest.raises(AssertionError, match="raised DataError"):
        check_lies(module, [Case(Params(), {HUB: (4.0,)})], right=right, full=True)


def test_a_liar_waits_for_who_has_not_come_to_the_scope_yet():
    """A site that was told something else waits under another id; a liar that cannot wait for it would seem caught."""

    async def tells(ch, params):
        await ch.broadcast(SITES, Value(4.0, b"-"))
        await ch.sub("later").scatter(SITES, Echo(5.0, b"-"))

    async def is_slow(ch, params):
        x = (await ch.recv_broadcast(HUB, Value)).x
        time.sleep(0.5)
        await ch.sub("later").recv(HUB, Echo)
        return x

    module = SimpleNamespace(__name__="toy", roles=lambda params: {HUB: tells} | dict.fromkeys(SITES, is_slow))
    stage = Stage(Lie("a", HUB, "toy.Value", A, "x"))
    roles = {p: stage.role(p, r) for p, r in module.roles(None).items()}
    run = run_protocol(module, Case(Params(), {}), roles=roles)
    check_no_errors(run)
    assert [values(run)[u] for u in SITES] == [5.0, 4.0, 4.0]


def test_every_kind_of_value_has_something_else_to_say():
    key = secure_sum.Keys(b"1", b"2", b"3")
    for value in (True, 3, 2.5, "x", b"x", (1, 2), {"a": 1}, key, np.arange(3.0), np.arange(3, dtype=np.uint64)):
        for other in changes(value):
            assert type(other) is type(value)
            assert not lies._equal(other, value)
        assert changes(value)
    assert changes(None) == changes(()) == changes(b"") == changes({}) == changes(np.zeros(0)) == []
    assert np.isnan(changes(np.arange(3.0))[1][0])
    assert borrowed(key, []).c_pk == b"2"
    assert borrowed(key, [key]).c_pk == b"2"
    assert borrowed(Value(1.0, b""), []) is None


def test_each_letter_occurs_and_a_short_list_has_every_message():
    stage = Stage()
    roles = {p: stage.role(p, r) for p, r in toy().roles(None).items()}
    run_protocol(toy(), Case(Params(), {HUB: (4.0,)}), roles=roles)
    whole = list(all_lies(stage.said, {HUB: hub, A: site}, {HUB}))
    assert {lie.letter for lie in whole} == set(lies.LETTERS) - {"h", "k"}  # the toy sends no words, and opens no sum
    short = list(one_of_each(iter(whole)))
    assert {(lie.liar, lie.name) for lie in short} == {(lie.liar, lie.name) for lie in whole}
    assert len(short) < len(whole) / 2
    assert str(Lie("d", HUB, "toy.Echo", A)) == "(d) 'hub' toy.Echo, number 0, a"


def test_arrays_of_the_wire_can_be_compared():
    @message("L9", protocol="toy")
    class Arrays:
        f: F64
        u: U64

    one = Arrays(np.zeros(2), np.zeros(2, np.uint64))
    assert borrowed(one, [Arrays(np.zeros(2), np.zeros(2, np.uint64))]) is None
    assert borrowed(one, [Arrays(np.ones(2), np.zeros(2, np.uint64))]).f[0] == 1


@message("L9", protocol="toy")
class Words:
    z: U64
    share: float
    count: int
    by_site: dict[str, F64]


WORDS = Words(np.arange(3, dtype=np.uint64), 0.5, 7, {"a": np.ones(2)})


def test_a_scaled_message_has_all_its_numbers_scaled():
    """Words modulo 2^64; counts only where a field is scaled alone."""
    minus = lies.scaled(WORDS, -1)
    assert minus.z.dtype == np.uint64
    assert minus.z.tolist() == [0, 2**64 - 1, 2**64 - 2]
    assert (minus.share, minus.count, minus.by_site["a"].tolist()) == (-0.5, 7, [-1, -1])
    assert lies.scaled(WORDS, 0).z.tolist() == [0, 0, 0]
    assert lies.scaled(WORDS.count, 2, counts=True) == 14
    assert lies.scaled(True, 0, counts=True) is True
    assert lies.scaled(scipy.sparse.csr_matrix(np.eye(2)), 2).toarray().tolist() == [[2, 0], [0, 2]]


def test_a_prime_is_added_to_the_first_word_of_an_array_of_words():
    added = [int(lies.plus_prime(WORDS.z, prime)[0]) for prime in lies.PRIMES]
    assert added == [p % 2**64 for p in lies.PRIMES]
    assert lies.plus_prime(np.ones(2), 7) is None
    assert lies.plus_prime(np.ones(2, np.uint8), 7) is None


def test_received_values_become_own_ones():
    other = Value(5.0, b"12")
    assert lies.received_as_own(Value(4.0, b"34"), [WORDS, other]) is other
    assert lies.received_as_own(Echo(4.0, b"34"), [other]).signature == b"12"
    mine = dataclasses.replace(WORDS, z=WORDS.z + np.uint64(1), by_site={})
    assert lies.received_as_own(mine, [WORDS]) is WORDS
    assert lies.received_as_own(Value(4.0, b"3"), [other]) is other
    assert lies.received_as_own(Echo(4.0, b"3"), [WORDS, other]) is None


def test_special_lies_change_a_message_for_all_or_for_one():
    found = list(lies._special_lies(HUB, "toy.Words", A, WORDS, 0))
    assert {(lie.letter, lie.field) for lie in found} >= {("g", ""), ("g", "z"), ("g", "count"), ("h", "z")}
    assert {lie.to for lie in found} == {None, A}
    assert {lie.general for lie in found} == {"a", "b"}
    for lie in found:
        other = Stage(lie)._special(WORDS)
        assert other is not None
        assert not lies._same(other, WORDS)


def test_replays_of_this_run_and_received_values_are_sent():
    """The hub sends the sites' echoes on: under (i) its second to a site is the first once more."""
    stage = Stage(Lie("i", HUB, "toy.Echo", nth=1))
    roles = {p: stage.role(p, r) for p, r in toy().roles(None).items()}
    run = run_protocol(toy(), Case(Params(), {HUB: (4.0,)}), roles=roles, timeout=2.0)
    assert stage.lied
    assert {run.errors[u].code for u in SITES if not run.errors[u].heard} == {"signature"}


def test_a_protocol_that_adds_up_what_a_site_claims_is_tried_with_other_inputs():
    """(j): the honest parties' result has to be that of the inputs that were used."""

    async def adds(ch, params, x):
        total = x + sum([(await ch.recv(u, Echo)).x for u in SITES])
        await ch.scatter(SITES, Value(total, b"-"))
        return total

    async def claims(ch, params, x):
        await ch.send(HUB, Echo(x, b"-"))
        return (await ch.recv(HUB, Value)).x

    module = SimpleNamespace(
        __name__="toy", __doc__="", roles=lambda params: {HUB: adds} | dict.fromkeys(SITES, claims)
    )
    case = Case(Params(), {HUB: (0.0,)} | {u: (float(i),) for i, u in enumerate(SITES, 1)})
    seen = []

    def right(lie, values):
        seen.append(lie.case.inputs[A])
        assert set(values.values()) == {sum(x for (x,) in lie.case.inputs.values())}

    only = {"only": lambda lie: lie.letter == "j", "full": True, "liars": (A,)}
    assert check_lies(module, [case], right=right, **only).right == 3
    assert seen == [(1000.0,), (-1.0,), (0.0,)]

    def of_the_first_case(lie, values):
        assert set(values.values()) == {6.0}

    with pytest.raises(AssertionError):
        check_lies(module, [case], right=of_the_first_case, **only)


def test_a_site_contributes_something_else_after_its_own_checks():
    """(k): what `Channel.contribute` hands over is inflated, negated or zeroed, one contribution at a time."""

    async def adds(ch, params):
        total = 0.0
        for _ in range(2):
            total += sum([(await ch.recv(u, Echo)).x for u in SITES])
        await ch.scatter(SITES, Value(total, b"-"))
        return total

    async def claims(ch, params, x):
        rows = Rows(20)
        for line in ("L1", "L2"):
            part = rows.whole(np.array([x]))
            value = ch.contribute(part, protocol="toy", line=line, what="a number")
            await ch.send(HUB, Echo(float(value[0]), b"-"))
        return (await ch.recv(HUB, Value)).x

    module = SimpleNamespace(
        __name__="toy", __doc__="", roles=lambda params: {HUB: adds} | dict.fromkeys(SITES, claims)
    )
    case = Case(Params(), {u: (float(i),) for i, u in enumerate(SITES, 1)})
    seen = {}

    def right(lie, values):
        (seen[str(lie)],) = set(values.values())

    found = check_lies(module, [case], right=right, only=lambda lie: lie.letter == "k", full=True, liars=(A,))
    assert found.right == 6
    assert seen["(k) 'a' toy L1 inflated, number 0"] == 12 + 999
    assert seen["(k) 'a' toy L2 negated, number 1"] == 12 - 2
    assert seen["(k) 'a' toy L2 zeroed, number 1"] == 12 - 1
