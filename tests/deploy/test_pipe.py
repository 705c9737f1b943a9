"""Packets between the processes of a party: neither end can make the other wait, hold much, or believe nonsense."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest

from cloister.deploy import pipe as pipes
from cloister.deploy.pipe import ANSWER, HEAD, LOG, MOST, NOBODY, REQUEST, Asker, BrokenPipe, Packet, Pipe


@pytest.fixture
def ends():
    a, b = socket.socketpair()
    made = Pipe(a), Pipe(b)
    yield made
    for end in made:
        end.close()


def test_packets_arrive_as_they_were_in_order(ends):
    ours, theirs = ends
    run = os.urandom(16)
    sent = [Packet(REQUEST, "basel", i, run, random.Random(i).randbytes(i * 997)) for i in range(200)]
    sent.append(Packet(ANSWER, "hub", 2**64 - 1, run, bytes(MOST)))
    got = []
    reader = threading.Thread(target=lambda: got.extend(theirs.read() for _ in sent))
    reader.start()
    assert all(ours.post(p) for p in sent)
    reader.join(60)
    assert got == sent


def test_an_end_that_reads_nothing_holds_up_nobody(ends, monkeypatch):
    monkeypatch.setattr(pipes, "ROOM", 1 << 20)
    ours, theirs = ends
    began = time.monotonic()
    taken = sum(ours.post(Packet(LOG, data=bytes(1000))) for _ in range(20_000))
    assert time.monotonic() - began < 60.0
    assert 1000 < taken < 19_000  # the rest was dropped; the kernel holds some of it
    assert all(theirs.read().data == bytes(1000) for _ in range(taken))  # what was taken is whole
    assert ours.post(Packet(LOG, data=b"again"))
    assert theirs.read().data == b"again"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 1000,
        HEAD.pack(2**32 - 1, LOG, 0, bytes(16), 0),  # four gigabytes, it says
        HEAD.pack(MOST + 10, LOG, 0, bytes(16), 3),
        HEAD.pack(0, 99, 0, bytes(16), 0),  # a kind that is none
        HEAD.pack(2, LOG, 0, bytes(16), 9),  # a name longer than the packet
        HEAD.pack(2, LOG, 0, bytes(16), 2) + b"\xc3\xa9",
        HEAD.pack(10, LOG, 0, bytes(16), 0) + b"half",
        b"\x00",
        b"",
    ],
)
def test_what_is_no_packet_breaks_the_pipe(garbage):
    a, b = socket.socketpair()
    end = Pipe(b)
    a.sendall(garbage)
    a.close()
    with pytest.raises(BrokenPipe):
        end.read()
    assert not end.post(Packet(LOG)) or not end.post(Packet(LOG))  # nobody is there; the first may not notice
    end.close()


def test_answers_find_their_questions_and_no_other(ends):
    ours, theirs = ends
    asker = Asker(ours, bytes(16))

    def reply() -> None:
        asked = theirs.read()
        for packet in (
            Packet(ANSWER, "lugano", asked.ticket, data=b"of somebody else"),
            Packet(ANSWER, "basel", asked.ticket + 1, data=b"to another question"),
            Packet(ANSWER, "basel", asked.ticket, data=b"right"),
            Packet(ANSWER, "basel", asked.ticket, data=b"twice"),
        ):
            asker.settle(packet)

    threading.Thread(target=reply).start()
    assert asker.ask("basel", b"?", 60.0).data == b"right"
    with pytest.raises(TimeoutError):
        asker.ask("basel", b"?", 0.1)
    asker.settle(Packet(NOBODY, "basel", 2))  # too late
    assert not asker._open
