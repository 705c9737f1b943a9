"""A study carried by a job of FLARE 2.9: the simulator's server and clients are all that talks to the network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import chat
import pytest
from federation import PARTIES, Federation, cells

from cloister.deploy import launch
from cloister.deploy.kit import Kit
from cloister.errors import ParameterError
from cloister.rehearsal.rehearsal import rehearse

pytest.importorskip("nvflare")
from cloister.deploy.flare_job import Bridge, _message, _read, write_job
from cloister.deploy.pipe import REQUEST

chat.register()
SITES = [p for p in PARTIES if p != "hub"]


@pytest.mark.slow
def test_a_study_inside_an_existing_flare_network(tmp_path):
    federation = Federation(tmp_path, timeout=30.0)
    for party, kit in federation.kits.items():
        (kit / "meet").mkdir(mode=0o750)
        file = kit / "local" / "site.toml"
        file.write_text(f'carrier = "meet/carrier.sock"\n{file.read_text()}')
        for secret in kit.glob("startup/*"):  # FLARE has its own
            secret.unlink()
        assert party in PARTIES
    federation.agree()
    write_job(tmp_path / "job", str(tmp_path / "kits" / "{site}" / "meet" / "carrier.sock"))
    flare = [
        str(Path(sys.executable).parent / "nvflare"),
        "simulator",
        str(tmp_path / "job"),
        *("-w", str(tmp_path / "w"), "-c", ",".join(SITES), "-t", str(len(SITES))),
    ]
    allowed = {"class_allow_list": ["cloister.deploy.flare_job"]}  # as each site of a real network writes it
    (tmp_path / "w" / "local").mkdir(parents=True)
    (tmp_path / "w" / "local" / "resources.json").write_text(json.dumps(allowed))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "flare.out", "wb") as out:
        simulator = subprocess.Popen(flare, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        federation.start(*PARTIES)
        federation.wait_for_connection(*SITES)
        ended = federation.run()
        assert ended.result == rehearse("chat", cells()).results["coordinator"]
        assert ended.parties == dict.fromkeys(SITES, "done")
        again = federation.run()  # FLARE's job goes on
        assert again.parties == dict.fromkeys(SITES, "done")
        federation.stop("vienna")  # a service that restarts finds the job again
        federation.start("vienna")
        federation.wait_until(
            lambda: "connected to the coordinator" in (federation.kits["vienna"] / "log.txt").read_text()
        )
        assert federation.run().status == "done"
        for party in PARTIES:
            assert list(federation.kits[party].glob("startup/*")) == []
    finally:
        os.killpg(simulator.pid, signal.SIGKILL)
        simulator.wait()
        federation.close()


def test_what_the_job_takes_from_flare_is_checked():
    good = {"k": REQUEST, "f": "basel", "t": "hub", "n": 7}
    assert _read(_message(good, bytes(16))) == (good, bytes(16))
    for headers, payload in (
        ({**good, "k": 99}, bytes(16)),
        ({**good, "n": -1}, bytes(16)),
        ({**good, "f": 3}, bytes(16)),
        ({"k": REQUEST}, bytes(16)),
        (good, bytes(15)),
        (good, "text"),
        (good, bytes(1 << 21)),
    ):
        message = _message(headers, b"")
        message["p"] = payload
        assert _read(message) is None


def test_a_bridge_drops_what_no_service_has_asked_for():
    bridge = Bridge("/no/such/socket", lambda headers, payload: True)
    bridge.deliver({"k": REQUEST, "f": "hub", "t": "basel", "n": 1}, bytes(16))  # nobody is there
    assert not bridge.there


def test_a_folder_that_every_user_may_write_is_refused(tmp_path):
    """Whoever can write there could listen in the service's place, or remove its socket."""
    made = Federation(tmp_path)
    kit = Kit.open(made.kits["basel"])
    file = kit.path / "local" / "site.toml"
    text = file.read_text()
    meet = tmp_path / "meet"
    meet.mkdir()
    meet.chmod(0o777)
    file.write_text(f'carrier = "{meet}/carrier.sock"\n{text}')
    with pytest.raises(ParameterError, match="every user may write in"):
        launch.carrier_socket(kit.policy().carrier)
    meet.chmod(0o750)
    with launch.carrier_socket(kit.policy().carrier) as server:
        assert (meet / "carrier.sock").stat().st_mode & 0o777 == 0o660
        assert server.getsockname() == str(meet / "carrier.sock")
    (meet / "carrier.sock").unlink()
    (meet / "carrier.sock").write_text("precious")
    with pytest.raises(ParameterError, match="is no socket"):
        launch.carrier_socket(kit.policy().carrier)
    file.write_text(f'carrier = "{tmp_path}/gone/carrier.sock"\n{text}')
    with pytest.raises(ParameterError, match="is no folder"):
        launch.carrier_socket(kit.policy().carrier)


def test_the_plan_for_another_programs_carrier_has_no_path_and_no_password(tmp_path):
    from cloister.deploy.service import Service

    made = Federation(tmp_path)
    file = made.kits["basel"] / "local" / "site.toml"
    file.write_text(f'carrier = "carrier.sock"\nproxy = "http://user:s3cret@proxy:3128"\n{file.read_text()}')
    file.chmod(0o600)
    kit = Kit.open(made.kits["basel"])
    assert Service(kit)._plan(kit) == {"me": "basel", "hub": "hub", "parties": [*PARTIES]}
