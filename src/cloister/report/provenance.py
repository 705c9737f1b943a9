"""What was signed: the study and its grounds, who approved it on which cells, and what a run used of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister import governance, workflows
from cloister.mpc.net.receipts import smallest_group
from cloister.rehearsal.record import Record
from cloister.report.parts import Html, facts, join, tag
from cloister.workflows.modes import LEAVES

Row = tuple[str, str]
BUDGET = {  # key of [budget] → what people read before the number
    "runs": "runs",
    "queries": "workflows computed",
    "query_cells": "cells labelled for one querier",
    "epsilon": "ε",
    "delta": "δ",
}


def signed_rows(header: Mapping[str, Any]) -> list[Row]:
    """What a receipt's header, or its brief, says about study, grounds and approval: title and text."""
    digest = header.get("whole_study", header.get("study_digest"))
    rows = [("Study digest", str(digest))] if digest else []
    try:
        rows += governance.in_words(dict(header.get("governance", {}))) + _approval(header.get("approval", {}))
    except (KeyError, ValueError, TypeError, AttributeError):
        rows.append(("Approved", "what the receipt says about it is damaged"))
    for row in header.get("summary", ()):
        if title := {"used": "Cells used", "spent": "Privacy spent"}.get(row["kind"]):
            rows.append((title, str(row["name"])))
    texts = [str(row["name"]) for row in header.get("summary", ()) if row["kind"] == "contributed"]
    if smallest := smallest_group(texts):
        size = " of ".join(f"{n} {what}" for what, n in smallest.items())
        rows.append(("Smallest group", f"{size} of this site behind every number that it added to a common result"))
    return rows


def _approval(approval: Mapping[str, Any]) -> list[Row]:
    if not approval:
        return []
    user = "" if approval["user"] == approval["by"] else f" (logged in as {approval['user']})"
    rows = [("Approved", f"{approval['when']} by {approval['by']}{user}")]
    if data := approval.get("data"):
        donors = "" if data["donors"] is None else f" of {data['donors']} donors"
        rows.append(("Approved cells", f"{data['cells']} cells{donors}, {data['genes']} genes"))
        rows.append(("Fingerprint", f"{data['matrix']} (matrix and names), {data['read']} (what else is read)"))
    if total := approval.get("privacy"):
        spent = f"ε = {total['epsilon']:g} at δ = {total['delta']:g} for {total['protects']} ({total['accountant']})"
        rows.append(("Privacy of all runs on these cells", spent))
    return rows + terms_rows(approval.get("terms", {}))


def terms_rows(terms: Mapping[str, Any]) -> list[Row]:
    """Consents, limits, thresholds and file of a party, as title and text."""
    if not terms:
        return []
    rows = [("Consents", ", ".join(terms.get("consent", ())) or "none beyond taking part")]
    words = {"study": "of this study", "min_cells": "cells", "min_donors": "donors"}
    if limits := terms.get("limits"):
        rows.append(
            ("Runs allowed", ", ".join(f"{most} {words.get(what, 'of ' + what)}" for what, most in limits.items()))
        )
    if floors := terms.get("floors"):
        rows.append(("Minimum group", " and ".join(f"{least} {words.get(key, key)}" for key, least in floors.items())))
    if budget := terms.get("budget"):
        shown = (f"{BUDGET[key]} {most:g}" if key in BUDGET else f"{most:g} {key}" for key, most in budget.items())
        rows.append(("Budget of these cells", ", ".join(shown)))
    if file := terms.get("file"):
        rows.append(("File", str(file)))
    return rows


def signed(run: Record) -> Html:
    """The section of a page: what is the same for all parties, then each party's own."""
    study = run.study
    rows = [("Study digest", study.whole.digest.hex()), *governance.in_words(study.governance)]
    rows += [("Leaves a site", what) for who, what in workflows.learns(study.workflow, study.mode) if who == LEAVES]
    parts = [facts(rows)]
    if not study.governance:
        parts.append(tag("p", "The study file names no purpose, legal basis, permit or expiry.", class_="quiet"))
    for party in run.parties:
        own = signed_rows({**run.receipts[party].header, "summary": run.rows(party)})
        shared = dict(rows)
        if kept := [(k, v) for k, v in own if shared.get(k) != v]:
            parts += [tag("h4", party), facts(kept)]
    return join(parts)
