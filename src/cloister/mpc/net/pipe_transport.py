"""Frames over pipes between processes of one machine: each party has one to a carrier, which passes frames on.

The carrier knows which party is at the end of each pipe, so that a sender is who it says. It sees names, sizes and
times of all messages, and their content as far as a protocol does not seal it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait

from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.parties import Party

CLOSED = (EOFError, OSError)


class PipeLink:
    """One party's end: a `Link` to post to, and a thread that fills the mailbox."""

    def __init__(self, pipe: Connection, mailbox: Mailbox) -> None:
        self._pipe, self._mailbox, self._lock = pipe, mailbox, threading.Lock()
        threading.Thread(target=self._fill, daemon=True).start()

    def post(self, to: Party, frame: bytes) -> None:
        with self._lock:
            self._pipe.send_bytes(b"%s\n%s" % (to.encode(), frame))

    def close(self) -> None:
        """The process ends the pipe; frames that are on their way are still delivered."""

    def _fill(self) -> None:
        while True:
            try:
                sender, _, frame = self._pipe.recv_bytes().partition(b"\n")
            except CLOSED:
                return
            self._mailbox.put(Party(sender.decode()), frame)


def carry(pipes: Mapping[Party, Connection]) -> None:
    """Pass on what the parties post, until all have closed their ends."""
    open_ends = {pipe: party for party, pipe in pipes.items()}
    while open_ends:
        for pipe in wait(list(open_ends)):
            sender = open_ends[pipe]  # type: ignore[index]
            try:
                to, _, frame = pipe.recv_bytes().partition(b"\n")  # type: ignore[union-attr]
            except CLOSED:
                del open_ends[pipe]  # type: ignore[arg-type]
                continue
            there = pipes.get(Party(to.decode()))
            if there is not None:
                with contextlib.suppress(*CLOSED):  # it has ended; what it posted before is still read
                    there.send_bytes(b"%s\n%s" % (sender.encode(), frame))
