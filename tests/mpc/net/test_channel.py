import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from cloister.arrays import U64
from cloister.errors import ParameterError, PeerLost, ProtocolAbort
from cloister.mpc.net import channel, mailbox, wire
from cloister.mpc.net.channel import NO_RUN, Channel, Endpoint, Hello, Welcome
from cloister.mpc.net.mailbox import COMPUTING, PATIENT, WAITING, Mailbox
from cloister.mpc.net.receipts import Receipt
from cloister.mpc.net.wire import Frame, message
from cloister.rehearsal.rehearsal import Fault, MemoryLink, Wires
from cloister.session import Outcome, take_part
from cloister.study import Party, Study

HUB, A, B, C = map(Party, ("hub", "a", "b", "c"))
RUN = bytes(range(32))
LONG = 30.0  # seconds: a timeout that must not matter


@message("L1", protocol="toy")
class Ping:
    y: U64


@message("L2", protocol="toy")
class Pong:
    n: int


def study(*sites, **changes):
    parties = {HUB: "coordinator"} | dict.fromkeys(sites or (A, B, C), "site")
    return Study(name="test", workflow="toy", parties=parties, **({"timeout": LONG} | changes))


# ---- one party, and frames made by hand ------------------------------------------------------------------------------


class Tape:
    """A link that keeps what is posted."""

    def __init__(self):
        self.frames, self.closed = [], False

    def post(self, to, frame):
        self.frames.append((to, wire.unpack(frame)))

    def close(self):
        self.closed = True

    def of(self, kind):
        return [(to, f) for to, f in self.frames if f.kind == kind]


@contextlib.contextmanager
def seated(me=HUB, link=None, **options):
    box, tape = Mailbox(me), link or Tape()
    endpoint = Endpoint(study(**options).agreement, me, tape, box, Receipt({}), nonce=bytes)
    try:
        yield endpoint, box, tape
    finally:
        endpoint.close()


def ping(seq=0, sender=A, to=HUB, run=RUN[:16], scope="1", y=(1, 2, 3), **changes):
    msg = Ping(np.array(y, dtype=np.uint64))
    made = Frame("data", run, scope, sender, to, seq, "toy.Ping", wire.to_fields(msg))
    return wire.pack(dataclasses.replace(made, **changes))


def control(kind, body, sender=A, to=HUB):
    return wire.pack(Frame(kind, NO_RUN, "", sender, to, 0, kind, body))


async def get(ch, frm=A, n=3):
    return (await ch.recv(frm, Ping, y=(n,))).y


def received(endpoint, count=1, n=3):
    async def role():
        ch = Channel(endpoint, "1", RUN)
        return [await get(ch, n=n) for _ in range(count)]

    return endpoint.drive(role())


def test_a_message_arrives_with_its_shape_checked():
    with seated() as (endpoint, box, _):
        box.put(A, ping(0))
        box.put(A, ping(1, y=(4, 5, 6)))
        first, second = received(endpoint, 2)
        np.testing.assert_array_equal(first, [1, 2, 3])
        np.testing.assert_array_equal(second, [4, 5, 6])


