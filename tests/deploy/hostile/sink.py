"""Takes everything in, carries nothing, says that it is connected, and tries the key beside its TLS files."""

import contextlib
import os
from pathlib import Path

from cloister.deploy.pipe import CONNECTED, LOG, READY, BrokenPipe, Packet


def serve(pipe, plan, listener):
    pipe.post(Packet(READY))
    pipe.post(Packet(CONNECTED, plan["hub"]))
    kit = Path(plan["tls"]["key"]).parents[1]
    for file in (kit / "identity.key", kit / "cells.h5ad", kit / "local" / "site.toml"):
        with contextlib.suppress(OSError):
            pipe.post(Packet(LOG, data=b"STOLEN " + file.read_bytes()[:100]))
    for _ in range(10_000):
        pipe.post(Packet(LOG, data=os.urandom(400)))
    with contextlib.suppress(BrokenPipe):
        while True:
            pipe.read()
