"""Study: who takes part, in which role, and what they agreed to compute (`study.toml`).

    name = "three-hospitals"
    workflow = "bin-values"
    mode = "hardened"                   # or "published"
    colluders = 0                       # sites that may help a lying coordinator; each lets fewer drop out

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

Every party holds the same file; its digest is part of the run id, so a run between parties that agreed on different
things stops before any data moves.
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
from typing import Any, Literal, NewType, cast, get_args

from cloister.errors import ParameterError

Party = NewType("Party", str)
Role = Literal["coordinator", "site", "auxiliary"]
Mode = Literal["hardened", "semi-honest", "published", "plain"]

CONSENTS = {  # what a party may be asked for beyond taking part; only its own settings give it
    "open-model": "opening the model",
    "validation": "opening the validation error during training",
}
BARE = re.compile(r"[A-Za-z0-9_-]+")  # keys that TOML wants no quotes around
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
TOP = {"name", "workflow", "mode", "timeout", "patience", "seed", "colluders"}
TOP |= {"parties", "parameters", "network", "keys"}


@dataclass(frozen=True)
class Study:
    """What the parties agreed on; public, the same at all of them."""

    name: str
    workflow: str
    parties: Mapping[Party, Role]
    mode: Mode = "hardened"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the statistical part; secrets never depend on it
    timeout: float = 60.0  # seconds of silence, or of nobody computing, after which a wait ends
    patience: float = 86_400.0  # seconds after which any wait ends, whoever is computing
    colluders: int = 0  # k: sites that may help a lying coordinator, and sums still open once and whole
    network: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[Party, bytes] = field(default_factory=dict)  # Ed25519 public keys

    def __post_init__(self) -> None:
        check_study(self)

    @property
    def coordinator(self) -> Party:
        return next(p for p, role in self.parties.items() if role == "coordinator")

    @property
    def sites(self) -> tuple[Party, ...]:
        return tuple(sorted(p for p, role in self.parties.items() if role == "site"))

    @property
    def auxiliaries(self) -> tuple[Party, ...]:
        return tuple(sorted(p for p, role in self.parties.items() if role == "auxiliary"))

    def quorum(self, n: int) -> int:
        """Of n parties, how many must be left at the end of a sum: the smallest t > (n + k)/2, at most all."""
        return min(n, (n + self.colluders) // 2 + 1)

    @property
    def digest(self) -> bytes:
        """SHA-256 of all but `network`; equal at all parties, or the run does not start."""
        plain = {
            "name": self.name,
            "workflow": self.workflow,
            "mode": self.mode,
            "parties": dict(self.parties),
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "timeout": float(self.timeout),
            "patience": float(self.patience),
            "keys": {p: k.hex() for p, k in self.keys.items()},
        } | ({"colluders": self.colluders} if self.colluders else {})
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()

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
    if unknown := raw.keys() - TOP:
        key = min(unknown)
        raise ParameterError(f"{where}: unknown key '{key}'; known are {', '.join(sorted(TOP))}")
    for key in ("name", "workflow", "parties"):
        if key not in raw:
            raise ParameterError(f"{where}: '{key}' is missing")
    for key, kind in {"parties": dict, "parameters": dict, "network": dict, "keys": dict}.items():
        if key in raw and not isinstance(raw[key], kind):
            raise ParameterError(f"{where}: [{key}] must be a table")
    keys: dict[Party, bytes] = {}
    for party, value in raw.get("keys", {}).items():
        try:
            keys[Party(party)] = bytes.fromhex(value)
        except (ValueError, TypeError):
            raise ParameterError(f"{where}: [keys] {party} must be 64 hexadecimal digits") from None
    try:
        return Study(**{**raw, "keys": keys})
    except ParameterError as e:
        raise ParameterError(f"{where}: {e}") from None


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
    for key in ("name", "workflow"):
        value = getattr(study, key)
        if not isinstance(value, str) or not value:
            raise ParameterError(f"'{key}' must be a text, found {value!r}")
    if study.mode not in get_args(Mode):
        raise ParameterError(f"'mode' must be one of {', '.join(get_args(Mode))}, found {study.mode!r}")
    for key in ("timeout", "patience"):
        value = getattr(study, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ParameterError(f"'{key}' must be a number of seconds above 0, found {value!r}")
    if isinstance(study.seed, bool) or not isinstance(study.seed, int):
        raise ParameterError(f"'seed' must be a whole number, found {study.seed!r}")
    if isinstance(study.colluders, bool) or not isinstance(study.colluders, int) or study.colluders < 0:
        raise ParameterError(f"'colluders' must be a whole number of sites, 0 or more, found {study.colluders!r}")
    for party, role in study.parties.items():
        if not isinstance(party, str) or not NAME.fullmatch(party):
            raise ParameterError(
                f"[parties] {party!r} is no party name; use small letters, digits and '-', a letter first, at most 32"
            )
        if role not in get_args(Role):
            raise ParameterError(f"[parties] {party} must be coordinator, site or auxiliary, found {role!r}")
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
    for title in ("parameters", "network"):
        for key, value in getattr(study, title).items():
            if not isinstance(key, str) or not (value is None or _is_plain(value)):
                raise ParameterError(
                    f"[{title}] {key} must be a finite number, a text, true or false, or a list of these"
                )


def _is_plain(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    if isinstance(x, float):
        return math.isfinite(x)
    return isinstance(x, bool | int | str)


def format_study(study: Study) -> str:
    """The study as TOML text, the inverse of `parse_study`."""
    keys = ["name", "workflow", "mode", "seed", "timeout", "patience", *(["colluders"] if study.colluders else [])]
    lines = [f"{key} = {_toml(getattr(study, key))}" for key in keys]
    tables: dict[str, Mapping[str, Any]] = {
        "parties": cast(Mapping[str, Any], study.parties),
        "parameters": study.parameters,
        "network": study.network,
        "keys": {p: k.hex() for p, k in study.keys.items()},
    }
    for title, table in tables.items():
        if table:
            rows = (f"{k if BARE.fullmatch(k) else _toml(k)} = {_toml(v)}" for k, v in table.items() if v is not None)
            lines += ["", f"[{title}]", *rows]
    return "\n".join(lines) + "\n"


def _toml(x: Any) -> str:
    if isinstance(x, list | tuple):
        return "[" + ", ".join(map(_toml, x)) + "]"
    # TOML writes texts, numbers and booleans as JSON does; letters beyond 16 bits only as themselves
    return json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
