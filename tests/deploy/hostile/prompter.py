"""A changed party's carrier: it carries as it should, and asks the others for what is not its to have.

A test puts MESSAGES before this text: (recipient, headers, payload, application) of each thing to say.
"""

import base64
import threading
import time

from cloister.deploy import carrier
from cloister.deploy.pipe import LOG, REQUEST, Packet

ATTACK = 1 << 62  # from here on, requests of ours


def serve(pipe, plan, listener):
    carrier.load_flare()
    from nvflare.fuel.f3.message import Message

    from cloister.deploy.relay import RUN, Relay, well_formed

    def tell(text):
        pipe.post(Packet(LOG, data=text.encode()[:290]))

    class Prompter(Relay):
        def process_message(self, endpoint, connection, app_id, message):
            headers, payload = message.headers, message.payload
            if not well_formed(headers, payload):
                if (headers or {}).get("cn__msg_type") != "req":  # another prompter's question
                    tell(f"HEARD 0 0 from {endpoint.name}: {headers} {payload!r}")
            elif headers["n"] >= ATTACK and headers["t"] == plan["me"] and headers["k"] != REQUEST:
                tell(f"HEARD {headers['n'] - ATTACK} {headers['k']} from {headers['f']}: {bytes(payload[RUN:])!r}")
            super().process_message(endpoint, connection, app_id, message)

        def attack(self):
            end = time.monotonic() + 240
            wanted = {to for to, *_ in MESSAGES} if listener else {plan["hub"]}  # noqa: F821
            while not wanted <= set(self.communicator.conn_manager.sfm_endpoints) and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(0.5)
            sent = 0
            for _ in range(3):
                for to, headers, payload, app in MESSAGES:  # noqa: F821
                    line = self.communicator.find_endpoint(to if listener else plan["hub"])
                    self.communicator.send(line, app, Message(headers, base64.b64decode(payload)))
                    sent += 1
                    time.sleep(0.02)
                time.sleep(2.0)
            tell(f"ATTACKED with {sent} messages")

    relay = Prompter(pipe, plan, listener, tell)
    threading.Thread(target=relay.attack, daemon=True).start()
    relay.work()
