"""Parsers that read bytes from outside, as fuzz targets.

Each target takes arbitrary bytes. It returns if the input is accepted or rejected with the documented error, and raises
on anything else. `fuzz/run.py` drives the targets with a coverage-guided fuzzer, and `tests/test_fuzz.py` replays the
stored corpus and adds inputs from hypothesis.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloister.cells import probe
from cloister.cells.files import read_cells
from cloister.errors import CloisterError, DataError, ParameterError, ProtocolAbort, ReceiptError, WireError
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net import wire
from cloister.mpc.net.receipts import Receipt
from cloister.session import SIGNED
from cloister.study import format_study, parse_study

CORPUS = Path(__file__).parent / "corpus"
_FOLDER = Path(tempfile.mkdtemp(prefix="cloister-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


@functools.cache
def message_classes() -> dict[str, Any]:
    """Every message class of the package, by its name on the wire."""
    import cloister

    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(cloister.__path__, "cloister."):
        if not info.name.startswith(("cloister.mpc.", "cloister.workflows.", "cloister.papers.")):
            continue
        with contextlib.suppress(ImportError, CloisterError):
            module = importlib.import_module(info.name)
            for item in vars(module).values():
                spec = getattr(item, "__message__", None)
                if isinstance(item, type) and isinstance(spec, wire.Spec):
                    found[spec.name] = item
    return found


def frame(data: bytes) -> None:
    """Wire format: a frame, then its body against the schema of the message it names and of a few others."""
    try:
        parsed = wire.unpack(data)
    except WireError:
        return
    classes = message_classes()
    named = classes.get(parsed.name)
    others = [classes[name] for name in ("secure_sum.MaskedInput", "channel.Hello") if name in classes]
    for cls in dict.fromkeys([named, *others] if named else others):
        try:
            message = wire.from_fields(cls, parsed.body)
        except WireError:
            continue
        again = wire.to_fields(wire.from_fields(cls, wire.to_fields(message)))
        assert wire.canonical(again) == wire.canonical(wire.to_fields(message)), "a message changed in a round trip"


def _receipt(path: Path) -> None:
    try:
        receipt = Receipt.load(path)
        receipt.brief()
        receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
    except ReceiptError:
        return
    except ProtocolAbort:  # a signature that does not verify
        return


def receipt(data: bytes) -> None:
    """A receipt file: loading, summary, chain and signature."""
    path = _FOLDER / "fuzz.receipt.json"
    path.write_bytes(data)
    _receipt(path)


def journal(data: bytes) -> None:
    """A journal of an unfinished run."""
    path = _FOLDER / "fuzz.receipt.journal"
    path.write_bytes(data)
    _receipt(path)


def study(data: bytes) -> None:
    """study.toml: parse, and if it is accepted, write and parse again."""
    try:
        parsed = parse_study(data.decode("utf-8", errors="replace"))
    except ParameterError:
        return
    assert parse_study(format_study(parsed)).digest == parsed.digest, "a study changed in a round trip"


def npz(data: bytes) -> None:
    """A zip archive of arrays, as a file of cells."""
    path = _FOLDER / "fuzz.npz"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(DataError):
            read_cells(path)


def hdf5(data: bytes) -> None:
    """The HDF5 probe, which parses in a process of its own; what it passes is read here."""
    path = _FOLDER / "fuzz.h5ad"
    path.write_bytes(data)
    if not data:
        return
    answer = probe.verdict(path)
    assert answer in (probe.FINE, probe.DAMAGED, probe.LINKED, probe.TOO_LARGE), f"the probe answered {answer!r}"
    if answer != probe.FINE:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(DataError):
            read_cells(path, probe=False)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": frame,
    "receipt": receipt,
    "journal": journal,
    "study": study,
    "npz": npz,
    "hdf5": hdf5,
}
