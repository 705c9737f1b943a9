"""What owner and provider keep of an asking, so that one that breaks off goes on. Local steps of `encrypted_inference`.

    owner      `Taps`, one file: its key, as long as something is to be read, and the taps of the batches it has read
    provider   `Answers`, a folder for each owner: after every block the activations, under that owner's key, and the
               taps of the batch at hand, as they were sent

A tap leaves the provider once. If it was lost on the way, the very same ciphertext is sent again, so that an owner who
claims a break gets no more out of the model than it has paid for: what it opens between taps is uniform. What was paid
for, and of which nothing was told, an owner may ask for with a new key.

A provider that lies asks a yes or no about key and samples by each check. So an owner's no costs it its key, and the
samples that were sent under it and have no taps yet: they stand as read, without features, before it says no. Both put
down what a check may make of their files before it begins; then it takes a renaming, for which a full disk has room.
One run at a time has the file, and the folder.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloister import files
from cloister.arrays import F64, U32
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks.scheme import OwnerKey, Parameters
from cloister.study import Party
from cloister.workflows.adapt_model.block_messages import parts
from cloister.workflows.adapt_model.block_values import Values

FORMAT = 1
NAME = "encrypted_inference"


def packed(meta: dict[str, Any], **arrays: Any) -> bytes:
    """One `.npz` without pickles."""
    out = io.BytesIO()
    np.savez(out, meta=np.frombuffer(json.dumps({"format": FORMAT} | meta).encode(), np.uint8), **arrays)
    return out.getvalue()


def unpacked(path: Path, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Meta and arrays of such a file; raises `DataError` if it is something else."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files}
        meta = json.loads(arrays.pop("meta").tobytes())
        if meta["format"] != FORMAT:
            raise ValueError
    except Exception as e:  # every way in which a file can be wrong
        raise DataError(
            f"{path} is not a file of {what} ({type(e).__name__}); remove it and run the inference again"
        ) from None
    return meta, arrays


# ---- the owner -------------------------------------------------------------------------------------------------------


@dataclass
class Taps:
    """The owner's file of taps: for its eyes only, replaced as a whole after every batch; nothing without a path."""

    path: Path | None = None
    about: str = ""  # fingerprint of the samples, the model's card and the mode
    read: list[F64] = field(default_factory=list)  # taps of the first samples on, in parts of (m, taps, r)
    _key: OwnerKey | None = None
    _lost: list[F64] = field(default_factory=list)  # what a check that fails makes of the samples at hand

    @classmethod
    def open(cls, path: Path, about: str, params: Parameters) -> Taps:
        """What was kept of these samples; raises `DataError` if the file is of others."""
        if not path.exists():
            return cls(path, about)
        meta, arrays = unpacked(path, "taps")
        if meta.get("about") != about:
            raise DataError(
                f"{path} holds taps of other samples, of another model or of another mode; name another folder. If "
                "only the provider's model metadata changed, find out why first: lost samples would be queried again"
            )
        try:
            key = (
                OwnerKey.kept(params, arrays["secret"], arrays["b"], bytes.fromhex(meta["seed"]))
                if "secret" in arrays
                else None
            )
            taps = arrays.get("taps", np.zeros(0))
            return cls(path, about, [taps] if len(taps) else [], key)
        except (KeyError, ValueError):
            raise DataError(f"{path} is not a file of taps; remove it and run the inference again") from None

    @property
    def count(self) -> int:
        """Samples whose taps are here."""
        return sum(map(len, self.read))

    @property
    def begun(self) -> bool:
        """Whether an earlier run has asked with the key that is here."""
        return self._key is not None

    @contextmanager
    def held(self, params: Parameters) -> Iterator[None]:
        """No other run asks with this file meanwhile; what it says now counts."""
        if self.path is None:
            yield
            return
        with files.locked(self.path):
            files.clear(self._aside)
            self._aside.unlink(missing_ok=True)  # of a run that was killed; every check begins with another
            now = Taps.open(self.path, self.about, params)
            self.read, self._key = now.read, now._key
            yield

    def key(self, params: Parameters, entropy: Entropy, samples: int) -> OwnerKey:
        """The key of an asking that broke off, or a new one; on disk before it is used, if not all samples are read."""
        key = self._key or OwnerKey(params, entropy)
        if self.count < samples:
            self._save(key)
        return key

    def add(self, features: F64, key: OwnerKey | None) -> None:
        """The taps of one more batch; without a key, of the last one."""
        self.read.append(features)
        self._save(key)

    def forget(self) -> None:
        """The key: it is not used again."""
        self._save(None)

    def stake(self, lost: F64) -> None:
        """What stands for the samples at hand if a check fails from here on."""
        self._lost = [lost]
        if self.path is not None:
            files.write(self._aside, self._packed([*self.read, lost], None))

    def lose(self) -> None:
        """The key and the samples at hand, at one stroke: neither is used again."""
        self.read, self._key = self.read + self._lost, None
        if self.path is not None:
            try:
                files.move(self._aside, self.path)
            except OSError:  # somebody tidied up
                self._save(None)

    @property
    def _aside(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.lost")

    def _save(self, key: OwnerKey | None) -> None:
        self._key = key
        if self.path is not None:
            files.write(self.path, self._packed(self.read, key))
            self._aside.unlink(missing_ok=True)

    def _packed(self, read: list[F64], key: OwnerKey | None) -> bytes:
        arrays: dict[str, Any] = {"taps": np.concatenate(read)} if read else {}
        meta = {"about": self.about}
        if key is not None:
            meta["seed"] = key.seed.hex()
            arrays |= {"secret": key.secret, "b": key.b}
        return packed(meta, **arrays)


def check_start(block: int, most: int) -> None:
    """L1: the provider goes on behind a block that can be done."""
    if not 0 <= block <= most:
        raise ProtocolAbort(
            NAME, "L1", "state", f"the provider goes on after block {block}, at most {most} can be done"
        )


# ---- the provider ----------------------------------------------------------------------------------------------------


@dataclass
class Answers:
    """How far one owner's asking has come; nothing is kept without a folder."""

    folder: Path | None = None
    owner: str = ""  # which asking it is: of its owner's public key and `how`
    how: str = ""  # the model's shape and the packing
    left: int = 0  # batches that were paid for, less those that the owner has read for sure
    block: int = 0  # blocks of the first of them that are done
    taps: list[U32] = field(default_factory=list)  # of these blocks, as they were sent
    held: dict[str, Any] = field(default_factory=dict)  # file and measures of the activations
    compared: bool = False  # answers are being compared: who leaves now has been told how that ends
    new: bool = True  # nothing is kept of it yet
    _next: tuple[int, list[U32], dict[str, Any]] = (0, [], {})  # block, taps and held, if answers prove true

    @classmethod
    def of(cls, folder: Path | None, who: Party, key: bytes, how: str, batches: int) -> tuple[Answers, int]:
        """What is kept of an asking, and how many of its batches are still to be paid for."""
        how = hashlib.sha256(how.encode()).hexdigest()
        name = hashlib.sha256(key + how.encode()).hexdigest()
        if folder is None or not batches:
            return cls(None, name, how, batches), batches
        own = folder / who
        if not (own / "state.npz").exists():
            return cls(own, name, how, batches), batches
        meta, arrays = unpacked(own / "state.npz", "answers")
        if meta["owner"] != name:
            return cls(own, name, how, batches), batches - min(batches, untold(meta, how))
        if meta.get("compared"):
            what = f"the run broke off while answers of '{who}' were compared; it has to start again, with a new key"
            raise ProtocolAbort(NAME, "L1", "state", what)
        taps = [arrays[f"tap{i}"] for i in range(len(arrays))]
        found = cls(own, name, how, int(meta["left"]), int(meta["block"]), taps, meta["held"], new=False)
        if batches == found.left - 1:
            found.start(batches)  # it has read the batch that was at hand
        elif batches != found.left:
            what = f"'{who}' requests {batches} batches under a key that has {found.left} left; ask under a new one"
            raise ProtocolAbort(NAME, "L1", "state", what)
        return found, 0

    @property
    def receipt(self) -> str:
        """By which a ledger knows an asking that was paid for and could not be put down."""
        if self.folder is None:
            return ""
        return hashlib.sha256(f"{self.folder.resolve()} {self.owner}".encode()).hexdigest()

    def start(self, left: int) -> None:
        """A new batch is at hand: what came before it has been read."""
        self.left, self.block, self.taps, self.held, self.compared = left, 0, [], {}, False
        self._save()
        self._tidy()
        self.new = False

    def compare(self) -> None:
        """From here on, until a block or a batch is done, this key cannot be taken up again."""
        self.compared = True
        self._save()

    def prepare(self, block: int, x: Values | None, ev: Any, taps: list[U32]) -> None:
        """One more block is computed, and the tap behind it; None for activations of the last block."""
        held = {} if x is None or self.folder is None else self._hold(self.folder, block, x, ev)
        self._next = block, self.taps + taps, held
        if self.folder is not None:
            files.write(self.folder / "next.npz", self._packed(*self._next, compared=False))

    def add(self) -> None:
        """That block is done: its answers were true, and the tap is about to be sent."""
        (self.block, self.taps, self.held), self.compared = self._next, False
        if self.folder is not None:
            files.move(self.folder / "next.npz", self.folder / "state.npz")
            self._tidy()

    def _hold(self, folder: Path, block: int, x: Values, ev: Any) -> dict[str, Any]:
        """Write the activations, a message's worth at a time."""
        name = f"block-{self.left}-{block}.npy"
        with files.replacing(folder / name) as part:
            kept: Any = None
            for some in parts(x.n):
                words = ev.host(x.get(range(some.start, some.stop), x.k))
                if kept is None:
                    kept = np.lib.format.open_memmap(part, "w+", words.dtype, (x.n, *words.shape[1:]))
                kept[some] = words
            kept.flush()
        return {"file": name, "n": x.n, "p": x.p, "scale": x.scale, "k": x.k, "group": x.group}

    def values(self, ev: Any, pool: Any, degree: int) -> Values:
        """The activations after the last block that is done."""
        if self.folder is None or not self.held:
            raise DataError("there are no activations to go on from")
        h, path = self.held, self.folder / str(self.held["file"])
        try:
            kept = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            raise DataError(f"{path} is missing or damaged; remove its folder, and let the site ask anew") from None
        shelf = pool.shelf(h["n"], h["p"], h["k"], degree, rarely=True)
        for some in parts(h["n"]):
            shelf.put(some.start, ev.put(np.array(kept[some])))
        return Values(h["n"], h["p"], h["scale"], shelf.read, h["k"], h["group"], shelf=shelf)

    def _save(self) -> None:
        if self.folder is not None:
            now = self._packed(self.block, self.taps, self.held, compared=self.compared)
            files.write(files.private_folder(self.folder) / "state.npz", now)

    def _packed(self, block: int, taps: list[U32], held: dict[str, Any], *, compared: bool) -> bytes:
        meta = {"owner": self.owner, "how": self.how, "left": self.left}
        meta |= {"block": block, "held": held, "compared": compared}
        return packed(meta, **{f"tap{i}": words for i, words in enumerate(taps)})

    def _tidy(self) -> None:
        """Remove activations that nothing goes on from."""
        if self.folder is not None:
            for path in self.folder.glob("block-*.npy"):
                if path.name != self.held.get("file"):
                    path.unlink()


def untold(meta: dict[str, Any], how: str) -> int:
    """Batches that were paid for under another key, of which the owner was told nothing."""
    told = bool(meta["block"] or meta.get("compared"))
    return max(0, int(meta["left"]) - told) if meta.get("how") == how else 0
