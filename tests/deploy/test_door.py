"""The door: a changed coordinator and a changed site ask for a site's key, its cells, its folders, the deletion of its
results, and to run their code. They get nothing, and an honest run goes through meanwhile.

What they send are the very bytes to which FLARE's own client hands over the key (test_plain_flare.py), and everything
that can be said in our own words.
"""

from __future__ import annotations

import base64
import dataclasses
import re
import threading
import time
from pathlib import Path

import chat
import psutil
import pytest
from federation import IMPATIENT, PARTIES, Federation, cells
from plain_flare import requests

from cloister.deploy import sandbox
from cloister.deploy.invitation import Invitation
from cloister.deploy.kit import Kit
from cloister.deploy.pipe import REQUEST, SERVICE
from cloister.deploy.service import INVITE, PING
from cloister.errors import PeerLost, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy
from cloister.rehearsal.rehearsal import rehearse

pytest.importorskip("nvflare")
pytestmark = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
chat.register()
HOSTILE = Path(__file__).parent / "hostile"
ATTACK = 1 << 62
WORDS = (
    "refused agreement signature bad-signature",
    "refused invitation I1 stale",
    "refused invitation I1 replay",
    "aborted channel H2 mismatch",
)
WORKFLOW = {"workflow": "bin-values", "parameters": {"n_bins": 9, "min_values": 50}}


def sayings(federation: Federation, me: str, targets: list[str]) -> list[list]:
    """Everything that a changed party says to each of `targets`."""
    made: list[list] = []
    study, identity = Kit.open(federation.kits["hub"]).study, Kit.open(federation.kits[me]).identity
    now = int(time.time())

    def ours(to: str, data: bytes, run: bytes = SERVICE, sender: str = me, ticket: int = 0) -> list:
        headers = {"k": REQUEST, "f": sender, "t": to, "n": ATTACK + ticket}
        return [to, headers, base64.b64encode(run + data).decode(), 1]

    for to in targets:
        kit = federation.kits[to]
        wanted = {"key": str(kit / "identity.key"), "cells": str(kit / "cells.h5ad")}
        wanted |= {"results": "results", "mark": str(federation.folder / f"mark-{to}")}
        for origin in (me, "hub", "server"):
            for headers, payload in requests(origin, to, wanted).values():
                packed = base64.b64encode(payload).decode()
                made += [[to, headers, packed, app] for app in (0, 1, 2, 3)]
        run = Entropy().bytes(16)
        good = Invitation(run, study.digest, to, now)
        made += [
            ours(to, PING, ticket=1),
            ours(to, b"cat /etc/passwd", ticket=2),
            ours(to, b"P", run=run, ticket=3),  # a run that is not
            ours(to, INVITE + bytes(120), ticket=4),
            ours(to, INVITE + dataclasses.replace(good, time=now - 3600).sign(identity), ticket=5),
            ours(to, INVITE + dataclasses.replace(good, study=bytes(32)).sign(identity), ticket=6),
            ours(to, INVITE + dataclasses.replace(good, to="basel" if to != "basel" else "lugano").sign(identity)),
        ]
        if me != "hub":
            made += [ours(to, INVITE + good.sign(identity), ticket=7)]  # signed, but not by the coordinator
            made += [ours(to, INVITE + good.sign(identity), sender="hub", ticket=8)]  # and in its name
    return made


def changed(federation: Federation, party: str, targets: list[str]) -> Path:
    program = federation.folder / f"{party}_carrier.py"
    text = f"MESSAGES = {sayings(federation, party, targets)!r}\n" + (HOSTILE / "prompter.py").read_text()
    program.write_text(text)
    return program