FORGED = {
    "replayed": ([ping(0), ping(0)], "replay"),
    "replayed later": ([ping(0), ping(1), ping(0)], "replay"),
    "out of order": ([ping(1), ping(0)], "gap"),
    "one lost": ([ping(0), ping(2)], "gap"),
    "a negative number": ([ping(-1)], "replay"),
    "of another sender": ([ping(sender=B)], "malformed"),
    "to another party": ([ping(to=B)], "malformed"),
    "of another run": ([ping(run=bytes(16))], "mismatch"),
    "of another message": ([ping(name="toy.Pong", body={"n": 1})], "unexpected"),
    "of no message": ([ping(name="toy.Nothing", body={})], "unexpected"),
    "of another shape": ([ping(y=(1, 2))], "malformed"),
    "of two axes": ([ping(y=((1, 2, 3),))], "malformed"),
    "of another dtype": ([ping(body={"y": ["<i8", [3], bytes(24)]})], "malformed"),
    "without its field": ([ping(body={})], "malformed"),
    "with one more field": ([ping(body={"y": ["<u8", [3], bytes(24)], "z": 1})], "malformed"),
    "cut short": ([ping()[:-1]], "malformed"),
    "random": ([b"\x99random bytes"], "malformed"),
    "empty": ([b""], "malformed"),
    "a pulse that says nothing": ([control("pulse", 7)], "malformed"),
    "a pulse that is not a number": ([control("pulse", True)], "malformed"),
    "an abort without place": ([control("abort", ["x"])], "malformed"),
    "an abort with numbers": ([control("abort", ["x", "y", 1])], "malformed"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_frame_that_is_wrong_aborts_with_its_code(what):
    frames, code = FORGED[what]
    with seated() as (endpoint, box, _):
        for data in frames:
            box.put(A, data)
        with pytest.raises(ProtocolAbort) as e:
            received(endpoint, len(frames) + 1)
        assert e.value.code == code
        assert (e.value.protocol, e.value.line) == ("toy", "L1")
        assert not e.value.heard


def test_a_frame_under_another_scope_waits_until_that_scope_is_read():
    with seated() as (endpoint, box, _):
        ch = Channel(endpoint, "1", RUN)
        sub = ch.sub("later", {"n": 1})
        box.put(A, ping(0, scope="1/later", run=sub.run_id[:16], y=(9, 9, 9)))
        box.put(A, ping(0))

        async def role():
            return await get(ch), await get(sub)

        first, second = endpoint.drive(role())
        assert (first[0], second[0]) == (1, 9)
        assert not box._queues
        assert (box._waiting[A], box._held[A]) == (0, 0)


def test_what_nobody_asks_for_is_bounded_in_number(monkeypatch):
    monkeypatch.setattr(mailbox, "MAX_WAITING", 10)
    with seated() as (endpoint, box, _):
        for i in range(1000):
            box.put(A, ping(0, scope=f"never/{i}"))
        assert len(box._queues) == 10
        with pytest.raises(ProtocolAbort) as e:
            received(endpoint)
        assert e.value.code == "flood"


def test_what_nobody_asks_for_is_bounded_in_bytes():
    box = Mailbox(HUB, room=2 * 10**6)  # one party may use half of it
    for i in range(1000):
        box.put(A, ping(i, scope="never", y=range(1000)))
    assert sum(size for q in box._queues.values() for _, size, _ in q) < 10**6
    assert box.failed[A].code == "flood"


def test_frames_that_unfold_in_memory_count_as_what_they_become():
    box = Mailbox(HUB, room=2 * 10**6)
    many = ping(0, scope="never", body={"x": [{}] * 60_000})
    assert len(many) < 70_000
    box.put(A, many)
    assert box.failed[A].code == "flood"
    assert not box._queues


def test_the_limits_are_no_burden_to_an_honest_run():
    assert mailbox.MAX_WAITING >= 10_000
    assert mailbox.ROOM // 2 > wire.MAX_FRAME


# ---- time ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def feeding(box, every, *frames):
    """Put the same frames again and again, as a peer's pulse does."""
    stop = threading.Event()

    def feed():
        while not stop.wait(every):
            for sender, data in frames:
                box.put(sender, data)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def lost_after(endpoint, **options):
    async def role():
        return await Channel(endpoint, "1", RUN).gather((A,), Ping, y=(3,), **options)

    began = time.monotonic()
    with pytest.raises(PeerLost) as e:
        endpoint.drive(role())
    return e.value, time.monotonic() - began


def test_a_silent_peer_is_lost_after_the_timeout():
    with seated(timeout=0.5) as (endpoint, _, _):
        e, took = lost_after(endpoint)
        assert e.code == "timeout"
        assert "nothing from 'a' for 0.5 s" in str(e)
        assert 0.4 < took < 20


def test_silence_of_one_is_not_hidden_by_the_pulse_of_another():
    with seated(timeout=0.5) as (endpoint, box, _), feeding(box, 0.05, (B, control("pulse", COMPUTING, B))):
        e, _ = lost_after(endpoint)
        assert e.code == "timeout"


def test_when_everyone_waits_nobody_will_ever_send():
    with seated(timeout=0.5) as (endpoint, box, _), feeding(box, 0.05, (A, control("pulse", WAITING))):
        e, took = lost_after(endpoint)
        assert e.code == "timeout"
        assert took > 0.4


def test_late_pulses_do_not_keep_a_wait_open_for_ever():
    late = 0.25  # between two pulses, where one is due every 0.1 s
    with seated(timeout=0.8) as (endpoint, box, _), feeding(box, late, (A, control("pulse", WAITING))):
        e, took = lost_after(endpoint)
        assert e.code == "timeout"
        assert took < 20


def test_patience_ends_even_a_wait_for_a_computing_party():
    frames = [(A, control("pulse", COMPUTING))]
    with seated(timeout=0.5, patience=1.5) as (endpoint, box, _), feeding(box, 0.05, *frames):
        e, took = lost_after(endpoint)
        assert e.code == "timeout"
        assert "for 1.5 s" in str(e)
        assert took > 1.4


@pytest.mark.parametrize("state", [COMPUTING, PATIENT])
def test_somebody_computing_or_about_to_go_on_keeps_a_wait_open(state):
    frames = [(A, control("pulse", WAITING)), (B, control("pulse", state, B))]
    with seated(timeout=0.5) as (endpoint, box, _), feeding(box, 0.05, *frames):
        threading.Timer(2.0, box.put, (A, ping())).start()
        np.testing.assert_array_equal(received(endpoint)[0], [1, 2, 3])


def test_two_that_would_both_go_on_without_the_missing_do_not_wait_for_each_other():
    with seated(timeout=0.5) as (endpoint, box, _), feeding(box, 0.05, (A, control("pulse", PATIENT))):
        e, _ = lost_after(endpoint, quorum=1)
        assert e.code == "too-few"


def test_messages_that_arrive_keep_a_wait_for_another_party_open():
    """Two exchange much with each other, and say that they wait; a third one is not the only one who counts."""
    frames = [(A, control("pulse", WAITING)), (B, control("pulse", WAITING, B))]
    with seated(timeout=0.5) as (endpoint, box, _), feeding(box, 0.05, *frames):
        for i in range(20):
            threading.Timer(0.1 * i, box.put, (B, ping(i, sender=B, scope="2"))).start()
        threading.Timer(2.0, box.put, (A, ping())).start()
        np.testing.assert_array_equal(received(endpoint)[0], [1, 2, 3])


def test_pieces_of_a_large_message_are_no_silence():
    with seated(timeout=0.5) as (endpoint, box, _):
        for i in range(20):
            threading.Timer(0.1 * i, box.hold, (A, 100)).start()
        threading.Timer(2.0, box.put, (A, ping())).start()
        np.testing.assert_array_equal(received(endpoint)[0], [1, 2, 3])


@pytest.mark.parametrize("cause", ["messages", "pieces", "processor"])
def test_a_party_that_waits_and_is_at_work_says_so(cause):
    """Without this, a coordinator gave up all sites of a long exchange: "0 sites are left"."""
    with seated(timeout=8.0) as (endpoint, box, tape):
        ended = threading.Event()

        def work():
            i = 0
            while not ended.wait(0.0 if cause == "processor" else 0.1):
                if cause == "messages":
                    box.put(B, ping(i, sender=B, scope="2"))
                elif cause == "pieces":
                    box.hold(B, 1)
                i += 1

        def states():
            return [f.body for to, f in tape.of("pulse") if to == C]

        async def role():
            await get(Channel(endpoint, "1", RUN))

        thread = threading.Thread(target=endpoint.drive, args=(role(),))
        thread.start()
        until(lambda: WAITING in states())
        worker = threading.Thread(target=work)
        worker.start()
        tape.frames.clear()
        until(lambda: COMPUTING in states())
        ended.set()
        worker.join()
        box.put(A, ping())
        thread.join()


def test_a_wait_that_ends_names_the_limit_and_its_option():
    with seated(timeout=0.5) as (endpoint, box, _):
        e, _ = lost_after(endpoint)
        assert "nothing from 'a' for 0.5 s ('timeout' of the study)" in str(e)
    with seated(timeout=0.5) as (endpoint, box, _), feeding(box, 0.05, (A, control("pulse", WAITING))):
        e, _ = lost_after(endpoint)
        assert "for 0.5 s, in which no party was computing ('timeout' of the study)" in str(e)
    with (
        seated(timeout=0.5, patience=1.5) as (endpoint, box, _),
        feeding(box, 0.05, (A, control("pulse", COMPUTING))),
    ):
        e, _ = lost_after(endpoint)
        assert "for 1.5 s ('patience' of the study)" in str(e)


# ---- farewells, aborts and the missing -------------------------------------------------------------------------------


def test_a_farewell_ends_a_wait_at_once():
    with seated() as (endpoint, box, _):
        box.put(A, control("bye", None))
        e, took = lost_after(endpoint)
        assert (e.code, took < LONG / 2) == ("finished", True)


def test_what_was_sent_before_the_farewell_is_still_read():
    with seated() as (endpoint, box, _):
        box.put(A, ping())
        box.put(A, control("bye", None))
        box.put(A, ping(1))  # after it: not read
        assert len(received(endpoint)) == 1
        assert received_code(endpoint) == "finished"


def received_code(endpoint):
    with pytest.raises(ProtocolAbort) as e:
        received(endpoint)
    return e.value.code


def test_a_message_and_the_farewell_behind_it_may_arrive_while_the_receiver_looks():
    with seated() as (endpoint, box, _):
        take = box.take

        def late(sender, scope):
            item = take(sender, scope)
            if item is None and A not in box.failed:
                box.put(A, ping())
                box.put(A, control("bye", None))
            return item

        box.take = late
        np.testing.assert_array_equal(received(endpoint)[0], [1, 2, 3])


def test_an_abort_of_a_peer_is_raised_with_its_place():
    with seated() as (endpoint, box, _):
        box.put(A, control("abort", ["secure_sum", "L5", "shares"]))
        with pytest.raises(ProtocolAbort) as e:
            received(endpoint)
        assert (e.value.protocol, e.value.line, e.value.code) == ("secure_sum", "L5", "shares")
        assert e.value.heard


def test_the_words_of_an_abort_are_short_and_printable():
    with seated() as (endpoint, box, _):
        box.put(A, control("abort", ["p" * 10_000, "\x1b[31m\n", "c"]))
        with pytest.raises(ProtocolAbort) as e:
            received(endpoint)
        assert (e.value.protocol, e.value.line, e.value.code) == ("p" * mailbox.MAX_WORD, "[31m", "c")


def test_what_the_transport_knows_ends_a_wait_at_once():
    with seated() as (endpoint, box, _):
        box.gone(A, "its process ended")
        e, took = lost_after(endpoint)
        assert e.code == "lost"
        assert "its process ended" in str(e)
        assert took < LONG / 2


def gathered(endpoint, quorum, scope="1", senders=(A, B, C)):
    async def role():
        return await Channel(endpoint, scope, RUN).gather(senders, Ping, quorum=quorum, y=(3,))

    return endpoint.drive(role())


def test_a_tolerant_gather_leaves_out_the_missing_tells_them_and_ignores_what_they_send_later():
    with seated(timeout=0.5) as (endpoint, box, tape):
        box.put(C, ping(0, sender=C, scope="2"))  # sent ahead, for a later step
        box.put(B, ping(sender=B))
        box.put(A, ping())
        assert list(gathered(endpoint, 2)) == [A, B]  # in the order of the senders, without c
        assert [(to, f.body) for to, f in tape.of("abort")] == [(C, ["channel", "-", "dropped"])]
        told = [e for e, _ in endpoint.receipt.entries if e.kind == "sent"]
        assert [(e.kind, e.name, e.to) for e in told] == [("sent", "channel.Abort", C)]

        box.put(C, ping(sender=C))
        box.put(C, ping(1, sender=C, scope="2"))
        for who in (A, B):
            box.put(who, ping(sender=who, scope="2"))
        assert list(gathered(endpoint, 2, scope="2")) == [A, B]
        assert len(tape.of("abort")) == 1  # once is enough
        assert box.failed.keys() == {C}
        assert Channel(endpoint, "1", RUN).lost(C)
        assert not Channel(endpoint, "1", RUN).lost(A)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"no frame at all", "malformed"),
        (ping(sender=C)[:-3], "malformed"),
        (ping(sender=A), "malformed"),  # in somebody else's name
        (ping(sender=C, y=range(4)), "malformed"),  # of another shape
        (ping(sender=C, body={"x": "text"}), "malformed"),
    ],
)
def test_what_one_party_sends_wrongly_does_not_end_a_wait_that_a_quorum_survives(bad, code):
    with seated(timeout=5.0) as (endpoint, box, tape):
        box.put(C, bad)
        for who in (A, B):
            box.put(who, ping(sender=who))
        assert list(gathered(endpoint, 2)) == [A, B]
        assert C in box.failed
        assert [(to, f.body) for to, f in tape.of("abort")] == [(C, ["channel", "-", code])]  # and C hears why
    with seated(timeout=5.0) as (endpoint, box, _):
        box.put(C, bad)
        for who in (A, B):
            box.put(who, ping(sender=who))
        with pytest.raises(ProtocolAbort) as e:  # where all are needed, it ends by name
            gathered(endpoint, None)
        assert e.value.code == code


