"""The sealed link without FLARE: a relay in memory that loses, repeats, alters and delays."""

from __future__ import annotations

import random
import threading
import time

import pytest

from cloister.deploy import link as links
from cloister.deploy.link import BATCH, REFUSED, Absent, SealedLink, Unreachable
from cloister.errors import ParameterError
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.wire import Frame
from cloister.study import Party, Study

A, B = Party("basel"), Party("hub")
FIRST = b"first" * 60


class Box(Mailbox):
    """A mailbox that only collects."""

    def __init__(self, me: Party) -> None:
        super().__init__(me)
        self.got: list[tuple[Party, bytes]] = []
        self.lost: dict[Party, str] = {}
        self.news = threading.Event()

    def put(self, sender: Party, data: bytes) -> None:
        self.got.append((sender, data))
        self.news.set()

    def gone(self, party: Party, why: str) -> None:
        self.lost.setdefault(party, why)
        self.news.set()

    def wait_for(self, done) -> None:
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end, (len(self.got), self.lost)
            self.news.wait(0.1)
            self.news.clear()


class Pair:
    """Two parties; `meddle(to, request)` stands in the middle and may raise, or return other bytes."""

    def __init__(
        self, meddle=lambda to, request, forward: forward(request), timeout=60.0, keys=None, statement=b""
    ) -> None:
        identities = self.identities = {p: Identity.create(Entropy()) for p in (A, B)}
        self.study = Study(
            "pair",
            "chat",
            {A: "site", B: "coordinator"},
            timeout=timeout,
            keys=keys or {p: i.public for p, i in identities.items()},
        )
        self.boxes = {p: Box(p) for p in (A, B)}

        def ask_as(me):
            def ask(to, request, seconds):
                return meddle(to, request, lambda r: self.links[to].answer(me, r))

            return ask

        self.links = {
            p: SealedLink(self.study, p, "run-1", identities[p], self.boxes[p], ask_as(p), Entropy(), statement)
            for p in (A, B)
        }
        for one in self.links.values():
            one.start()

    def meet(self) -> None:
        """Until both have greeted and something went through; a greeting alone may be the other's, and ours to come."""
        assert self.links[A].meet(60) == ()
        self.links[A].post(B, FIRST)
        self.boxes[B].wait_for(lambda: self.boxes[B].got)

    def close(self) -> None:
        for one in self.links.values():
            one.stop("over", seconds=0.2)
            one.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(links, "JOIN", 1.0)


def test_frames_arrive_once_and_in_order():
    pair = Pair()
    assert pair.links[A].meet(60) == ()
    sent = [random.Random(i).randbytes(i * 37) for i in range(300)]
    for frame in sent:
        pair.links[A].post(B, b"x" * 256 + frame)
    pair.links[A].close()
    assert pair.boxes[B].got == [(A, b"x" * 256 + frame) for frame in sent]
    pair.close()


def test_a_frame_larger_than_a_batch_travels_in_pieces():
    pair = Pair()
    pair.links[A].meet(60)
    large = random.Random(0).randbytes(3 * links.MOST + 5)
    pair.links[A].post(B, large)
    pair.links[A].post(B, b"y" * 300)
    pair.links[A].close()
    assert [data for _, data in pair.boxes[B].got] == [large, b"y" * 300]
    pair.close()


def test_a_lossy_relay_loses_nothing():
    dice, lock = random.Random(1), threading.Lock()

    def meddle(to, request, forward):
        with lock:
            throw = dice.random()
        if throw < 0.2:
            raise TimeoutError  # lost on the way there
        answer = forward(request)
        if throw < 0.4:
            raise TimeoutError  # lost on the way back: it will be sent again
        if throw < 0.5:
            forward(request)  # delivered twice
        return answer

    pair = Pair(meddle)
    pair.links[A].meet(60)
    for i in range(40):
        pair.links[A].post(B, b"%300d" % i)
        time.sleep(0.005)
    pair.links[A].close()
    assert [int(data) for _, data in pair.boxes[B].got] == list(range(40))
    pair.close()


def test_pulses_pass_a_long_frame():
    posted = threading.Event()

    def meddle(to, request, forward):
        if request[:1] == BATCH:
            posted.wait()
        return forward(request)

    pair = Pair(meddle)
    pair.links[A].meet(60)
    pair.links[A].post(B, bytes(1 << 21))  # more than may be on its way at once
    pulse = wire.pack(Frame("pulse", bytes(16), "", A, B, 0, "pulse", True))
    pair.links[A].post(B, pulse)
    posted.set()
    pair.boxes[B].wait_for(lambda: len(pair.boxes[B].got) == 2)
    assert pair.boxes[B].got[0] == (A, pulse)
    pair.close()


