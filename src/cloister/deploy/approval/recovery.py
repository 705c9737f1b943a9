"""Recovery: what a run's process left that could not end by itself, killed or cut off from power.

Its journal tells what had been sent. It is closed with `aborted`, signed with the kit's key, and takes the place of the
receipt; `outcome.json` says the same. The service does this when a run's process has ended, and when it starts: what
had begun is known by a file of its own, so that a run without a journal leaves its outcome, too.

    runs/3f2a9c1e….begun      from before a run's process starts until its outcome is on disk
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from cloister import errors, workflows
from cloister.deploy.kit import RUNS, Kit
from cloister.deploy.party import Ended, results_folder
from cloister.errors import CloisterError, PeerLost, ReceiptError
from cloister.mpc.net.journal import SUFFIX
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.results import save_run
from cloister.rehearsal.run import Run
from cloister.session import SIGNED

BEGUN = ".begun"  # behind the name of a run that has no outcome yet
CUT_OFF = "its process ended before the run did"

log = logging.getLogger("cloister.deploy")


def note_begun(kit: Kit, run: str) -> None:
    """A run begins here; should this machine stop at once, its outcome is written at the next start."""
    with contextlib.suppress(OSError):  # a full disk: the run ends by that name
        (kit.path / RUNS).mkdir(mode=0o700, exist_ok=True)
        (kit.path / RUNS / f"{run}{BEGUN}").touch(mode=0o600)


def recover(kit: Kit, run: str = "") -> list[Path]:
    """Close the journals of a run, or of all that nobody is at work on, and return their folders. Never raises."""
    found = _close_all(kit, run)
    for mark in sorted((kit.path / RUNS).glob(f"{run}*{BEGUN}")):
        begun = mark.name.removesuffix(BEGUN)
        if begun != run:
            found += _close_all(kit, begun)
        if any(_out(kit).glob(f"*-{begun[:8]}/outcome.json")):
            with contextlib.suppress(OSError):
                mark.unlink()
    return found


def keep_late(kit: Kit, unsaved: dict[str, Ended]) -> None:
    """Write outcomes that could not be written when their runs ended, because the disk was full."""
    for run, ended in [*unsaved.items()]:
        file = Path(ended.folder) / "outcome.json"
        if ended.folder and not file.exists():
            ended.keep()
        if not ended.folder or file.exists():
            del unsaved[run]
            with contextlib.suppress(OSError):
                (kit.path / RUNS / f"{run}{BEGUN}").unlink(missing_ok=True)


def _out(kit: Kit) -> Path:
    try:
        return kit.policy().out
    except CloisterError:
        return kit.path / "results"


def _close_all(kit: Kit, run: str) -> list[Path]:
    out = _out(kit)
    found: dict[Path, list[Path]] = {}
    for pattern in (f"*-{run[:8]}*/*{SUFFIX}", f"*-{run[:8]}*/*/*{SUFFIX}"):
        for journal in sorted(out.glob(pattern)):
            top = out / journal.relative_to(out).parts[0]
            found.setdefault(top, []).append(journal)
    for top, journals in found.items():
        for journal in journals:
            try:
                _close(kit, journal)
            except (CloisterError, OSError) as e:
                log.error("%s could not be closed: %s", journal, e)
        if not (top / "outcome.json").exists():
            _tell(kit, top, f"{CUT_OFF}; the receipt in {top} says what had been sent")
    if run and not found and not any(out.glob(f"*-{run[:8]}/outcome.json")):
        if folders := [*out.glob(f"*-{run[:8]}")]:  # between two steps, or at the very end
            _tell(kit, folders[0], f"{CUT_OFF}; the receipts in {folders[0]} say what had been sent")
        else:
            _tell(kit, results_folder(kit, run), f"{CUT_OFF}; nothing had been sent")  # there was no journal yet
    return [*found]


def _tell(kit: Kit, folder: Path, why: str) -> None:
    """Leave word of how the run of this folder ended."""
    lost = PeerLost("local", "-", "lost", why)
    errors.blame(lost, kit.me, lost.code)
    Ended(folder.name.rpartition("-")[2], kit.me, "aborted", str(folder), errors.to_json(lost)).keep()
    log.error("run %s: %s", folder.name, lost)


def _close(kit: Kit, journal: Path) -> None:
    """Write the receipt that the journal is of, and `run.json` beside it; then the journal goes."""
    receipt = Receipt.load(journal)
    receipt.check()
    party = journal.name.removesuffix(SUFFIX)
    if party != kit.me or receipt.header.get("party") != party:
        raise ReceiptError(f"{journal} is not of '{kit.me}'")
    part = next((p for p in kit.study.parts if p.digest.hex() == receipt.header.get("study_digest")), None)
    if part is not None and receipt.status == "running":
        receipt.add_reveals(receipt.protocols, workflows.reveals(part))
    receipt.close(f"aborted: {CUT_OFF}", lambda head: (kit.identity.public, kit.identity.sign(SIGNED, head)))
    if part is not None:
        cut = PeerLost("local", "-", "lost", CUT_OFF)
        errors.blame(cut, kit.me, cut.code)
        save_run(Run(part, errors={kit.me: cut}, receipts={kit.me: receipt}), journal.parent)
    else:  # the kit has another study by now
        receipt.save(journal.with_name(f"{party}.receipt.json"))
    journal.unlink()
