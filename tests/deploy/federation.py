"""A whole consortium on loopback: kits, services as real processes, runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import chat
import numpy as np
import psutil

from cloister.cells.files import write_cells
from cloister.deploy.control_socket import run_study
from cloister.deploy.kit import Kit
from cloister.deploy.party import Ended
from cloister.deploy.provision import provision
from cloister.deploy.ready import is_running
from cloister.study import Study, format_study

CHAT = Path(__file__).parent / "chat"
SIZES = {"basel": 5, "lugano": 7, "vienna": 11}
PARTIES = {"hub": "coordinator", **dict.fromkeys(SIZES, "site"), "helper": "auxiliary"}
START = "import sys; from cloister.deploy.start import start_party; start_party(sys.argv[1])"
UNCHECKED = "import cloister.deploy.ready as r; r.check_certificate = lambda kit: None; "
IMPATIENT = "import cloister.deploy.control_socket as o; o.CONNECT = 6.0; "


def cells() -> dict[str, ad.AnnData]:
    rng = np.random.default_rng(0)
    made = {}
    for site, n in SIZES.items():
        made[site] = ad.AnnData(rng.poisson(2.0, (n, 60)).astype(np.float32))
        made[site].var_names = [f"GENE{i}" for i in range(60)]
        made[site].obs_names = [f"{site}{i}" for i in range(n)]
    return made


def free_port() -> int:
    """A port that nobody has, below those that connections are given: none of another test takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(
    folder: Path, workflow: str, sites: dict[str, ad.AnnData], options: dict, *, published: bool = False
) -> Iterator[Federation]:
    """A coordinator and three sites with these cells, approved for one workflow, started; published: a helper, too."""
    made = Federation(folder, timeout=120.0 if published else 20.0)  # keys of 3072 bits take their time
    parties = {p: role for p, role in PARTIES.items() if published or p != "helper"}
    keys = {p: k for p, k in made.study.keys.items() if p in parties}
    made.study = dataclasses.replace(made.study, workflow=workflow, parties=parties, keys=keys, parameters=options)
    if published:
        made.study = dataclasses.replace(made.study, mode="published")
    for site, adata in sites.items():
        write_cells(adata, made.kits[site] / "cells.h5ad")
    made.agree()
    made.start(*parties)
    try:
        yield made
    finally:
        made.close()


class Federation:
    """Provisioned once; services can be started, stopped and killed one by one."""

    def __init__(self, folder: Path, timeout: float = 12.0) -> None:
        chat.register()  # the kits are made for it, whatever is run then
        self.folder, self.port = folder, free_port()
        study = Study("test", "chat", PARTIES, timeout=timeout, network={"host": "localhost", "port": self.port})
        self.kits = provision(study, folder / "kits")
        self.study = Study.load(folder / "kits" / "study.toml")
        for site, adata in cells().items():
            write_cells(adata, self.kits[site] / "cells.h5ad")
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.services: dict[str, subprocess.Popen] = {}
        self._lines: list[contextlib.AbstractContextManager] = []

    def behind(self, make) -> Any:
        """Have all others reach the coordinator over a line of the test, `make(port)`; call it before `start`."""
        where = free_port()
        context = make(where)
        self._lines.append(context)
        inner = context.__enter__()
        self.study = dataclasses.replace(self.study, network={"host": "localhost", "port": inner.port})
        file = self.kits["hub"] / "local" / "site.toml"
        file.write_text(f'listen = "127.0.0.1:{where}"\n' + file.read_text())
        return inner

    def agree(self, **changes) -> Study:
        """Give every party the same changed study, and have all approve it."""
        study = dataclasses.replace(self.study, **changes)
        for p in study.parties:
            self.hand_over(p, study)
        return study

    def hand_over(self, party: str, study: Study) -> None:
        (self.kits[party] / "study.toml").write_text(format_study(study))
        if study.parties[party] != "coordinator":
            Kit.open(self.kits[party]).approve()

    def start(self, *parties: str, patch: str = "", carrier: Path | None = None) -> None:
        """Start services; `patch` is code to run first, `carrier` a program to run in the carrier's place."""
        if carrier is not None:
            patch += f"import cloister.deploy.launch as s; s.PROGRAM = {str(carrier)!r}; "
        code = patch + START
        for p in parties:
            self.services[p] = self.spawn(self.kits[p], self.folder / f"{p}.out", code)
        for p in parties:
            self.wait_until(lambda p=p: is_running(Kit.open(self.kits[p])))

    def spawn(self, kit: Path, out: Path, code: str = START) -> subprocess.Popen:
        path = os.pathsep.join([str(CHAT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "CHAT_MARK": str(self.marks), "OMP_NUM_THREADS": "1"}
        with open(out, "ab") as file:
            return subprocess.Popen([sys.executable, "-c", code, str(kit)], stdout=file, stderr=file, env=env)

    def processes(self, *parties: str) -> list[psutil.Process]:
        """All processes of these parties, the ones FLARE starts for a run included."""
        folders = tuple(str(self.kits[p]) for p in parties)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(word in folders for word in process.cmdline()):
                    found.append(process)
        return found

    def kill(self, party: str) -> None:
        for process in self.processes(party):
            process.kill()
        self.services.pop(party).wait()

    def stop(self, *parties: str) -> dict[str, int]:
        """SIGTERM; returns the exit codes."""
        for p in parties:
            self.services[p].send_signal(signal.SIGTERM)
        return {p: self.services.pop(p).wait(timeout=60) for p in parties}

    def run(self, limit: float = 180.0) -> Ended:
        return run_study(self.kits["hub"], limit=limit)

    def ended(self, party: str) -> Ended:
        """How the last run ended at a party; a slow one may write it when the coordinator has already ended."""
        with contextlib.suppress(AssertionError):
            self.wait_until(lambda: self._last(party) >= self._last("hub") or self._same(party, "hub"), 30.0)
        return Ended.load(self._last(party)[1])

    def _last(self, party: str) -> tuple[float, Path]:
        found = (self.kits[party] / "results").glob("*/outcome.json")
        return max(((f.stat().st_mtime, f) for f in found), default=(0.0, Path()))

    def _same(self, one: str, other: str) -> bool:
        """Whether the latest outcomes of two parties are of one run: its name begins that of their folders."""
        runs = {self._last(p)[1].parent.name.rpartition("-")[2] for p in (one, other)}
        return len(runs) == 1

    def wait_for_mark(self, party: str, ends: list, seconds: float = 180.0) -> None:
        """Until a party is at round 2 of a run that is still going on."""
        end = time.monotonic() + seconds
        while not (self.marks / party).exists():
            assert not ends, ends
            assert time.monotonic() < end, f"{party} never came to round 2"
            time.sleep(0.05)
        (self.marks / party).unlink()

    def wait_for_connection(self, *parties: str) -> None:
        """Until the coordinator has heard of these; who has only started may take its time to connect."""
        log = self.kits["hub"] / "log.txt"
        self.wait_until(lambda: all(f"{p} is connected" in log.read_text() for p in parties))

    def clear_marks(self) -> None:
        for mark in self.marks.iterdir():
            mark.unlink()

    def wait_until(self, done: Callable[[], bool], seconds: float = 180.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end
            time.sleep(0.2)

    def close(self) -> None:
        for process in self.processes(*self.kits):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for service in self.services.values():
            service.wait()
        for each in self._lines:
            each.__exit__(None, None, None)
