"""Kit: the folder a party runs from, and what its owner allows in it.

    kits/basel/
        study.toml            what all parties agreed on, the same at each of them
        identity.key          this party's Ed25519 key (0600)
        local/site.toml       this party's own: where the cells are, what may run here, and how often
        local/approvals.json  who approved which study, when, and on which cells
        local/decisions.jsonl every decision so far (`approval.history`)
        local/users.json      who may look at this party's page or decide by it (`page.users`)
        local/rounds.json     rounds of the latest finished run of each study, to say how far another one is
        local/runs.json       how many runs were begun
        local/course.json     which steps of a study are finished here (`cloister.deploy.course`)
        local/budget.json     what was asked of the same cells in all (`approval.budget`)
        local/answered.npz    keyed fingerprints of the cells that were used so far (`approval.differencing`)
        local/invitations.json   invitations of the last minutes, which are not answered twice
        startup/              certificate and key for TLS
        page.token            opens the page of a party that was started with --page (0600)
        results/              one folder per run: outcome.json, receipt.json, cells with results

A run takes nothing from outside but the coordinator's signed invitation: study, data path and approval are read from
this folder, every time a run starts. What is not approved in `local/site.toml` is refused, before a process is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from cloister import files, governance, workflows
from cloister.cells.files import Settings
from cloister.cells.vocabulary import check_map
from cloister.deploy.approval import approval, own_cells
from cloister.deploy.approval.approval import Approval, Approvals, Refusal
from cloister.deploy.approval.budget import USUAL, Budget, cost_of, read_budget
from cloister.deploy.approval.differencing import AnsweredCells
from cloister.deploy.notify import read_hook
from cloister.deploy.proxy import Proxy
from cloister.deploy.sandbox import FULL, LEVELS
from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, about
from cloister.mpc.crypto.agreement import Identity
from cloister.study import Party, Role, Study

if TYPE_CHECKING:
    from anndata import AnnData

RUNS = "runs"  # folder of a kit: how far its runs are
DATA = "CLOISTER_DATA"  # a service that is started for one run finds its cells here
TOP = {"data", "out", "sandbox", "approve", "limits", "budget", "floors", "obs", "obsm", "labels"}
TOP |= {"layer", "raw", "genes", "kind"}  # of this site's file
TOP |= {"proxy", "listen", "carrier", "notify", "page"}
SANDBOXES = (*LEVELS[::-1], "systemd")  # the least level that this site accepts (`sandbox`), or two units of systemd
RENAMED = {"landlock": FULL}  # as kits of earlier versions have it
STUDY_RUNS, WORKFLOW_RUNS = 20, 100  # runs that may be begun where [limits] says nothing
COUNTS = "runs.json"  # in `local`: how many runs were begun, by study and by workflow
CONSENTS_SET = (  # shown before anybody here has seen these consents
    "these consents were in local/site.toml before this approval, and kits are delivered without any: {};"
    " to take them back, write: consent = []"
)
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:\d{1,5})?")
APPROVE = ("workflows", "modes", "studies", "consent")


@dataclass(frozen=True)
class Policy:
    """`local/site.toml`: what only this party decides."""

    data: Path | None = None
    out: Path = Path("results")
    workflows: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()  # digests, as `cloister site KIT --approve` writes them
    sandbox: str = FULL
    proxy: Proxy | None = None  # the way out, where only a proxy may connect to the outside
    notify: str | tuple[str, ...] = ""  # a web address or a command that is told of a study that waits
    page: Mapping[str, Any] = field(default_factory=dict)  # sso_header and hosts of this party's page
    carrier: Path | None = None  # the socket at which another program, a FLARE job, carries this party's frames
    listen: tuple[str, int] | None = None  # of a coordinator behind a TLS pass-through: where it listens itself
    consent: tuple[str, ...] = ()  # what a study may do here beyond running: "open-model"; --approve adds none
    limits: Mapping[str, int] = field(default_factory=dict)  # "study" or a workflow's name → runs it may have here
    budget: Mapping[str, Any] = field(default_factory=dict)  # what may be asked of the same cells under any study
    floors: Mapping[str, int] = field(default_factory=dict)  # minimum group sizes: raise the study's, never lower them
    obs: Mapping[str, str] = field(default_factory=dict)  # name in the study → name in this site's file
    obsm: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)  # layer, raw, genes, kind: how this site's file is read
    labels: Mapping[str, str] = field(default_factory=dict)  # name of a label in this site's file → in the study


@dataclass(frozen=True)
class Kit:
    """A party's folder, opened."""

    path: Path
    study: Study
    me: Party
    identity: Identity
    via: str = ""  # how decisions about it come, for their history

    @classmethod
    def open(cls, path: str | Path) -> Kit:
        """Read a kit's study and key; the key says which party it is."""
        path = Path(path).absolute()
        if not (path / "startup").is_dir():
            raise ParameterError(
                f"{path} is not a start-up kit (it has no folder 'startup'); cloister provision makes them"
            )
        check_private(path)
        study, identity = Study.load(path / "study.toml"), Identity.load(path / "identity.key")
        me = next((p for p, public in study.keys.items() if public == identity.public), None)
        if me is None:
            raise ParameterError(
                f"{path / 'study.toml'}: no party in [keys] has this kit's identity.key"
                f" ({identity.public.hex()[:16]}…); the study file belongs to other kits"
            )
        return cls(path, study, me, identity)

    @property
    def role(self) -> Role:
        return self.study.parties[self.me]

    @property
    def policy_file(self) -> Path:
        return self.path / "local" / "site.toml"

    @property
    def approvals(self) -> Approvals:
        return Approvals(self.path / "local" / approval.FILE, self.me, self.via)

    def policy(self) -> Policy:
        """Read `local/site.toml` as it is now; every error names the key."""
        where = self.policy_file
        try:
            raw = tomllib.loads(where.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ParameterError(f"there is no {where}; copy it from the kit as it was delivered") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise ParameterError(f"{where} cannot be read as TOML: {e}") from None
        _check_keys(raw, TOP, f"{where.name}")
        approve = _table(raw, "approve")
        _check_keys(approve, set(APPROVE), f"{where.name} [approve]")
        for key in ("data", "out", "carrier"):
            if not isinstance(raw.get(key, ""), str):
                raise ParameterError(f"{where.name}: '{key}' must be a path in quotes")
        for key in ("layer", "genes", "kind"):
            if not isinstance(raw.get(key, ""), str):
                raise ParameterError(f"{where.name}: '{key}' must be a name in quotes")
        if not isinstance(raw.get("raw", False), bool):
            raise ParameterError(f"{where.name}: 'raw' must be true or false")
        sandbox = RENAMED.get(str(raw.get("sandbox")), raw.get("sandbox", FULL))
        if sandbox not in SANDBOXES:
            raise ParameterError(f"{where.name}: 'sandbox' must be one of {', '.join(SANDBOXES)}")
        proxy, listen = self._read_network(raw)
        page = _table(raw, "page")
        _check_keys(page, {"sso_header", "hosts"}, f"{where.name} [page]")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,63}", str(page.get("sso_header", "X"))):
            text = f"{where.name} [page]: 'sso_header' must be the name of a header, as \"X-Remote-User\""
            raise ParameterError(text)
        hosts = page.get("hosts", [])
        if not isinstance(hosts, list) or not all(isinstance(h, str) and HOST.fullmatch(h) for h in hosts):
            raise ParameterError(f"{where.name} [page]: 'hosts' must be a list of names, as [\"cloister.example.org\"]")
        for key in APPROVE:
            approved = approve.get(key, [])
            if not isinstance(approved, list) or not all(isinstance(x, str) for x in approved):
                raise ParameterError(f"{where.name} [approve]: '{key}' must be a list of texts, as [\"bin-values\"]")
        limits = _table(raw, "limits")
        _check_keys(limits, {"study", *workflows.names()}, f"{where.name} [limits]")
        for key, most in limits.items():
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                raise ParameterError(f"{where.name} [limits]: '{key}' must be a number of runs, found {most!r}")
        floors = _table(raw, "floors")
        _check_keys(floors, {"min_cells", "min_donors"}, f"{where.name} [floors]")
        for key, least in floors.items():
            if not isinstance(least, int) or isinstance(least, bool) or least < 1:
                text = f"{where.name} [floors]: '{key}' must be a whole number of at least 1, found {least!r}"
                raise ParameterError(text)
        names = {key: _table(raw, key) for key in ("obs", "obsm", "labels")}
        if not all(isinstance(x, str) for table in (names["obs"], names["obsm"]) for x in table.values()):
            raise ParameterError(f'{where.name}: [obs] and [obsm] hold lines as: cell_type = "your_column"')
        check_map(names["labels"], f"{where.name}: [labels]")
        data = os.environ.get(DATA) or raw.get("data")
        allowed: dict[str, Any] = {key: tuple(approve.get(key, ())) for key in APPROVE}
        return Policy(
            data=self.path / data if data else None,
            out=self.path / raw.get("out", "results"),
            **allowed,
            limits={"study": STUDY_RUNS} | dict.fromkeys(self._asked()["workflows"], WORKFLOW_RUNS) | dict(limits),
            budget=read_budget(_table(raw, "budget")),
            sandbox=sandbox,
            proxy=proxy,
            notify=read_hook(raw.get("notify", ""), where.name),
            page=dict(page),
            listen=listen,
            carrier=self.path / raw["carrier"] if raw.get("carrier") else None,
            floors=dict(floors),
            obs=names["obs"],
            obsm=names["obsm"],
            labels=names["labels"],
            settings=Settings(raw.get("raw", False), raw.get("layer"), raw.get("genes"), raw.get("kind")),
        )

    def _read_network(self, raw: Mapping[str, Any]) -> tuple[Proxy | None, tuple[str, int] | None]:
        """`proxy` of a party that connects, `listen` of the coordinator; no error repeats a password."""
        where, hub = self.policy_file.name, self.role == "coordinator"
        wrong = "listen" if not hub else "proxy"
        if wrong in raw:
            does = "opens no connection" if hub else "listens nowhere"
            raise ParameterError(f"{where}: '{wrong}' is of no use here, since {self.me} {does}; remove the line")
        proxy = listen = None
        if "proxy" in raw:
            if not isinstance(raw["proxy"], str):
                raise ParameterError(f"{where}: 'proxy' must be a text in quotes")
            with about(where):
                proxy = Proxy.parse(raw["proxy"])
            if proxy.authorization and os.name == "posix" and (mode := self.policy_file.stat().st_mode) & 0o077:
                raise DataError(
                    f"{self.policy_file} contains a password and can be read by other users of this machine"
                    f" (mode {stat.S_IMODE(mode):03o}); run: chmod 600 {self.policy_file}"
                )
        if "listen" in raw:
            host, _, port = str(raw["listen"]).rpartition(":")
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise ParameterError(f"{where}: 'listen' must be as \"0.0.0.0:8002\", found {raw['listen']!r}")
            listen = host.strip("[]"), int(port)
        return proxy, listen

    def _asked(self) -> dict[str, list[str]]:
        """What the study wants approved; a study of several steps is one study, and all their workflows and modes."""
        parts = self.study.parts
        return {
            "workflows": [*dict.fromkeys(part.workflow for part in parts)],
            "modes": [*dict.fromkeys(part.mode for part in parts)],
            "studies": [self.study.digest.hex()],
        }

    @property
    def decision(self) -> str:
        """Where the study stands at this party, in one word."""
        if self.role == "coordinator":
            return "asks"
        if governance.expired(self.study.governance):
            return "ended"
        entry = self.approvals.entry(self.study)
        if entry is None:
            return "waits"
        if entry.withdrawn:
            return "refused" if entry.refused else "withdrawn"
        return "approved" if entry.made_here else "waits"

    def check_approved(self, policy: Policy) -> None:
        """Raise `Refusal` unless this party allowed the workflows, the modes and this very study, and still does."""
        if self.role == "coordinator":
            return  # it is the one that asks
        if (entry := self.approvals.entry(self.study)) is not None and entry.withdrawn:
            self.approvals.current(self.study)
        asked = self._asked()
        what = {"workflows": "the workflow", "modes": "the mode", "studies": "the study"}
        for key, values in asked.items():
            for value in values:
                if value not in getattr(policy, key):
                    read = value if key == "workflows" else _to_read(self.study)
                    raise Refusal(
                        f"'{self.me}' has not approved {what[key]} {value!r}; read: cloister explain {read},"
                        " then: cloister site KIT --approve"
                    )
        self.approvals.current(self.study)

    def runs_so_far(self) -> dict[str, int]:
        """How many runs were begun here: of this kit's study, and of its workflows under any study."""
        counts = self._counts()
        return {"study": counts.get(self.study.digest.hex(), 0)} | {
            name: counts.get(name, 0) for name in self._asked()["workflows"]
        }

    def _cost(self, entry: Approval, what: Study, *, more: bool) -> dict[str, float]:
        """What a run of the study, or of one step, takes of the budget."""
        cost = dict(entry.cost) if what.digest == self.study.digest else cost_of(what)
        return cost if more else {**cost, "runs": 0}

    def check_limits(self, policy: Policy, part: Study | None = None, *, more: bool = True) -> None:
        """Raise `Refusal` if this party's runs of the study, or of the workflow, are used up."""
        counted = part or self.study
        asked = {*(["study"] if more else []), *(one.workflow for one in counted.parts)}
        for key, runs in self.runs_so_far().items():
            most = policy.limits.get(key)
            if most is not None and runs >= most and key in asked:
                what = "of this study" if key == "study" else f"of '{key}'"
                raise Refusal(
                    f"'{self.me}' allows {most} runs {what}, and {runs} were begun; to allow more, raise {key} under"
                    " [limits] in local/site.toml"
                )
        if (entry := self.approvals.entry(self.study)) is not None and entry.data is not None:
            self.budget(policy).check(entry.data.matrix, self._cost(entry, counted, more=more), counted)

    def budget(self, policy: Policy) -> Budget:
        """What may be spent on this site's cells."""
        return Budget(self.path / "local" / policy.budget["file"], policy.budget, self.me)

    def privacy_total(self, policy: Policy, due: Study | None) -> dict[str, Any]:
        """ε of all runs with noise on the approved cells, and what is `due` for this one; empty if none has noise."""
        entry = self.approvals.entry(self.study)
        if self.role == "coordinator" or entry is None or entry.data is None:
            return {}
        total = self.budget(policy).privacy(entry.data.matrix, due)
        return {"privacy": total.record()} if total.epsilon else {}

    def answered(self, policy: Policy) -> AnsweredCells:
        """The sets of cells that earlier runs used, of all kits that share the budget's file."""
        return AnsweredCells(self.budget(policy).path.parent)

    @property
    def donor_key(self) -> str | None:
        """The column that names donors in any step of the study."""
        keys = [part.parameters.get("donor_key", part.parameters.get("sample_key")) for part in self.study.parts]
        return next((str(key) for key in keys if key), None)

    def check_differences(self, policy: Policy, adata: AnnData, matrix: str) -> None:
        """Raise `Refusal` if these cells differ from those of an earlier run in too few."""
        least = Thresholds().raised(policy.floors)
        columns, groups = own_cells.columns_read(self.study), own_cells.columns_read(self.study, grouped=True)
        self.answered(policy).check(adata, matrix, self.donor_key, least, columns, groups)

    def count_run(
        self, policy: Policy, adata: AnnData | None = None, part: Study | None = None, *, more: bool = True
    ) -> None:
        """Count one run more, or raise `Refusal`. A run counts from its start, since an aborted one reveals too.

        `part` is the step that is answered once more, if that is all that this run repeats (`cloister.deploy.course`);
        `more`, whether that makes it one more run of the study.
        """
        what = part or self.study
        with files.locked(self.path / "local" / COUNTS, wait=60.0):
            self.check_limits(policy, what, more=more)
            counts = self._counts()
            if (entry := self.approvals.entry(self.study)) is not None and entry.data is not None:
                if adata is not None:
                    least = None if entry.small_change else Thresholds().raised(policy.floors)
                    columns, groups = (
                        own_cells.columns_read(self.study),
                        own_cells.columns_read(self.study, grouped=True),
                    )
                    key, name = self.donor_key, self.study.name
                    self.answered(policy).admit(adata, entry.data.matrix, key, name, least, columns, groups)
                self.budget(policy).charge(entry.data.matrix, what, self._cost(entry, what, more=more))
            for key in ([self.study.digest.hex()] if more else []) + [one.workflow for one in what.parts]:
                counts[key] = counts.get(key, 0) + 1
            files.write(self.path / "local" / COUNTS, json.dumps(counts, indent=1))

    def admit_step(self, policy: Policy, part: Study, adata: AnnData) -> None:
        """Raise `Refusal` if the cells or labels that a later step reads disclose a few cells with earlier answers."""
        if (entry := self.approvals.entry(self.study)) is None or entry.data is None:
            return
        least = None if entry.small_change else Thresholds().raised(policy.floors)
        columns, groups = own_cells.columns_read(part), own_cells.columns_read(part, grouped=True)
        self.answered(policy).admit_step(adata, entry.data.matrix, self.study.name, least, columns, groups)

    def _counts(self) -> dict[str, int]:
        path = self.path / "local" / COUNTS
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return {str(k): int(v) for k, v in raw.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError):
            raise ParameterError(
                f"{path} is damaged, so nobody knows how many runs were made; put it right, or delete it to begin anew"
            ) from None

    def approve(self, by: str = "", data: str | Path | None = None, *, small_change: bool = False) -> Approval:
        """Add this kit's study to `local/site.toml`, and who allowed it on which cells to `local/approvals.json`.

        `data` are the cells, where they are not those that `local/site.toml` names. `small_change` allows runs on cells
        that differ from those of earlier runs by fewer than the minimum group size.
        """
        policy, text = self.policy(), self.policy_file.read_text(encoding="utf-8")
        if governance.expired(self.study.governance):
            raise Refusal(f"the study '{self.study.name}' ended on {self.study.governance['expires']}")
        found, stamp = None, tuple[Any, ...]()
        if self.role == "site":
            policy = policy if data is None else replace(policy, data=Path(data).absolute())
            adata = own_cells.open_cells(self, policy)
            stamp = own_cells.large_stamp(adata)
            found = own_cells.fingerprint_of(self.study, self.me, adata)
            if not small_change:
                self.check_differences(policy, adata, found.matrix)
        added = {key: [*dict.fromkeys((*getattr(policy, key), *asked))] for key, asked in self._asked().items()}
        text = self._edited(text, added)
        entry = self.approvals.add(
            self.study,
            by,
            found,
            cost_of(self.study),
            stamp,
            small_change=small_change,
            terms=self.terms(policy),
        )
        self._write_policy(text)
        return entry

    def terms(self, policy: Policy) -> dict[str, Any]:
        """On what terms this party takes part: what approval, doctor, page and receipt show."""
        terms: dict[str, Any] = {"consent": [*policy.consent], "limits": dict(policy.limits)}
        if self.role == "site":
            least = Thresholds().raised(policy.floors)
            terms["floors"] = {"min_cells": least.min_cells, "min_donors": least.min_donors}
            terms["budget"] = {key: value for key, value in policy.budget.items() if key != "file"}
            terms["file"] = str(policy.data) if policy.data is not None else ""
        return terms

    def unseen_consents(self, policy: Policy) -> list[str]:
        """Consents in `local/site.toml` that nobody here has seen while approving, as a kit may be delivered with."""
        known = self.approvals.known_consents()
        return [word for word in policy.consent if word not in known]

    def _edited(self, text: str, lists: Mapping[str, list[str]]) -> str:
        """`local/site.toml` with other lists under [approve]; comments, order and layout stay."""
        document = tomlkit.parse(text)
        if "approve" not in document:
            document["approve"] = tomlkit.table()
        table: Any = document["approve"]
        for key, values in lists.items():
            if [*table.get(key, ())] != values:
                table[key] = values
        return tomlkit.dumps(document)

    def refuse(self, by: str = "") -> Approval:
        """Keep in `local/approvals.json` that somebody read this kit's study and does not allow it."""
        return self.approvals.refuse(self.study, by)

    def withdraw(self, by: str = "") -> bool:
        """Take the approval of this kit's study back; whether there was one."""
        entry, digest = self.approvals.withdraw(self.study, by), self.study.digest.hex()
        with contextlib.suppress(ParameterError):  # nothing runs from a file that cannot be read
            if digest in (listed := self.policy().studies):
                text = self.policy_file.read_text(encoding="utf-8")
                self._write_policy(self._edited(text, {"studies": [x for x in listed if x != digest]}))
        return entry is not None

    def _write_policy(self, text: str) -> None:
        try:
            files.write(self.policy_file, text)
        except OSError as e:
            raise DataError(f"{self.policy_file} cannot be written ({e.strerror})") from None


