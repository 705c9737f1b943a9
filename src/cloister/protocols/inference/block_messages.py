"""How the openings of a plan are cut into messages, and what these hold. Local steps of `encrypted_inference`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloister.arrays import U32
from cloister.crypto.owner_ckks.scheme import KEEP, Opening, Parameters, unpack_words
from cloister.errors import CloisterError, ProtocolAbort
from cloister.study import Party

NAME = "encrypted_inference"
CHUNK = 32  # values of one message


def parts(count: int) -> list[slice]:
    return [slice(s, min(count, s + CHUNK)) for s in range(0, count, CHUNK)]


def chunks(how: Opening) -> list[slice]:
    """The messages of one opening."""
    found = []
    for lo in range(0, how.count, how.group):
        found += [slice(lo + p.start, lo + p.stop) for p in parts(min(how.group, how.count - lo))]
    return found


def pairs(part: slice) -> int:
    """How many pairs of values travel in one message."""
    return -(-int(part.stop - part.start) // 2)


def traffic(openings: Sequence[Opening]) -> tuple[int, int, int]:
    """Messages each way; polynomials at one prime, down and up."""
    every = [(how, pairs(part)) for how in openings for part in chunks(how)]
    return len(every), sum(n * 2 * KEEP for _, n in every), sum(2 * n * how.back for how, n in every)


def powers(openings: Sequence[Opening]) -> int:
    """How many powers of an owner's key need switching keys."""
    return max(how.polys for how in openings) - 2


def key_shapes(p: Parameters, openings: Sequence[Opening]) -> dict[str, tuple[int, ...]]:
    return {"b": (p.count, p.tight), "switching": (powers(openings), p.count, p.count, p.tight)}


def together(how: Opening, most: int) -> int:
    """How many ciphertexts of an opening are made at once: whole groups, about `most`."""
    return how.group * max(1, most // how.group)


def read(params: Parameters, x: U32, line: str, who: Party) -> Any:
    try:
        return unpack_words(params, x)
    except CloisterError as e:
        raise ProtocolAbort(NAME, line, "malformed", f"from '{who}': {e}") from None


def seed_of(seed: bytes, line: str, who: Party) -> bytes:
    if len(seed) != 32:
        raise ProtocolAbort(NAME, line, "malformed", f"'{who}' sent no seed of 32 bytes")
    return seed
