"""Steps over one link: honest parties in any order of arrival, and what a party gets that plays another order."""

import dataclasses
import queue
import threading
import time

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Hello, Welcome
from cloister.mpc.net.multiplex import EARLY, Mailboxes, StepLink
from cloister.mpc.net.wire import Frame
from cloister.rehearsal.run import workflow_part
from cloister.session import take_part
from cloister.study import Party, Step, Study

HUB, A, B, C = map(Party, ("hub", "a", "b", "c"))
PARTIES = {HUB: "coordinator", A: "site", B: "site", C: "site"}
OPTIONS = {"n_bins": 8, "min_values": 50}


def three_steps(timeout=6.0, **changes):
    steps = tuple(
        Step("bin-values", options=OPTIONS | {"key_added": name}, name=name) for name in ("one", "two", "six")
    )
    return Study("s", "", PARTIES, timeout=timeout, steps=changes.pop("steps", steps), **changes)


def cells(seed):
    rng = np.random.default_rng(seed)
    adata = AnnData(sparse.csr_matrix(rng.poisson(1.5, (40, 12)).astype(np.float32)))
    adata.var_names = [f"g{i}" for i in range(12)]
    return adata


class Post:
    """A tagged link in memory; what is late comes 0.1 s later, in the order in which it was sent, as over any link."""

    def __init__(self, me, boxes, late=None):
        self.me, self.boxes, self.late = me, boxes, late
        self.under_way = queue.SimpleQueue()
        if late is not None:
            threading.Thread(target=self.carry, daemon=True).start()

    def post(self, to, frame, tag=b""):
        if self.late is not None and self.late(to, frame):
            self.under_way.put((time.monotonic() + 0.1, to, tag + frame))
        else:
            self.boxes[to].put(self.me, tag + frame)

    def carry(self):
        while True:
            due, to, data = self.under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self.boxes[to].put(self.me, data)


def honest(study):
    return [(part, part.at) for part in study.parts]


