"""Who computes together: parties, their roles, and what they agreed on before anything is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NewType

Party = NewType("Party", str)
Role = Literal["coordinator", "site", "auxiliary"]


@dataclass(frozen=True)
class Agreement:
    """What all parties of a run hold alike; a run between parties with different digests stops before data moves."""

    parties: Mapping[Party, Role]  # exactly one coordinator
    digest: bytes = b""  # of everything that was agreed on; by default, of this
    keys: Mapping[Party, bytes] = field(default_factory=dict)  # Ed25519 public keys
    colluders: int = 0  # sites that may help a malicious coordinator
    timeout: float = 60.0  # seconds of silence, or of nobody computing, after which a wait ends
    patience: float = 86_400.0  # seconds after which any wait ends, whoever is computing
    place: str = ""  # which step of several this is, in words
    places: Mapping[bytes, str] = field(default_factory=dict)  # digest of each step → its place, in words

    def __post_init__(self) -> None:
        if not self.digest:
            plain = {
                "parties": dict(self.parties),
                "keys": {p: k.hex() for p, k in self.keys.items()},
                "colluders": self.colluders,
                "timeout": float(self.timeout),
                "patience": float(self.patience),
            }
            object.__setattr__(self, "digest", hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest())

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

    def with_keys(self, keys: Mapping[Party, bytes]) -> Agreement:
        return replace(self, keys=dict(keys), digest=b"")
