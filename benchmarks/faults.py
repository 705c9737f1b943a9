"""A random fault in every run of a study of three steps, with five services on this machine: what becomes of it.

    python benchmarks/faults.py --runs 30 --seed 1

Faults: SIGKILL of a run's process, a carrier, a service, or all processes of a party; SIGSTOP for some seconds; a line
that is cut or hangs for 1 to 60 s; a full disk (if a file system can be mounted here); a coordinator that is restarted.
After a run that broke off, what was broken is put right and the study is run again: it continues at the first step that
not every party has finished. Printed for every run: the fault, how the run ended and whether all parties give one
reason, the steps that were not repeated, and the seconds that it took beside those of a run without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

DEPLOY = Path(__file__).parents[1] / "tests" / "deploy"
sys.path[:0] = [str(DEPLOY), str(DEPLOY / "chat")]

import chat  # noqa: E402
from federation import PARTIES, SIZES, Federation  # noqa: E402
from proxies import Line, line  # noqa: E402

from cloister.deploy.kit import Kit  # noqa: E402
from cloister.deploy.party import Ended  # noqa: E402
from cloister.errors import CloisterError  # noqa: E402
from cloister.mpc.net.receipts import Receipt  # noqa: E402
from cloister.study import Step  # noqa: E402

chat.register()
TALK = {"rounds": 60, "pause": 0.05}
STEPS = (
    Step("bin-values", options={"n_bins": 9, "min_values": 50}, name="fine"),
    Step("chat", options=TALK, name="talk"),
    Step(
        "bin-values", options={"n_bins": 4, "min_values": 50, "layer": "binned", "key_added": "coarse"}, name="coarse"
    ),
)


@dataclass
class Result:
    fault: str
    first: str  # how the run with the fault ended
    said: str  # reasons and origins that the parties wrote
    skipped: int  # steps that the next run did not repeat
    repeated: int  # finished steps that were done twice; none, where nothing is lost
    final: str
    seconds: float


class Faults:
    def __init__(self, federation: Federation, wire: Line, dice: random.Random, disk: Path | None) -> None:
        self.federation, self.wire, self.dice, self.disk = federation, wire, dice, disk
        kinds = [self.kill_run, self.kill_carrier, self.kill_service, self.kill_all, self.freeze, self.cut, self.hang]
        self.kinds = [*kinds, self.restart, *([self.fill] if disk is not None else [])]
        self._later: list[threading.Timer] = []
        self.within = 12.0  # seconds of a run in which its fault begins
        self.undo: Callable[[], None] = lambda: None

    def pick(self) -> Callable[[], str]:
        return self.dice.choice(self.kinds)

    def _processes(self, party: str, word: str) -> list[psutil.Process]:
        """Processes of a party whose command line has this word, its carrier by its parent."""
        own = self.federation.processes(party)
        if word == "carrier":
            service = self.federation.services[party].pid
            with contextlib.suppress(psutil.Error):
                return [
                    p for p in psutil.Process(service).children() if "cloister.deploy.carrier" in " ".join(p.cmdline())
                ]
            return []
        return [p for p in own if "cloister.deploy.run" in p.cmdline()]

    def _anyone(self) -> str:
        return self.dice.choice([*PARTIES])

    def kill_run(self) -> str:
        party = self._anyone()
        for process in self._processes(party, "run"):
            process.kill()
        return f"SIGKILL run, {party}"

    def kill_carrier(self) -> str:
        party = self._anyone()
        for process in self._processes(party, "carrier"):
            process.kill()
        return f"SIGKILL carrier, {party}"

    def kill_service(self) -> str:
        party = self._anyone()
        service = self.federation.services.pop(party)
        service.kill()
        service.wait()
        self.undo = lambda: self.federation.start(party)
        return f"SIGKILL service, {party}"

    def kill_all(self) -> str:
        party = self._anyone()
        self.federation.kill(party)
        self.undo = lambda: self.federation.start(party)
        return f"SIGKILL all, {party}"

    def restart(self) -> str:
        self.federation.stop("hub")
        self.federation.start("hub")
        return "restart, hub"

    def freeze(self) -> str:
        party, seconds = self._anyone(), self.dice.uniform(1.0, 60.0)
        stopped = self._processes(party, "run") or self._processes(party, "carrier")

        def thaw() -> None:
            for process in stopped:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)

        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        self._after(seconds, thaw)
        return f"SIGSTOP {seconds:.0f} s, {party}"

    def cut(self) -> str:
        return self._break("cut")

    def hang(self) -> str:
        return self._break("hang")

    def _break(self, how: str) -> str:
        seconds = self.dice.uniform(1.0, 60.0)
        getattr(self.wire, how)()
        self._after(seconds, self.wire.heal)
        return f"line {how}s {seconds:.0f} s"

    def fill(self) -> str:
        assert self.disk is not None
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
            while f.write(bytes(4096)):
                pass
        self.undo = filler.unlink
        return "full disk, vienna"

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.start()
        self._later.append(timer)
        self.undo = lambda: (timer.cancel(), work())[1]

    def put_right(self) -> None:
        undo, self.undo = self.undo, lambda: None
        undo()
        for party in PARTIES:
            if (service := self.federation.services.get(party)) is None or service.poll() is not None:
                self.federation.start(party)


def outcomes(federation: Federation) -> dict[str, set[Path]]:
    return {p: {*_results(federation, p).glob("*/outcome.json")} for p in PARTIES}


def _results(federation: Federation, party: str) -> Path:
    return Kit.open(federation.kits[party]).policy().out


def done(federation: Federation, party: str, study: str) -> list[str]:
    """Steps of a study that this party has finished, each time."""
    found: dict[str, str] = {}
    for path in _results(federation, party).glob(f"*/[0-9][0-9]-*/{party}.receipt.json"):
        receipt = Receipt.load(path)
        if receipt.header["study"] == study and receipt.status == "done":
            found[receipt.head] = path.parent.name
    return sorted(found.values())


def order(federation: Federation, blow: Callable[[], None] | None = None) -> str:
    """Run the study; how that ended, in a word. `blow` is struck meanwhile."""
    ends: list[str] = []

    def go() -> None:
        try:
            ends.append(federation.run(limit=400.0).status)
        except CloisterError as e:
            ends.append(getattr(e, "began", "") or getattr(e, "code", type(e).__name__))

    thread = threading.Thread(target=go)
    thread.start()
    if blow is not None:
        blow()
    thread.join(420)
    return ends[0] if ends else "hangs"


def play(federation: Federation, faults: Faults, number: int) -> Result:
    name = f"study {number}"
    federation.agree(name=name, workflow="", steps=STEPS)
    federation.wait_for_connection(*(p for p in PARTIES if p != "hub"))
    before, said = outcomes(federation), [""]
    began = time.monotonic()

    def blow() -> None:
        time.sleep(faults.dice.uniform(0.0, faults.within))
        said[0] = faults.pick()()

    final = first = order(federation, blow)
    reasons, skipped = "", 0
    tries = 0
    while final != "done" and tries < 3:
        faults.put_right()
        if not tries:
            reasons = written(federation, before)
        tries += 1
        had = min(len(set(done(federation, p, name))) for p in SIZES)
        final = order(federation)
        if final == "done":
            skipped = had
    seconds = time.monotonic() - began
    faults.put_right()
    repeated = max(len(done(federation, p, name)) - len(STEPS) for p in SIZES)
    return Result(said[0], first, reasons, skipped, repeated, final, seconds)


def written(federation: Federation, before: dict[str, set[Path]]) -> str:
    """Reasons and origins that the parties wrote, and who wrote nothing."""
    end = time.monotonic() + 60
    while True:
        new = {p: files - before[p] for p, files in outcomes(federation).items()}
        if all(new.values()) or time.monotonic() > end:
            break
        time.sleep(0.5)
    ends = [Ended.load(file) for files in new.values() for file in files]
    said = sorted({f"{e.error.get('reason')} at {e.error.get('origin')}" for e in ends if e.error})
    return ", ".join([*said, *(f"nothing written at {p}" for p, files in new.items() if not files)])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    place = folder / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(place)], capture_output=True).returncode:
        yield None
        return
    place.chmod(0o700)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="of the study, in seconds; 60 is the default")
    parser.add_argument("--folder", type=Path, help="where kits and results are; a temporary folder by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-", dir=args.folder) as place, small_disk(Path(place)) as disk:
        federation = Federation(Path(place), timeout=args.timeout)
        wire = federation.behind(line)
        if disk is not None:
            file = federation.kits["vienna"] / "local" / "site.toml"
            file.write_text(file.read_text().replace('out = "results"', f'out = "{disk}"'))
        federation.agree(name="plain", workflow="", steps=STEPS)
        federation.start(*PARTIES)
        try:
            report(federation, Faults(federation, wire, random.Random(args.seed), disk), args.runs)
        finally:
            federation.close()


def report(federation: Federation, faults: Faults, runs: int) -> None:
    plain = []
    for i in range(2):
        federation.agree(name=f"plain {i}", workflow="", steps=STEPS)
        began = time.monotonic()
        assert order(federation) == "done"
        plain.append(time.monotonic() - began)
    usual = statistics.median(plain)
    faults.within = 0.9 * usual
    print(f"without a fault: {usual:.1f} s", flush=True)
    print(f"{'':3} {'fault':26} {'ended':10} {'then':6} {'not repeated':12} {'twice':5} {'+ s':>6}  parties say")
    results = []
    for i in range(runs):
        results.append(r := play(federation, faults, i))
        then = "" if r.first == "done" else r.final
        row = f"{i + 1:3} {r.fault:26} {r.first:10} {then:6} {r.skipped if then else '':<12} {r.repeated:<5}"
        print(f"{row} {r.seconds - usual:6.1f}  {r.said}", flush=True)
        if faults.disk is not None:
            for old in sorted(faults.disk.glob("2*"))[:-4]:
                subprocess.run(["rm", "-rf", str(old)], check=True)
    broke = [r for r in results if r.first != "done"]
    resumed = [r for r in broke if r.final == "done"]
    print(
        f"{runs} runs: {runs - len(broke)} went through, {len(broke)} broke off,"
        f" {len(resumed)} of them were completed by"
        f" the next runs, {sum(r.skipped > 0 for r in resumed)} without repeating finished steps;"
        f" {sum(r.first == 'hangs' or r.final == 'hangs' for r in results)} hung;"
        f" {sum(',' in r.said for r in broke)} with more than one reason or origin;"
        f" median time cost {statistics.median(r.seconds - usual for r in results):.1f} s"
    )


if __name__ == "__main__":
    main()
