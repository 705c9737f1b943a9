"""The carrier itself, which also tells everything that FLARE would hand a message to."""

import gc
import json
import sys
import threading
import time

from cloister.deploy import carrier
from cloister.deploy.pipe import LOG, Packet


def inventory(relay):
    manager = relay.communicator.conn_manager
    cells = [f"{type(o).__module__}.{type(o).__name__}" for o in gc.get_objects() if "Cell" in type(o).__name__]
    return {
        "receivers": {str(app): type(r).__name__ for app, r in manager.receivers.items()},
        "monitors": [type(m).__name__ for m in manager.monitors],
        "connectors": [[type(c.driver).__name__, c.mode.name] for c in manager.connectors.values()],
        "endpoints": sorted(manager.sfm_endpoints),
        "resolver": type(manager.identity_resolver).__name__,
        "modules": sorted(m for m in sys.modules if m == "nvflare" or m.startswith("nvflare.")),
        "others": sorted(m for m in ("grpc", "yaml", "multiprocessing", "subprocess", "asyncio") if m in sys.modules),
        "cells": sorted(cells),
        "threads": sorted({t.name.rstrip("0123456789_-") for t in threading.enumerate()}),
    }


def serve(pipe, plan, listener):
    carrier.load_flare()
    from cloister.deploy.relay import Relay

    relay = Relay(pipe, plan, listener, carrier.LogToParty(pipe).tell)

    def tell():
        while not relay.communicator.conn_manager.sfm_endpoints:
            time.sleep(0.1)
        pipe.post(Packet(LOG, data=b"INVENTORY" + json.dumps(inventory(relay)).encode()))

    threading.Thread(target=tell, name="lister").start()
    relay.work()