def check_private(path: Path) -> None:
    """Raise a `DataError` if other users of this machine can read a key of the kit, or change what it says.

    The TLS key may be readable by a group, because the carrier can run as a user of its own.
    """
    if os.name != "posix":
        return
    keys = [p for p in (path / "startup").iterdir() if p.suffix == ".key"]
    settings = [path, path / "local", path / "startup", path / "study.toml", path / "local" / "site.toml"]
    for files_of, forbidden, what in ((keys, 0o027, "read or changed by"), (settings, 0o022, "changed by")):
        for file in files_of:
            if file.exists() and (owner := file.stat().st_uid) not in (os.geteuid(), 0) and os.geteuid() != 0:
                raise DataError(
                    f"{file} belongs to user {owner}, who could change it; run: chown -R {os.geteuid()} {path}"
                )
            if file.exists() and (mode := stat.S_IMODE(file.stat().st_mode)) & forbidden:
                right = "700" if file.is_dir() else "600"
                raise DataError(
                    f"{file} can be {what} other users of this machine (mode {mode:03o}); run: chmod {right} {file}"
                )


def _to_read(study: Study) -> str:
    """What `cloister explain` is asked for before somebody approves."""
    return "study.toml" if study.steps else study.workflow


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := table.keys() - known:
        raise ParameterError(f"{where}: unknown key '{min(unknown)}'; known are {', '.join(sorted(known))}")


