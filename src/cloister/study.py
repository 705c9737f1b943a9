"""Study: who takes part, in which role, and what they agreed to compute (`study.toml`).

    name = "three-hospitals"
    workflow = "bin-values"
    mode = "hardened"                   # or "published"
    colluders = 0                       # sites that may help a malicious coordinator; each lets fewer drop out

    [parties]
    hub = "coordinator"                 # exactly one
    basel = "site"                      # holds data
    lugano = "site"
    vienna = "site"
    helper = "auxiliary"                # holds none; only some protocols need one

    [parameters]                        # the workflow's own options, the same names as in Python and on the CLI
    n_bins = 51

    [network]                           # only for runs between machines
    host = "hub.example.org"
    port = 8002

    [keys]                              # Ed25519 public keys, written by `cloister provision`
    basel = "9f86d0…"

    [governance]                        # purpose, legal basis, permit, contact, retention, expiry (governance.py)
    purpose = "..."

Every party holds the same file; its digest is part of the run id, so a run between parties that agreed on different
things stops before any data moves.

A study of several steps has a table for each, in their order, instead of `workflow`, `mode` and `[parameters]`:

    [[step]]
    workflow = "shared-pca"

    [[step]]
    name = "labels"                     # the workflow's name by default; no two steps have the same
    workflow = "map-labels"
    mode = "hardened"
    options = { query = "vienna", use_rep = "X_shared_pca" }

One digest covers all of them. `study.parts` are the steps, each a study that knows its place: its own digest, which the
parties compare before the step, is of the whole study and of that place.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from cloister.errors import ParameterError
from cloister.governance import check_governance, read_governance
from cloister.mpc.parties import Agreement, Party, Role

Mode = Literal["hardened", "semi-honest", "published", "plain"]

__all__ = [
    "CONSENTS",
    "Agreement",
    "Mode",
    "Party",
    "Role",
    "Step",
    "Study",
    "check_study",
    "format_study",
    "parse_study",
]

CONSENTS = {  # what a party may be asked for beyond taking part; only its own settings give it
    "open-model": "opening the model",
    "donor-inputs": "training on inputs drawn per class or donor, which a malicious site can make show a donor",
    "validation": "opening the validation error during training",
    "iterative-fit": "opening gradients at points that a malicious site can steer (solver='logistic')",
    "outside-query": "answering a party that took no part in the training",
    "exact-updates": "opening sums of gradients without noise",
    "whole-model": "answering enough donors of one party to determine the model",
}
BARE = re.compile(r"[A-Za-z0-9_-]+")  # keys that TOML wants no quotes around
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")  # of a step
PARTY = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
COMMON = {"name", "timeout", "patience", "seed", "colluders", "parties", "network", "keys", "governance"}
COMMON |= {"labels", "ontology"}
ONTOLOGY = {"version", "terms"}
SINGLE = {"workflow", "mode", "parameters"}  # of a study of one workflow
STEP = {"name", "workflow", "mode", "options"}
MOST_STEPS = 20


@dataclass(frozen=True)
class Step:
    """One workflow of a study of several."""

    workflow: str
    mode: Mode = "hardened"
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""  # the workflow's by default

    def __post_init__(self) -> None:
        if self.name == "":
            object.__setattr__(self, "name", self.workflow)


@dataclass(frozen=True)
class Study:
    """What the parties agreed on; public, the same at all of them."""

    name: str
    workflow: str  # empty for a study of several steps
    parties: Mapping[Party, Role]
    mode: Mode = "hardened"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the statistical part; secrets never depend on it
    timeout: float = 60.0  # seconds of silence, or of nobody computing, after which a wait ends
    patience: float = 86_400.0  # seconds after which any wait ends, whoever is computing
    colluders: int = 0  # k: sites that may help a malicious coordinator, and sums still open once and whole
    network: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[Party, bytes] = field(default_factory=dict)  # Ed25519 public keys
    governance: Mapping[str, str] = field(default_factory=dict)  # why, by whose leave and until when; in words
    labels: Mapping[str, str] = field(default_factory=dict)  # a site's name of a label → the name in this study
    ontology: Mapping[str, Any] = field(default_factory=dict)  # version of the Cell Ontology, terms that labels become
    steps: tuple[Step, ...] = ()
    at: int = 0  # which of the steps this is about, from 1; 0 for the whole study

    def __post_init__(self) -> None:
        check_study(self)

    @property
    def parts(self) -> tuple[Study, ...]:
        """What is run, one after the other: the steps, or the study itself if it has none."""
        if not self.steps or self.at:
            return (self,)
        return tuple(
            replace(self, workflow=step.workflow, mode=step.mode, parameters=dict(step.options), at=i)
            for i, step in enumerate(self.steps, 1)
        )

    @property
    def whole(self) -> Study:
        """The study that this is a step of."""
        return replace(self, workflow="", mode="hardened", parameters={}, at=0) if self.at else self

    @property
    def label(self) -> str:
        """What this is called among other steps: the step's name, or the workflow's."""
        return self.steps[self.at - 1].name if self.at else self.workflow

    @property
    def place(self) -> str:
        """Which step this is, in words; empty for a study of one workflow."""
        return f"step {self.at} of {len(self.steps)} ({self.label})" if self.at else ""

    @property
    def coordinator(self) -> Party:
        return next(p for p, role in self.parties.items() if role == "coordinator")

    @property
    def sites(self) -> tuple[Party, ...]:
        return tuple(sorted(p for p, role in self.parties.items() if role == "site"))

    @property
    def auxiliaries(self) -> tuple[Party, ...]:
        return tuple(sorted(p for p, role in self.parties.items() if role == "auxiliary"))

    @property
    def digest(self) -> bytes:
        """SHA-256 of all but `network`; equal at all parties, or the run does not start."""
        plain = {
            "name": self.name,
            "parties": dict(self.parties),
            "seed": self.seed,
            "timeout": float(self.timeout),
            "patience": float(self.patience),
            "keys": {p: k.hex() for p, k in self.keys.items()},
        } | {key: value for key in ("colluders", "governance", "labels", "ontology") if (value := getattr(self, key))}
        if self.steps:
            plain["steps"] = [[s.name, s.workflow, s.mode, dict(s.options)] for s in self.steps]
            plain["at"] = self.at
        else:
            plain |= {"workflow": self.workflow, "mode": self.mode, "parameters": dict(self.parameters)}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()

    @property
    def agreement(self) -> Agreement:
        """What protocols need of this."""
        parts = self.whole.parts if self.steps else ()
        return Agreement(
            self.parties,
            self.digest,
            self.keys,
            self.colluders,
            self.timeout,
            self.patience,
            self.place,
            {part.digest: part.place for part in parts},
        )

    def with_keys(self, keys: Mapping[Party, bytes]) -> Study:
        return replace(self, keys=dict(keys))

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read and check a `study.toml`; every error names the key."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ParameterError(f"there is no study file at {path}; write one as in docs/tutorial.md") from None
        except (OSError, UnicodeDecodeError) as e:
            raise ParameterError(f"{path} cannot be read as text ({type(e).__name__})") from None
        return parse_study(text, path.name)


def parse_study(text: str, where: str = "study.toml") -> Study:
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # tomllib's own, a number of 5000 digits, a list within lists
        raise ParameterError(f"{where} is not valid TOML: {_explain(text, e)}") from None
    known = COMMON | SINGLE | {"step", "at"}
    if unknown := raw.keys() - known:
        key = min(unknown)
        raise ParameterError(f"{where}: unknown key '{key}'; known are {', '.join(sorted(known - {'at'}))}")
    if "step" in raw and (both := raw.keys() & SINGLE):
        raise ParameterError(f"{where}: '{min(both)}' and [[step]] exclude each other; write it into the steps")
    for key in ("name", "parties") if "step" in raw else ("name", "workflow", "parties"):
        if key not in raw:
            raise ParameterError(f"{where}: '{key}' is missing")
    for key in ("parties", "parameters", "network", "keys", "governance", "labels", "ontology"):
        if key in raw and not isinstance(raw[key], dict):
            raise ParameterError(f"{where}: [{key}] must be a table")
    raw["governance"] = read_governance(raw.get("governance", {}))
    keys: dict[Party, bytes] = {}
    for party, value in raw.get("keys", {}).items():
        try:
            keys[Party(party)] = bytes.fromhex(value)
        except (ValueError, TypeError):
            raise ParameterError(f"{where}: [keys] {party} must be 64 hexadecimal digits") from None
    try:
        if "step" not in raw:
            return Study(**{**raw, "keys": keys})
        common = {key: raw[key] for key in raw.keys() & COMMON}
        whole = Study(**{**common, "workflow": "", "keys": keys, "steps": _read_steps(raw["step"])})
        at = raw.get("at", 0)
        if type(at) is not int or not 0 <= at <= len(whole.steps):
            raise ParameterError(f"'at' must be the number of a step, found {at!r}")
        return whole.parts[at - 1] if at else whole
    except ParameterError as e:
        raise ParameterError(f"{where}: {e}") from None


def _read_steps(raw: Any) -> tuple[Step, ...]:
    if not isinstance(raw, list) or not all(isinstance(one, dict) for one in raw):
        raise ParameterError("steps are tables of their own; write [[step]] above each")
    for i, one in enumerate(raw, 1):
        if unknown := one.keys() - STEP:
            raise ParameterError(f"[[step]] {i}: unknown key '{min(unknown)}'; known are {', '.join(sorted(STEP))}")
        if "workflow" not in one:
            raise ParameterError(f"[[step]] {i}: 'workflow' is missing")
        if not isinstance(one.get("options", {}), dict):
            raise ParameterError(f"[[step]] {i}: 'options' must be a table")
    return tuple(Step(**one) for one in raw)


def _explain(text: str, e: Exception) -> str:
    line = re.search(r"at line (\d+)", str(e))
    if "overwrite" in str(e):
        rows = text.rstrip().split("\n")
        key, equals, _ = rows[int(line[1]) - 1 if line else -1].partition("=")
        if equals:
            return f"'{key.strip()}' stands twice; two parties (or keys) need two names"
    return str(e)


def check_study(study: Study) -> None:
    """Raise `ParameterError` unless the study is whole; the message names the key."""
    name = study.name
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise ParameterError(f"'name' must be one line of text, at most 200 characters, found {str(name)[:40]!r}")
    if study.steps:
        _check_steps(study)
    else:
        _check_part(study.workflow, study.mode, study.parameters, "")
    for key in ("timeout", "patience"):
        value = getattr(study, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ParameterError(f"'{key}' must be a number of seconds above 0, found {value!r}")
    if isinstance(study.seed, bool) or not isinstance(study.seed, int):
        raise ParameterError(f"'seed' must be a whole number, found {study.seed!r}")
    if isinstance(study.colluders, bool) or not isinstance(study.colluders, int) or study.colluders < 0:
        raise ParameterError(f"'colluders' must be a whole number of sites, 0 or more, found {study.colluders!r}")
    for party, role in study.parties.items():
        if not isinstance(party, str) or not PARTY.fullmatch(party):
            raise ParameterError(
                f"[parties] {party!r} is not a valid party name; use letters, digits and '-', a letter first, up to 32"
            )
        if role not in get_args(Role):
            raise ParameterError(f"[parties] {party} must be coordinator, site or auxiliary, found {role!r}")
    alike = {party.casefold(): party for party in study.parties}
    if len(alike) < len(study.parties):
        party = next(p for p in study.parties if alike[p.casefold()] != p)
        raise ParameterError(f"[parties] {party!r} and {alike[party.casefold()]!r} differ by case only; rename one")
    hubs = [p for p, role in study.parties.items() if role == "coordinator"]
    if len(hubs) != 1:
        raise ParameterError(f"[parties] needs exactly one coordinator, found {len(hubs)}")
    if not study.sites:
        raise ParameterError("[parties] has no site; at least one party must hold data")
    if study.colluders > (most := max(0, len(study.sites) - 2)):
        raise ParameterError(
            f"'colluders' can be {most} at most with {len(study.sites)} sites, found {study.colluders}; a sum hides"
            " nothing unless two sites are honest"
        )
    for party, public in study.keys.items():
        if party not in study.parties:
            raise ParameterError(f"[keys] {party} is not among the parties")
        if not isinstance(public, bytes) or len(public) != 32:
            raise ParameterError(f"[keys] {party} must be 64 hexadecimal digits")
    _check_table("[network]", study.network)
    check_governance(study.governance)
    _check_labels(study)


def _check_labels(study: Study) -> None:
    for name, label in study.labels.items():
        if not isinstance(name, str) or not isinstance(label, str) or not name.strip() or not label.strip():
            raise ParameterError(f'[labels] holds lines as: "T_CD4" = "CD4 T cells"; found {name!r} = {label!r}')
    if unknown := study.ontology.keys() - ONTOLOGY:
        raise ParameterError(f"[ontology]: unknown key '{min(unknown)}'; known are {', '.join(sorted(ONTOLOGY))}")
    if study.ontology and not isinstance(study.ontology.get("version"), str):
        raise ParameterError('[ontology] needs the release of the Cell Ontology, as: version = "2026-03-26"')
    terms = study.ontology.get("terms", [])
    if not isinstance(terms, list | tuple) or not all(isinstance(term, str) for term in terms):
        raise ParameterError('[ontology] terms must be a list of names, as: terms = ["T cell", "B cell"]')


def _check_part(workflow: Any, mode: Any, options: Mapping[str, Any], where: str) -> None:
    if not isinstance(workflow, str) or not workflow:
        raise ParameterError(f"{where}'workflow' must be a text, found {workflow!r}")
    if mode not in get_args(Mode):
        raise ParameterError(f"{where}'mode' must be one of {', '.join(get_args(Mode))}, found {mode!r}")
    _check_table(f"{where}options:" if where else "[parameters]", options)


def _check_table(title: str, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if not isinstance(key, str) or not (value is None or _is_plain(value)):
            raise ParameterError(f"{title} {key} must be a finite number, a text, true or false, or a list of these")


def _check_steps(study: Study) -> None:
    steps = study.steps
    if len(steps) > MOST_STEPS:
        raise ParameterError(f"at most {MOST_STEPS} steps make a study, found {len(steps)}")
    names: set[str] = set()
    for i, step in enumerate(steps, 1):
        _check_part(step.workflow, step.mode, step.options, f"[[step]] {i}: ")
        if not isinstance(step.name, str) or not NAME.fullmatch(step.name):
            raise ParameterError(
                f"[[step]] {i}: {step.name!r} is not a valid step name; use small letters, digits and '-', at most 32"
            )
        if step.name in names:
            raise ParameterError(f"two steps are called '{step.name}'; give one of them another name = ...")
        names.add(step.name)
    if not 0 <= study.at <= len(steps):
        raise ParameterError(f"'at' must be the number of a step, found {study.at}")
    here = steps[study.at - 1] if study.at else Step("")
    if (study.workflow, study.mode, dict(study.parameters)) != (here.workflow, here.mode, dict(here.options)):
        raise ParameterError("workflow, mode and parameters of a study of several steps stand in its steps")


def _is_plain(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    if isinstance(x, float):
        return math.isfinite(x)
    return isinstance(x, bool | int | str)


def format_study(study: Study) -> str:
    """The study as TOML text, the inverse of `parse_study`."""
    top = ["name", *(["at"] if study.at else []), *([] if study.steps else ["workflow", "mode"])]
    top += ["seed", "timeout", "patience", *(["colluders"] if study.colluders else [])]
    lines = [f"{key} = {_toml(getattr(study, key))}" for key in top]
    tables: dict[str, Mapping[str, Any]] = {
        "parties": cast(Mapping[str, Any], study.parties),
        "parameters": {} if study.steps else study.parameters,
        "network": study.network,
        "keys": {p: k.hex() for p, k in study.keys.items()},
        "governance": study.governance,
        "labels": study.labels,
        "ontology": study.ontology,
    }
    for title, table in tables.items():
        if table:
            lines += ["", f"[{title}]", *_rows(table)]
    for step in study.steps:
        lines += ["", "[[step]]", *_rows({"name": step.name, "workflow": step.workflow, "mode": step.mode})]
        if step.options:
            lines += ["[step.options]", *_rows(step.options)]
    return "\n".join(lines) + "\n"


def _rows(table: Mapping[str, Any]) -> list[str]:
    return [f"{k if BARE.fullmatch(k) else _toml(k)} = {_toml(v)}" for k, v in table.items() if v is not None]


def _toml(x: Any) -> str:
    if isinstance(x, list | tuple):
        return "[" + ", ".join(map(_toml, x)) + "]"
    # TOML writes texts, numbers and booleans as JSON does; letters beyond 16 bits only as themselves
    return json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
