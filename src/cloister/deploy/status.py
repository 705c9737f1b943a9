"""Status: what a party's service does now, for `cloister status`, its page, and Prometheus. All of it is public or own.

The service answers by its Unix socket, which is for its own user only. What is on disk (runs so far, approval,
certificate) is read from the kit, so a service that is stopped is shown as well.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister.deploy.kit import Kit
from cloister.deploy.logs import standing_of
from cloister.deploy.ready import tls_files
from cloister.errors import CloisterError
from cloister.rehearsal.progress import Standing

if TYPE_CHECKING:
    from cloister.deploy.service import Service

TWICE_SHOWN = 3600.0  # seconds for which a party that connected twice is shown


@dataclass(frozen=True)
class Status:
    """What a service knows of itself."""

    running: bool = False
    since: float = 0.0
    confined: str = ""  # how well the carrier is confined; "" until it is
    connected: Mapping[str, str] = field(default_factory=dict)  # party → address
    twice: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # party → when, and from where
    runs: Mapping[str, Standing | None] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)  # how the latest run ended, if it did not end well

    @classmethod
    def load(cls, raw: Mapping[str, Any]) -> Status:
        runs = {run: None if s is None else Standing(**s) for run, s in raw.pop("runs", {}).items()}  # type: ignore[attr-defined]
        return cls(**{**raw, "runs": runs})


def of_service(service: Service) -> Status:
    """What this service knows of itself."""
    now = time.time()
    last = service.last.error if service.last is not None else {}
    return Status(
        running=True,
        since=service.since,
        confined=service.confined,
        connected=dict(service.connected),
        twice={p: seen for p, seen in service.twice.items() if now - seen[0] < TWICE_SHOWN},
        runs={run.hex(): standing_of(service.kit, run.hex()) for run in [*service.runs]},
        last={key: str(last[key]) for key in ("text", "reason", "origin", "next") if key in last},
    )


def to_json(status: Status) -> dict[str, Any]:
    return asdict(status)


# ---- what is on disk -------------------------------------------------------------------------------------------------


def run_counts(results: Path) -> Counter[str]:
    """How many runs ended how, as far as their folders are there."""
    found: Counter[str] = Counter()
    for file in results.glob("*/outcome.json"):
        try:
            status = json.loads(file.read_text(encoding="utf-8"))["status"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found[str(status) if status in ("done", "refused", "aborted") else "other"] += 1
    return found


def lines(kit: Kit, status: Status) -> Iterator[tuple[str, str]]:
    """For people: title and text."""
    yield "party", f"{kit.me}, {kit.role} of '{kit.study.name}' ({kit.study.digest.hex()[:16]}…)"
    up = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.since))
    yield "service", f"running since {up}" if status.running else f"not running; start it: cloister site {kit.path}"
    if status.running:
        yield "carrier", status.confined or "not ready yet"
        others = [p for p in kit.study.parties if p != kit.me] if kit.role == "coordinator" else [kit.study.coordinator]
        for party in others:
            where = status.connected.get(party)
            yield "line", f"{party} is connected ({where})" if where is not None else f"{party} is not connected"
    for twice, (when, where) in status.twice.items():
        at = time.strftime("%H:%M:%S UTC", time.gmtime(when))
        yield "warning", f"{twice} was connected twice at {at}, from {where}: two services use its kit"
    try:
        yield "study", kit.decision
    except CloisterError as e:
        yield "study", str(e)
    for run, standing in status.runs.items():
        yield "run", f"{run[:8]}: {standing.words if standing is not None else 'begins'}"
    if not status.runs:
        yield "run", "none is going on"
    if status.last:
        yield "last", f"{status.last.get('text', '')}; next: {status.last.get('next', '')}"


# ---- Prometheus ------------------------------------------------------------------------------------------------------

METRICS = {  # name → type and help
    "cloister_up": ("gauge", "1 if the service of this party runs"),
    "cloister_confined": ("gauge", "1 if the carrier is confined and ready"),
    "cloister_connected": ("gauge", "1 if this party has a connection to the peer"),
    "cloister_connected_twice": ("gauge", "1 if two services used the peer's kit within the last hour"),
    "cloister_study_waiting": ("gauge", "1 if the study in the kit waits for a decision here"),
    "cloister_runs_active": ("gauge", "runs that are going on"),
    "cloister_run_rounds": ("gauge", "rounds of a run that is going on"),
    "cloister_run_sent_bytes": ("gauge", "bytes that a run that is going on has sent"),
    "cloister_runs": ("gauge", "runs whose folders are in the results, by how they ended"),
    "cloister_runs_left": ("gauge", "runs that [limits] still allow, of the study or of a workflow"),
    "cloister_certificate_end_seconds": ("gauge", "time when the TLS certificate ends, in seconds since 1970"),
}


def metrics(*parties: tuple[Kit, Status]) -> str:
    """The text format of Prometheus, version 0.0.4, for the services of one machine."""
    rows: dict[str, list[str]] = {name: [] for name in METRICS}
    for kit, status in parties:
        base = {"party": str(kit.me), "study": kit.study.name}
        for name, value, labels in _samples(kit, status):
            inside = ",".join(f'{k}="{_escaped(v)}"' for k, v in {**base, **labels}.items())
            rows[name].append(f"{name}{{{inside}}} {value:.17g}")
    parts = [f"# HELP {n} {METRICS[n][1]}\n# TYPE {n} {METRICS[n][0]}\n" + "\n".join(r) for n, r in rows.items() if r]
    return "\n".join(parts) + "\n"


def _samples(kit: Kit, status: Status) -> Iterator[tuple[str, float, dict[str, str]]]:
    yield "cloister_up", status.running, {}
    yield "cloister_confined", bool(status.confined), {}
    hub = kit.role == "coordinator"
    for peer in [p for p in kit.study.parties if p != kit.me] if hub else [kit.study.coordinator]:
        yield "cloister_connected", peer in status.connected, {"peer": str(peer)}
        if hub:
            yield "cloister_connected_twice", peer in status.twice, {"peer": str(peer)}
    yield "cloister_runs_active", len(status.runs), {}
    for run, standing in status.runs.items():
        if standing is not None:
            yield "cloister_run_rounds", standing.rounds, {"run": run[:8]}
            yield "cloister_run_sent_bytes", standing.sent, {"run": run[:8]}
    if (ends := _certificate_end(kit)) is not None:
        yield "cloister_certificate_end_seconds", ends, {}
    with contextlib.suppress(CloisterError):  # the kit's own mistakes are shown by the page and by `cloister doctor`
        policy = kit.policy()
        yield "cloister_study_waiting", kit.decision == "waits", {}
        for how, n in sorted(run_counts(policy.out).items()):
            yield "cloister_runs", n, {"status": how}
        for key, begun in ({} if hub else kit.runs_so_far()).items():
            if (most := policy.limits.get(key)) is not None:
                yield "cloister_runs_left", max(0, most - begun), {"of": key}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _certificate_end(kit: Kit) -> float | None:
    from cryptography import x509

    try:
        data = Path(tls_files(kit)["certificate"]).read_bytes()
        return x509.load_pem_x509_certificate(data).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None
