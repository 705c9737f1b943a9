"""What can go wrong, and whose turn it is to act.

    CloisterError
    ├── UsageError        a flag or a name that does not exist           exit code 2
    ├── DataError         your file or your AnnData                      exit code 1
    │   └── DiskError     a file or folder that cannot be written        exit code 1
    ├── ParameterError    an option, or a key of study.toml              exit code 1
    ├── MissingExtra      an optional engine is not installed            exit code 1
    ├── RefusedError      this site's own policy says no                 exit code 4
    ├── WireError         bytes that are not a message                      exit code 4
    ├── ProtocolAbort     a check failed, here or at a peer              exit code 4
    │   └── PeerLost      a peer is silent, dead or out of reach         exit code 3
    └── ReceiptError      a receipt that was altered                     exit code 4

A message says what was expected, what was found and what to do next. It may name keys, shapes and agreed
parameters; it never carries a private value. Peers see only `(protocol, line, code)` of an abort, and at which party it
began with which code, where that is another one: so all of them can name one origin and one reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


class CloisterError(Exception):
    exit_code = 1


class UsageError(CloisterError):
    exit_code = 2


class DataError(CloisterError):
    exit_code = 1


class DiskError(DataError):
    exit_code = 1


class ParameterError(CloisterError):
    exit_code = 1


class MissingExtra(CloisterError):
    """An engine that is an extra is not installed."""

    exit_code = 1

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'cloister[{extra}]'")


class RefusedError(CloisterError):
    exit_code = 4


class WireError(CloisterError):
    exit_code = 4


class ReceiptError(CloisterError):
    exit_code = 4


class ProtocolAbort(CloisterError):
    """A run that ended before its result, with the place where it did.

    Parameters
    ----------
    protocol, line
        Where in the protocol file, by the line labels of its docstring.
    code
        One word that may travel to the peers: `timeout`, `replay`, `malformed`, `mismatch`, ...
    detail
        A sentence for the local user. It stays here.
    """

    exit_code = 4
    heard = False  # whether a peer stopped, and this party only heard of it
    origin = ""  # the party where it began, as far as is known
    began = ""  # that party's own code

    def __init__(self, protocol: str, line: str, code: str, detail: str = "") -> None:
        self.protocol, self.line, self.code = protocol, line, code
        super().__init__(f"{protocol} {line}".removesuffix(" -") + f": {detail or code}")


class PeerLost(ProtocolAbort):
    exit_code = 3


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Let an error say what it is about, a site and its file for example, unless it does already."""
    try:
        yield
    except CloisterError as e:
        if what and what not in str(e):
            e.args = (f"{what}: {e}",)  # not a new one: some kinds are made from other things than a text
        raise


def to_json(e: BaseException) -> dict[str, Any]:
    """An error as JSON holds it, for a process of the same user: the local sentence is in it."""
    kind = next((k for k in type(e).__mro__ if k.__module__ == __name__), type(e))  # the class here that it is
    place = {k: getattr(e, k) for k in ("protocol", "line", "code", "heard")} if isinstance(e, ProtocolAbort) else {}
    first = {k: v for k in ("origin", "began") if (v := getattr(e, k, ""))}
    reason = reason_of(e)
    what = {"reason": reason, "next": next_step(reason, str(first.get("origin", "")))}
    return {"type": kind.__name__, "text": str(e) or type(e).__name__, **what, **place, **first}


def from_json(told: Mapping[str, Any]) -> CloisterError:
    """The error again; one that is not of this module, a bug's, becomes a plain `CloisterError`."""
    kind = globals().get(told["type"])
    if not isinstance(kind, type) or not issubclass(kind, CloisterError):
        error = CloisterError(f"{told['type']}: {told['text']}")
    else:
        error = kind.__new__(kind)  # some kinds are made from other things than a text
        error.args = (told["text"],)
    blame(error, str(told.get("origin", "")), str(told.get("began", "")))
    for key in ("protocol", "line", "code", "heard") if isinstance(error, ProtocolAbort) else ():
        setattr(error, key, told.get(key, False if key == "heard" else ""))
    return error


def code_of(e: BaseException) -> str:
    """The one word of an error that may travel to the peers: an abort's code, or the name of a class."""
    if isinstance(e, ProtocolAbort):
        return e.code
    if isinstance(e, OSError):
        return "OSError"
    return next((k for k in type(e).__mro__ if k.__module__ == __name__), type(e)).__name__


