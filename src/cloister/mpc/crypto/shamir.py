"""Shamir's secret sharing: any t of n shares give the secret, t - 1 give nothing at all.

    share      f(X) = s + a_1 X + ... + a_{t-1} X^{t-1}   mod p,  a_i uniform;  party x gets f(x)
    combine    s = Σ_i f(x_i) Π_{j≠i} x_j / (x_j - x_i)   mod p

over the prime p = 2^521 - 1, so that a 32-byte key, and anything up to 65 bytes, is one element. A share has 66
bytes whatever it shares. When more than t shares come together, all of them must lie on one polynomial.

References
----------
[Sha79] Shamir, How to share a secret, CACM 22(11), 1979.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy, check_entropy

PRIME = 2**521 - 1
SHARE_BYTES = 66
MAX_SECRET = 65  # bytes; below p whatever they are


def share(secret: bytes, threshold: int, points: Sequence[int], entropy: Entropy) -> dict[int, bytes]:
    """One share per point; any `threshold` of them recombine."""
    check_entropy(entropy)
    check_points(threshold, points)
    if not 0 < len(secret) <= MAX_SECRET:
        raise ParameterError(f"a secret has 1 to {MAX_SECRET} bytes, found {len(secret)}; share a key instead of data")
    coefficients = [int.from_bytes(secret, "big"), *(entropy.integer_below(PRIME) for _ in range(threshold - 1))]
    return {x: _evaluate(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in points}


def combine(shares: Mapping[int, bytes], threshold: int, length: int = 32) -> bytes:
    """The secret of `length` bytes behind `threshold` or more shares."""
    points = tuple(sorted(shares))
    check_points(threshold, points)
    if not 0 < length <= MAX_SECRET:
        raise ParameterError(f"a secret has 1 to {MAX_SECRET} bytes, requested {length}")
    ys = [_element(shares[x], x) for x in points]
    used, rest = points[:threshold], points[threshold:]
    for x, y in zip(rest, ys[threshold:], strict=True):
        if _interpolate(used, ys, x) != y:
            raise ProtocolAbort("sharing", "combine", "mismatch", "the shares do not belong to one secret")
    secret = _interpolate(used, ys, 0)
    if secret >> (8 * length):
        raise ProtocolAbort("sharing", "combine", "mismatch", f"the shares give no secret of {length} bytes")
    return secret.to_bytes(length, "big")


def check_points(threshold: int, points: Sequence[int]) -> None:
    """Raise unless there are at least `threshold` points, distinct and none of them zero, modulo p."""
    if any(type(x) is not int or not 0 < x < PRIME for x in points):
        raise ParameterError("a share stands at a whole number from 1 to 2**521 - 2; number the parties from 1")
    if len(set(points)) != len(points):
        raise ParameterError(f"{len(points)} shares stand at {len(set(points))} points; every party needs its own")
    if not 1 <= threshold <= len(points):
        raise ParameterError(f"a threshold of {threshold} cannot be met by {len(points)} shares")


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    y = 0
    for a in reversed(coefficients):  # Horner
        y = (y * x + a) % PRIME
    return y


def _interpolate(points: tuple[int, ...], ys: Sequence[int], at: int) -> int:
    return sum(w * y for w, y in zip(_weights(points, at), ys, strict=False)) % PRIME


@functools.lru_cache(maxsize=256)  # points are public, and the same for every secret of a run
def _weights(points: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange's Π_{j≠i} (x_j - at) / (x_j - x_i) for every i."""
    weights = []
    for i, x in enumerate(points):
        above = below = 1
        for j, other in enumerate(points):
            if j != i:
                above = above * (other - at) % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


def _element(data: bytes, x: int) -> int:
    if not isinstance(data, bytes) or len(data) != SHARE_BYTES or (y := int.from_bytes(data, "big")) >= PRIME:
        raise ProtocolAbort("sharing", "combine", "malformed", f"the share at {x} is no {SHARE_BYTES}-byte element")
    return y