@pytest.mark.parametrize(("number", "code"), [(5, "gap"), (0, "replay")])
def test_what_comes_twice_or_out_of_order_ends_the_run_even_where_a_quorum_is_there(number, code):
    with seated(timeout=5.0) as (endpoint, box, _):
        for who in (A, B, C):
            box.put(who, ping(sender=who))
        box.put(C, ping(number, sender=C))
        with pytest.raises(ProtocolAbort) as e:
            gathered(endpoint, 2)
        assert e.value.code == code


def test_parties_share_the_room_and_one_of_them_gets_half():
    box = Mailbox(HUB, room=1000)
    assert box.hold(A, 500)
    assert not box.hold(A, 1)
    assert box.failed[A].code == "flood"
    assert box.hold(B, 400)
    assert not box.hold(C, 200)  # together no more than the room
    box.release(B, 400)
    assert box.hold(B, 500)


def test_a_tolerant_gather_needs_its_quorum():
    with seated(timeout=0.5) as (endpoint, box, _):
        box.put(A, ping())
        with pytest.raises(PeerLost, match="1 of 3 parties are left without 'b', 'c', 2 are needed") as e:
            gathered(endpoint, 2)
        assert e.value.code == "too-few"


def test_a_tolerant_gather_goes_on_without_one_that_aborts_or_is_gone():
    with seated() as (endpoint, box, tape):
        box.put(A, ping())
        box.put(B, control("abort", ["toy", "L1", "ZeroDivisionError"], sender=B))
        box.gone(C, "its process ended")
        assert list(gathered(endpoint, 1)) == [A]
        assert tape.of("abort") == []  # they know


