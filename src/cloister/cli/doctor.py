"""Doctor: is this installation, and this kit, ready for a run? Looks at everything, changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.errors import CloisterError, about
from cloister.report.parts import size

if TYPE_CHECKING:
    from cloister.deploy.kit import Kit, Policy
    from cloister.deploy.proxy import Proxy

ENGINES = {"he": "seal-python", "models": "torch", "flare": "nvflare", "report": "matplotlib", "fcs": "flowio"}
RECEIPTS = 1 << 26  # bytes that must be free beside the size of the cells
SLOW = 0.3  # GB/s below which the machine has no AES instructions to speak of


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # "ok" | "note" | "wrong"
    detail: str


def examine(kit: Path | None = None) -> Iterator[Finding]:
    """Yield what was found, one thing at a time."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "wrong", version if good else f"{version}; Cloister needs 3.11 or newer")
    for extra, package in ENGINES.items():
        try:
            yield Finding(extra, "ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(extra, "note", f"{package} is not installed; if needed: pip install 'cloister[{extra}]'")
    yield _generator()
    yield _sandbox()
    yield _proofs()
    yield _rings()
    yield _card()
    if kit is not None:
        yield from _examine_kit(kit)


def _generator() -> Finding:
    from cloister.mpc.crypto.entropy import Entropy
    from cloister.mpc.crypto.prg import Prg

    prg, size = Prg(Entropy().bytes(32)), 1 << 24
    prg.bytes(size)
    began = time.perf_counter()
    prg.bytes(size)
    speed = size / (time.perf_counter() - began) / 1e9
    if speed < SLOW:
        return Finding(
            "generator", "note", f"AES-CTR at {speed:.2f} GB/s: slow, does this machine lack AES instructions?"
        )
    return Finding("generator", "ok", f"AES-CTR at {speed:.1f} GB/s")


def _sandbox() -> Finding:
    from cloister.deploy.sandbox import offered

    found = offered()
    if isinstance(found, str):
        return Finding("sandbox", "note", f"{found}; services need the two units of docs/deploy.md (systemd)")
    return Finding("sandbox", "note" if found.open else "ok", str(found))


def _carrier(sandbox: str, *, listen: bool) -> Finding:
    """What confines the process that talks to the network, and what that leaves open."""
    from cloister.deploy.sandbox import offered, why_not

    found = offered(listen=listen)
    if sandbox == "systemd":
        more = f"; besides {found}" if not isinstance(found, str) else ""
        return Finding("carrier", "note", f"run by systemd as another user, by the unit files of docs/deploy.md{more}")
    if reason := why_not(sandbox, listen=listen):
        return Finding("carrier", "wrong", f"{reason}; see 'Kernels' in docs/deploy.md")
    left = not isinstance(found, str) and bool(found.open)
    return Finding("carrier", "note" if left else "ok", f"confined by the service: {found}; accepted here: '{sandbox}'")


def _proofs() -> Finding:
    from cloister.mpc.crypto import gf64, gf64_portable

    if gf64_portable.LANES:
        return Finding("proofs", "ok", f"GF(2^64) by {gf64.HOW}")
    slow = "the proofs of hardened map-labels and propagate-labels take about ten times the CPU"
    return Finding("proofs", "note", f"GF(2^64) without carry-less instructions: {slow}")


def _rings() -> Finding:
    """The lattices that encrypted inference uses; a training's own stands in its report."""
    from cloister.mpc.crypto.owner_ckks.ring import SMALL, STANDARD
    from cloister.mpc.crypto.rns.ring import SECURE_BITS

    most = max(SECURE_BITS)
    trained = f"training: up to log N {most.bit_length() - 1}, log Q {SECURE_BITS[most]}"
    return Finding("rings", "ok", f"inference, small: {SMALL.about}; standard: {STANDARD.about}; {trained}")


def _card() -> Finding:
    """A card that a provider of `adapt-model` could compute on."""
    from cloister.provider.gpu import cuda_device

    if reason := cuda_device.why_not():
        return Finding("gpu", "note", f"{reason}; a model's provider computes on its CPU")
    return Finding("gpu", "ok", cuda_device.name())


def _examine_kit(path: Path) -> Iterator[Finding]:
    from cloister import workflows
    from cloister.deploy.approval.expiry import overdue
    from cloister.deploy.kit import Kit
    from cloister.workflows.pipeline import check_site, check_steps

    try:
        kit = Kit.open(path)
        policy = kit.policy()
    except CloisterError as e:
        yield Finding("kit", "wrong", str(e))
        return
    yield Finding("kit", "ok", f"{kit.me}, {kit.role} of '{kit.study.name}'")
    yield from _permissions(path, policy.out)
    yield from _certificates(kit)
    yield _disk(policy)
    if policy.carrier is not None:
        text = f"another program carries the frames, by {policy.carrier}; it must run as another user (docs/deploy.md)"
        yield Finding("carrier", "note", text)
    else:
        yield _carrier(policy.sandbox, listen=kit.role == "coordinator")
    try:
        parts = [f"{part.workflow}, mode {part.mode}" for part, _, _ in check_steps(kit.study)]
        yield Finding("study", "ok", f"{', then '.join(parts)}, {len(kit.study.sites)} sites")
    except CloisterError as e:
        yield Finding("study", "wrong", str(e))
        return
    for note in workflows.warnings_of(kit.study):
        yield Finding("study", "note", note)
    yield from (Finding(name, "note", what) for name, what in overdue(kit, policy))
    if kit.role != "coordinator":
        yield from _terms(kit, policy)
        try:
            kit.check_approved(policy)
            yield Finding("approval", "ok", _approval(kit))
        except CloisterError as e:
            yield Finding("approval", "note", str(e))
        try:
            kit.check_limits(policy)
            so_far = [(f"of '{k}'" if k != "study" else "of this study", k, n) for k, n in kit.runs_so_far().items()]
            counts = ", ".join(f"{n} {what} ({_limit(policy.limits.get(k))})" for what, k, n in so_far)
            yield Finding("limits", "ok", f"runs begun: {counts}")
            if (entry := kit.approvals.entry(kit.study)) is not None and entry.data is not None:
                spent = kit.budget(policy).spent(entry.data.matrix).items()
                words = ", ".join(f"{n:g} {what} ({_limit(policy.budget.get(what))})" for what, n in spent)
                yield Finding("budget", "ok", f"of these cells, over all studies that share this file: {words}")
                if not Path(policy.budget["file"]).is_absolute():
                    text = "of this kit alone; other studies on the same cells count if [budget] file is one full path"
                    yield Finding("budget", "note", text)
        except CloisterError as e:
            yield Finding("limits", "note", str(e))
        if policy.carrier is None:
            yield _coordinator_answers(kit.study.network.get("host"), kit.study.network.get("port"), policy.proxy)
    if kit.role == "site":
        from cloister.deploy.approval.own_cells import check_approved_cells, open_cells

        try:
            with about(str(policy.data or "")):
                adata = open_cells(kit, policy)
                notes = check_site(kit.study, kit.me, adata)
            yield Finding("cells", "ok", f"{adata.n_obs} cells, {adata.n_vars} genes in {policy.data}")
            if (entry := kit.approvals.entry(kit.study)) is not None and not entry.withdrawn:
                check_approved_cells(kit, adata)
            yield from (Finding("cells", "note", note) for note in notes)
        except CloisterError as e:
            yield Finding("cells", "wrong", str(e))


def _approval(kit: Kit) -> str:
    entry = kit.approvals.current(kit.study)
    on = f", on {entry.data.words}" if entry.data is not None else ""
    return f"this site allows the study in its kit: {entry.by}, {entry.when}{on}"


def _terms(kit: Kit, policy: Policy) -> Iterator[Finding]:
    """On what terms this party takes part."""
    from cloister.deploy.kit import CONSENTS_SET
    from cloister.report.provenance import terms_rows

    shown = "; ".join(f"{title}: {text}" for title, text in terms_rows(kit.terms(policy)))
    yield Finding("terms", "ok", shown)
    if unseen := kit.unseen_consents(policy):
        yield Finding("consent", "note", CONSENTS_SET.format(", ".join(unseen)))


def _limit(most: float | None) -> str:
    return "no limit" if most is None else f"at most {most:g}"


def _permissions(kit: Path, results: Path) -> Iterator[Finding]:
    """Keys must be the owner's alone; so should the folders that hold settings, cells and results."""
    kit, results = kit.resolve(), results.resolve()
    for file in sorted(p for p in kit.rglob("*") if p.is_file() and not p.is_symlink()):
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077 and (file.suffix == ".key" or b"PRIVATE KEY" in _start(file)):
            yield Finding("keys", "wrong", f"{file} is open to others (mode {mode:03o}); run: chmod 600 {file}")
    open_ones = [p for p in (kit, results) if p.is_dir() and stat.S_IMODE(p.stat().st_mode) & 0o077]
    if kit not in open_ones and kit in results.parents:
        open_ones = []  # nobody gets past the kit's own folder
    for folder in open_ones:
        yield Finding("files", "note", f"{folder} is open to other users of this machine; run: chmod 700 {folder}")
    if not open_ones:
        yield Finding("files", "ok", "keys, settings and results are for their owner only")


def _disk(policy: Policy) -> Finding:
    """Whether results can be written: as large as the cells, and some receipts."""
    place = next(p for p in (policy.out, *policy.out.parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Finding("disk", "wrong", f"results cannot be written to {policy.out}: {place} is closed to this user")
    cells = policy.data.stat().st_size if policy.data is not None and policy.data.is_file() else 0
    free, needed = shutil.disk_usage(place).free, cells + RECEIPTS
    if free < needed:
        return Finding("disk", "wrong", f"{size(free)} are free for results in {place}; {size(needed)} are needed")
    return Finding("disk", "ok", f"{size(free)} are free for results")


def _start(file: Path) -> bytes:
    try:
        with file.open("rb") as f:
            return f.read(4096) if file.suffix in (".pem", ".json", ".key", ".crt") else b""
    except OSError:
        return b""


def _certificates(kit: Kit) -> Iterator[Finding]:
    """Whether this party's own will be accepted, and how long all of them last."""
    import datetime

    from cryptography import x509

    from cloister.deploy.ready import check_certificate

    try:
        check_certificate(kit)
    except CloisterError as e:
        yield Finding("certificate", "wrong", str(e))
    now = datetime.datetime.now(datetime.UTC)
    for file in sorted(kit.path.glob("startup/*.crt")):
        try:
            ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
        except ValueError:
            yield Finding("certificate", "wrong", f"{file} is not a certificate; ask for a new kit")
            continue
        days = (ends - now).days
        state = "ok" if days > 30 else "note" if days >= 0 else "wrong"
        yield Finding("certificate", state, f"{file.name} is valid for {days} more days")


def _coordinator_answers(host: str | None, port: int | None, proxy: Proxy | None) -> Finding:
    from cloister.deploy.proxy import ProxyError, open_tunnel

    through = f" through the proxy {proxy}" if proxy is not None else ""
    try:
        first = (str(host), int(port or 0)) if proxy is None else (proxy.host, proxy.port)
        with socket.create_connection(first, timeout=5) as sock:
            if proxy is not None:
                open_tunnel(sock, str(host), int(port or 0), proxy.authorization, 5.0)
            return Finding("coordinator", "ok", f"{host}:{port} answers{through}")
    except ProxyError as e:
        return Finding("coordinator", "note", f"{host}:{port}: {e}")
    except OSError as e:
        why = e.strerror or type(e).__name__
        if proxy is not None:
            return Finding("coordinator", "note", f"the proxy {proxy} does not answer ({why}); is its address right?")
        return Finding(
            "coordinator", "note", f"{host}:{port} does not answer ({why}); is it started, is the port open?"
        )
