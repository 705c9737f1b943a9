"""Rehearsal with one process per party: the parent only carries frames between them.

A party's cells, results and model pass through files in a private folder (cells that come as a file are read where
they are), frames through a socket pair as bytes. The child is
`python -m cloister.rehearsal.processes FOLDER PARTY FD`, so nothing of the calling script is imported again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister import errors, workflows
from cloister.cells.files import open_cells, write_cells
from cloister.cells.progress import told_to
from cloister.errors import PeerLost
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.events import Event
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.memory_transport import Fault, Killed, Wires
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.progress import passes_of
from cloister.rehearsal.results import write_files
from cloister.rehearsal.run import Run, workflow_part
from cloister.session import Outcome, take_part
from cloister.study import CONSENTS, Party, Study, format_study
from cloister.workflows.site_labels import use_study_labels

if TYPE_CHECKING:
    from anndata import AnnData

GRACE = 10.0  # seconds that a party's process has to end, once the rehearsal has


def run_processes(
    study: Study,
    data: Mapping[Party, AnnData | str | Path],
    *,
    faults: Iterable[Fault] = (),
    on_event: Callable[[Event], None] | None = None,
    identities: Mapping[Party, Identity] | None = None,
    folders: Mapping[str, Path] | None = None,
) -> Run:
    """Run the study's workflow with one process per party; `folders` holds what earlier steps wrote, by their names."""
    identities = identities or {p: Identity.create(Entropy()) for p in study.parties}
    study = study.with_keys({p: i.public for p, i in identities.items()})
    run = Run(study)
    top = Folder()
    with top.kept_by(run):
        homes = {p: top.path / p for p in study.parties}
        pipes: dict[Party, Connection] = {}
        children: dict[Party, subprocess.Popen[bytes]] = {}
        try:
            for p, folder in homes.items():
                folder.mkdir(mode=0o700)
                (folder / "study.toml").write_text(format_study(study))
                identities[p].save(folder / "identity.key")
                if p in data:
                    _hand_over(data[p], folder)
                earlier = {step: os.path.abspath(place) for step, place in (folders or {}).items()}
                (folder / "steps.json").write_text(json.dumps(earlier))
                ours, theirs = socket.socketpair()
                with theirs:
                    command = [
                        sys.executable,
                        "-m",
                        "cloister.rehearsal.processes",
                        str(folder),
                        p,
                        str(theirs.fileno()),
                    ]
                    children[p] = subprocess.Popen(command, pass_fds=[theirs.fileno()])
                pipes[p] = Connection(ours.detach())
            _route(pipes, children, run, faults, on_event)
        except BaseException:
            for child in children.values():
                child.kill()
            raise
        finally:
            for child in children.values():
                try:
                    child.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
            for pipe in pipes.values():
                pipe.close()
        for p, home in homes.items():
            _take_back(run, p, home)
        run.outcomes = {p: run.outcomes[p] for p in homes if p in run.outcomes}  # in the study's order
    return run


def _hand_over(cells: AnnData | str | Path, folder: Path) -> None:
    """Leave a party's cells in its folder, or the name of the file they are in."""
    if isinstance(cells, str | Path):
        (folder / "cells.txt").write_text(os.path.abspath(cells))
    else:
        write_cells(cells, folder / "cells.h5ad")


def _take_back(run: Run, p: Party, folder: Path) -> None:
    """What a party left in its folder: the receipt, and where it came to its end, cells and model."""
    if (folder / "receipt.json").exists():
        run.receipts[p] = Receipt.load(folder / "receipt.json")
    if p not in run.outcomes:
        return
    outcome = run.outcomes[p]
    outcome.receipt = run.receipts.get(p)
    if (folder / "result.h5ad").exists():
        outcome.adata = open_cells(folder / "result.h5ad", probe=False)  # our own file
    made = {path.name.removeprefix(f"{p}."): path for path in (folder / "files").iterdir()}
    outcome.files = {name: path.read_bytes() for name, path in made.items()}
    workflow, options = workflows.check_plan(run.study)
    if workflow.model is not None and workflow.model[0] in made:
        outcome.model = workflow.model[1](made[workflow.model[0]], options)