def test_a_strict_gather_needs_everyone():
    with seated() as (endpoint, box, _):
        box.put(A, ping())
        box.put(B, control("abort", ["toy", "L1", "oops"], sender=B))
        with pytest.raises(ProtocolAbort) as e:
            gathered(endpoint, None)
        assert e.value.code == "oops"


@pytest.mark.parametrize("party", ["hub", "nobody"])
def test_only_other_parties_of_the_study_can_be_written_to_or_read_from(party):
    with seated() as (endpoint, _, tape):
        ch = Channel(endpoint, "1", RUN)
        with pytest.raises(ParameterError, match="not another party"):
            endpoint.drive(ch.send(Party(party), Pong(1)))
        with pytest.raises(ParameterError, match="not another party"):
            endpoint.drive(ch.recv(Party(party), Pong))
        assert tape.of("data") == []


def test_messages_are_numbered_per_recipient_and_scope():
    with seated() as (endpoint, _, tape):
        ch = Channel(endpoint, "1", RUN)

        async def role():
            await ch.scatter([A, B], Pong(1))
            await ch.scatter({A: Pong(2), C: Pong(3)})
            await ch.sub("x").send(A, Pong(4))

        endpoint.drive(role())
        sent = [(to, f.scope, f.seq, f.body["n"]) for to, f in tape.of("data")]
        assert sent == [(A, "1", 0, 1), (B, "1", 0, 1), (A, "1", 1, 2), (C, "1", 0, 3), (A, "1/x", 0, 4)]
        assert {f.run for _, f in tape.of("data")} == {RUN[:16], ch.sub("x").run_id[:16]}


