"""The sandbox: a program in the carrier's place tries everything it should not be able to do."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cloister.cli import doctor
from cloister.deploy import launch, ready, sandbox, seccomp
from cloister.deploy.kit import Kit
from cloister.deploy.pipe import LOG, PLAN, READY, BrokenPipe, Packet, Pipe
from cloister.deploy.provision import provision
from cloister.errors import ParameterError, UsageError
from cloister.study import Study

THIEF = Path(__file__).parent / "hostile" / "thief.py"
needs_kernel = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
STUDY = Study("s", "bin-values", {"hub": "coordinator", "basel": "site"}, network={"host": "localhost", "port": 18779})


@pytest.fixture
def goods(tmp_path):
    """A kit with everything in it, a service on another port, and one on a Unix socket."""
    kit = provision(STUDY, tmp_path / "kits")["basel"]
    (kit / "cells.h5ad").write_bytes(b"cells")
    (kit / "results").mkdir()
    (kit / "results" / "outcome.json").write_text("{}")
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        path, name = str(tmp_path / "s"), f"cloister-test-{os.getpid()}"
        unix.bind(path)
        unix.listen()
        abstract.bind("\0" + name)
        abstract.listen()
        yield {
            "kit": kit,
            "files": [str(kit / "identity.key"), str(kit / "cells.h5ad"), str(kit / "study.toml"), "/etc/shadow"],
            "folders": ["/", str(kit)],
            "result": str(kit / "results" / "outcome.json"),
            "new": str(kit / "new"),
            "other_port": other.getsockname()[1],
            "unix": path,
            "abstract": name,
        }


def spawn_patched(end: socket.socket, patch: str) -> subprocess.Popen:
    """A carrier on a kernel that offers less; `patch` is code about `s`, the module `sandbox`."""
    root = str(Path(sandbox.__file__).parents[2])
    code = f"import sys; sys.path.insert(0, sys.argv.pop(1)); import cloister.deploy.sandbox as s; {patch}; s.main()"
    command = [sys.executable, "-I", "-B", "-c", code, root, str(THIEF), str(end.fileno())]
    return subprocess.Popen(command, pass_fds=[end.fileno()], env={}, cwd="/")


def steal(goods, monkeypatch, *, listen, confined=True, least="full", patch="", plan=None) -> dict[str, str]:
    """Put the thief into the carrier's place; returns what it could do."""
    monkeypatch.setattr(launch, "PROGRAM", str(THIEF))
    kit = Kit.open(goods["kit"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plan = {
        "host": "localhost",
        "port": port,
        "listen": listen,
        "tls": ready.tls_files(kit),
        "sandbox": least if confined else "none",
        "goods": {k: v for k, v in goods.items() if k != "kit"},
        **(plan or {}),
    }
    ours, theirs = socket.socketpair()
    with theirs:
        process = launch.spawn_carrier(theirs) if not patch else spawn_patched(theirs, patch)
    pipe, said = Pipe(ours), {}
    pipe.post(Packet(PLAN, data=json.dumps(plan).encode()))
    try:
        while True:
            packet = pipe.read()
            assert packet.kind == LOG
            line = packet.data.decode()
            assert line.startswith("["), line
            what, outcome = json.loads(line)
            said[what] = outcome
    except BrokenPipe:
        pass
    finally:
        pipe.close()
        process.wait(60)
    return said


@needs_kernel
@pytest.mark.parametrize("listen", [False, True], ids=["site", "coordinator"])
def test_a_program_in_the_carriers_place_gets_nothing(goods, monkeypatch, listen):
    said = steal(goods, monkeypatch, listen=listen)
    assert said.pop("a thread") == "ran"  # it is not merely dead
    assert len(said) > 25
    assert {what: x for what, x in said.items() if not x.startswith("refused")} == {}
    assert (goods["kit"] / "results" / "outcome.json").exists()


@needs_kernel
def test_without_the_sandbox_the_same_program_gets_most_of_it(goods, monkeypatch):
    """The control: the tries are good ones."""
    said = steal(goods, monkeypatch, listen=False, confined=False)
    key, cells = (f"read {goods['kit'] / name}" for name in ("identity.key", "cells.h5ad"))
    for what in (key, cells, "list /", "delete the results", "connect to another port", "connect to a Unix socket"):
        assert said[what].startswith("WORKED"), (what, said[what])
    for what in ("connect to an abstract socket", "send a datagram", "listen", "execute a program", "fork"):
        assert said[what].startswith("WORKED"), (what, said[what])
    if os.geteuid() == 0:
        assert said["read /etc/shadow"].startswith("WORKED")
        assert said["open the party's memory"].startswith("WORKED")


@needs_kernel
def test_the_carrier_reads_its_own_tls_files_and_no_other_key(goods, monkeypatch):
    startup = goods["kit"] / "startup"
    goods["files"] = [str(startup / "client.key"), str(startup / "rootCA.pem"), str(goods["kit"] / "identity.key")]
    said = steal(goods, monkeypatch, listen=False)
    assert [said[f"read {f}"].partition(":")[0] for f in goods["files"]] == ["WORKED", "WORKED", "refused"]


@needs_kernel
@pytest.mark.parametrize("missing", ["_landlock", "_seccomp"])
def test_half_a_sandbox_is_noticed(missing):
    """`confine` tries what must not work; with a part of it left out, it says so."""
    code = f"""
import sys
from cloister.deploy import sandbox
sandbox.{missing} = sandbox._namespaces = lambda *a, **k: None
try:
    sandbox.confine([], 8002)
except sandbox.SandboxError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "the sandbox does not hold" in done.stdout, done.stderr


# -- kernels that offer less -------------------------------------------------------------------------------------------

ABIS = {6: 0, 5: 1, 4: 2, 3: 3, 2: 4, 1: 5}  # Landlock's ABI → the first rung that it takes
NO_LANDLOCK, NO_NAMESPACES = "s.RUNGS = ()", "s._namespaces = lambda readable: None"
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0,
    reason="user namespaces are not allowed here",
)


def offer(patch: str, connect: str = "connect") -> dict:
    """What a kernel that offers less gives: level, layers and what stays open."""
    code = sandbox.TRY.replace("s.report()", f"{patch}; s.report()")
    command = [sys.executable, "-I", "-B", "-c", code, str(Path(sandbox.__file__).parents[2]), connect]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@needs_kernel
@pytest.mark.parametrize("abi", ABIS)
def test_every_abi_of_landlock_is_used_for_what_it_can_do(abi):
    found = offer(f"s.RUNGS = s.RUNGS[{ABIS[abi]}:]")
    assert found["level"] == ("full" if abi >= 4 else "files")
    assert any(layer.startswith("Landlock") for layer in found["by"])
    assert found["open"] == ([] if abi >= 4 else [sandbox.OPEN["ports"]])
    assert offer(f"s.RUNGS = s.RUNGS[{ABIS[abi]}:]", "listen")["level"] == "full"  # a coordinator connects nowhere


@needs_kernel
def test_a_kernel_that_reports_scopes_and_refuses_them_is_used_without(monkeypatch):
    """Some kernels of RHEL 9 report Landlock 6 and answer EINVAL."""
    patch = (
        "real = s._call; fail = lambda: (_ for _ in ()).throw(s.SandboxError('EINVAL'));"
        "s._call = lambda number, *a: fail() if number == s.CREATE_RULESET and a[1] == 24 else real(number, *a)"
    )
    found = offer(patch)
    assert found["level"] == "full"
    assert "scopes" not in found["by"][0]


@needs_kernel
def test_a_kernel_that_refuses_to_restrict_leaves_nothing_half_applied():
    patch = (
        "real = s._call; fail = lambda: (_ for _ in ()).throw(s.SandboxError('EINVAL'));"
        "s._call = lambda number, *a: fail() if number == s.RESTRICT_SELF else real(number, *a);" + NO_NAMESPACES
    )
    found = offer(patch)
    assert found["level"] == "seccomp"
    assert found["open"] == [sandbox.OPEN["files"], sandbox.OPEN["ports"]]


OTHER_PORT = {"connect to another port", "connect by IPv6"}  # what level `files` leaves open
BY_PATCH = {"Landlock 1": "s.RUNGS = s.RUNGS[5:]", "namespaces": NO_LANDLOCK}


@needs_kernel
@needs_namespaces
@pytest.mark.parametrize("layer", BY_PATCH)
def test_on_an_older_kernel_a_thief_gets_ports_and_no_file(goods, monkeypatch, layer):
    said = steal(goods, monkeypatch, listen=False, least="files", patch=BY_PATCH[layer])
    assert said.pop("a thread") == "ran"
    if layer == "namespaces":  # its own root folder may be listed: there is nothing in it but code
        assert not {"home", "var", "proc"} & set(re.findall(r"'(\w+)'", said.pop("list /")))
        assert said.pop(f"list {goods['kit']}") == "WORKED: ['startup']"  # and there only the TLS files
    assert {what for what, x in said.items() if not x.startswith("refused")} <= OTHER_PORT
    assert (goods["kit"] / "results" / "outcome.json").read_text() == "{}"


@needs_kernel
def test_by_seccomp_alone_a_thief_reads_files_and_changes_none(goods, monkeypatch):
    said = steal(goods, monkeypatch, listen=False, least="seccomp", patch=f"{NO_LANDLOCK}; {NO_NAMESPACES}")
    got = {what for what, x in said.items() if not x.startswith("refused") and what != "a thread"}
    assert f"read {goods['kit'] / 'identity.key'}" in got  # as OPEN says
    assert {what.split(" ")[0] for what in got - OTHER_PORT} <= {"read", "list", "open"}
    assert (goods["kit"] / "results" / "outcome.json").read_text() == "{}"


@needs_kernel
def test_a_level_below_what_the_site_accepts_ends_the_carrier(goods, monkeypatch):
    with pytest.raises(AssertionError, match="this site accepts 'full' or better"):
        steal(goods, monkeypatch, listen=False, patch="s.RUNGS = s.RUNGS[5:]")


def test_the_service_names_what_a_lower_level_leaves_open(goods, monkeypatch):
    kit = Kit.open(goods["kit"])
    lower = sandbox.Confined("files", ("Landlock (13 rights of files)", "seccomp"), (sandbox.OPEN["ports"],))
    monkeypatch.setattr(sandbox, "offered", lambda **_: lower)
    with pytest.raises(UsageError, match=r"connect to any TCP address.*accepts 'full' or better.*sandbox = "):
        ready.check_ready(kit)
    text = kit.policy_file.read_text()
    kit.policy_file.write_text(text.replace('sandbox = "full"', 'sandbox = "files"'))
    ready.check_ready(kit)
    shown = [f for f in doctor.examine(kit.path) if f.name == "carrier"]
    assert shown[0].state == "note"
    assert "connect to any TCP address" in shown[0].detail
    kit.policy_file.write_text(text.replace('sandbox = "full"', 'sandbox = "landlock"'))  # a kit of an earlier version
    assert kit.policy().sandbox == "full"


@needs_kernel
def test_a_process_with_threads_is_not_confined_by_halves(tmp_path):
    wait = threading.Event()
    thread = threading.Thread(target=wait.wait)
    thread.start()
    try:
        with pytest.raises(sandbox.SandboxError, match="several"):
            sandbox.confine([], None)
    finally:
        wait.set()
        thread.join()


# -- the filter, on both architectures ---------------------------------------------------------------------------------


PID = 4711


def judge(machine: str, number: int, *args: int, may_connect: bool = True, architecture: int | None = None) -> object:
    """What the filter says to a system call: an interpreter of its few instructions."""
    code = [*struct.iter_unpack("=HBBI", seccomp.build_filter(machine, may_connect=may_connect, pid=PID))]
    arch = architecture or seccomp.ARCHITECTURES[machine][1]
    data = struct.pack("=iIQ6Q", number, arch, 0, *args, *[0] * (6 - len(args)))
    at = value = 0
    for _ in range(10_000):
        op, yes, no, k = code[at]
        at += 1
        if op == seccomp.LOAD:
            (value,) = struct.unpack_from("=I", data, k)
        elif op == seccomp.AND:
            value &= k
        elif op == seccomp.END:
            kind, error = k & 0xFFFF0000, k & 0xFFFF
            return "allow" if kind == seccomp.ALLOW else "kill" if kind == seccomp.KILL else errno.errorcode[error]
        else:
            holds = {seccomp.EQUAL: value == k, seccomp.ABOVE: value > k, seccomp.MASKED: bool(value & k)}[op]
            at += yes if holds else no
    raise AssertionError("the filter does not end")


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_what_the_filter_says(machine):
    which = seccomp.ARCHITECTURES[machine][0]
    for numbers in seccomp.REFUSED.values():
        if numbers[which] is not None:
            assert judge(machine, numbers[which]) == "EPERM"
    socket_, clone, prlimit = (x[which] for x in (seccomp.SOCKET, seccomp.CLONE, seccomp.PRLIMIT))
    tcp = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    assert judge(machine, socket_, socket.AF_INET, tcp, 0) == "allow"
    assert judge(machine, socket_, socket.AF_INET6, tcp, 6) == "allow"
    for family, kind, protocol in (
        (socket.AF_UNIX, tcp, 0),
        (socket.AF_INET, socket.SOCK_DGRAM, 0),
        (socket.AF_INET, socket.SOCK_RAW, 6),
        (socket.AF_INET, tcp, 262),
        (socket.AF_INET, tcp, 132),
        (16, socket.SOCK_RAW, 0),
    ):
        assert judge(machine, socket_, family, kind, protocol) == "EPERM"
    assert judge(machine, socket_, socket.AF_INET, tcp, 0, may_connect=False) == "EPERM"
    assert judge(machine, clone, 0x00010000 | 0x100) == "allow"
    assert judge(machine, clone, 17) == "EPERM"
    for numbers in seccomp.MISSING.values():
        assert judge(machine, numbers[which]) == "ENOSYS"
    for numbers, argument in seccomp.OPENING.items():
        if numbers[which] is not None:
            says = [judge(machine, numbers[which], *[0] * argument, flags) for flags in (0, 1, 2, 0o1000, 0o100)]
            assert says == ["allow", *["EPERM"] * 4]
    assert judge(machine, seccomp.TGKILL[which], PID) == "allow"
    assert judge(machine, seccomp.TGKILL[which], PID + 1) == "EPERM"
    assert judge(machine, 462) == "ENOSYS"
    assert judge(machine, prlimit, 0) == "allow"
    assert judge(machine, prlimit, 1) == "EPERM"
    for numbers, argument in seccomp.SENDING.items():
        assert judge(machine, numbers[which], *[0] * argument, 0x20000000) == "EPERM"
        assert judge(machine, numbers[which], *[0] * argument, 0x4000) == "allow"
    for numbers in seccomp.NO_ACCEPT.values():
        assert judge(machine, numbers[which]) == "EPERM"
        assert judge(machine, numbers[which], may_connect=False) == "allow"
    read, write = {"x86_64": (0, 1), "aarch64": (63, 64)}[machine]
    assert judge(machine, read) == judge(machine, write) == "allow"
    assert judge(machine, read, architecture=0x40000003) == "kill"  # the same numbers, called as another machine
    if machine == "x86_64":
        assert judge(machine, 0x40000000 | 59) == "kill"


def test_numbers_of_system_calls_are_those_of_this_kernel():
    """The tables, against the system's own headers, where these are installed."""
    place = {"x86_64": "asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[platform.machine()]
    found = [p for p in Path("/usr/include").rglob(place)]
    if not found:
        pytest.skip("no kernel headers here")
    words = (line.split() for line in found[0].read_text().splitlines() if line.startswith("#define __NR"))
    known = {w[1].removeprefix("__NR_").removeprefix("__NR3264_"): w[2] for w in words if len(w) == 3}
    which = seccomp.ARCHITECTURES[platform.machine()][0]
    for name, numbers in (seccomp.REFUSED | seccomp.NO_SOCKET | seccomp.NO_ACCEPT).items():
        if numbers[which] is not None and name in known and known[name].isdigit():
            assert int(known[name]) == numbers[which], name


# -- before a service starts -------------------------------------------------------------------------------------------


def test_an_old_kernel_is_refused_unless_systemd_confines(goods, monkeypatch):
    kit = Kit.open(goods["kit"])
    monkeypatch.setattr(sandbox, "offered", lambda **_: sandbox.Confined("seccomp", ("seccomp",), ("read files",)))
    with pytest.raises(UsageError, match='read files.*sandbox = "systemd"'):
        ready.check_ready(kit)
    text = kit.policy_file.read_text()
    kit.policy_file.write_text(text.replace('sandbox = "full"', 'sandbox = "systemd"'))
    with pytest.raises(ParameterError, match="start the service by the unit file"):
        ready.check_ready(kit)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(kit.path.parent))
    ready.check_ready(kit)


def listens(path: Path) -> bool:
    """Whether somebody takes calls at a Unix socket: there, it is marked in the kernel's list."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(row[-1] == str(path) and int(row[3], 16) & 0x10000 for row in rows if len(row) > 7)


def test_a_carrier_of_systemd_comes_by_itself_and_needs_no_kit(goods, monkeypatch, tmp_path):
    """What the carrier's unit does: it starts the program with a path and its own copy of the TLS files."""
    kit = Kit.open(goods["kit"])
    text = kit.policy_file.read_text()
    kit.policy_file.write_text(text.replace('sandbox = "full"', 'sandbox = "systemd"'))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    own = tmp_path / "credentials"
    own.mkdir()
    for what, file in ready.tls_files(kit).items():
        (own / what).write_bytes(Path(file).read_bytes())
    said: list = []
    waiting = threading.Thread(target=lambda: said.append(launch.open_carrier(kit, threading.Event())))
    waiting.start()
    shown, end = tmp_path / "carrier.sock", time.monotonic() + 60
    while not listens(shown):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert shown.stat().st_mode & 0o777 == 0o660  # for its owner and its group
    words = [sys.executable, "-I", "-B", "-m", "cloister.deploy.sandbox", "cloister.deploy.carrier"]
    process = subprocess.Popen([*words, str(tmp_path / "carrier.sock")], env={"CREDENTIALS_DIRECTORY": str(own)})
    try:
        waiting.join(120)
        (child, ours) = said[0]
        assert child is None
        pipe = Pipe(ours)
        plan = {"me": "basel", "hub": "hub", "parties": ["hub", "basel"], "host": "localhost", "port": 1}
        plan |= {"listen": False, "addresses": [], "sandbox": "systemd"}
        plan["tls"] = dict.fromkeys(ready.tls_files(kit), "/nowhere")
        pipe.post(Packet(PLAN, data=json.dumps(plan).encode()))
        kinds = iter(lambda: pipe.read().kind, READY)  # it may say before that it has nowhere to connect to
        assert set(kinds) <= {LOG}
        pipe.close()
        assert process.wait(60) == 0
    finally:
        for _, ours in said:
            ours.close()
        process.kill()
        process.wait()


@needs_kernel
def test_cells_must_not_lie_where_the_carrier_may_read(goods, monkeypatch):
    kit = Kit.open(goods["kit"])
    ready.check_ready(kit)
    monkeypatch.setattr(sandbox, "readable_code", lambda: [kit.path.parent])
    with pytest.raises(ParameterError, match="which the carrier may read"):
        ready.check_ready(kit)


def test_a_carrier_may_start_before_its_service(tmp_path):
    """As in two containers that start together."""
    shown, found = tmp_path / "carrier.sock", []
    waiting = threading.Thread(target=lambda: found.append(sandbox._open_pipe(str(shown), patience=30)))
    waiting.start()
    time.sleep(0.3)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(shown))
        server.listen()
        ours, _ = server.accept()
        waiting.join(30)
        found[0].close()
        ours.close()


def test_a_carrier_without_a_service_says_so_in_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"no service listens at .*carrier\.sock after 0 s; is it running\?"):
        sandbox._open_pipe(str(tmp_path / "carrier.sock"), patience=0.1)
