"""The unit files of systemd: what they grant, and that service and carrier work within them as two users."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cloister.deploy import ready, sandbox, seccomp
from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.study import Study

pytest.importorskip("nvflare")
UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SOURCE = Path(__file__).parents[2] / "src"
SERVICE, CARRIER = "cloister@.service", "cloister-carrier@.service"
STUDY = Study("s", "bin-values", {"hub": "coordinator", "basel": "site"}, network={"host": "localhost", "port": 18781})
PARTY, NET = 61_201, 61_202  # users and their groups; the party is in the carrier's group, too
ANALYZE = shutil.which("systemd-analyze")
HEADERS = [*Path("/usr/include").rglob("asm/unistd_64.h")] if platform.machine() == "x86_64" else []
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


@needs_systemd
@pytest.mark.parametrize("unit", [SERVICE, CARRIER])
def test_the_units_are_not_exposed(unit, tmp_path):
    """The service scored 8.6 without these lines."""
    copy = tmp_path / unit.replace("@", "@basel")
    shutil.copyfile(UNITS / unit, copy)
    command = [ANALYZE, "security", "--offline=true", "--no-pager", "--threshold=20", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than --offline")
    assert done.returncode == 0, done.stdout[-500:]


@pytest.mark.parametrize("unit", [SERVICE, CARRIER])
def test_a_unit_leaves_no_core_file(unit):
    assert "\nLimitCORE=0\n" in (UNITS / unit).read_text()


def allowed_calls(unit: str) -> set[str]:
    """The system calls that a unit's filter allows, by the groups of the installed systemd."""
    groups: dict[str, set[str]] = {}

    def expand(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        if name not in groups:
            told = subprocess.run([ANALYZE, "syscall-filter", name], capture_output=True, text=True, check=True).stdout
            members = [line.strip() for line in told.splitlines()[1:] if line.strip() and "#" not in line]
            groups[name] = set().union(*map(expand, members))
        return groups[name]

    calls: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", (UNITS / unit).read_text(), re.MULTILINE):
        names = set().union(*map(expand, line.lstrip("~").split()))
        calls = calls - names if line.startswith("~") else calls | names
    return calls


def allow_list(calls: set[str]) -> bytes:
    """The seccomp program of a unit with SystemCallErrorNumber=EPERM, as systemd would load it."""
    words = (line.split() for line in HEADERS[0].read_text().splitlines() if line.startswith("#define __NR_"))
    numbers = {w[1].removeprefix("__NR_"): int(w[2]) for w in words if w[2].isdigit()}
    code = [(seccomp.LOAD, 0, 0, seccomp.NUMBER)]
    for name in sorted(calls & numbers.keys()):
        code += [(seccomp.EQUAL, 0, 1, numbers[name]), (seccomp.END, 0, 0, seccomp.ALLOW)]
    code.append((seccomp.END, 0, 0, seccomp.ERROR | 1))
    return b"".join(struct.pack("=HBBI", *each) for each in code)


WITHIN = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
program = bytes.fromhex(sys.argv[1])
libc.prctl(38, 1, 0, 0, 0)
if sys.argv[2] == "1":
    libc.prctl(65, 1, 0, 0, 0)  # MemoryDenyWriteExecute
buffer = ctypes.create_string_buffer(program)
assert libc.syscall(317, 1, 0, ctypes.c_char_p(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))) == 0
os.execv(sys.argv[3], sys.argv[3:])
"""


def within(unit: str, *command: str) -> list[str]:
    """The command under a unit's filter of system calls, where that can be built here."""
    if ANALYZE is None or not HEADERS:
        return [*command]
    strict = "1" if "\nMemoryDenyWriteExecute=true\n" in (UNITS / unit).read_text() else "0"
    return [command[0], "-I", "-c", WITHIN, allow_list(allowed_calls(unit)).hex(), strict, *command]


