"""Provisioning: one start-up kit per party, with certificates of a study's own authority.

    cloister provision study.toml --out kits/

    kits/hub, kits/basel, ...      one folder per party, to be handed to its owner (see `cloister.deploy.kit`)
    kits/authority/                the certificate authority's key (0700); keep it, and keep it off the machines
    kits/study.toml                the study with everyone's public keys, as it stands in every kit

FLARE's own tools make the certificates. Whoever holds the authority could issue more of them, and whoever runs
`provision` has held the parties' keys. Where that is too much trust, parties make their keys themselves: they run
`make_identity` and send the public half for `[keys]`, get their certificate signed with `nvflare cert request`,
`nvflare cert approve` and `nvflare package`, and turn FLARE's kit into ours with `adopt` (docs/deploy.md).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cloister import files
from cloister.deploy.kit import format_policy
from cloister.errors import CloisterError, DataError, MissingExtra, ParameterError
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.study import Party, Study, format_study

ORGANISATION = "cloister"
PORT = 8002
DAYS = 3650  # of the authority; certificates last 360, as FLARE sets it
RESERVED = ("server", "authority")  # FLARE's name for the coordinator, and a folder of ours
STARTUP = ("rootCA.pem", "client.crt", "client.key", "server.crt", "server.key")  # what we keep of FLARE's kits
LOCAL = ("site.toml", "runs.json", "invitations.json")
AUTHORITY = "authority"


def provision(
    study: Study, out_dir: str | Path, *, host: str | None = None, port: int | None = None
) -> dict[Party, Path]:
    """Make a start-up kit for every party that has none in `out_dir` yet.

    Parameters
    ----------
    host, port
        Where all parties reach the coordinator; by default `[network]` of the study.

    Returns
    -------
    Party → folder of its kit. Parties whose key stands in the study's `[keys]` already get no `identity.key`: they
    have it.
    """
    out = Path(out_dir)
    study = _with_network(study, host, port)
    if clash := [p for p in study.parties if p in (*RESERVED, study.network["host"])]:
        raise ParameterError(f"[parties] '{clash[0]}' is a name that FLARE or the kits use; choose another")
    if clash := [p for p in study.parties if (out / p).exists()]:
        raise DataError(f"{out / clash[0]} exists already; move it away, or choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    identities = {p: Identity.create(Entropy()) for p in study.parties if p not in study.keys}
    study = study.with_keys({**study.keys, **{p: i.public for p, i in identities.items()}})
    with tempfile.TemporaryDirectory(prefix=".kits-", dir=out) as work:
        flare_kits = _flare_kits(study, Path(work), out / AUTHORITY)
        for p, folder in flare_kits.items():
            if p in identities:
                identities[p].save(folder / "identity.key")
            adopt(folder, study, p)
        for p, folder in flare_kits.items():
            shutil.move(folder, out / p)  # no kit is there before all are whole
    (out / "study.toml").write_text(format_study(study), encoding="utf-8")
    return {p: out / p for p in study.parties}


def make_identity(folder: str | Path) -> str:
    """Make a party's `identity.key` in `folder` (0600); returns the public half, for `[keys]` in study.toml."""
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = Identity.create(Entropy())
    identity.save(folder / "identity.key")
    return identity.public.hex()


def adopt(folder: str | Path, study: Study, me: Party) -> None:
    """Turn a FLARE start-up kit into a Cloister kit: certificates, study, own settings, tight permissions."""
    folder = Path(folder)
    if not (folder / "startup" / "rootCA.pem").exists():
        raise ParameterError(f"{folder} is not a FLARE start-up kit: there is no startup/rootCA.pem")
    if me not in study.parties:
        raise ParameterError(f"'{me}' is not among the parties of the study")
    for part, kept in {"startup": STARTUP, "local": LOCAL}.items():  # FLARE's scripts and settings are of no use here
        for file in (folder / part).rglob("*"):
            if file.is_file() and file.name not in kept:
                file.unlink()
    (folder / "readme.txt").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / "transfer").rmdir()
    (folder / "study.toml").write_text(format_study(study), encoding="utf-8")
    (folder / "local").mkdir(exist_ok=True)
    policy = folder / "local" / "site.toml"
    if not policy.exists():
        policy.write_text(format_policy(study, study.parties[me]), encoding="utf-8")
    folder.chmod(0o700)
    for key in folder.rglob("*.key"):
        key.chmod(0o600)


