"""A run as a Five Safes RO-Crate: the study, who allowed it, on what, and the signed receipt, for who keeps records.

    crate/
        ro-crate-metadata.json      people, project, data, setting and output of the run, in the terms of the profile
        receipt.json                what was sent and opened, in a signed chain
        workflow/study.toml         what all parties agreed on; with its own metadata, a Workflow RO-Crate

Safe people are the agents, safe projects the study and its grounds, safe data the fingerprint, safe settings the mode
and the protocols that ran, safe outputs the receipt and whether somebody has looked at the results. No cell, label or
result is in it.

References
----------
[5S] Five Safes RO-Crate 0.4, https://w3id.org/5s-crate/0.4, on RO-Crate 1.1; Workflow RO-Crate 1.0.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister import files, governance, workflows
from cloister.errors import CloisterError, DataError, ReceiptError
from cloister.mpc.net.receipts import Receipt
from cloister.report.provenance import signed_rows
from cloister.workflows.modes import LEAVES, STAYS

METADATA = "ro-crate-metadata.json"
CRATE = "https://w3id.org/ro/crate/1.1"
PROFILE = "https://w3id.org/5s-crate/0.4"
WORKFLOW_PROFILE = "https://w3id.org/workflowhub/workflow-ro-crate/1.0"
SAFE = "https://w3id.org/shp#"  # the profile's terms for its phases
STATUS = "http://schema.org/{}ActionStatus"
Entity = dict[str, Any]


def export_crate(receipt: Receipt, study: str, out: Path) -> list[Path]:
    """Write the crate of one party's run into the new folder `out`; whole or not at all. Returns its files.

    `receipt` must have been checked; `study` is the text of the study file.
    """
    if receipt.status == "running":
        raise ReceiptError("the receipt has no end; a service closes it when it starts: cloister site KIT")
    if out.exists():
        raise DataError(f"{out} is there already; name a new folder for the crate")
    part = out.with_name(f".{out.name}.{uuid.uuid4().hex}.part")
    try:
        (part / "workflow").mkdir(parents=True)
        receipt.save(part / "receipt.json")
        files.write(part / "workflow" / "study.toml", study)
        _write_graph(part / "workflow", _workflow_crate(receipt))
        _write_graph(part, _graph(receipt, part))
        part.rename(out)
    except OSError as e:
        raise DataError(f"{out} cannot be written ({e.strerror or type(e).__name__})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(p for p in out.rglob("*") if p.is_file())


def _write_graph(folder: Path, graph: list[Entity]) -> None:
    whole = {"@context": f"{CRATE}/context", "@graph": graph}
    files.write(folder / METADATA, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _ref(x: str) -> dict[str, str]:
    return {"@id": x}


def _descriptor() -> Entity:
    return {"@id": METADATA, "@type": "CreativeWork", "about": _ref("./"), "conformsTo": _ref(CRATE)}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- the workflow: what all parties agreed on ------------------------------------------------------------------------


def _workflow_crate(receipt: Receipt) -> list[Entity]:
    header = receipt.header
    name = f"Study {header['study']}: {header['workflow']}, {header['mode']}"
    language = "#study-file"
    return [
        _descriptor() | {"conformsTo": [_ref(CRATE), _ref(WORKFLOW_PROFILE)]},
        {
            "@id": "./",
            "@type": "Dataset",
            "name": name,
            "description": "What all parties of the study agreed on before anything was sent.",
            "datePublished": _today(),
            "license": "Internal record of the parties of the study",
            "mainEntity": _ref("study.toml"),
            "hasPart": [_ref("study.toml")],
        },
        {
            "@id": "study.toml",
            "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
            "name": name,
            "encodingFormat": "application/toml",
            "programmingLanguage": _ref(language),
        },
        {
            "@id": language,
            "@type": "ComputerLanguage",
            "name": "Cloister study file",
            "version": str(header.get("version", "")),
        },
    ]


# ---- the run: five safes ---------------------------------------------------------------------------------------------


def _graph(receipt: Receipt, folder: Path) -> list[Entity]:
    header = receipt.header
    summary = receipt.summary()
    approval = header.get("approval", {})
    actions = [_run_action(receipt), *([_sign_off(header, approval)] if approval else []), _disclosure(header)]
    return [
        _descriptor(),
        {
            "@id": "./",
            "@type": "Dataset",
            "name": f"Run of study {header['study']} at {header['party']}, {header['started']}",
            "description": f"{_summary(header)} Record of one party: what left it, by whose leave, and how it ended.",
            "datePublished": _today(),
            "license": _ref("#terms"),
            "conformsTo": _ref(PROFILE),
            "mainEntity": _ref("workflow/"),
            "hasPart": [_ref("workflow/"), _ref("receipt.json")],
            "mentions": [_ref(action["@id"]) for action in actions],
            "sourceOrganization": _ref("#project"),
        },
        {"@id": PROFILE, "@type": "CreativeWork", "name": "Five Safes RO-Crate profile", "version": "0.4"},
        _terms(header),
        _project(header),
        *_people(header, approval),
        {
            "@id": "workflow/",
            "@type": "Dataset",
            "name": f"{header['workflow']}, mode {header['mode']}, Cloister {header['version']}",
            "conformsTo": _ref(WORKFLOW_PROFILE),
            "description": " ".join(f"{who}: {what}" for who, what in _learns(header)),
        },
        _receipt_file(receipt, folder),
        _cells(header, summary),
        *_parameters(header),
        *actions,
    ]


def _summary(header: Mapping[str, Any]) -> str:
    return workflows.get(header["workflow"]).summary if header["workflow"] in workflows.names() else ""


def _learns(header: Mapping[str, Any]) -> list[tuple[str, str]]:
    try:
        rows = workflows.learns(str(header["workflow"]), str(header["mode"]))
    except CloisterError:  # a mode of another version
        return []
    return [(who, " ".join(what.split())) for who, what in rows]


def _terms(header: Mapping[str, Any]) -> Entity:
    table = header.get("governance", {})
    kept = f"Results are kept: {table['retention']}." if "retention" in table else ""
    text = f"Record of a study on data of persons; not for publication. {kept}".strip()
    return {"@id": "#terms", "@type": "CreativeWork", "name": "Terms of this record", "description": text}


def _project(header: Mapping[str, Any]) -> Entity:
    table = header.get("governance", {})
    described = "; ".join(f"{title}: {text}" for title, text in governance.in_words(table))
    return {
        "@id": "#project",
        "@type": ["Project", "Organization"],
        "name": str(header["study"]),
        "identifier": str(header.get("whole_study", header["study_digest"])),
        "description": described or "The study file names no purpose, legal basis or permit.",
        "member": [_ref(f"#party-{p}") for p in header["parties"]],
    }


def _people(header: Mapping[str, Any], approval: Mapping[str, Any]) -> list[Entity]:
    """Who asked, who allowed, and the parties they belong to."""
    hub = next(p for p, role in header["parties"].items() if role == "coordinator")
    contact = str(header.get("governance", {}).get("contact", f"the operator of {hub}"))
    asking = {"@id": "#requesting", "@type": "Person", "name": contact}
    people = [asking | {"affiliation": _ref(f"#party-{hub}"), "memberOf": _ref("#project")}]
    if approval:
        who = {"@id": "#approving", "@type": "Person", "name": str(approval["by"])}
        people.append(who | {"affiliation": _ref(f"#party-{header['party']}")})
    for party, role in header["parties"].items():
        people.append({"@id": f"#party-{party}", "@type": "Organization", "name": party, "description": role})
    return people


def _receipt_file(receipt: Receipt, folder: Path) -> Entity:
    data = (folder / "receipt.json").read_bytes()
    return {
        "@id": "receipt.json",
        "@type": "File",
        "name": f"Signed receipt of {receipt.header['party']}",
        "encodingFormat": "application/json",
        "contentSize": str(len(data)),
        "identifier": f"sha256:{hashlib.sha256(data).hexdigest()}",
        "description": f"{len(receipt.entries)} entries in a chain; checked by: cloister receipt receipt.json --verify",
    }


def _cells(header: Mapping[str, Any], summary: list[dict[str, Any]]) -> Entity:
    about = ("Approved cells", "Fingerprint", "Cells used", "Privacy spent")
    rows = [row for row in signed_rows({**header, "summary": summary}) if row[0] in about]
    stays = [f"{who}: {what}" for who, what in _learns(header) if who in (STAYS, LEAVES)]
    words = [f"{title}: {text}" for title, text in rows] + stays
    return {
        "@id": "#cells",
        "@type": "PropertyValue",
        "name": f"Cells of {header['party']}, which are not in this crate",
        "value": str(header.get("approval", {}).get("data", {}).get("matrix", "not recorded")),
        "description": "; ".join(words) or "This party holds no cells.",
    }


def _parameters(header: Mapping[str, Any]) -> list[Entity]:
    return [
        {"@id": f"#option-{key}", "@type": "PropertyValue", "name": key, "value": json.dumps(value)}
        for key, value in header.get("parameters", {}).items()
    ]


def _run_action(receipt: Receipt) -> Entity:
    header, done = receipt.header, receipt.status == "done"
    ran = ", ".join(receipt.reveals) or "none"
    return {
        "@id": "#run",
        "@type": "CreateAction",
        "name": f"Run of {header['workflow']} ({header['mode']}) at {header['party']}",
        "description": f"Protocols that ran: {ran}.",
        "agent": _ref("#requesting"),
        "instrument": _ref("workflow/"),
        "object": [_ref("#cells"), *(_ref(one["@id"]) for one in _parameters(header))],
        "result": [_ref("receipt.json")],
        "startTime": str(header["started"]),
        "actionStatus": STATUS.format("Completed" if done else "Failed"),
        **({} if done else {"error": receipt.status}),
    }


def _sign_off(header: Mapping[str, Any], approval: Mapping[str, Any]) -> Entity:
    return {
        "@id": "#sign-off",
        "@type": "AssessAction",
        "additionalType": _ref(f"{SAFE}SignOff"),
        "name": f"Approval of the study by {header['party']}",
        "agent": _ref("#approving"),
        "object": [_ref("./"), _ref("workflow/"), _ref("#project"), _ref("#cells")],
        "endTime": str(approval["when"]),
        "actionStatus": STATUS.format("Completed"),
    }


def _disclosure(header: Mapping[str, Any]) -> Entity:
    return {
        "@id": "#disclosure",
        "@type": "AssessAction",
        "additionalType": _ref(f"{SAFE}DisclosureCheck"),
        "name": f"Check of the results of {header['party']} before they are passed on",
        "description": "To be done by a person: results stay with the party, and Cloister does not judge them.",
        "object": _ref("./"),
        "actionStatus": STATUS.format("Potential"),
    }