class Folder:
    """A temporary folder that lasts as long as somebody reads results from it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="cloister-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @contextlib.contextmanager
    def kept_by(self, run: Run) -> Iterator[None]:
        """Leave the folder to the results of the run that stayed on disk; remove it now if there are none."""
        try:
            yield
        finally:
            origins = [adata.origin for adata in run.data.values() if hasattr(adata, "origin")]
            for origin in origins:
                origin.folder = self
            if not origins:
                self.remove()


def _route(
    pipes: Mapping[Party, Connection],
    children: Mapping[Party, subprocess.Popen[bytes]],
    run: Run,
    faults: Iterable[Fault],
    on_event: Callable[[Event], None] | None,
) -> None:
    outbox: dict[Party, queue.SimpleQueue[bytes | None]] = {p: queue.SimpleQueue() for p in pipes}

    def pump(p: Party) -> None:  # a full pipe at one party must not stop the others
        with contextlib.suppress(OSError, ValueError):
            while (item := outbox[p].get()) is not None:
                pipes[p].send_bytes(item)

    pumps = [threading.Thread(target=pump, args=(p,), daemon=True) for p in pipes]
    for thread in pumps:
        thread.start()
    wires = Wires(lambda sender, to, frame: outbox[to].put(b"F" + sender.encode() + b"\0" + frame), faults)
    open_ends: dict[Any, Party] = {pipe: p for p, pipe in pipes.items()}
    while open_ends:
        for pipe in wait(list(open_ends), timeout=1.0):
            p = open_ends[pipe]
            try:
                item = pipes[p].recv_bytes()
            except (EOFError, OSError):
                del open_ends[pipe]
                if p not in run.outcomes and p not in run.errors and p not in wires.dead:
                    run.errors[p] = PeerLost("local", "-", "lost", f"the process of '{p}' died")
                    errors.blame(run.errors[p], p, "lost")
                for other in outbox:
                    outbox[other].put(b"G" + p.encode())
                continue
            kind, rest = item[:1], item[1:]
            if kind == b"F":
                to, _, frame = rest.partition(b"\0")
                try:
                    wires.carry(p, Party(to.decode()), frame)
                except Killed:
                    children[p].kill()
            elif kind == b"E":
                event = Event(**json.loads(rest))
                run.events.append(event)
                if on_event is not None:
                    on_event(event)
            elif kind == b"R":
                done = json.loads(rest)
                run.outcomes[p] = Outcome(result=done["result"], cost=done["cost"])
            elif kind == b"X" and p not in wires.dead:
                run.errors[p] = errors.from_json(json.loads(rest))
    for box in outbox.values():
        box.put(None)
    for thread in pumps:
        thread.join(timeout=5)


@dataclass(frozen=True)
class PipeLink:
    pipe: Connection
    lock: threading.Lock

    def post(self, to: Party, frame: bytes) -> None:
        self.tell(b"F" + to.encode() + b"\0" + frame)

    def tell(self, item: bytes) -> None:
        with self.lock, contextlib.suppress(OSError):
            self.pipe.send_bytes(item)

    def close(self) -> None:
        """The process ends, and the pipe with it."""


def _own_cells(study: Study, cells: str | Path) -> AnnData:
    adata = open_cells(cells)
    use_study_labels(study, adata)
    return adata


def child(folder: str, me: str, fd: str) -> None:
    """One party's process."""
    home, party = Path(folder), Party(me)
    pipe = Connection(int(fd))
    link, mailbox, over = PipeLink(pipe, threading.Lock()), Mailbox(party), threading.Event()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                item = pipe.recv_bytes()
                if item[:1] == b"G":
                    mailbox.gone(Party(item[1:].decode()), "its process ended")
                else:
                    sender, _, frame = item[1:].partition(b"\0")
                    mailbox.put(Party(sender.decode()), frame)
        for p in study.parties:
            mailbox.gone(p, "the rehearsal ended")
        over.wait(GRACE)
        os._exit(1)  # whatever it is computing, nobody waits for it

    def tell(event: Event) -> None:
        link.tell(b"E" + json.dumps(dataclasses.asdict(event)).encode())

    def keep(receipt: Receipt) -> None:
        receipt.save(home / "receipt.json")

    try:
        study = Study.load(home / "study.toml")
        threading.Thread(target=listen, daemon=True).start()
        name = home / "cells.txt"
        cells = name.read_text() if name.exists() else home / "cells.h5ad"
        folders = {step: Path(place) for step, place in json.loads((home / "steps.json").read_text()).items()}
        outcome = take_part(
            study,
            party,
            link,
            mailbox,
            (lambda: _own_cells(study, cells)) if study.parties[party] == "site" else None,
            part=functools.partial(workflow_part, checked=True, folders=folders),
            consent=frozenset(CONSENTS),
            reveals=workflows.reveals(study),
            identity=Identity.load(home / "identity.key"),
            on_event=tell,
            on_receipt=keep,
        )
        if outcome.adata is not None:
            with told_to(passes_of(party, tell)):
                write_cells(outcome.adata, home / "result.h5ad")
        (home / "files").mkdir()
        write_files(Run(study, {party: outcome}), party, home / "files")
        link.tell(b"R" + json.dumps({"result": outcome.result, "cost": outcome.cost}).encode())
    except BaseException as e:
        link.tell(b"X" + json.dumps(errors.to_json(e)).encode())
    over.set()


if __name__ == "__main__":
    child(*sys.argv[1:])