def test_run_ids_of_sub_protocols_are_bound_to_label_and_parameters():
    with seated() as (endpoint, _, _):
        ch = Channel(endpoint, "1", RUN)
        ids = [ch.sub("a"), ch.sub("b"), ch.sub("a", 1), ch.sub("a").sub("b"), ch.sub("a/b"), ch]
        assert len({c.run_id for c in ids}) == len(ids)
        assert ch.sub("a", {"n": 1}).run_id == ch.sub("a", {"n": 1}).run_id


def test_reveal_returns_the_value_and_notes_what_for_whom_but_not_the_value():
    with seated() as (endpoint, _, tape):
        ch = Channel(endpoint, "1", RUN)
        x = np.array([123456789])
        assert ch.reveal(x, to=[HUB, A], line="L7", what="the sum", protocol="toy") is x
        assert ch.reveal(5, to=A, line="L8", what="a count", protocol="toy") == 5
        rows = [(e.kind, e.line, e.name, e.to, e.bytes) for e, _ in endpoint.receipt.entries]
        assert rows == [
            ("opened", "L7", "the sum", HUB, 0),
            ("opened", "L7", "the sum", A, 0),
            ("opened", "L8", "a count", A, 0),
        ]
        assert "123456789" not in json.dumps(endpoint.receipt.to_json())
        assert tape.of("data") == []