def _table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = raw.get(key, {})
    if not isinstance(table, Mapping):
        raise ParameterError(f"site.toml: [{key}] must be a table")
    return table


SANDBOX_TEXT = """
# How well the process that talks to the network must be confined; below this level the service does not start.
# "full": it reads no file of yours and connects to one port. "files": on older kernels, it may connect to any port.
# "seccomp": it may also read what this service may read. "systemd": another user runs it, by two unit files.
# cloister doctor shows what this machine offers; docs/deploy.md explains the levels.
sandbox = "full"
"""
PROXY_TEXT = """
# If only a proxy may connect to the outside: the process above then connects to the proxy's port and to no other.
# With a password, chmod 600 this file. http://user:password@proxy.example.org:3128
# proxy = "http://proxy.example.org:3128"

# A command or a web address that learns that a study waits for a decision here; it gets JSON, and nothing of the cells.
# notify = ["/usr/local/bin/tell-privacy-office"]
# notify = "https://chat.example.org/hooks/cloister"
"""
LISTEN_TEXT = """
# Behind a TLS pass-through (port 443 of [network] outside): where this coordinator listens itself.
# listen = "127.0.0.1:8002"
"""


def format_policy(study: Study, role: Role) -> str:
    """The `local/site.toml` that a kit is delivered with: nothing is approved yet."""
    cells = """\
# Your cells. A path from this kit's folder, or a full path; it never leaves this machine.
data = "cells.h5ad"
# If the counts are not in X: a layer, or raw = true for adata.raw. genes names the column of var to match genes by,
# kind says what the values are ("counts", "log") where that is not found out by itself.
# layer = "counts"
# raw = true
# genes = "gene_name"
# kind = "counts"

"""
    names = """\

# If your file uses other names than the study: study's name = "yours".
[obs]
# cell_type = "CellType_level2"

[obsm]
# X_pca = "X_pca_harmony"

# If your labels have other names than the study's: "yours" = "study's". Your column stays, as cell_type_original.
[labels]
# "T_CD4" = "CD4 T cells"
"""
    asked = "\n".join(f"#   workflow {part.workflow!r} in mode {part.mode!r}" for part in study.parts)
    explain = _to_read(study) + ("" if study.steps else f" --mode {study.mode}")
    limits = "\n".join(f"{name} = {WORKFLOW_RUNS}" for name in dict.fromkeys(part.workflow for part in study.parts))
    approval = f"""\

# What may run here. Empty lists: nothing. This kit's study needs
{asked}
# What these reveal: cloister explain {explain}
# `cloister site KIT --approve` adds all three lines for the study.toml in this kit, and stores name, time and a
# fingerprint of the cells in approvals.json. On other cells nothing runs until they are approved.
[approve]
workflows = []
modes = []
studies = []
# What needs your consent besides. "open-model": train-cellcnn may decrypt the trained model for all parties;
# "donor-inputs": inputs may be drawn per class or donor, so that one malicious site can make the model show a donor;
# "validation": and one number, the error on held-out donors, during training; "outside-query": predict-cellcnn may
# answer a party that took no part in the training; "whole-model": it may answer enough donors of one party to
# determine the model; "iterative-fit": train-classifier may run solver="logistic" without noise, with which one
# malicious site can recover cells; "exact-updates": fine-tune and adapt-model may open sums without noise, with the
# same risk.
consent = []

# Number of runs that may begin here, of one study file and of a workflow under any study. Every answer reveals a
# little; `local/runs.json` stores the count.
[limits]
study = {STUDY_RUNS}
{limits}

# Limits for the same cells over all studies: runs, workflows computed, and ε of all runs with noise together.
# `file` stores the counts; kits of several studies on the same cells share it by a full path.
[budget]
file = "budget.json"
runs = {USUAL["runs"]}
queries = {USUAL["queries"]}
# epsilon = 10.0
# delta = {USUAL["delta"]:g}
# Cells that one querier may have labelled with these cells as references, over all studies (map-labels).
query_cells = {USUAL["query_cells"]}

# Minimum group sizes: whatever others send, every number that these cells add to a common result is based on at least
# this many cells and donors, or it is zero. These lines raise what a study agreed on; they never lower it.
# Cells that differ from those of an earlier run by fewer are rejected (cloister site KIT --approve
# --allow-small-change).
[floors]
min_cells = {Thresholds().min_cells}
# min_donors = {Thresholds().min_donors}
"""
    return (
        "# Read each time a run starts; no restart is needed after a change.\n\n"
        + (cells if role == "site" else "")
        + '# Results and receipts, one folder per run.\nout = "results"\n'
        + SANDBOX_TEXT
        + (LISTEN_TEXT if role == "coordinator" else PROXY_TEXT)
        + (approval if role != "coordinator" else "")
        + (names if role == "site" else "")
    )
