"""What must hold before a party's service starts: certificates, a port, a kernel that confines; and it runs once."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from cloister import files
from cloister.deploy import sandbox
from cloister.deploy.kit import Kit
from cloister.deploy.launch import carrier_socket
from cloister.errors import DataError, MissingExtra, ParameterError, UsageError


def check_ready(kit: Kit) -> None:
    """Raise unless a service can be started from this kit on this machine."""
    policy = kit.policy()
    if policy.carrier is not None:
        carrier_socket(policy.carrier).close()  # what carries the frames has certificates and ports of its own
        return
    check_certificate(kit)
    if not kit.study.network.get("host") or not kit.study.network.get("port"):
        raise ParameterError("study.toml: [network] must name host and port of the coordinator")
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra("nvflare", "flare")
    if policy.sandbox == "systemd":
        carrier_socket().close()
    else:
        if reason := sandbox.why_not(policy.sandbox, listen=kit.role == "coordinator"):
            raise UsageError(
                f"{reason}. Accept a lower level with sandbox = ... in local/site.toml, or let systemd run the carrier"
                ' as another user: the two units of docs/deploy.md and sandbox = "systemd"'
            )
        for path in (kit.path, policy.out, *([policy.data] if policy.data else [])):
            if place := next((p for p in sandbox.readable_code() if path.resolve().is_relative_to(p.resolve())), None):
                raise ParameterError(f"{path} lies in {place}, which the carrier may read; move it elsewhere")


@contextlib.contextmanager
def only_one(kit: Kit, wait: float = 1.0) -> Iterator[None]:
    """Hold the kit's lock; `is_running` may have it for a moment, hence the wait."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(files.locked(kit.path / "running", wait=wait))
        except DataError:
            raise UsageError(f"{kit.me} is running already from {kit.path}; stop that process first") from None
        yield


def is_running(kit: Kit) -> bool:
    """Whether a service was started from this kit and has not ended."""
    try:
        with only_one(kit, wait=0.0):
            return False
    except UsageError:
        return True


def tls_files(kit: Kit) -> dict[str, str]:
    folder, name = kit.path / "startup", "server" if kit.role == "coordinator" else "client"
    files = {"authority": "rootCA.pem", "certificate": f"{name}.crt", "key": f"{name}.key"}
    return {what: str(folder / file) for what, file in files.items()}


def check_certificate(kit: Kit) -> None:
    """Raise if the certificate in the kit cannot be accepted by anyone: the others only say that a handshake failed."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    files = tls_files(kit)
    file = Path(files["certificate"])
    try:
        mine, root = (x509.load_pem_x509_certificate(Path(f).read_bytes()) for f in (file, files["authority"]))
        mine.verify_directly_issued_by(root)
    except FileNotFoundError as e:
        raise ParameterError(f"{e.filename} is missing; ask for a new kit") from None
    except (ValueError, TypeError, InvalidSignature):
        raise ParameterError(f"{file} was not issued by the authority in rootCA.pem; ask for a new kit") from None
    names = [a.value for a in mine.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    due = str(kit.study.network.get("host"))[:64] if kit.role == "coordinator" else kit.me
    if names != [due]:
        raise ParameterError(f"{file} was issued to {', '.join(map(str, names))}, and this is the kit of {due}")
    if mine.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ParameterError(f"{file} ended on {mine.not_valid_after_utc:%Y-%m-%d}; ask for a new kit")


def check_port(kit: Kit) -> None:
    if kit.policy().carrier is not None:
        return
    at, port = kit.policy().listen, int(kit.study.network["port"])
    port = port if at is None else at[1]
    try:
        sandbox.open_listener(str(kit.study.network["host"]), port, at).close()
    except PermissionError:
        raise UsageError(
            f"port {port} cannot be opened: ports below 1024 need a privilege; listen at another one behind a TLS"
            ' pass-through, with listen = "0.0.0.0:8002" in local/site.toml (docs/deploy.md)'
        ) from None
    except OSError as e:
        raise UsageError(f"port {port} cannot be opened ({e.strerror}); is another coordinator running?") from None
