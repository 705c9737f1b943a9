"""Estimate the security of every lattice ring in use, by a stated method, and compare with the public tables.

    python scripts/lattice_security.py            prints the table of docs/security/parameters.md
    python scripts/lattice_security.py 32768 868  estimates one ring: its degree N and log2 of its modulus

The modulus of a ring counts all primes, those of switching keys included. Secrets are uniform ternary, errors have
standard deviation 3.2. Where several parties hold one ternary share each, an attacker may know all shares but one: the
estimate is for that one.

Method. b = BKZ block size, d = lattice dimension, q = modulus, s = 3.2, x = s / sqrt(2/3), the factor that makes secret
and error equally long. All logarithms are to base 2.

    delta(b)  = ((pi b)^(1/b) b / (2 pi e))^(1 / (2 (b - 1)))          root Hermite factor [Chen13]
    bkz(b, d) = 0.292 b + 16.4 + log(8 d)                              classical sieving [BDGL16], 8 d calls [ACC18]

    primal    smallest b with sqrt(b) s <= delta^(2 b - d - 1) (q^m x^n)^(1/d), d = n + m + 1, over all m
              [ADPS16] with the rescaled secret of [BG14]; cost bkz(b, d)
    dual      vectors of length l = delta^d (q / x)^((n - z) / d), d = n - z + m, of the scaled dual lattice; each has
              advantage e = exp(-2 pi^2 (l s / q)^2). 2^(0.2075 b) come with one reduction; 2 ln(3^z + 2) / e^2 are
              needed; all 3^z values of z guessed secret entries are tried by one Fourier transform
              [Albrecht17, EJK20]; cost bkz times the reductions needed, plus z 3^z, over all m, b and z
    hybrid    z entries by meeting in the middle, 3^(z/2), the rest by Babai's nearest plane on a BKZ-b reduced basis
              of n - z entries; success is the product of erf(r_i / (2 sqrt(2) s)) over the Gram-Schmidt lengths r_i
              [HG07]; every collision counts as found; cost (bkz + 3^(z/2) d) / success, over all m, b and z

Each choice favours the attacker: as many samples m as it likes, no factor sqrt(4/3) on sieved vectors, no modulus
switching in the guesses, certain collisions. `core-SVP` is 0.292 b of the primal attack, for comparison only.

The public lattice estimator (https://github.com/malb/lattice-estimator) needs Sage. Sage is not on PyPI and not part of
this project's environment, so the estimator is not run here.

References
----------
[ACC18] Homomorphic Encryption Standard, homomorphicencryption.org, 2018, table 1.  [BCC24] IACR ePrint 2024/463.
[ADPS16] New Hope.  [BG14] Bai, Galbraith.  [BDGL16] Becker et al.  [Chen13] Chen, thesis.  [Albrecht17] Eurocrypt 2017.
[EJK20] Espitau, Joux, Kharchenko, IACR ePrint 2020/515.  [HG07] Howgrave-Graham, Crypto 2007.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cloister.mpc.crypto.rns.ring import SECURE_BITS, SIGMA

LEAST = 128.0
STANDARD_2018 = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}  # [ACC18], classical, ternary
X = SIGMA / math.sqrt(2 / 3)
LOG3 = math.log2(3)


def log_delta(b: float) -> float:
    return (math.log2(math.pi * b) / b + math.log2(b / (2 * math.pi * math.e))) / (2 * (b - 1))


def bkz(b: float, d: float) -> float:
    return 0.292 * b + 16.4 + math.log2(8 * d)


def plus(*logs: float) -> float:
    """log2 of a sum of numbers given by their logarithms."""
    most = max(logs)
    return most + math.log2(sum(2.0 ** (x - most) for x in logs))


def samples(n: int) -> np.ndarray:
    """Numbers of samples m that are tried: RLWE gives as many as one likes."""
    return np.unique(np.linspace(n // 16, 3 * n, 400).astype(int))


# ---- the attacks -----------------------------------------------------------------------------------------------------


def primal_block(n: int, logq: float) -> tuple[int, int]:
    """The smallest block size that finds the secret, and the dimension at which it does."""
    m = samples(n)
    d = n + m + 1

    def works(b: int) -> int:
        right = (2 * b - d - 1) * log_delta(b) + (m * logq + n * math.log2(X)) / d
        best = int(right.argmax())
        return int(d[best]) if right[best] >= math.log2(SIGMA) + math.log2(b) / 2 else 0

    low, high = 50, 4 * n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high, works(high)


def blocks(n: int, logq: float) -> np.ndarray:
    """Block sizes near the one of the primal attack, where the others have their optimum."""
    b, _ = primal_block(n, logq)
    return np.unique(np.linspace(max(60, int(0.75 * b)), int(1.1 * b), 60).astype(int))


def guesses(most: float, step: int) -> range:
    """Numbers of secret entries that are guessed: beyond, guessing alone costs more than `most` bits."""
    return range(0, int(most / LOG3) + step, step)


def dual(n: int, logq: float) -> float:
    best = math.inf
    for z in guesses(160, 4):
        m, k = samples(n), n - z
        d, guess = k + m, z * LOG3 + math.log2(max(z, 1))
        needed = math.log2(2 * (z * math.log(3) + math.log(2)))  # times exp(4 pi² (l s / q)²)
        for b in blocks(n, logq):
            length = float((d * log_delta(b) + k / d * (logq - math.log2(X))).min())
            at = int((d * log_delta(b) + k / d * (logq - math.log2(X))).argmin())
            vectors = needed + 4 * math.pi**2 * 4.0 ** min(length + math.log2(SIGMA) - logq, 9) * math.log2(math.e)
            reductions = max(0.0, vectors - 0.2075 * b)
            best = min(best, plus(bkz(b, int(d[at])) + reductions, guess, vectors))
    return best


def hybrid(n: int, logq: float) -> float:
    best = math.inf
    for z in guesses(320, 8):
        k = n - z
        for b in blocks(n, logq):
            delta = log_delta(b)
            m = max(1, round(math.sqrt(k * logq / delta)) - k)  # maximises the last Gram-Schmidt length
            d = k + m + 1
            if (bound := plus(bkz(b, d), z * LOG3 / 2 + math.log2(d))) >= best:
                continue
            at = np.linspace(0, d - 1, min(d, 4096))
            r = (d - 1 - 2 * at) * delta + (m * logq + k * math.log2(X)) / d
            success = np.log2(np.maximum(erf(2.0 ** np.minimum(r - math.log2(SIGMA) - 1.5, 40)), 1e-300))
            best = min(best, bound - float(success.mean()) * d)
    return best


def erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(v) for v in x])


@dataclass(frozen=True)
class Estimate:
    block: int
    core: float
    primal: float
    dual: float
    hybrid: float

    @property
    def least(self) -> float:
        return min(self.primal, self.dual, self.hybrid)


@functools.lru_cache(maxsize=64)
def estimate(n: int, logq: float) -> Estimate:
    b, d = primal_block(n, logq)
    return Estimate(b, 0.292 * b, bkz(b, d), dual(n, logq), hybrid(n, logq))


# ---- the rings in use ------------------------------------------------------------------------------------------------


def rings() -> Iterator[tuple[str, int, int]]:
    """What it is for, N, log2 of the modulus with all special primes."""
    from cloister.models import cellcnn
    from cloister.mpc.crypto.owner_ckks import ring as owner
    from cloister.papers import published_training
    from cloister.papers.hamming import hamming_he
    from cloister.workflows.predict_cellcnn import private_prediction
    from cloister.workflows.train_cellcnn import encrypted_validation
    from cloister.workflows.train_cellcnn.cellcnn_circuit import VALUE_BITS
    from cloister.workflows.train_cellcnn.level_schedule import chain

    config = cellcnn.Config(markers=38, filters=8, classes=2, batch=66, steps=20)
    for scale in (84, 88, 92, 96, 100, 104):
        made = {sum(chain(16384, scale_bits=scale, value_bits=VALUE_BITS, parties=n).bits) for n in range(2, 65)}
        yield f"encrypted training and prediction, scale 2^{scale}", 32768, max(made)
    checked = {sum(encrypted_validation.ring_for(config, n).bits) for n in (2, 3, 5)}
    yield "encrypted training with validation", 32768, max(checked)
    printed = published_training.choose_ring(16)
    yield "training as published", printed.degree, sum(printed.bits)
    yield "prediction with an opened model", private_prediction.RING.degree, sum(private_prediction.RING.bits)
    for name, ring in (("small", owner.SMALL), ("standard", owner.STANDARD), ("quadratic", owner.QUADRATIC)):
        yield f"encrypted inference, {name} ring", ring.degree, ring.count * ring.bits
    for bits in (256, 1024, 4096):
        scheme = hamming_he.he.Scheme(hamming_he.ring_of(bits).bits, bits.bit_length())
        yield f"Hamming distances by BFV, {bits} bits", scheme.degree, sum(scheme.primes)


def table() -> str:
    """Markdown: every ring in use, then the largest modulus that `check_secure` admits for each degree."""
    head = "| ring | N | log Q | admitted | standard 2018 | primal b | core-SVP | primal | dual | hybrid |"
    rows = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    every = [*rings(), *(("largest that is admitted", n, most) for n, most in SECURE_BITS.items())]
    for name, n, logq in every:
        e = estimate(n, float(logq))
        rows.append(
            f"| {name} | {n} | {logq} | {SECURE_BITS[n]} | {STANDARD_2018[n]} | {e.block} | {e.core:.0f} |"
            f" {e.primal:.1f} | {e.dual:.1f} | {e.hybrid:.1f} |"
        )
    return "\n".join(rows)


def main(arguments: list[str]) -> None:
    if arguments:
        n, logq = int(arguments[0]), float(arguments[1])
        print(estimate(n, logq))
    else:
        print(table())


if __name__ == "__main__":
    main(sys.argv[1:])
