"""A party's own folder for a long training: its key share, the public keys, and the encrypted state after each step.

    <folder>/public/<digest>.bin     switching keys, held once per machine: parties that share the folder share them
    <folder>/<party>/keys.json       which keys belong together
    <folder>/<party>/secret.bin      this party's share of the key; readable by its owner only
    <folder>/<party>/state.bin       [M], and [W], [V], [A] at those who follow them, after the last finished step
    <folder>/<party>/before.bin      the same after the step before it: parties may be one step apart when a run ends
    <folder>/<party>/losses.bin      validation errors so far, where all agreed to open them
    <folder>/<party>/answers.json    how many results were opened with these keys, and donors answered for each querier

Files are written whole or not at all, and every one is checked against its digest when it is read. `answers.json` is
read, compared and written under a lock, and is on disk before the share that it counts is sent. It belongs to the key
share: every run and every study that uses the share counts here, whatever the study is called. New keys in the same
folder start with no openings; answered donors stay counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from cloister import files
from cloister.errors import DataError, ParameterError, RefusedError, WireError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.study import CONSENTS, Party
from cloister.workflows.common.query_ledger import total_of

CONSENT = "whole-model"
WAIT = 60.0  # seconds, for another run that counts at the same moment
RUNS = 256  # that may load one key share; see docs/security/retries.md


def check_openings(before: int, openings: int, most: int) -> int:
    """The new count; raises where it exceeds what the floods are sized for."""
    if before + openings > most:
        raise ParameterError(
            f"{before} results were opened with these keys, {openings} more would be beyond {most}; train anew"
        )
    return before + openings


def donor_budget(markers: int) -> int:
    """Donors that one querier may have answered: half as many as determine the model."""
    return markers // 2


@dataclass(frozen=True)
class Answers:
    """What was opened with one set of keys."""

    openings: int = 0
    runs: int = 0  # that loaded the key share: resumed trainings and predictions
    donors: Mapping[str, int] = field(default_factory=dict)  # by identity key and by party name

    def to_json(self) -> str:
        return json.dumps({"openings": self.openings, "runs": self.runs, "donors": dict(self.donors)})

    @classmethod
    def from_json(cls, text: str) -> Answers:
        raw = json.loads(text)
        counts = {str(who): int(n) for who, n in raw["donors"].items()}
        if min(found := [int(raw["openings"]), int(raw["runs"]), *counts.values()]) < 0:
            raise ValueError("a negative count")
        return cls(found[0], found[1], counts)


class KeyStore:
    def __init__(self, folder: Path | str, party: Party) -> None:
        self._top, self._own = Path(folder), Path(folder) / party
        (self._top / "public").mkdir(parents=True, exist_ok=True)
        self._own.mkdir(mode=0o700, exist_ok=True)
        self._pending: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"KeyStore({str(self._own)!r})"

    @property
    def name(self) -> bytes:
        """Which keys are complete here; empty if none."""
        return bytes.fromhex(self._index().get("name", ""))

    def _index(self) -> dict[str, str]:
        path = self._own / "keys.json"
        if not path.exists():
            return {}
        try:
            index = json.loads(path.read_text())
        except ValueError:
            raise DataError(f"{path} is damaged; remove the folder and train anew") from None
        return dict(index)

    # ---- keys --------------------------------------------------------------------------------------------------------

    def put_public(self, key: ckks.PublicKey, secret: ckks.Secret | None) -> None:
        """Begin with new keys. Answered donors stay counted: training anew on the same donors gives a similar model."""
        with self._counting():
            donors = self._answers().donors
            for name in ("keys.json", "state.bin", "before.bin", "losses.bin", "openings"):
                (self._own / name).unlink(missing_ok=True)
            self._write_answers(Answers(donors=donors))
        self._pending = {"public": self._put(np.stack([key.b, key.a]))}
        if secret is not None:
            files.write(self._own / "secret.bin", secret.to_bytes())

    def put_switching(self, label: str, key: ckks.SwitchingKey) -> None:
        self._pending[label] = self._put(np.stack([key.b, key.a])) + f"/{key.galois}"

    def _put(self, data: np.ndarray) -> str:
        raw = data.tobytes()
        digest = hashlib.sha256(raw).hexdigest()
        path = self._top / "public" / f"{digest}.bin"
        if not path.exists():
            files.write(path, raw, private=False)
        return digest

    def finish(self, name: bytes) -> None:
        files.write(self._own / "keys.json", json.dumps({"name": name.hex(), **self._pending}).encode())

    def _get(self, entry: str, shape: tuple[int, ...]) -> np.ndarray:
        digest = entry.partition("/")[0]
        path = self._top / "public" / f"{digest}.bin"
        try:
            raw = path.read_bytes()
        except OSError:
            raise DataError(f"the key file {path} is missing; remove the folder and train anew") from None
        if hashlib.sha256(raw).hexdigest() != digest or len(raw) != 8 * int(np.prod(shape)):
            raise DataError(f"the key file {path} was altered; remove the folder and train anew")
        return np.frombuffer(raw, np.uint64).reshape(shape)

    def get_public(self, params: ckks.Parameters, *, secret: bool) -> tuple[ckks.PublicKey, ckks.Secret | None]:
        b, a = self._get(self._index()["public"], (2, params.top, params.degree))
        key = ckks.PublicKey(b, a)
        if not secret:
            return key, None
        try:
            return key, ckks.Secret.from_bytes(params, (self._own / "secret.bin").read_bytes())
        except (OSError, WireError, ValueError):
            raise DataError(f"the key share in {self._own} is missing or altered; train anew") from None

    def get_switching(self, params: ckks.Parameters, label: str) -> ckks.SwitchingKey:
        entry = self._index()[label]
        K = len(params.bits)
        b, a = self._get(entry, (2, params.digits, K, params.degree))
        return ckks.SwitchingKey(b, a, int(entry.partition("/")[2]))

    # ---- the encrypted state -----------------------------------------------------------------------------------------

    def steps(self, tag: bytes) -> tuple[int, ...]:
        """After which steps of a training with these very parameters a state is kept here, the last one first."""
        steps = []
        for name in ("state.bin", "before.bin"):
            try:
                kept = self._read(name)
            except DataError:
                continue
            if kept["tag"] == tag:
                steps.append(int(kept["step"]))
        return tuple(steps)

    def put_state(
        self, c: ckks.Context, tag: bytes, step: int, state: Mapping[str, list[ckks.Cipher]], extra: bytes = b""
    ) -> None:
        body = {}
        for label, cts in state.items():
            raws = [c.raw(ct) for ct in cts]
            body[label] = [[scale, raw.shape[1], [c.pack(p) for p in raw]] for raw, scale in raws]
        packed = msgpack.packb({"step": step, "tag": tag, "state": body, "extra": extra})
        last = self.steps(tag)
        if last and last[0] == step - 1 and (self._own / "state.bin").exists():
            (self._own / "state.bin").replace(self._own / "before.bin")
        files.write(self._own / "state.bin", hashlib.sha256(packed).digest() + packed)

    def forget_before(self, tag: bytes, step: int) -> None:
        """Remove the state before that step: this party will not go back behind it."""
        if self.steps(tag)[:1] == (step,):
            (self._own / "before.bin").unlink(missing_ok=True)

    def _read(self, name: str) -> dict[str, Any]:
        path = self._own / name
        try:
            raw = path.read_bytes()
            content = msgpack.unpackb(raw[32:])
        except (OSError, ValueError, TypeError, msgpack.exceptions.UnpackException):
            raise DataError(f"there is no whole checkpoint at {path}; train anew") from None
        if hashlib.sha256(raw[32:]).digest() != raw[:32] or type(content) is not dict:
            raise DataError(f"the checkpoint {path} was altered; remove it and train anew")
        return content

    def get_state(self, c: ckks.Context, tag: bytes, step: int) -> dict[str, list[ckks.Cipher]]:
        """The ciphertexts after that step, checked residue by residue."""
        for name in ("state.bin", "before.bin"):
            if name == "before.bin" and not (self._own / name).exists():
                continue
            kept = self._read(name)
            if kept["tag"] != tag:
                raise DataError(f"the checkpoint in {self._own} is of a training with other parameters")
            if int(kept["step"]) != step:
                continue
            try:
                return {
                    label: [c.cipher(np.stack([c.unpack(p, k) for p in parts]), scale) for scale, k, parts in cts]
                    for label, cts in kept["state"].items()
                }
            except (WireError, ValueError, KeyError, TypeError):
                raise DataError(f"the checkpoint in {self._own} was altered; remove it and train anew") from None
        raise DataError(f"the training in {self!r} did not come to step {step}; let it finish")

    def get_extra(self, tag: bytes, step: int) -> bytes:
        """The bytes that were stored with the state after that step; none without."""
        for name in ("state.bin", "before.bin"):
            if (self._own / name).exists() and (kept := self._read(name))["tag"] == tag and kept["step"] == step:
                return bytes(kept.get("extra", b""))
        return b""

    def losses(self, tag: bytes, before: int) -> dict[int, float]:
        """Validation errors of a training with these very parameters, of the steps before that one."""
        if not (self._own / "losses.bin").exists():
            return {}
        kept = self._read("losses.bin")
        return {int(k): float(v) for k, v in kept["losses"] if int(k) < before} if kept["tag"] == tag else {}

    def put_losses(self, tag: bytes, losses: Mapping[int, float]) -> None:
        packed = msgpack.packb({"tag": tag, "losses": [[k, v] for k, v in losses.items()]})
        files.write(self._own / "losses.bin", hashlib.sha256(packed).digest() + packed)

    # ---- openings and answered donors --------------------------------------------------------------------------------

    @property
    def openings(self) -> int:
        """How many results were opened with these keys."""
        return self._answers().openings

    def spend(self, openings: int, most: int) -> int:
        """Count openings before they happen, or raise `ParameterError`; returns the new count."""
        with self._counting():
            before = self._answers()
            total = check_openings(before.openings, openings, most)
            self._write_answers(replace(before, openings=total))
        return total

    def begin_run(self) -> None:
        """Count one more run that uses the key share; `RUNS` bounds how often refreshes are repeated under one key."""
        with self._counting():
            before = self._answers()
            if before.runs >= RUNS:
                raise ParameterError(f"{RUNS} runs have used the key share in {self._own}; train anew")
            self._write_answers(replace(before, runs=before.runs + 1))

    def account(self, who: tuple[str, ...], markers: int, *, unbounded: bool = False) -> Account:
        """The donors of one querier, which is known by these entries (`query_ledger.entries_of`)."""
        return Account(self, who, markers, unbounded)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with files.locked(self._own / "answers.json", wait=WAIT):
            yield

    def _answers(self) -> Answers:
        path, old = self._own / "answers.json", self._own / "openings"  # `old`: a number, as earlier versions wrote it
        try:
            if path.exists():
                return Answers.from_json(path.read_text(encoding="utf-8"))
            return Answers(int(old.read_text())) if old.exists() else Answers()
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{path} is damaged, so nobody knows how much was opened; train anew") from None

    def _write_answers(self, answers: Answers) -> None:
        files.write(self._own / "answers.json", answers.to_json())


@dataclass(frozen=True)
class Account:
    """What one querier may have answered under the model of a store, over all runs and studies.

    Logits are linear in a donor's marker means: each answered donor is one linear equation for every class, and as many
    linearly independent donors as markers determine the model. A holder sees no query, so it counts donors, which
    bounds the rank from above.
    """

    store: KeyStore
    who: tuple[str, ...]
    markers: int
    unbounded: bool  # the querier has the model, or this site's own settings allow answers that determine it

    def check(self, donors: int) -> None:
        """Raise `RefusedError` unless this many more donors may be answered."""
        self._total(self.store._answers(), donors)

    def charge(self, donors: int) -> None:
        """Count donors before their answers leave, or raise `RefusedError`."""
        with self.store._counting():
            before = self.store._answers()
            total = self._total(before, donors)
            self.store._write_answers(replace(before, donors={**before.donors, **dict.fromkeys(self.who, total)}))

    def _total(self, before: Answers, donors: int) -> int:
        used, most = total_of(before.donors, self.who), donor_budget(self.markers)
        if used + donors > most and not self.unbounded:
            raise RefusedError(
                f"{used} donors of the querying site were answered under this model, {donors} more (max_donors) would"
                f" exceed {most}: {self.markers} donors determine a model of {self.markers} markers; ask about fewer,"
                f' or add "{CONSENT}" to [approve] consent in local/site.toml, which allows {CONSENTS[CONSENT]}'
            )
        return used + donors
