"""The control: FLARE's own client, in the place of our service, hands out the key that it stands beside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from federation import free_port
from plain_flare import settings

from cloister.deploy.provision import _flare_kits
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.study import Study

pytest.importorskip("nvflare")
HERE = Path(__file__).parent


def test_flares_own_client_gives_up_the_key(tmp_path):
    port = free_port()
    parties = {"hub": "coordinator", "basel": "site"}
    study = Study("s", "bin-values", parties, network={"host": "localhost", "port": port})
    kits = _flare_kits(study, tmp_path / "work", tmp_path / "authority")
    basel = kits["basel"]
    Identity.create(Entropy()).save(basel / "identity.key")
    (basel / "cells.h5ad").write_text("many cells")
    (basel / "results").mkdir()
    (basel / "results" / "outcome.json").write_text("{}")
    config = kits["hub"] / "startup" / "fed_server.json"
    config.write_text(config.read_text().replace("0.0.0.0", "localhost"))
    for party, kit in kits.items():
        settings(kit, server=party == "hub")
    wanted = {
        "key": str(basel / "identity.key"),
        "cells": str(basel / "cells.h5ad"),
        "results": "results",
        "mark": str(tmp_path / "mark"),
    }
    out = tmp_path / "stolen.json"
    program = [sys.executable, str(HERE / "plain_flare.py")]
    said = (tmp_path / "flare.out").open("ab")
    running = [
        subprocess.Popen(
            [*program, "server", str(kits["hub"]), "basel", str(out), json.dumps(wanted)], stdout=said, stderr=said
        ),
        subprocess.Popen([*program, "client", str(basel), "basel"], stdout=said, stderr=said),
    ]
    try:
        end = time.monotonic() + 300
        while not out.exists():
            assert time.monotonic() < end, (tmp_path / "flare.out").read_text()[-3000:]
            assert all(p.poll() is None for p in running), (tmp_path / "flare.out").read_text()[-3000:]
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()
            process.wait()
        said.close()
    stolen = json.loads(out.read_text())
    assert stolen["key"].strip() == (basel / "identity.key").read_text().strip()
    assert stolen["cells"].strip() == "many cells"
    assert "etc" in stolen["root"].split()
    assert not (basel / "results").exists()  # deleted from afar
