"""A carrier that carries until messages of a run have gone through it for a while, and then sends what is no packet."""

import time

from cloister.runtime import carrier
from cloister.runtime.pipe import SERVICE


def serve(pipe, plan, listener):
    carrier.load_flare()
    from cloister.runtime.relay import Relay

    class Turncoat(Relay):
        since = None

        def _deliver(self, headers, payload):
            if payload[:16] != SERVICE:
                self.since = self.since or time.monotonic()
                if time.monotonic() - self.since > 14.0:
                    pipe._sock.sendall(b"\xff" * 1000)
            super()._deliver(headers, payload)

    Turncoat(pipe, plan, listener, carrier.LogToParty(pipe).tell).work()