def test_a_changed_coordinator_and_a_changed_site_get_nothing(tmp_path):
    federation = Federation(tmp_path, timeout=30.0)
    parties = {p: role for p, role in PARTIES.items() if p != "helper"}
    keys = {p: k for p, k in federation.study.keys.items() if p in parties}
    federation.study = federation.agree(parties=parties, keys=keys, **WORKFLOW)
    old = federation.kits["basel"] / "results" / "old"
    old.mkdir(parents=True)
    try:
        programs = {"hub": changed(federation, "hub", ["basel", "lugano"])}
        programs["vienna"] = changed(federation, "vienna", ["basel", "hub"])
        for p in parties:
            federation.start(p, carrier=programs.get(p))
        ended = federation.run()  # meanwhile
        for p in programs:
            federation.wait_until(lambda p=p: "ATTACKED with" in (tmp_path / f"{p}.out").read_text())
        rehearsed = rehearse("bin-values", cells(), **WORKFLOW["parameters"])
        assert ended.result["bin_edges"] == rehearsed.results["coordinator"]["bin_edges"]
        assert set(ended.parties.values()) == {"done"}
        said = {p: (tmp_path / f"{p}.out").read_text() for p in parties}
        check_heard(federation, said)
        assert old.exists()
        assert not [f for f in tmp_path.iterdir() if f.name.startswith("mark-")]
        for site in ("basel", "lugano"):
            runs = [f for f in (federation.kits[site] / "results").iterdir() if f.name != "old"]
            words = sorted(federation_ended(f) for f in runs)
            own = {"aborted channel H2 mismatch", "aborted invitation I1 stale"}  # the coordinator's: an unknown study,
            assert set(words) - {"done"} <= own  # and one dated an hour back; both have one run, so one folder
            assert set(words) > {"done"}
            assert "an invitation was refused" in said[site]
    finally:
        federation.close()


def federation_ended(folder: Path) -> str:
    from cloister.deploy.party import Ended

    return Ended.load(folder / "outcome.json").word


def check_heard(federation: Federation, said: dict[str, str]) -> None:
    """What the changed parties were answered: that a party is there, that a run is not, and refusals."""
    heard = [line.partition("HEARD ")[2] for p in ("hub", "vienna") for line in said[p].splitlines() if "HEARD" in line]
    assert heard
    for line in heard:
        answer = re.fullmatch(r"\d+ \d+ from \w+: b['\"](.*)['\"]", line)[1]
        assert answer in ("+", "") or answer.endswith(WORDS), line
    secrets = [f.read_text() for kit in federation.kits.values() for f in kit.rglob("*.key") if f.stem != "answered"]
    for text in said.values():
        assert "PRIVATE KEY" not in text
        assert not any(secret.splitlines()[1] in text for secret in secrets)


def test_a_carrier_that_is_another_program_ends_the_run_by_name_everywhere(tmp_path):
    """Basel's carrier works until a run is on; then it sends no packets. All end by name; the next run works."""
    federation = Federation(tmp_path, timeout=12.0)
    federation.agree(parameters={"rounds": 1_000_000, "pause": 0.01})
    try:
        others = [p for p in PARTIES if p != "basel"]
        federation.start(*others)
        federation.start("basel", carrier=HOSTILE / "turncoat.py")
        ends: list = []

        def go() -> None:
            try:
                ends.append(federation.run(120.0))
            except Exception as e:
                ends.append(e)

        thread = threading.Thread(target=go)
        thread.start()
        federation.wait_for_mark("basel", ends)
        thread.join()
        assert isinstance(ends[0], ProtocolAbort), ends
        assert ends[0].protocol == "chat"  # before the order's own limit, which would say "flare"
        for p in [*PARTIES]:
            ended = federation.ended(p)
            assert (ended.status, ended.error["protocol"]) == ("aborted", "chat"), p
            assert ended.error["code"] in ("lost", "timeout"), p
        assert "this party's carrier ended" in federation.ended("basel").error["text"]
        assert "the carrier's pipe broke: what came is not a packet" in (tmp_path / "basel.out").read_text()
        carrier = [c for c in psutil.Process(federation.services["basel"].pid).children() if "-I" in c.cmdline()]
        assert len(carrier) <= 1
    finally:
        federation.close()


def test_a_carrier_that_never_carries_ends_in_a_named_error(tmp_path):
    """A thief in the carrier's place: it steals nothing, carries nothing, and the coordinator hears who is missing."""
    federation = Federation(tmp_path, timeout=8.0)
    federation.agree()
    try:
        federation.start("hub", patch=IMPATIENT)
        federation.start("lugano", "vienna", "helper")
        federation.start("basel", carrier=HOSTILE / "sink.py")
        federation.wait_for_connection("lugano", "vienna", "helper")
        with pytest.raises(PeerLost, match="not connected: basel;"):
            federation.run()
        assert "STOLEN" not in (tmp_path / "basel.out").read_text()
        assert federation.stop("basel") == {"basel": 0}
    finally:
        federation.close()