def test_the_receipt_keeps_size_and_hash_of_what_left_and_never_what_was_in_it():
    import hashlib

    secret = np.frombuffer(b"genotype" * 4, dtype=np.uint64)

    class Raw(Tape):
        def post(self, to, frame):
            self.raw = frame
            super().post(to, frame)

    with seated(link=Raw()) as (endpoint, _, tape):
        endpoint.drive(Channel(endpoint, "1", RUN).send(A, Ping(secret)))
        raw = tape.raw
        assert b"genotype" in raw
        (entry,) = [e for e, _ in endpoint.receipt.entries]
        assert (entry.bytes, entry.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
        assert (entry.kind, entry.protocol, entry.line, entry.name, entry.to) == ("sent", "toy", "L1", "toy.Ping", A)
        text = json.dumps(endpoint.receipt.to_json())
        assert "genotype" not in text
        assert str(int(secret[0])) not in text


# ---- pulses and the end ----------------------------------------------------------------------------------------------


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_a_pulse_says_what_its_party_does():
    with seated(timeout=0.8) as (endpoint, box, tape):
        until(lambda: tape.of("pulse"))
        assert {f.body for _, f in tape.of("pulse")} == {COMPUTING}
        assert {to for to, _ in tape.of("pulse")} <= {A, B, C}

        def states_during(**options):
            tape.frames.clear()
            with feeding(box, 0.05, (A, control("pulse", COMPUTING))):
                threading.Timer(1.0, box.put, (A, ping(endpoint.rounds))).start()
                endpoint.drive(Channel(endpoint, "1", RUN).gather((A,), Ping, y=(3,), **options))
            return [f.body for to, f in tape.of("pulse") if to == A]

        assert WAITING in states_during()
        assert PATIENT in states_during(quorum=1)

        async def busy():
            time.sleep(1.0)

        tape.frames.clear()
        until(lambda: any(to == C for to, _ in tape.of("pulse")))  # one of before may still be on its way to somebody
        tape.frames.clear()
        endpoint.drive(busy())
        assert {f.body for _, f in tape.of("pulse")} == {COMPUTING}


def test_a_blocked_loop_is_computing_even_while_another_wait_is_open():
    said = []
    with seated(timeout=0.8) as (endpoint, box, tape):

        async def waits():
            await get(Channel(endpoint, "1", RUN))

        async def computes():
            await asyncio.sleep(0.05)
            time.sleep(1.5)
            said.extend(f.body for to, f in tape.of("pulse") if to == A)
            box.put(A, ping())

        async def role():
            await asyncio.gather(waits(), computes())

        tape.frames.clear()
        endpoint.drive(role())
        assert said[-1] == COMPUTING


def test_a_link_that_raises_stops_neither_the_pulse_nor_the_farewell():
    class Broken(Tape):
        calls = 0

        def post(self, to, frame):
            self.calls += 1
            raise OSError("no route")

    with seated(link=Broken(), timeout=0.2) as (endpoint, _, link):
        until(lambda: link.calls > 10)
        endpoint.abort(ValueError("local"))
        assert endpoint._pulse.is_alive()
    assert link.closed
    assert not endpoint._pulse.is_alive()


def test_nothing_is_sent_after_the_farewell():
    for _ in range(20):
        with seated(timeout=0.008) as (endpoint, _, tape):
            until(lambda tape=tape: tape.of("pulse"))
        count = len(tape.frames)
        assert [to for to, f in tape.frames if f.kind == "bye"] == [A, B, C]
        endpoint.close()  # a second time does nothing
        time.sleep(0.01)
        assert len(tape.frames) == count
        assert tape.closed


def test_a_mailbox_outlives_the_loop_that_listened():
    with seated() as (endpoint, box, _):
        box.put(A, ping())
        received(endpoint)
        box.put(A, ping(1))  # nobody listens: kept for the next role
        assert len(received(endpoint)) == 1


def test_an_abort_carries_the_place_and_one_word_and_no_text():
    for error, words in {
        ProtocolAbort("toy", "L3", "oops", "x = 31415926"): ["toy", "L3", "oops"],
        ZeroDivisionError("31415926 / 0"): ["local", "-", "ZeroDivisionError"],
        KeyboardInterrupt(): ["local", "-", "KeyboardInterrupt"],
        PeerLost("toy", "L1", "timeout", "nothing from 'a'"): ["toy", "L1", "timeout"],
    }.items():
        with seated() as (endpoint, _, tape):
            endpoint.abort(error)
            assert {to: f.body for to, f in tape.of("abort")} == dict.fromkeys((A, B, C), words)
            assert "31415926" not in json.dumps(endpoint.receipt.to_json())


# ---- several parties -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Meeting:
    results: dict
    errors: dict
    receipts: dict
    events: list

    def codes(self):
        return {p: e.code for p, e in self.errors.items()}


def meet(roles, *, studies=None, params=None, faults=(), runs=1, wires=Wires, **options):
    """Give every party a thread and a role; studies and parameters may differ by party."""
    common = study(*(p for p in roles if p != HUB), **options)
    studies, params = studies or {}, params or {}
    boxes = {p: Mailbox(p) for p in roles}
    between = wires(lambda sender, to, frame: boxes[to].put(sender, frame), faults)
    met = Meeting({}, {}, {}, [])

    def sit(p):
        def part(session, _):
            return Outcome(result={"value": [session.run(roles[p], params.get(p, "same")) for _ in range(runs)]})

        try:
            outcome = take_part(
                studies.get(p, common),
                p,
                MemoryLink(p, between),
                boxes[p],
                None,
                part=part,
                on_event=met.events.append,
                on_receipt=lambda r: met.receipts.__setitem__(p, r),
            )
            met.results[p] = outcome.result["value"]
        except BaseException as e:
            met.errors[p] = e

    threads = [threading.Thread(target=sit, args=(p,), daemon=True) for p in roles]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a party hangs"
    return met


async def asks(ch, _):
    sites = [p for p in ch.agreement.parties if p != HUB]
    got = await ch.gather(sites, Ping, y=(None,))
    await ch.scatter(sites, Pong(len(got)))
    return ch.run_id


async def answers(ch, _):
    await ch.send(HUB, Ping(np.arange(3, dtype=np.uint64)))
    await ch.recv(HUB, Pong)
    return ch.run_id


ROLES = {HUB: asks, A: answers, B: answers}


def data_messages(met):
    return [e.name for r in met.receipts.values() for e, _ in r.entries if e.name.startswith("toy.")]


def test_all_parties_agree_on_a_run_id_that_is_new_every_time():
    first, second = meet(ROLES, runs=2), meet(ROLES)
    assert first.errors == second.errors == {}
    ids = [set(ids) for ids in zip(*first.results.values(), strict=True)] + [{r[0] for r in second.results.values()}]
    assert [len(i) for i in ids] == [1, 1, 1]
    assert len(set.union(*ids)) == 3


@pytest.mark.parametrize("odd", [A, HUB])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 1}, "another study file"),
        ({"mode": "published"}, "another study file"),
        ({"parameters": {"n_bins": 3}}, "another study file"),
        ({"keys": {A: bytes(32)}}, "another study file"),
    ],
)
def test_different_studies_stop_before_any_data_moves(odd, change, what):
    met = meet(ROLES, studies={odd: study(A, B, **change)})
    check_mismatch(met, odd, what)


def check_mismatch(met, odd, what):
    assert met.codes() == dict.fromkeys(ROLES, "mismatch")
    assert data_messages(met) == []
    for p, e in met.errors.items():
        assert (e.protocol, e.line) == ("channel", "H2")
        others = [o for o in ROLES if o != p] if p == odd else [odd]
        if not e.heard:
            assert f"{', '.join(sorted(others))} came with {what} than {p}" in str(e)
    assert not all(e.heard for e in met.errors.values())


