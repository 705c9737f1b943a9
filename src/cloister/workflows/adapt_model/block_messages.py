"""How the openings of a plan are cut into messages, and what these hold. Local steps of `encrypted_inference`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloister.arrays import U8, U32
from cloister.errors import CloisterError, ProtocolAbort
from cloister.mpc.crypto.owner_ckks.scheme import KEEP, Opening, Parameters, unpack_words
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "encrypted_inference"
CHUNK = 32  # values of one message
NO_MORE = -1  # in place of a block: the provider does not take up this key again
CONTROLS = 4  # sums that follow the values of an opening (`tied_answers`): an even number, as they travel in pairs


@message("L1", protocol=NAME)
class Key:  # u → P
    b: U32  # (K, tight)
    seed: bytes
    switching: U32  # (keys, K, K, tight)
    switching_seed: bytes
    batches: int
    tokens: int  # P


@message("L1", protocol=NAME)
class Start:  # P → u
    block: int  # or NO_MORE


@message("L2", protocol=NAME)
class Inputs:  # u → P
    c0: U32  # (n, K, tight)
    seed: bytes


@message("L3", protocol=NAME)
class Blinded:  # P → u
    c: U32  # (⌈n/2⌉, 2, KEEP, tight)


@message("L4", protocol=NAME)
class Fresh:  # u → P
    c0: U32  # (2⌈n/2⌉, k', tight)
    seed: bytes


@message("T1", protocol=NAME)
class Check:  # P → u
    c: U32  # (CONTROLS, 2, SENT, tight)
    seal: bytes


@message("T2", protocol=NAME)
class Sealed:  # u → P
    seal: bytes


@message("T3", protocol=NAME)
class Shifts:  # P → u
    salt: bytes
    h: U8  # (CONTROLS, N)


@message("T4", protocol=NAME)
class Found:  # u → P
    salts: U8  # (CONTROLS N, SALT) or, if it found something else, (0, SALT)
    others: U8  # (CONTROLS N, LEAF) or none


@message("L5", protocol=NAME)
class Features:  # P → u
    c: U32  # (r, 2, k, tight)


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


def traffic(openings: Sequence[Opening], controls: int = CONTROLS) -> tuple[int, int, int]:
    """Messages each way; polynomials at one prime, down and up."""
    every = [(how, pairs(part)) for how in openings for part in chunks(how)]
    every += [(how, controls // 2) for how in openings if controls]
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
