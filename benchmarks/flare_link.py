"""Round trips and throughput between parties on FLARE, with real processes on loopback.

    python benchmarks/flare_link.py --quick
    python benchmarks/flare_link.py --against 754d8c9        before and after the carrier, in turns

A coordinator and two sites are provisioned and started; a run of theirs sends messages to and fro: coordinator and
site, and site and site, which the coordinator's server relays. Everything is timed inside the run, on top of mutual
TLS, the parties' own sealing, the wire format and receipts. `start` is from the order to the first message.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloister import workflows
from cloister.arrays import U8
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.session import Outcome, Session
from cloister.study import Party, Study
from cloister.workflows.modes import Mode

SIZES = {100: 100, 100_000: 30, 10_000_000: 5}  # bytes → round trips
LARGE = {100_000_000: 3}


@dataclass(frozen=True)
class Options:
    quick: bool = True


@dataclass(frozen=True, slots=True)
class Params:
    one: Party
    other: Party
    size: int
    rounds: int


@message("L1")
class There:
    x: U8


@message("L2")
class Back:
    x: U8


async def play(ch: Channel, params: Params) -> list[float]:
    """Seconds of each round trip, at `one`."""
    times, x = [], np.frombuffer(os.urandom(params.size), np.uint8)
    for _ in range(params.rounds):
        began = time.perf_counter()
        if ch.me == params.one:
            await ch.send(params.other, There(x))
            await ch.recv(params.other, Back, x=(params.size,))
            times.append(time.perf_counter() - began)
        elif ch.me == params.other:
            await ch.send(params.one, Back((await ch.recv(params.one, There, x=(params.size,))).x))
    return times


def part(session: Session, options: Options) -> Outcome:
    began, rows = time.time(), []
    hub, (a, b) = session.coordinator, session.sites
    for size, rounds in (SIZES if options.quick else SIZES | LARGE).items():
        for one, other in ((hub, a), (a, b)):
            times = session.run(play, Params(one, other, size, rounds))
            if times:
                rows.append([one, other, size, statistics.median(times), max(times)])
    return Outcome(None, {"rows": rows, "began": began})


WORKFLOW = workflows.Workflow(
    name="bench-link",
    summary="Time messages.",
    options=Options,
    modes={"hardened": Mode(("bench_link",))},
    site=lambda session, adata, options: part(session, options),
    coordinator=part,
    check=lambda adata, options: [],
)


def register() -> None:
    workflows.register(WORKFLOW)


def measure(*, quick: bool) -> dict:
    """One run between real services on loopback, of the code that is on the path."""
    import anndata as ad

    from cloister.cells.files import write_cells
    from cloister.deploy.control_socket import run_study
    from cloister.deploy.kit import Kit
    from cloister.deploy.party import Ended
    from cloister.deploy.provision import provision

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as work:
        folder = Path(work)
        (folder / "sitecustomize.py").write_text("import flare_link\nflare_link.register()\n")
        parties = {"hub": "coordinator", "a": "site", "b": "site"}
        network = {"host": "localhost", "port": port}
        study = Study("bench", "bench-link", parties, parameters={"quick": quick}, network=network)
        kits = provision(study, folder / "kits")
        for p in ("a", "b"):
            write_cells(ad.AnnData(np.ones((2, 2), np.float32)), kits[p] / "cells.h5ad")
            Kit.open(kits[p]).approve()
        path = os.pathsep.join([work, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = "import sys; from cloister.deploy.start import start_party; start_party(sys.argv[1])"
        services = [
            subprocess.Popen(
                [sys.executable, "-c", command, str(kit)],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for kit in kits.values()
        ]
        try:
            _wait_for_services(kits.values())
            said: dict[str, float] = {}
            ended = run_study(kits["hub"], on_status=lambda s: said.setdefault(s.rpartition(" ")[2], time.time()))
            first = ended.result["began"] - said["submitted"]
            rows = ended.result["rows"] + Ended.load(next(kits["a"].glob("results/*/outcome.json"))).result["rows"]
        finally:
            for service in services:
                service.terminate()
            for service in services:
                service.wait(timeout=30)
    return {"rows": rows, "first": first}


def _wait_for_services(kits: Iterable[Path]) -> None:
    """Until each has its kit's lock file; the order waits for the rest."""
    end = time.monotonic() + 60
    while not all((kit / "running.lock").exists() for kit in kits) and time.monotonic() < end:
        time.sleep(0.2)


def measure_in(source: Path, *, quick: bool) -> dict:
    """`measure` in a process of its own, with the package at `source` and the script of the same commit."""
    script = source.parent / "benchmarks" / "flare_link.py"
    words = [sys.executable, str(script), "--measure", *(["--quick"] if quick else [])]
    env = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no messages of 100 MB")
    parser.add_argument("--against", metavar="COMMIT", help="also measure this commit, in turns, and compare")
    parser.add_argument("--turns", type=int, default=3, help="how often each is measured, with --against")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        register()
        print(json.dumps(measure(quick=args.quick)))
        return
    root = Path(__file__).parents[1]
    if not args.against:
        report(measure_in(root / "src", quick=args.quick))
        return
    with tempfile.TemporaryDirectory(prefix="cloister-before-") as work:
        old = Path(work) / "tree"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--detach", str(old), args.against], check=True, capture_output=True)
        try:
            trees = {"before": old / "src", "after": root / "src"}
            turns = [{k: measure_in(v, quick=args.quick) for k, v in trees.items()} for _ in range(args.turns)]
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True, capture_output=True)
    compare(turns, args.against)


def machine() -> str:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}"


def pair(one: str, other: str) -> str:
    return f"{one} - {other}" + ("" if one == "hub" else " (relay)")


def report(measured: dict) -> None:
    from importlib.metadata import version

    print(f"FLARE {version('nvflare')} on loopback, mutual TLS, sealed; {machine()}, 1 thread each")
    print(f"from the order to the first message: {measured['first']:.1f} s")
    print(f"{'between':<18}{'bytes':>12}{'round trip ms':>16}{'worst ms':>12}{'MB/s one way':>15}")
    for one, other, size, median, worst in measured["rows"]:
        rate = f"{2 * size / median / 1e6:.0f}" if size >= 100_000 else ""
        print(f"{pair(one, other):<18}{size:>12,}{median * 1e3:>16.1f}{worst * 1e3:>12.1f}{rate:>15}")


def compare(turns: list[dict], commit: str) -> None:
    """The best of the turns' medians: what else the machine does only adds."""
    from importlib.metadata import version

    print(f"FLARE {version('nvflare')} on loopback, mutual TLS, sealed; {machine()}, 1 thread each")
    print(f"before: {commit}; best of {len(turns)} medians each, in turns")
    starts = {k: min(t[k]["first"] for t in turns) for k in ("before", "after")}
    print(f"from the order to the first message: {starts['before']:.1f} s before, {starts['after']:.1f} s after")
    print(f"{'between':<18}{'bytes':>12}{'before ms':>12}{'after ms':>12}{'time':>8}{'MB/s':>8}{'MB/s':>8}{'rate':>8}")
    for i, (one, other, size, *_) in enumerate(turns[0]["after"]["rows"]):
        old, new = (min(t[k]["rows"][i][3] for t in turns) for k in ("before", "after"))
        rates = f"{2 * size / old / 1e6:>8.0f}{2 * size / new / 1e6:>8.0f}{old / new:>7.2f}x" if size >= 100_000 else ""
        print(f"{pair(one, other):<18}{size:>12,}{old * 1e3:>12.1f}{new * 1e3:>12.1f}{new / old:>7.2f}x{rates}")


if __name__ == "__main__":
    main()