@needs_systemd
@pytest.mark.skipif(not HEADERS, reason="no kernel headers here, so no filter can be built")
@pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
def test_the_service_may_confine_its_carrier_within_its_unit():
    command = [sys.executable, "-I", "-B", "-c", sandbox.TRY, str(SOURCE), "connect"]
    done = subprocess.run(within(SERVICE, *command), capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["level"] == "full", done.stderr


@needs_systemd
@pytest.mark.skipif(not HEADERS, reason="no kernel headers here, so no filter can be built")
def test_threads_start_within_the_carriers_unit_although_clone3_is_tried_first():
    code = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
    done = subprocess.run(within(CARRIER, sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.stdout == "ran\n", done.stderr


MEET = """
import json, sys
from cloister.deploy.launch import carrier_socket
from cloister.deploy.pipe import LOG, PLAN, READY, Packet, Pipe
with carrier_socket() as server:
    server.settimeout(60)
    print("listens", flush=True)
    pipe = Pipe(server.accept()[0])
pipe.post(Packet(PLAN, data=sys.argv[1].encode()))
while (packet := pipe.read()).kind != READY:
    assert packet.kind == LOG
    print(packet.data.decode(), flush=True)
print("READY", packet.data.decode(), flush=True)
pipe.close()
"""


def as_user(user: int, groups: list[int], *command: str) -> list[str]:
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={','.join(map(str, groups))}"]
    return [*drop, "--no-new-privs", *command]


@pytest.fixture
def folder():
    """A folder that other users can enter; pytest's own is closed to them."""
    made = Path(tempfile.mkdtemp(prefix="cloister-units-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def python_for_all() -> list[str]:
    """An interpreter that every user of this machine can start, with this one's packages."""
    mine = Path(sys.executable).resolve()
    if all(p.stat().st_mode & 0o005 for p in (mine, *mine.parents)):
        return [sys.executable, "-I", "-B"]
    other = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")
    if other is None:
        pytest.skip(f"other users cannot start {mine}")
    return [other, "-I", "-B"]


def program(code: str, *args: str) -> list[str]:
    """A command that runs code with this process's packages; `-I` so that nothing else is on its path."""
    packages = [str(SOURCE), *(p for p in sys.path if p.endswith("site-packages"))]
    return [*python_for_all(), "-c", f"import sys; sys.path[:0] = {packages!r}\n{code}", *args]


def give(path: Path, user: int, group: int | None = None) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, user, user if group is None else group)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of two other users")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_service_and_carrier_meet_as_two_users(folder):
    """Before, the socket had the service's own group, and the carrier's user got EACCES."""
    probe = as_user(PARTY, [PARTY, NET], *program("import cloister.deploy.carrier, nvflare"))
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("other users cannot read this installation")
    kit = provision(STUDY, folder / "kits")["basel"]
    opened = Kit.open(kit)
    secrets = {what: Path(file).read_bytes() for what, file in ready.tls_files(opened).items()}
    give(kit, PARTY)
    run, own = folder / "run", folder / "credentials"
    run.mkdir(mode=0o750)
    own.mkdir(mode=0o700)
    for what, content in secrets.items():
        (own / what).write_bytes(content)
    give(own, NET)
    give(run, PARTY, NET)  # RuntimeDirectory= and the chgrp of the unit
    plan = {"me": "basel", "hub": "hub", "parties": ["hub", "basel"], "host": "localhost", "port": 1, "listen": False}
    plan |= {"addresses": [], "sandbox": "systemd", "tls": dict.fromkeys(secrets, "/nowhere")}
    party = subprocess.Popen(
        as_user(PARTY, [PARTY, NET], *program(MEET, json.dumps(plan))),
        env={**os.environ, "RUNTIME_DIRECTORY": str(run)},
        stdout=subprocess.PIPE,
        text=True,
    )
    code = "from cloister.deploy.sandbox import main; main()"
    start = program(code, "cloister.deploy.carrier", str(run / "carrier.sock"))
    try:
        assert party.stdout.readline() == "listens\n"
        shown = (run / "carrier.sock").stat()
        assert (shown.st_uid, shown.st_gid, shown.st_mode & 0o777) == (PARTY, NET, 0o660)
        carrier = subprocess.Popen(
            as_user(NET, [NET], *within(CARRIER, *start)),
            env={"CREDENTIALS_DIRECTORY": str(own)},
        )
        try:
            said, _ = party.communicate(timeout=60)
        finally:
            carrier.kill()
            carrier.wait()
    finally:
        party.kill()
        party.wait()
    assert "READY" in said
    peek = as_user(NET, [NET], *program(f"open({str(kit / 'identity.key')!r})"))
    assert subprocess.run(peek, capture_output=True, check=False).returncode == 1  # the other user has no kit


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_a_user_outside_the_carriers_group_is_told_so(folder):
    run = folder / "run"
    run.mkdir(mode=0o770)
    give(run, PARTY, NET)
    code = "from cloister.deploy.launch import carrier_socket; carrier_socket()"
    command = as_user(PARTY, [PARTY], *program(code))
    env = {**os.environ, "RUNTIME_DIRECTORY": str(run)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert f"belongs to group {NET}, and this user is not in it" in done.stderr