def test_what_the_relay_alters_is_refused_and_sent_again():
    altered = []

    def meddle(to, request, forward):
        if request[:1] == BATCH and len(altered) < 3:
            altered.append(forward(request[:-1] + bytes([request[-1] ^ 1])))
        return forward(request)

    pair = Pair(meddle)
    pair.links[A].meet(60)
    pair.links[A].post(B, b"z" * 300)
    pair.links[A].close()
    assert altered
    assert set(altered) == {REFUSED}
    assert pair.boxes[B].got == [(A, b"z" * 300)]
    pair.close()


def test_the_relay_sees_no_frame():
    seen = []

    def meddle(to, request, forward):
        seen.append(request)
        return forward(request)

    pair = Pair(meddle)
    pair.links[A].meet(60)
    pair.links[A].post(B, b"expression" * 100)
    pair.links[A].close()
    assert pair.boxes[B].got
    assert not any(b"expression" in request for request in seen)
    pair.close()


def test_who_has_another_key_than_the_study_says_is_given_up(quick):
    strangers = {p: Identity.create(Entropy()).public for p in (A, B)}
    pair = Pair(keys=strangers)
    assert pair.links[A].meet(1.5) == (B,)
    assert B in pair.boxes[A].lost
    pair.close()


def test_a_batch_of_one_party_does_not_pass_as_anothers():
    requests = []

    def meddle(to, request, forward):
        requests.append((to, request))
        return forward(request)

    pair = Pair(meddle)
    pair.links[A].meet(60)
    pair.links[A].post(B, b"a" * 300)
    pair.links[A].close()
    batch = next(r for to, r in requests if to == B and r[:1] == BATCH)
    assert pair.links[A].answer(B, batch) == REFUSED  # reflected
    assert pair.links[B].answer(Party("nobody"), batch) == REFUSED
    assert pair.boxes[A].got == []
    pair.close()


def test_a_party_without_a_connection_is_lost_after_a_while():
    cut = threading.Event()

    def meddle(to, request, forward):
        if cut.is_set():
            raise Unreachable
        return forward(request)

    pair = Pair(meddle, timeout=4.0)
    pair.meet()
    cut.set()
    began = time.monotonic()
    pair.links[A].post(B, b"q" * 300)
    pair.boxes[A].wait_for(lambda: B in pair.boxes[A].lost)
    assert time.monotonic() - began > 2.4  # two thirds of the timeout are forgiven,
    assert "connection ended" in pair.boxes[A].lost[B]  # and this, not the timeout, is what ended it
    pair.links[A].post(B, b"q" * 300)  # goes nowhere, and waits for nothing
    pair.close()


def test_a_process_that_is_still_starting_is_waited_for():
    began = time.monotonic()

    def meddle(to, request, forward):
        if time.monotonic() - began < 1.5:
            raise Unreachable  # longer than a connection may be away later on
        return forward(request)

    pair = Pair(meddle, timeout=2.0)
    assert pair.links[A].meet(60) == ()
    pair.close()


def test_whose_service_is_gone_is_not_waited_for():
    def meddle(to, request, forward):
        raise Absent

    pair = Pair(meddle, timeout=2.0)
    assert pair.links[A].meet(60) == (B,)
    assert "connection ended" in pair.boxes[A].lost[B]  # not: it did not come within 60 s
    pair.close()


def test_a_short_interruption_is_forgiven():
    cut, refused = threading.Event(), threading.Semaphore(0)

    def meddle(to, request, forward):
        if cut.is_set():
            refused.release()
            raise Unreachable
        return forward(request)

    pair = Pair(meddle)
    pair.meet()
    cut.set()
    pair.links[A].post(B, b"q" * 300)
    for _ in range(3):
        assert refused.acquire(timeout=60)
    cut.clear()
    pair.links[A].close()
    assert pair.boxes[B].got == [(A, FIRST), (A, b"q" * 300)]
    pair.close()


def test_who_never_answers_is_lost_after_the_timeout():
    def meddle(to, request, forward):
        if request[:1] == BATCH:
            raise TimeoutError
        return forward(request)

    pair = Pair(meddle, timeout=1.0)
    pair.links[A].post(B, b"q" * 300)
    pair.boxes[A].wait_for(lambda: B in pair.boxes[A].lost)
    assert "not answered for 1 s" in pair.boxes[A].lost[B]
    pair.close()


def test_random_requests_are_refused_and_break_nothing():
    pair = Pair()
    pair.links[A].meet(60)
    dice = random.Random(2)
    for kind in (b"G", b"B", b"P", b"", b"?"):
        for n in (0, 1, 31, 32, 96, 200):
            answer = pair.links[B].answer(A, kind + dice.randbytes(n))
            assert answer == (links.TAKEN if kind == b"P" else REFUSED)
    pair.links[A].post(B, b"r" * 300)
    pair.links[A].close()
    assert pair.boxes[B].got == [(A, b"r" * 300)]
    pair.close()


