"""How many samples each owner has had answered by a provider, over all runs. A local step of `encrypted_inference`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister import files
from cloister.errors import DataError, ProtocolAbort
from cloister.study import Party

PROTOCOL = "encrypted_inference"
BEGUN = "paid, nothing told"  # in the file; no party has such a name
WAIT = 60.0  # seconds, for another run that counts at the same moment


def entries_of(keys: Mapping[Party, bytes], party: Party) -> tuple[str, ...]:
    """The entries under which a party is counted: its identity key, where the study lists one, and its name.

    The larger count applies. Neither a new name nor a new key alone starts a new count.
    """
    return (f"key:{keys[party].hex()}", party) if party in keys else (party,)


def total_of(used: Mapping[str, int], who: tuple[str, ...]) -> int:
    """What was counted for a party so far."""
    return max(used.get(entry, 0) for entry in who)


@dataclass
class Ledger:
    """How many samples each owner has had answered; stored in a file if there is a path, which runs share."""

    path: Path | None = None
    used: dict[str, int] = field(default_factory=dict)  # by identity key and by party name
    begun: dict[str, Any] = field(default_factory=dict)  # owner → (receipt, samples) of a query that was only paid for
    keys: Mapping[Party, bytes] = field(default_factory=dict)  # Ed25519 public keys of the study's parties

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            kept = json.loads(self.path.read_text())
            self.begun = {str(k): (str(what), int(n)) for k, (what, n) in kept.pop(BEGUN, {}).items()}
            self.used = {str(k): int(v) for k, v in kept.items()}
        except Exception:  # every way in which a file can be wrong
            raise DataError(
                f"{self.path} is not a ledger of queries; repair it: without it all budgets start from zero"
            ) from None

    def admit(self, owner: Party, samples: int, budget: int) -> None:
        """Count a query before it is answered, or refuse it."""
        with self.paid(owner, samples, budget, ""):
            pass

    @contextmanager
    def paid(self, owner: Party, samples: int, budget: int, receipt: str) -> Iterator[None]:
        """Count a query, or refuse it; the block puts down that it is answered from here on.

        If the block fails, the query that has this receipt, of as many samples, is not counted again, as long as that
        owner has no other. Nothing may be told in the block.
        """
        with contextlib.nullcontext() if self.path is None else files.locked(self.path, wait=WAIT):
            self._read()
            again = samples > 0 and self.begun.get(owner) == (receipt, samples)
            who = entries_of(self.keys, owner)
            total = total_of(self.used, who) + (0 if again else samples)
            if total > budget:
                asked = f"'{owner}' has requested {total} samples, its budget is {budget}"
                raise ProtocolAbort(PROTOCOL, "L1", "budget", asked)
            others = {u: one for u, one in self.begun.items() if u != owner}
            mine = {owner: (receipt, samples)} if samples and receipt else {}
            self._write(self.used | (dict.fromkeys(who, total) if samples else {}), others | mine)
            yield
            self._write(self.used, others)

    def _write(self, used: dict[str, int], begun: dict[str, Any]) -> None:
        if (used, begun) == (self.used, self.begun):
            return
        if self.path is not None:
            files.write(self.path, json.dumps(used | ({BEGUN: begun} if begun else {})))
        self.used, self.begun = used, begun
