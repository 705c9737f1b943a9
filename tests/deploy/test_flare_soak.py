"""Twenty runs in a row on FLARE with random kills: each ends in a result or by name, and nothing is left behind."""

from __future__ import annotations

import random
import socket
import threading
import time

import chat
import pytest
from federation import PARTIES, Federation

from cloister.deploy.kit import Kit
from cloister.deploy.ready import is_running
from cloister.errors import CloisterError

chat.register()
SITES = [p for p, role in PARTIES.items() if role == "site"]


def play(federation: Federation, rng: random.Random) -> str:
    """One run; with luck, somebody's processes are killed on the way. Returns how it ended."""
    victim = rng.choice([None, *SITES, *SITES, "helper"])
    federation.agree(parameters={"rounds": 60, "pause": 0.02} if victim else {})
    ends: list = []

    def go() -> None:
        try:
            ends.append(federation.run(limit=150.0))
        except Exception as e:
            ends.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    if victim:
        time.sleep(rng.uniform(1.0, 12.0))
        federation.kill(victim)
    thread.join(timeout=240)
    assert not thread.is_alive(), f"the run with {victim} killed does not end"
    assert not isinstance(ends[0], Exception) or isinstance(ends[0], CloisterError), ends[0]
    if victim:
        federation.start(victim)
    return "named" if isinstance(ends[0], CloisterError) else "result"


@pytest.mark.slow
def test_twenty_runs_with_random_kills(tmp_path):
    federation = Federation(tmp_path, timeout=16.0)
    federation.agree()
    federation.start(*PARTIES)
    rng, ends = random.Random(7), []
    try:
        for _ in range(20):
            ends.append(play(federation, rng))
        federation.agree()
        assert federation.run().result == {"total": 23.0}  # after all that, it still works
        assert federation.stop(*PARTIES) == dict.fromkeys(PARTIES, 0)
        assert federation.processes(*PARTIES) == []
        assert not any(is_running(Kit.open(kit)) for kit in federation.kits.values())
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", federation.port))  # the port is free again
        for kit in federation.kits.values():
            assert not list(kit.rglob("*.part"))
    finally:
        federation.close()
    assert ends.count("result") >= 2
    assert ends.count("named") >= 5