@pytest.mark.parametrize("odd", [B, HUB])
def test_different_parameters_stop_before_any_data_moves(odd):
    met = meet(ROLES, params={odd: {"n": 4}})
    check_mismatch(met, odd, "other options for this workflow")


def test_another_version_stops_before_any_data_moves():
    with seated() as (endpoint, box, tape):
        mine = Hello("0", endpoint.agreement.digest, wire.digest("toy", None), bytes(16))
        for p in (A, B, C):
            hello = dataclasses.replace(mine, version=channel.WIRE_VERSION if p != B else "99.1")
            box.put(p, hello_frame(p, hello))
        with pytest.raises(ProtocolAbort, match="b came with another version of Cloister than hub") as e:
            endpoint.drive(endpoint.open_run("toy", None))
        assert e.value.code == "mismatch"
        assert {f.name for _, f in tape.of("data")} == {"channel.Welcome"}


def hello_frame(sender, msg, to=HUB):
    return wire.pack(Frame("data", NO_RUN, "hello/1", sender, to, 0, type(msg).__message__.name, wire.to_fields(msg)))


def test_a_nonce_has_sixteen_bytes():
    with seated() as (endpoint, box, _):
        for p in (A, B, C):
            short = bytes(15 if p == A else 16)
            hello = Hello(channel.WIRE_VERSION, endpoint.agreement.digest, wire.digest("toy", None), short)
            box.put(p, hello_frame(p, hello))
        with pytest.raises(ProtocolAbort) as e:
            endpoint.drive(endpoint.open_run("toy", None))
        assert e.value.code == "malformed"


@pytest.mark.parametrize("lie", ["another nonce", "without me", "without the coordinator", "with a stranger"])
def test_a_coordinator_that_repeats_another_hello_is_caught(lie):
    with seated(me=A) as (endpoint, box, tape):
        hello = Hello(channel.WIRE_VERSION, endpoint.agreement.digest, wire.digest("toy", None), bytes(16))
        hellos = dict.fromkeys((HUB, A, B, C), hello)
        if lie == "another nonce":
            hellos[A] = dataclasses.replace(hello, nonce=b"x" * 16)
        elif lie == "without me":
            del hellos[A]
        elif lie == "without the coordinator":
            del hellos[HUB]
        else:
            hellos["stranger"] = hello
        box.put(HUB, hello_frame(HUB, Welcome(hellos), to=A))
        with pytest.raises(ProtocolAbort, match="repeats another hello") as e:
            endpoint.drive(endpoint.open_run("toy", None))
        assert e.value.code == "mismatch"
        assert [f.name for _, f in tape.of("data")] == ["channel.Hello"]


@pytest.mark.parametrize(
    ("kind", "codes"),
    [("drop", {"timeout"}), ("duplicate", {"replay"}), ("swap", {"gap"}), ("truncate", {"malformed"})],
)
def test_faults_on_the_way_are_noticed_and_reach_everyone(kind, codes):
    async def sends_two(ch, _):
        await ch.send(HUB, Ping(np.arange(3, dtype=np.uint64)))
        await ch.send(HUB, Pong(1))
        return await ch.recv(HUB, Pong)

    async def reads_two(ch, _):
        for p in (A, B):
            await ch.recv(p, Ping, y=(3,))
            await ch.recv(p, Pong)
        await ch.scatter((A, B), Pong(0))

    roles = {HUB: reads_two, A: sends_two, B: sends_two}
    met = meet(roles, faults=[Fault(kind, A, HUB, "Ping")], timeout=1.0 if kind == "drop" else LONG)
    allowed = codes | ({"gap"} if kind == "drop" else set())  # the message behind a lost one is out of order
    assert met.errors.keys() == roles.keys()
    assert set(met.codes().values()) <= allowed
    assert {e.protocol for e in met.errors.values()} == {"toy"}


def test_a_bug_in_a_role_reaches_the_peers_as_the_name_of_its_class():
    async def bug(ch, _):
        return 31415926 // 0

    met = meet({HUB: asks, A: answers, B: bug}, timeout=20.0)
    assert isinstance(met.errors[B], ZeroDivisionError)
    for p in (HUB, A):
        e = met.errors[p]
        assert (e.protocol, e.line, e.code, e.heard) == ("local", "-", "ZeroDivisionError", True)
    assert met.receipts[B].status == "aborted: ZeroDivisionError"


def test_an_abort_reaches_those_who_wait_without_its_text():
    seen = []

    async def fails(ch, _):
        raise ProtocolAbort("toy", "L9", "shares", "my private value is 31415926")

    class Spy(Wires):
        def carry(self, sender, to, data):
            seen.append(data)
            super().carry(sender, to, data)

    roles = {HUB: asks, A: answers, B: fails}
    met = meet(roles, wires=Spy)
    for p in (HUB, A):
        e = met.errors[p]
        assert (e.protocol, e.line, e.code, e.heard) == ("toy", "L9", "shares", True)
        assert "31415926" not in str(e)
    assert not any(b"31415926" in data for data in seen)
    assert "31415926" in str(met.errors[B])  # the local user is told


