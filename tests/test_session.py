import asyncio
import json
import threading

import numpy as np
import pytest

from cloister.errors import DataError, PeerLost, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, check_signature
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.receipts import UNDECLARED
from cloister.mpc.net.wire import message
from cloister.rehearsal.rehearsal import MemoryLink, Wires, run_parties
from cloister.session import SIGNED, Outcome, root_cause, take_part
from cloister.study import CONSENTS, Party, Study

HUB, A, B = map(Party, ("hub", "a", "b"))
STUDY = Study(name="test", workflow="toy", parties={HUB: "coordinator", A: "site", B: "site"}, timeout=20.0, seed=5)


@message("L1", protocol="toy")
class Note:
    text: str


async def role(ch, params):
    others = [p for p in ch.agreement.parties if p != ch.me]
    await ch.scatter(others, Note(ch.me))
    return {p: m.text for p, m in (await ch.gather(others, Note)).items()}


def every(part):
    return dict.fromkeys(STUDY.parties, part)


def test_a_role_gets_what_its_signature_names():
    seen = {}

    async def wants(ch, params, x, *, entropy, identity, rng):
        seen[ch.me] = (x, entropy, identity, rng)

    async def wants_nothing(ch, params, x):
        seen[ch.me] = x

    def part(session, data):
        session.run(wants if session.me == A else wants_nothing, "p", 7)
        return Outcome()

    run = run_parties(STUDY, every(part), {})
    assert run.errors == {}
    x, entropy, identity, rng = seen[A]
    assert (x, seen[HUB], seen[B]) == (7, 7, 7)
    assert isinstance(entropy, Entropy)
    assert identity.public == run.study.keys[A]
    assert isinstance(rng, np.random.Generator)


def test_statistical_randomness_repeats_and_differs_by_party_label_and_seed():
    def draws(seed):
        found = {}

        def part(session, _):
            found.update({(session.me, label): session.rng(label).integers(2**62) for label in ("", "x")})
            return Outcome()

        run_parties(Study("test", "toy", STUDY.parties, seed=seed), every(part), {})
        return found

    first = draws(5)
    assert draws(5) == first
    assert len(set(first.values())) == 6
    assert not set(draws(6).values()) & set(first.values())


def test_a_seat_knows_its_place():
    def part(session, data):
        return Outcome(result={"role": session.role, "me": session.me, "data": data})

    run = run_parties(STUDY, every(part), {A: 1, B: 2})
    assert run.results == {
        HUB: {"role": "coordinator", "me": HUB, "data": None},
        A: {"role": "site", "me": A, "data": 1},
        B: {"role": "site", "me": B, "data": 2},
    }


def test_a_run_works_inside_a_running_loop_as_in_a_notebook():
    def part(session, _):
        async def cell():
            return session.run(role, None)

        return Outcome(result=asyncio.run(cell()) if session.me == A else session.run(role, None))

    run = run_parties(STUDY, every(part), {})
    assert run.errors == {}
    assert run.results[A] == {HUB: HUB, B: B}


def test_a_finished_run_leaves_a_signed_receipt_with_the_terms():
    run = run_parties(STUDY, every(lambda session, _: Outcome(result=session.run(role, None))), {})
    for p, receipt in run.receipts.items():
        receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
        assert receipt.signature["public"] == run.study.keys[p].hex()
        header = receipt.header
        assert (header["party"], header["study"], header["workflow"], header["role"]) == (
            p,
            "test",
            "toy",
            STUDY.parties[p],
        )
        assert header["study_digest"] == run.study.digest.hex()
        assert receipt.status == "done"
        json.loads(receipt.brief())
        assert run.outcomes[p].receipt is receipt
        cost = run.cost[p]
        sent = [e for e, _ in receipt.entries if e.kind == "sent"]
        assert (cost["messages"], cost["bytes"]) == (len(sent), sum(e.bytes for e in sent))
        assert cost["rounds"] >= 2
        assert cost["seconds"] >= cost["cpu_seconds"] * 0.5


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ProtocolAbort("toy", "L3", "shares", "secret 31415926"), "aborted: toy L3 shares"),
        (ValueError("secret 31415926"), "aborted: ValueError"),
        (DataError("secret 31415926"), "aborted: DataError"),
    ],
)
def test_a_failed_run_leaves_a_signed_receipt_too_and_no_thread(error, status):
    def part(session, _):
        if session.me == A:
            raise error
        return Outcome(result=session.run(role, None))

    before = threading.active_count()
    run = run_parties(STUDY, every(part), {})
    assert run.errors[A] is error
    receipt = run.receipts[A]
    assert receipt.status == status
    receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
    assert "31415926" not in json.dumps(receipt.to_json())
    assert threading.active_count() == before
    for p in (HUB, B):
        assert run.receipts[p].status.startswith("aborted: ")


