"""How many samples each owner has had answered by a provider, over all runs. A local step of `encrypted_inference`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from cloister import files
from cloister.errors import DataError, ProtocolAbort
from cloister.study import Party

PROTOCOL = "encrypted_inference"


@dataclass
class Ledger:
    """How many samples each owner has had answered; kept in a file if there is a path."""

    path: Path | None = None
    used: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            try:
                self.used = {str(k): int(v) for k, v in json.loads(self.path.read_text()).items()}
            except Exception:  # every way in which a file can be wrong
                raise DataError(f"{self.path} is no ledger of queries; remove it, or name another") from None

    def admit(self, owner: Party, samples: int, budget: int) -> None:
        """Count a query before it is answered, or refuse it."""
        total = self.used.get(owner, 0) + samples
        if total > budget:
            raise ProtocolAbort(
                PROTOCOL, "L1", "budget", f"'{owner}' has asked for {total} samples, its budget is {budget}"
            )
        self.used[owner] = total
        if self.path is not None:
            files.write(self.path, json.dumps(self.used))