def test_a_frame_that_never_ends_is_bounded(monkeypatch):
    """A peer sends pieces of one frame for ever: the receiver stops at its room, and names the sender."""
    pair = Pair()
    pair.boxes[B].room = 1 << 20
    pair.links[A].meet(60)
    pair.links[A].post(B, bytes(4 << 20))
    pair.boxes[B].wait_for(lambda: A in pair.boxes[B].failed)
    assert pair.boxes[B].failed[A].code == "flood"
    pair.boxes[B].wait_for(lambda: not pair.boxes[B]._held[A])  # given back a moment later
    assert not pair.links[B]._peers[A].parts
    pair.close()


def test_a_batch_that_is_no_list_of_pieces_is_its_senders_failure(monkeypatch):
    pair = Pair()
    pair.links[A].meet(60)
    monkeypatch.setattr(links, "_piece", lambda kind, data: (bytes((kind,)) + (1 << 30).to_bytes(4, "big"), data))
    pair.links[A].post(B, b"x" * 300)
    pair.boxes[B].wait_for(lambda: A in pair.boxes[B].failed)
    assert pair.boxes[B].failed[A].code == "malformed"
    pair.close()


def test_whose_process_has_ended_is_lost_at_once():
    ended = threading.Event()

    def meddle(to, request, forward):
        if ended.is_set():
            raise links.Over
        return forward(request)

    pair = Pair(meddle)
    pair.meet()
    ended.set()
    pair.links[A].post(B, b"q" * 300)
    pair.boxes[A].wait_for(lambda: B in pair.boxes[A].lost)
    assert pair.boxes[A].lost[B] == "its process ended"  # nothing was forgiven, and no timeout waited for
    pair.close()


def test_a_study_without_keys_cannot_be_linked():
    study = Study("pair", "chat", {A: "site", B: "coordinator"})
    with pytest.raises(ParameterError, match="\\[keys\\] has none for basel, hub"):
        SealedLink(study, A, "r", Identity.create(Entropy()), Box(A), lambda *_: b"", Entropy())


def test_a_batch_does_not_pass_under_another_number():
    """Who stands in the middle keeps the first batch and sends it once more as the next one."""
    requests = []

    def meddle(to, request, forward):
        requests.append((to, request))
        return forward(request)

    pair = Pair(meddle)
    pair.links[A].meet(60)
    pair.links[A].post(B, b"a" * 300)
    pair.links[A].close()  # it is answered: the next one is due
    first = next(r for to, r in requests if to == B and r[:1] == BATCH)
    due = pair.links[B]._peers[A].due
    answer = pair.links[B].answer(A, BATCH + due.to_bytes(8, "big") + first[9:])
    assert answer == REFUSED
    assert [data for _, data in pair.boxes[B].got].count(b"a" * 300) == 1
    pair.close()


def test_a_process_that_greeted_and_ended_before_it_was_greeted_is_lost():
    """Its service was started again meanwhile and does not know the run: the others waited for their timeout."""
    ended = threading.Event()

    def meddle(to, request, forward):
        if to == B and request[:1] == links.GREETING:
            ended.wait(60)
            raise links.Over
        if ended.is_set():
            raise links.Over
        return forward(request)

    pair = Pair(meddle)
    pair.boxes[A].wait_for(lambda: pair.links[A]._peers[B].key is not None)  # its greeting came
    ended.set()
    pair.boxes[A].wait_for(lambda: B in pair.boxes[A].lost)
    assert pair.boxes[A].lost[B] == "its process ended"
    pair.close()


# ---- statements ------------------------------------------------------------------------------------------------------


def test_a_statement_travels_with_the_greeting_and_only_as_its_party_signed_it():
    """Who stands in the middle changes what is stated, cuts it off, or adds to it; the honest greeting goes through."""
    altered = []

    def meddle(to, request, forward):
        if request[:1] == links.GREETING:
            altered.extend(map(forward, (request[:-1] + b"x", request[:-3], request + b"x")))
        return forward(request)

    pair = Pair(meddle, statement=b"finished: 2")
    pair.meet()
    assert altered
    assert set(altered) == {REFUSED}
    assert {p: one.statements for p, one in pair.links.items()} == {A: {B: b"finished: 2"}, B: {A: b"finished: 2"}}
    pair.close()


def test_a_party_that_states_two_things_in_one_run_is_refused():
    pair = Pair(statement=b"finished: 2")
    pair.meet()
    other = SealedLink(
        pair.study, A, "run-1", pair.identities[A], Box(A), lambda *_: b"", Entropy(), statement=b"finished: 1"
    )
    assert pair.links[B].answer(A, links.GREETING + other._greeting) == REFUSED
    assert pair.links[B].statements == {A: b"finished: 2"}
    pair.close()