def sleeps(seconds):
    async def role(ch, params):
        time.sleep(seconds)
        return await answers(ch, params)

    return role


def computes(seconds):
    async def role(ch, params):
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            n = (n * 31 + 7) % 1_000_003
        return await answers(ch, params)

    return role


def awaits(seconds):
    async def role(ch, params):
        await asyncio.sleep(seconds)
        return await answers(ch, params)

    return role


@pytest.mark.parametrize("slow", [sleeps, computes, awaits])
def test_a_party_that_computes_for_much_longer_than_the_timeout_trips_nobody(slow):
    met = meet({HUB: asks, A: answers, B: slow(4.0)}, timeout=1.0)
    assert met.errors == {}


def test_a_coordinator_that_computes_for_long_trips_nobody():
    async def slow(ch, params):
        time.sleep(3.0)
        return await asks(ch, params)

    assert meet({HUB: slow, A: answers, B: answers}, timeout=0.8).errors == {}


def test_parties_that_wait_for_each_other_stop_after_the_timeout():
    async def waits(ch, _):
        await ch.recv(HUB if ch.me != HUB else A, Pong)

    began = time.monotonic()
    met = meet(dict.fromkeys((HUB, A, B), waits), timeout=0.8)
    assert met.errors.keys() == {HUB, A, B}
    assert "timeout" in met.codes().values()
    assert time.monotonic() - began < 30


def test_the_one_who_waits_for_the_dead_notices_and_the_others_hear_of_it():
    def waits_for(peer):
        async def role(ch, _):
            await ch.recv(peer, Pong)

        return role

    async def dies(ch, _):
        await ch.send(A, Pong(1))

    roles = {HUB: waits_for(A), A: waits_for(B), B: dies}
    met = meet(roles, faults=[Fault("kill", B, A, "Pong")], timeout=1.5)
    assert "nothing from 'b'" in str(met.errors[A])
    assert met.errors[HUB].heard  # not: nothing from 'a'
    assert (met.errors[HUB].line, met.errors[HUB].code) == ("L2", "timeout")


def test_a_site_left_out_is_told_and_the_others_finish():
    async def hub(ch, _):
        got = await ch.gather((A, B, C), Ping, quorum=2, y=(3,))
        await ch.scatter(got, Pong(len(got)))
        return tuple(got)

    async def mute(ch, _):
        await ch.recv(HUB, Pong)

    met = meet({HUB: hub, A: answers, B: answers, C: mute}, timeout=0.8)
    assert met.results[HUB] == [(A, B)]
    assert met.results.keys() == {HUB, A, B}
    assert met.codes() == {C: "dropped"}


def test_a_later_run_goes_on_without_who_dropped_out_since():
    async def hub(ch, _):
        got = await ch.gather((A, B, C), Ping, quorum=2, y=(3,))
        await ch.scatter(got, Pong(len(got)))
        return tuple(got)

    turns = []

    async def leaves(ch, params):
        if turns:
            raise ValueError("no more")
        turns.append(1)
        return await answers(ch, params)

    met = meet({HUB: hub, A: answers, B: answers, C: leaves}, runs=2, timeout=20.0)
    assert met.results[HUB] == [(A, B, C), (A, B)]
    assert met.errors.keys() == {C}


def test_many_sub_protocols_run_at_once_and_none_waits_for_a_lost_call():
    async def one(ch, i):
        sub = ch.sub(f"sub-{i}")
        peer = A if ch.me == HUB else HUB
        total = 0
        for k in range(10):
            if (ch.me == HUB) == (k % 2 == 0):
                await sub.send(peer, Pong(i))
            else:
                total += (await sub.recv(peer, Pong)).n
            await asyncio.sleep(0)
        return total

    async def many(ch, _):
        ch._endpoint.poll = 600.0  # nobody looks by himself: a lost call would not be made up for
        return await asyncio.gather(*(one(ch, i) for i in range(20)))

    met = meet({HUB: many, A: many}, timeout=400.0)
    assert met.errors == {}
    assert met.results[HUB] == [[5 * i for i in range(20)]]


def test_events_tell_a_progress_bar_what_happens():
    async def steps(ch, params):
        ch.step("thinking", protocol="toy", line="L0")
        return await answers(ch, params)

    met = meet({HUB: asks, A: steps})
    kinds = {(e.party, e.kind, e.name) for e in met.events}
    assert (A, "step", "thinking") in kinds
    assert (A, "sent", "toy.Ping") in kinds
    assert (HUB, "received", "toy.Ping") in kinds
    totals = [e.total for e in met.events if e.party == A]
    assert totals == sorted(totals)
    assert totals[-1] == sum(e.bytes for e in met.events if e.party == A and e.kind == "sent")
