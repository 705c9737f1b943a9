"""`cloister receipt`: what a receipt says, whether it is genuine, and whether two parties were told the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import out, show_receipt
from cloister.cli.options import FLAG, AsJson
from cloister.errors import DataError, ReceiptError, UsageError

if TYPE_CHECKING:
    from cloister.mpc.net.receipts import Receipt


def receipt(
    path: Annotated[Path, typer.Argument(help="File receipt.json, or an .h5ad with a receipt.")],
    other: Annotated[Path | None, typer.Argument(help="With --compare: receipt.json of another party.")] = None,
    compare: Annotated[  # noqa: FBT002
        bool, typer.Option("--compare", metavar=FLAG, help="Compare the broadcasts that two parties received.")
    ] = False,
    verify: Annotated[  # noqa: FBT002
        bool, typer.Option("--verify", metavar=FLAG, help="Fail unless the receipt is complete, unaltered and signed.")
    ] = False,
    study: Annotated[Path | None, typer.Option(help="Study whose key must have signed the receipt.")] = None,
    crate: Annotated[
        Path | None, typer.Option("--ro-crate", help="New folder for a Five Safes RO-Crate of the run.")
    ] = None,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Verify a receipt; print what left this party and who learned it."""
    from cloister.cells.files import open_cells
    from cloister.mpc.net.receipts import Receipt

    if compare or other is not None:
        _compare_receipts(path, other, compare=compare, study=study)
        return
    if not path.exists():
        raise DataError(f"{path} does not exist; a run leaves PARTY.receipt.json in its results folder")
    if path.suffix == ".h5ad":
        if verify or crate is not None:
            asked = "--verify" if verify else "--ro-crate"
            raise UsageError(f"the .h5ad carries a summary; {asked} needs the receipt.json beside it")
        verdict = "UNVERIFIED: an .h5ad carries a summary; verify the receipt.json beside it"
        notes = dict(open_cells(path).uns.get("cloister", {}))
        briefs = [json.loads(v) for v in notes.values() if isinstance(v, str) and v.startswith("{")]
        if not briefs:
            raise UsageError(f"{path} carries no receipt; was it written by a Cloister run?")
    else:
        loaded = Receipt.load(path)
        briefs = [json.loads(loaded.brief())]
        if loaded.status == "running" and not verify and crate is None:
            loaded.check()
            verdict = "INCOMPLETE: the run has not ended or was cut off, so the receipt is not signed yet"
        else:
            _check_genuine(loaded, study)
            verdict = f"VALID: {len(loaded.entries)} entries in one chain, signed by {loaded.header.get('party')}"
            verdict += "" if study is None else ", with the key that the study names"
        if crate is not None:
            _export(loaded, path, crate)
            return
    if as_json:
        out.print_json(json.dumps(briefs))
        return
    out.print(verdict, style="green" if verdict.startswith("VALID") else "yellow", markup=False)
    for brief in briefs:
        show_receipt(brief)


def _export(loaded: Receipt, path: Path, crate: Path) -> None:
    """Write the crate of a receipt that was found genuine; the study file is the one in `run.json` beside it."""
    from cloister.rehearsal.results import load_run
    from cloister.report.crate import export_crate
    from cloister.study import format_study

    run = load_run(path.parent)
    if run.study.digest.hex() != loaded.header.get("study_digest"):
        raise ReceiptError(f"{path.parent / 'run.json'} is of another study than the receipt")
    for written in export_crate(loaded, format_study(run.study), crate):
        out.print(str(written), markup=False)


def _compare_receipts(path: Path, other: Path | None, *, compare: bool, study: Path | None) -> None:
    from cloister.mpc.net import receipts

    if other is None or not compare:
        raise UsageError("two receipts are put side by side with --compare: cloister receipt A.json B.json --compare")
    both = [receipts.Receipt.load(p) for p in (path, other)]
    for one in both:
        _check_genuine(one, study)
    alike = receipts.compare(*both)
    unread = f", {alike.unread} of them never read" if alike.unread else ""
    out.print(
        f"{alike.told} broadcasts are identical; {alike.exchanged} messages between the two agree{unread}",
        style="green",
        markup=False,
    )


def _check_genuine(receipt: Receipt, study: Path | None) -> None:
    """Raise unless the chain holds and is signed, with the key that the study names for its party if there is one."""
    from cloister.mpc.crypto.agreement import check_signature
    from cloister.session import SIGNED
    from cloister.study import Party, Study

    if receipt.status == "running":
        receipt.check()
        raise ReceiptError(
            f"the chain of {len(receipt.entries)} entries is whole, but has no end yet: the run goes on, or was"
            " cut off; the service closes and signs it when it starts: cloister site KIT"
        )
    receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
    if study is None:
        return
    party = str(receipt.header.get("party", ""))
    pinned = Study.load(study).keys.get(Party(party))
    if pinned is None:
        raise UsageError(f"{study} names no key of '{party}' under [keys]; give the study.toml from a kit")
    if receipt.signature.get("public") != pinned.hex():
        raise ReceiptError(f"the receipt is signed with another key than {study} names for '{party}'")