def alone(part, adata=None, **options):
    box = Mailbox(A)
    wires = Wires(lambda sender, to, frame: None)
    return take_part(STUDY, A, MemoryLink(A, wires), box, adata, part=part, **options)


def test_a_part_that_returns_no_outcome_is_an_error_and_ends_the_session():
    before = threading.active_count()
    kept = []
    with pytest.raises(AttributeError):
        alone(lambda session, _: None, on_receipt=kept.append)
    assert kept[0].status == "aborted: AttributeError"
    assert threading.active_count() == before


def test_cells_may_be_read_while_the_pulse_is_running():
    seen = []

    def read():
        seen.extend(t.name for t in threading.enumerate())
        return "cells"

    assert alone(lambda session, adata: Outcome(result={"got": adata}), read).result == {"got": "cells"}
    assert "pulse-a" in seen

    def fails():
        raise DataError("the file is damaged")

    kept = []
    with pytest.raises(DataError, match="damaged"):
        alone(lambda session, adata: Outcome(), fails, on_receipt=kept.append)
    assert kept[0].status == "aborted: DataError"


def test_the_receipt_says_where_results_were_written():
    from anndata import AnnData

    def part(session, adata):
        adata.obs["score"] = 1.0
        adata.layers["binned"] = adata.X
        adata.uns.setdefault("cloister", {})["edges"] = np.arange(3)
        return Outcome(adata)

    adata = AnnData(np.ones((3, 2), np.float32))
    adata.obs["kept"] = "x"
    adata.uns["cloister"] = {"earlier": "{}"}
    outcome = alone(part, adata)
    written = [e.name for e, _ in outcome.receipt.entries if e.kind == "written"]
    assert written == ["layers['binned']", "obs['score']", "uns['cloister']['edges']"]
    assert json.loads(outcome.adata.uns["cloister"]["toy"])["status"] == "done"


def test_the_same_identity_signs_every_receipt_of_a_party():
    me = Identity.create(Entropy())
    outcome = alone(lambda session, _: Outcome(), identity=me)
    assert outcome.receipt.signature["public"] == me.public.hex()


def heard(e):
    e.heard = True
    return e


BUG, DATA = ZeroDivisionError("x"), DataError("x")
OWN, TOLD = ProtocolAbort("p", "L1", "mixed-values", "a: counts, b: log"), heard(ProtocolAbort("p", "L1", "x"))
LATE, LATE_TOLD = PeerLost("p", "L1", "timeout", "y"), heard(PeerLost("p", "L1", "timeout", "z"))


@pytest.mark.parametrize("order", [1, -1])
def test_the_root_cause_is_a_partys_own_error_before_one_it_heard_of(order):
    ranked = [BUG, DATA, OWN, TOLD, LATE, LATE_TOLD]
    for i, first in enumerate(ranked):
        rest = ranked[i:][::order]
        assert root_cause({Party(f"p{k}"): e for k, e in enumerate(rest)}) is first


def test_a_receipt_ends_with_the_protocols_that_ran_and_nothing_else():
    """Declared and never run is left out; run and never declared is said. Before, the header told what was imported."""
    declared = {"toy": "all : each other's notes", "never": "all : everything"}
    run = run_parties(STUDY, every(lambda session, _: Outcome(result=session.run(role, "p"))), {}, reveals=declared)
    assert run.errors == {}
    ran = {"toy": declared["toy"], "test_session": UNDECLARED}
    for receipt in run.receipts.values():
        assert receipt.reveals == ran
        assert receipt.header["protocols"] == ["toy", "never"]
        assert [e.kind for e, _ in receipt.entries][-3:] == ["ran", "ran", "result"]
        assert json.loads(receipt.brief())["reveals"] == ran
        assert "ran" not in {row["kind"] for row in receipt.summary()}


def test_consent_comes_from_the_seat_and_is_nothing_unless_given():
    seen = {}

    async def asks(ch, params, *, consent):
        seen[ch.me] = consent

    def part(session, data):
        session.run(asks, "p")
        return Outcome()

    run_parties(STUDY, every(part), {}, consent={A: frozenset({"open-model"}), B: frozenset()})
    assert seen == {HUB: frozenset(CONSENTS), A: {"open-model"}, B: frozenset()}

    def look(session, data):
        return Outcome(result={"consent": sorted(session.consent)})

    assert alone(look).result == {"consent": []}