def play(study, plans=None, studies=None, late=None, part=workflow_part):
    """Every party plays its plan, a list of (step, tag that it says); returns cells and errors by party."""
    keys = {p: Identity.create(Entropy()) for p in study.parties}
    publics = {p: i.public for p, i in keys.items()}
    mine = {p: (studies or {}).get(p, study).with_keys(publics) for p in study.parties}
    boxes = {p: Mailboxes([part.agreement for part in mine[p].parts], p) for p in study.parties}
    done, errors, receipts = {p: [] for p in study.parties}, {}, {p: [] for p in study.parties}

    def turn(p):
        adata = None if p == HUB else cells(sum(p.encode()))
        post = Post(p, boxes, late)
        try:
            for one, tag in (plans or {}).get(p, honest)(mine[p]):
                outcome = take_part(
                    one,
                    p,
                    StepLink(post, tag),
                    boxes[p].begin(tag),
                    adata,
                    part=part if p == A else workflow_part,
                    identity=keys[p],
                    on_receipt=receipts[p].append,
                )
                done[p].append(one.label)
                adata = outcome.adata
        except BaseException as e:
            errors[p] = e

    threads = [threading.Thread(target=turn, args=(p,), daemon=True) for p in study.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return done, errors, receipts


def test_steps_follow_each_other_over_one_link_each_with_its_receipt():
    study = three_steps()
    done, errors, receipts = play(study)
    assert errors == {}
    assert all(names == ["one", "two", "six"] for names in done.values())
    wholes = {r.header["whole_study"] for each in receipts.values() for r in each}
    assert len(wholes) == 1
    assert [r.header["step"] for r in receipts[A]] == [
        f"step {i} of 3 ({n})" for i, n in ((1, "one"), (2, "two"), (3, "six"))
    ]
    assert len({r.header["study_digest"] for r in receipts[A]}) == 3


def test_whoever_is_slower_finds_what_came_early():
    done, errors, _ = play(three_steps(), late=lambda to, frame: to == B)  # b is always behind
    assert errors == {}
    assert all(len(names) == 3 for names in done.values())


def test_a_party_that_is_long_at_one_step_is_not_taken_for_silent_in_the_next():
    study = three_steps(timeout=1.0)

    def slow(session, adata):
        outcome = workflow_part(session, adata)
        if session.study.at == 1:
            threading.Event().wait(2.5)  # computes on when all others have gone to the next step
        return outcome

    done, errors, _ = play(study, part=slow)
    assert errors == {}
    assert all(len(names) == 3 for names in done.values())


# ---- attacks ---------------------------------------------------------------------------------------------------------


def named(errors, who, *words):
    """All honest parties stopped, and at least one says whose doing it is and at which steps."""
    texts = [str(e) for e in errors.values()]
    assert any(all(word in text for word in (who, *words)) for text in texts), texts
    assert all(isinstance(e, ProtocolAbort) for e in errors.values())


def skips(study):
    return [(part, part.at) for part in study.parts[1:]]


def reorders(study):
    one, two, six = study.parts
    return [(two, 2), (one, 1), (six, 3)]


def test_a_coordinator_that_skips_a_step_is_named_and_nothing_was_sent():
    done, errors, receipts = play(three_steps(), {HUB: skips})
    assert {A, B, C} <= errors.keys()
    assert all(names == [] for names in done.values())
    named(errors, "hub", "order")
    sent = {e.name for p in (A, B, C) for r in receipts[p] for e, _ in r.entries if e.kind == "sent"}
    assert sent <= {"channel.Hello", "channel.Abort"}


def test_a_coordinator_that_exchanges_steps_is_named():
    done, errors, _ = play(three_steps(), {HUB: reorders})
    assert {A, B, C} <= errors.keys()
    assert done[A] == []
    named(errors, "hub", "order")


@pytest.mark.parametrize(
    "lie",
    [
        lambda study: [(study.parts[1], 1), (study.parts[0], 2), (study.parts[2], 3)],  # in the other order,
        lambda study: [(study.parts[0], 1), (study.parts[0], 2), (study.parts[2], 3)],  # twice the same,
        lambda study: [(study.parts[0], 1), (study.parts[2], 2)],  # or one left out, under the numbers that are due
    ],
)
def test_a_coordinator_that_lies_about_the_number_is_named_by_the_digests(lie):
    done, errors, _ = play(three_steps(), {HUB: lie})
    assert {A, B, C} <= errors.keys()
    assert all(len(done[p]) < 2 for p in (A, B, C))
    named(errors, "'hub' is at step", "of 3")


def test_without_the_place_in_the_digest_the_lie_about_the_number_succeeds(monkeypatch):
    """What the digest is for: with the whole study's alone, a coordinator runs the first step twice, unnoticed."""
    monkeypatch.setattr(Study, "digest", property(lambda self: b"one for all".ljust(32)))
    same = tuple(Step("bin-values", options=OPTIONS | {"key_added": n}, name=n) for n in ("one", "two"))
    lie = {HUB: lambda study: [(study.parts[0], 1), (study.parts[0], 2)]}
    done, errors, _ = play(three_steps(steps=same), lie)
    assert errors == {}
    assert done[HUB] == ["one", "one"]


def test_a_coordinator_that_repeats_a_step_is_named():
    def repeats(study):
        return [(study.parts[0], 1), (study.parts[0], 1)]

    done, errors, _ = play(three_steps(timeout=3.0), {HUB: repeats})
    assert {A, B, C} <= errors.keys()
    assert all(names == ["one"] for p, names in done.items() if p != HUB)
    named(errors, "hub")


def box_at(number, me=A):
    boxes = Mailboxes([part.agreement for part in three_steps().parts], me)
    for i in range(1, number + 1):
        boxes.begin(i)
    return boxes


def frame(msg, sender=HUB, to=A, scope="hello/1", kind="data"):
    spec = type(msg).__message__
    return wire.pack(Frame(kind, bytes(16), scope, sender, to, 0, spec.name, wire.to_fields(msg)))


WELCOME = frame(Welcome({HUB: Hello("v", bytes(32), bytes(32), bytes(16))}))


def test_a_welcome_of_a_step_that_is_not_due_is_refused_by_name_at_once():
    boxes = box_at(1)
    boxes.put(HUB, b"\x02" + WELCOME)
    failure = boxes.failed[HUB]
    assert (failure.code, failure.own) == ("order", True)
    assert failure.detail.startswith("'hub' went on to step 2 of 3 (two), and 'a' is at step 1 of 3 (one)")


def test_a_welcome_of_a_step_that_has_ended_is_refused_by_name_at_once():
    boxes = box_at(2)
    boxes.put(HUB, b"\x01" + WELCOME)
    assert boxes.failed[HUB].detail.startswith("'hub' repeats step 1 of 3 (one), and 'a' is at step 2 of 3 (two)")


def test_other_late_messages_are_dropped_and_long_early_ones_refused():
    boxes = box_at(2)
    boxes.put(HUB, b"\x01" + bytes(100_000))
    assert HUB not in boxes.failed
    boxes.put(HUB, b"\x03" + bytes(100_000))
    assert boxes.failed[HUB].code == "order"


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x04x", b"\xff" + WELCOME])
def test_a_step_that_there_is_not_is_refused(data):
    boxes = box_at(1)
    boxes.put(HUB, data)
    assert boxes.failed[HUB].code == "malformed"


def test_only_the_coordinator_gets_hellos_early_and_few_bytes_of_them():
    hello = frame(Hello("v", bytes(32), bytes(32), bytes(16)), sender=A, to=HUB)
    boxes = box_at(1, HUB)
    boxes.put(A, b"\x02" + hello)
    assert A not in boxes.failed
    assert boxes.begin(2).take(A, "hello/1") is not None
    assert boxes._boxes[2].room == EARLY
    other = box_at(1, B)
    other.put(A, b"\x02" + frame(Hello("v", bytes(32), bytes(32), bytes(16)), sender=A, to=B))
    assert other.failed[A].code == "order"


def test_a_site_that_sends_other_things_of_a_later_step_is_refused_and_the_others_are_still_heard():
    boxes = box_at(1, HUB)
    boxes.put(A, b"\x02" + frame(Welcome({}), sender=A, to=HUB, scope="1"))
    boxes.put(A, b"\x02" + bytes(100_000))
    assert boxes.failed[A].code == "order"
    assert B not in boxes.failed


def test_a_party_that_runs_another_list_of_steps_is_named():
    study = three_steps()
    others = {
        "fewer": study.steps[:2],
        "other options": (
            dataclasses.replace(study.steps[0], options=OPTIONS | {"n_bins": 9, "key_added": "one"}),
            *study.steps[1:],
        ),
        "exchanged": (study.steps[1], study.steps[0], study.steps[2]),
        "another mode": (*study.steps[:2], dataclasses.replace(study.steps[2], mode="published")),
    }
    for what, steps in others.items():
        done, errors, receipts = play(study, studies={B: three_steps(steps=steps)})
        assert all(names == [] for names in done.values()), what
        named(errors, "b came with another study file than")
        sent = {e.name for r in receipts[A] for e, _ in r.entries if e.kind == "sent"}
        assert sent <= {"channel.Hello", "channel.Abort"}


def test_a_program_that_runs_a_step_with_other_options_under_the_right_study_is_named():
    def cheats(session, adata):
        if session.study.label == "two":
            part = dataclasses.replace(session.study.steps[1], options=OPTIONS | {"n_bins": 12, "key_added": "two"})
            other = dataclasses.replace(
                session.study.whole, steps=(session.study.steps[0], part, session.study.steps[2])
            )
            session.study = other.parts[1]  # what its session says is still the agreed study
        return workflow_part(session, adata)

    done, errors, _ = play(three_steps(), part=cheats)
    assert all(names == ["one"] for names in done.values())
    named(errors, "a came with other options for this workflow than")