def _with_network(study: Study, host: str | None, port: int | None) -> Study:
    host = host or study.network.get("host")
    port = port or study.network.get("port", PORT)
    if not isinstance(host, str) or not host:
        raise ParameterError("[network] host is missing: the name by which all parties reach the coordinator")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ParameterError(f"[network] port must be between 1 and 65535, found {port!r}")
    return dataclasses.replace(study, network={**study.network, "host": host, "port": port})


def _flare_kits(study: Study, work: Path, authority: Path) -> dict[Party, Path]:
    """FLARE's own kits for all parties; nobody administers anything."""
    try:
        from nvflare.lighter.constants import CtxKey
        from nvflare.lighter.entity import Project
        from nvflare.lighter.impl.cert import CertBuilder
        from nvflare.lighter.impl.static_file import StaticFileBuilder
        from nvflare.lighter.impl.workspace import WorkspaceBuilder
        from nvflare.lighter.provisioner import Provisioner
    except ImportError:
        raise MissingExtra("nvflare", "flare") from None

    host, port, hub = study.network["host"], study.network["port"], study.coordinator
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=DAYS),
    ]
    log = _Log()
    try:
        project = Project("cloister", "")
        ports = {"fed_learn_port": port, "admin_port": port}
        project.set_server(host, ORGANISATION, {**ports, "default_host": host, "host_names": ["localhost"]})
        for p in study.parties:
            if p != hub:
                project.add_client(p, ORGANISATION, {})
        state = work / project.name / "state"
        state.mkdir(parents=True)
        if authority.exists():
            shutil.copy(authority / "cert.json", state)
        umask = os.umask(0o077)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                ctx = Provisioner(str(work), builders).provision(project, logger=log)
        finally:
            os.umask(umask)
    except ValueError as e:
        raise ParameterError(f"FLARE refuses the study's names: {e}") from None
    if ctx.get(CtxKey.BUILD_ERROR):
        raise CloisterError(f"FLARE could not make the certificates: {log.last}")
    authority.mkdir(mode=0o700, exist_ok=True)
    known = json.loads((state / "cert.json").read_text())
    kept = json.dumps({k: known[k] for k in (CtxKey.ROOT_CERT, CtxKey.ROOT_PRI_KEY)})  # no party's key
    files.write(authority / "cert.json", kept)
    folder = Path(ctx[CtxKey.CURRENT_PROD_DIR])
    kits = {p: folder / (project.get_server().name if p == hub else p) for p in study.parties}
    return kits


def main() -> None:
    """For parties that make their keys themselves (docs/deploy.md)."""
    parser = argparse.ArgumentParser(prog="python -m cloister.deploy.provision", description=main.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("identity", help="make identity.key in a folder, and print its public half")
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("adopt", help="turn a kit of `nvflare package` into a Cloister kit")
    verb.add_argument("folder", type=Path)
    verb.add_argument("study", type=Path)
    verb.add_argument("party")
    args = parser.parse_args()
    try:
        if args.verb == "identity":
            print(make_identity(args.folder))
        else:
            adopt(args.folder, Study.load(args.study), Party(args.party))
            print(f"{args.party}: {args.folder}")
    except CloisterError as e:
        parser.exit(e.exit_code, f"{e}\n")


class _Log:
    """What FLARE says while it works; only the last error is of interest."""

    last = ""

    def debug(self, *_: Any) -> None: ...

    info = warning = debug

    def error(self, message: str, *_: Any) -> None:
        self.last = message


if __name__ == "__main__":
    main()
