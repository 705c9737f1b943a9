"""A carrier that carries until a run is well under way, and then sends its party what is not a packet."""

from cloister.deploy import carrier
from cloister.deploy.pipe import SERVICE

ENOUGH = 600  # messages of a run; it starts with far fewer


def serve(pipe, plan, listener):
    carrier.load_flare()
    from cloister.deploy.relay import Relay

    class Turncoat(Relay):
        carried = 0

        def _deliver(self, headers, payload):
            self.carried += payload[:16] != SERVICE
            if self.carried == ENOUGH:
                pipe._sock.sendall(b"\xff" * 1000)
            super()._deliver(headers, payload)

    Turncoat(pipe, plan, listener, carrier.LogToParty(pipe).tell).work()