def blame(e: BaseException, origin: str, began: str) -> None:
    """Note on an error at which party it began, and that party's own code; what is noted already stays."""
    if origin and not getattr(e, "origin", ""):
        e.origin, e.began = origin, began  # type: ignore[attr-defined]


def origin_of(e: BaseException, here: str) -> str:
    """The party where an error of `here` began."""
    return getattr(e, "origin", "") or here


def reason_of(e: BaseException) -> str:
    """Why, in the one word that all parties of a run have for it."""
    code = getattr(e, "began", "") or code_of(e)
    return REASONS.get(code, code)


REASONS = {
    "DataError": "data",
    "DiskError": "disk",
    "OSError": "disk",
    "ParameterError": "options",
    "UsageError": "options",
    "MissingExtra": "options",
    "RefusedError": "refused",
    "MemoryError": "memory",
    "KeyboardInterrupt": "stopped",
    "stale": "clock",
}
"""Classes of errors that no party caused on purpose, in one word; an abort's code is such a word already."""


CODES = {
    "damaged": "a sum came out as no data can make it; a message was damaged on its way",
    "dropped": "the coordinator went on without this party, which was silent for too long",
    "few-common-genes": "the sites have hardly a gene in common",
    "finished": "it had finished",
    "foreign-labels": "a site has no label in common with any other",
    "halted": "a party stopped the run and withdrew its approval",
    "lost": "it lost a peer",
    "malformed": "it was sent something that is not a message",
    "mismatch": "the parties came with different studies, versions or options",
    "mixed-values": "the sites hold different kinds of values, counts and logarithms for example",
    "no-common-genes": "the sites have no gene in common",
    "no-labels": "no site has a label",
    "norms-apart": "its cells are more than a thousand times nearer to the origin than those of another site",
    "one-class": "all labels are of one class",
    "order": "a party was at another step of the study than the others",
    "refused": "a party's own policy does not allow this run",
    "replay": "a message was received twice, or out of order",
    "spelling": "two sites write one label in two ways",
    "stale": "its clock and the coordinator's differ by more than ten minutes",
    "timeout": "a peer did not answer in time",
    "too-few": "too few parties were left",
    "width": "the sites' rows are of different width",
    "DataError": "its own data were not fit for this workflow",
    "ParameterError": "its own options were not fit for this workflow",
    "DiskError": "its disk could not be written, or is full",
    "OSError": "its disk could not be read or written",
    "MemoryError": "its memory did not suffice",
    "RefusedError": "its own policy does not allow this run",
    "KeyboardInterrupt": "somebody stopped it",
    "stopped": "somebody stopped it",
}


GONE = {
    "lost": "is gone",
    "timeout": "was silent for too long",
    "spelling": "writes a label in another way than others",
    "foreign-labels": "has no label in common with any other site",
    "few-common-genes": "has hardly a gene in common with the others; do all sites name genes alike?",
}
"""What others say of a party that cannot say it itself, or does not know it."""


LEFT = frozenset({"dropped", "finished", "lost", "timeout", "too-few", "stopped", "KeyboardInterrupt"})
"""Codes of a party that dropped out, or that waited for one that did. Other codes mean that it found a fault."""


NEXT = {
    "clock": "compare the clocks of {0} and of the coordinator, which differ by more than ten minutes (timedatectl)",
    "data": "outcome.json at {0} names what does not fit; correct the file or local/site.toml there",
    "disk": "free disk space at {0}, where the kit and the folder 'out' of its local/site.toml are",
    "halted": "ask {0} why it halted; nothing runs there until it approves the study again",
    "lost": "check the machine, the service and the network of {0}; there: cloister status KIT",
    "memory": "free memory at {0}, or reduce the size of the analysis",
    "mismatch": "compare study.toml (sha256sum) and the version of Cloister at {0} with those of the others",
    "options": "outcome.json at {0} names the option or the line of local/site.toml; correct it there",
    "refused": "outcome.json at {0} says why; to allow the run, that party approves it: cloister site KIT --approve",
    "stopped": "start the service at {0} again: cloister site KIT",
    "timeout": "see log.txt at {0}, which was connected and silent; there: cloister status KIT",
}
"""What to do after a run that ended by a reason at party {0}; the same sentence at every party."""


def next_step(reason: str, origin: str) -> str:
    """What to do after a run that ended for this reason at that party."""
    step = NEXT.get(reason, "compare outcome.json at all parties").format(origin or "the party that stopped")
    return f"{step}; then start a new run"


def in_words(code: str) -> str:
    """What a peer's abort code means, as far as a code can tell."""
    return f"{REASONS.get(code, code)}: {CODES[code]}" if code in CODES else code
