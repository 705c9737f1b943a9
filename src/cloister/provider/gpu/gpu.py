"""Encrypted inference on a graphics card: `scheme.Evaluator` and `scheme.OwnerKey` once more, on tensors.

The same ciphertexts, byte for byte, wherever nothing is drawn at random; what is drawn from a public seed is the same,
too. Masks and noise come from other streams than on a CPU (`gpu_ring`): they never leave the side that draws them. So
a provider with a card and an owner without one understand each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from cloister.arrays import F64, I64, U32, U64
from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.owner_ckks.ring import KEEP, Opening, Parameters, modulus, primes_of
from cloister.mpc.crypto.owner_ckks.rotations import Turns, decode, order
from cloister.mpc.crypto.owner_ckks.smallness_check import SENT, joined
from cloister.provider.gpu import cuda_device
from cloister.provider.gpu.cuda_device import Tensor, wide
from cloister.provider.gpu.gpu_ring import ring_on_card
from cloister.provider.gpu.gpu_store import CardPool

TENSORS = {(p, q) for p in (2, 3) for q in (2, 3, 4, 5)} | {(3, 1), (4, 2), (4, 3), (4, 4), (5, 2), (5, 3)}


def expand(params: Parameters, c0: Tensor, seed: bytes) -> Tensor:
    """The ciphertexts (n, 2, k, N) whose c_0 came with a seed."""
    n, k, degree = c0.shape
    out = cuda_device.empty(n, 2, k, degree)
    out[:, 0] = c0
    return ring_on_card(params).uniform(seed, n, k, out)


# ---- the provider ----------------------------------------------------------------------------------------------------


@final
class Evaluator:
    """Arithmetic on ciphertexts of one owner, tensors (n, p, k, N). Results are new unless said otherwise."""

    at_once = 1024  # a card is idle with fewer

    def __init__(self, params: Parameters, b: U32, seed: bytes) -> None:
        self.params, self.ring = params, ring_on_card(params)
        self._kernels, self._known = self.ring.kernels, self.ring.known
        self._b = cuda_device.upload(self.ring.factors(b))
        self._a = cuda_device.upload(self.ring.factors(cuda_device.host(self.ring.uniform(seed, 1, params.count))[0]))

        self._switching: Tensor | None = None

    def accept(self, c0: U32, seed: bytes) -> None:
        """The owner's switching keys, c_0 of each (m, K, K, N)."""
        m, K, _, degree = c0.shape
        made = expand(self.params, cuda_device.put(c0.reshape(m * K, K, degree)), seed)
        self._switching = made.view(m, K, 2, K, degree)

    # arrays

    def pool(self) -> CardPool:
        return CardPool(ring=self.ring)

    def put(self, words: U32) -> Tensor:
        """From the wire; raises unless they are residues."""
        return self.ring.loose(cuda_device.put(words))

    def host(self, x: Tensor) -> U32:
        """For the wire."""
        return cuda_device.host(self.ring.tight(x))

    def expand(self, c0: Tensor, seed: bytes) -> Tensor:
        return expand(self.params, c0, seed)

    def zeros(self, n: int, p: int, k: int) -> Tensor:
        return cuda_device.empty(n, p, k, self.params.degree).zero_()

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def cut(self, x: Tensor, k: int) -> Tensor:
        return x[..., :k, :].contiguous()

    # sums and products

    def weights(self, w: I64) -> Tensor:
        """A matrix on the card, ready for `linear`."""
        if np.abs(w).sum(axis=1).max(initial=0) * float(self.ring.primes[0]) >= 2.0**53:
            raise ParameterError("a linear layer's weights are too large to be exact")
        return torch.from_numpy(w.astype(np.float64)).to(cuda_device.DEVICE)

    def linear(self, w: Any, x: Tensor) -> Tensor:
        """Integer matrix (o, i) times ciphertexts (i, p, k, N)."""
        w = self.weights(w) if isinstance(w, np.ndarray) else w
        if w.shape[1] != len(x):
            raise ParameterError(f"a linear layer of {w.shape[1]} inputs does not fit {len(x)} ciphertexts")
        n, p, k, degree = x.shape
        columns = torch.empty((n, p * k * degree), dtype=torch.float64, device=cuda_device.DEVICE)
        self._kernels.each("to_double", columns.numel() // 4, columns, x, wide(columns.numel()))
        sums = torch.mm(w, columns)
        del columns
        out = cuda_device.empty(len(w), p, k, degree)
        self._kernels.each("from_double", sums.numel() // 4, out, sums, self._known, k, wide(sums.numel()))
        return out

    def total(self, x: Tensor) -> Tensor:
        """Σ x, one ciphertext."""
        n, p, k, degree = x.shape
        out = cuda_device.empty(1, p, k, degree)
        self._kernels.each("total", out.numel(), out, x, self._known, n, k, wide(out.numel()))
        return out

    def centre(self, x: Tensor) -> Tensor:
        """n·x_i - Σ x for n ciphertexts: n times what lies above their mean."""
        n, k = len(x), x.shape[2]
        total, out, factor = self.total(x), cuda_device.empty(*x.shape), self.ring.multipliers([n], k)
        one, count = wide(total.numel()), wide(out.numel())
        self._kernels.each("centre", out.numel(), out, x, total, factor, self._known, k, one, count)
        return out

    def rows(self, x: Tensor, y: Tensor, at: I64) -> Tensor:
        """Σ_f x[r, f] ⊗ y[at[m, f]] for x (r, f, 2, k, N) and y (n, 2, k, N): (r, m, 3, k, N)."""
        rows, terms, _, k, degree = x.shape
        many, tile = len(at), 4
        if at.shape[1] != terms or at.min() < 0 or at.max() >= len(y):
            raise ParameterError("sums of products ask for ciphertexts that there are not")
        index = at.astype(np.int32)
        places = self.ring.kept(("places", index.shape, index.tobytes()), lambda: index)
        out = cuda_device.empty(rows, many, 3, k, degree)
        tiles = -(-rows // tile) * -(-many // tile)
        grid = (tiles * (degree // 128), k)
        self._kernels.blocks("tensor_rows", grid, 128, out, x, y, places, self._known, rows, many, terms, k)
        return out

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Σ x_f ⊗ y_f, a ciphertext of three polynomials (3, k, N)."""
        terms, _, k, degree = x.shape
        out = cuda_device.empty(3, k, degree)
        self._kernels.each("dot", k * degree, out, x.contiguous(), y.contiguous(), self._known, terms, k)
        return out

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """x_i ⊗ y_i for every i."""
        n, px, k, degree = x.shape
        py = y.shape[1]
        if (px, py) not in TENSORS or y.shape != (n, py, k, degree):
            raise ParameterError(f"there is no product of {tuple(x.shape)} and {tuple(y.shape)} on a GPU")
        out, count = cuda_device.empty(n, px + py - 1, k, degree), n * k * degree
        self._kernels.each(f"tensor_{px}_{py}", count, out, x, y, self._known, k, wide(count))
        return out

    def combine(self, parts: list[tuple[int | list[int], Tensor]], constants: npt.ArrayLike | None = None) -> Tensor:
        """Σ factor·x, for arrays of any p and one factor or one per ciphertext, plus an integer in every slot."""
        n, p, k = len(parts[0][1]), max(x.shape[1] for _, x in parts), min(x.shape[2] for _, x in parts)
        out = cuda_device.empty(n, p, k, self.params.degree)
        count = out.numel()
        for number, (factor, x) in enumerate(parts):
            fixed = None if constants is None or number else np.atleast_1d(np.asarray(constants, np.float64))
            factors = factor if isinstance(factor, list) else [factor]
            self._kernels.each(
                "add_multiple", count, out, x.contiguous(), self.ring.multipliers(factors, k), int(len(factors) > 1),
                None if fixed is None else self.ring.constants(fixed, k), int(fixed is not None and len(fixed) > 1),
                self._known, p, x.shape[1], k, x.shape[2], int(number == 0), wide(count),
            )  # fmt: skip
        return out

    def add_constants(self, x: Tensor, constants: npt.ArrayLike) -> Tensor:
        """Add integers to every slot, in place."""
        n, p, k, degree = x.shape
        values = np.broadcast_to(np.asarray(constants, np.float64), (n,))
        count = n * k * degree
        self._kernels.each("add_constants", count, x, self.ring.constants(values, k), self._known, p, k, wide(count))
        return x

    # refreshes

    def covered(self, cts: Tensor, small: Tensor, extra: Tensor | None = None) -> Tensor:
        """C + Enc(0) + extra: `small` (n, 2p - 1, N) holds errors, then ternary ones; extra (n, k, N)."""
        _, p, k, _ = cts.shape
        noise, out = self.ring.forward_small(small, k, extra), cuda_device.empty(*cts.shape)
        count = wide(out.numel())
        self._kernels.each("rerandomise", out.numel(), out, cts, noise, self._b, self._a, self._known, p, k, count)
        return out

    def switched(self, cts: Tensor, by: Sequence[int] | I64 = ()) -> Tensor:
        """The same messages in two polynomials; `by` names the keys of the others, s², s³, … if it does not.

        An array (n, p - 2) names them for every ciphertext.
        """
        n, p = cts.shape[:2]
        if p == 2:
            return cts
        named = np.asarray(by if len(by) else range(p - 2), np.int32)
        each = named.ndim == 2
        if self._switching is None or len(self._switching) <= named.max() or named.shape != (*[n] * each, p - 2):
            raise ParameterError(f"there are no switching keys for ciphertexts of {p} polynomials")
        return self.ring.switched(cts, self._switching, named)

    def turned(self, cts: Tensor, tokens: int, r: int) -> Tensor:
        """Ciphertexts (…, N) whose slots hold what stood r tokens further, under the turned key (`turns`)."""
        return torch.index_select(cts, -1, turned_order(self.params.degree, tokens, r))

    def plain(self, x: F64, scale: float, k: int) -> Tensor:
        """Slots (n, N/2) that are no secret, as ciphertexts of one polynomial (n, 1, k, N)."""
        values = torch.as_tensor(x, dtype=torch.float64, device=cuda_device.DEVICE)
        m = encoded(values, self.params.degree, scale)
        return self.ring.forward(torch.stack([torch.remainder(m, q) for q in self.ring.primes[:k]], dim=1).int())[
            :, None
        ]

    def dropped(self, cts: Tensor, keep: int) -> Tensor:
        """⌊c / D⌉ of ciphertexts (n, 2, k, N) at the first `keep` primes, D the product of the others."""
        return self.ring.dropped(cts, None, keep)

    def cover(self, cts: Tensor, entropy: Entropy) -> tuple[U32, U64]:
        """What is sent of ciphertexts (n, 2, k, N) for a comparison, and its masks (n, N), as `cover` says."""
        check_entropy(entropy)
        masks = self.ring.masks(entropy.bytes(32), len(cts), modulus(self.params, SENT))
        return self.covered_by(cts, self.ring.noise(entropy.bytes(32), len(cts), 3, 2), masks)

    def covered_by(self, cts: Tensor, small: Tensor, masks: Tensor) -> tuple[U32, U64]:
        """The same with noise (n, 3, N) and masks in words (n, words, N) that are given."""
        sent = self.ring.dropped(self.covered(cts, small), self.ring.residues(masks, SENT), SENT)
        return cuda_device.host(sent), np.stack([joined(words) for words in cuda_device.host(masks)])

    def blind(self, cts: Tensor, how: Opening, mask_key: bytes, entropy: Entropy) -> Tensor:
        """Masked pairs (⌈n/2⌉, 2, KEEP, N); the masks are drawn from the key, and again by `unblind`."""
        check_entropy(entropy)
        n = -(-len(cts) // 2)
        masks = self.ring.masks(mask_key, n, modulus(self.params, KEEP))
        return self.blinded(cts, how, self.ring.noise(entropy.bytes(32), n, 3, 2), masks)

    def blinded(self, cts: Tensor, how: Opening, small: Tensor, masks: Tensor) -> Tensor:
        """The same with noise (n, 3, N) and masks in words (n, words, N) that are given."""
        if tuple(cts.shape[1:3]) != (how.polys, how.primes):
            found = tuple(cts.shape[1:3])
            raise ParameterError(f"{how.label}: planned for {how.polys} at {how.primes} primes, found {found}")
        packed = self.covered(self.switched(self.ring.packed(cts, how.lift)), small)
        return self.ring.dropped(packed, self.ring.residues(masks, KEEP))

    def unblind(self, c0: Tensor, seed: bytes, how: Opening, masks: bytes | Tensor) -> Tensor:
        n, k, degree = c0.shape
        words = self.ring.masks(masks, n // 2, modulus(self.params, KEEP)) if isinstance(masks, bytes) else masks
        mask = self.ring.forward(self.ring.halves(words, how))
        out = self.ring.uniform(seed, n, k, cuda_device.empty(n, 2, k, degree))
        self._kernels.each("subtract_into", c0.numel(), out, c0, mask, self._known, k, wide(c0.numel()))
        return out

    def flood(self, cts: Tensor, bits: int, primes: int, entropy: Entropy) -> Tensor:
        """Ciphertexts to be read: re-randomised, and covered by noise uniform in [-2^bits, 2^bits)."""
        check_entropy(entropy)
        x = self.cut(cts, primes)
        n, p = x.shape[:2]
        noise = self.ring.residues(self.ring.masks(entropy.bytes(32), n, 2 << bits), primes, -(1 << bits))
        return self.covered(x, self.ring.noise(entropy.bytes(32), n, 2 * p - 1, p), noise)


# ---- the owner -------------------------------------------------------------------------------------------------------


@final
class OwnerKey:
    """Secret s on the card, and what of it the provider gets: b = -a·s + e, with a from a public seed."""

    __slots__ = ("_powers", "_s", "_stack", "b", "params", "seed")

    def __init__(self, params: Parameters, entropy: Entropy) -> None:
        check_entropy(entropy)
        ring = ring_on_card(params)
        drawn = ring.forward_small(ring.noise(entropy.bytes(32), 1, 2, 1), params.count)
        self._hold(params, entropy.bytes(32), drawn[0, 1])
        b = drawn[:, 0].contiguous()
        self.b = cuda_device.host(self._less_product(b, self.seed))[0]

    @classmethod
    def of(cls, params: Parameters, s: U32, b: U32, seed: bytes) -> OwnerKey:
        """A key that there is already, s in NTT form (K, N)."""
        made = cls.__new__(cls)
        made._hold(params, seed, cuda_device.put(s))
        made.b = b
        return made

    def _hold(self, params: Parameters, seed: bytes, s: Tensor) -> None:
        self.params, self.seed, self._s = params, seed, s.long()
        self._powers, self._stack = [s.long()], {1: _factors(params, s.long()[None])}

    def __repr__(self) -> str:
        return "OwnerKey(...)"

    def _power(self, most: int) -> Tensor:
        """s, s², …, s^most as factors (most, K, N, 2)."""
        if most not in self._stack:
            q = torch.tensor(primes_of(self.params), device=cuda_device.DEVICE)[:, None]
            while len(self._powers) < most:
                self._powers.append(self._powers[-1] * self._s % q)
            self._stack[most] = _factors(self.params, torch.stack(self._powers[:most]))
        return self._stack[most]

    def _less_product(self, m: Tensor, seed: bytes) -> Tensor:
        """Subtract a·s in place from (n, k, N) in NTT form, with the uniform halves a of a seed."""
        ring, (n, k, _) = ring_on_card(self.params), m.shape
        a = ring.uniform(seed, n, k)
        ring.kernels.each("subtract_known", m.numel(), m, a, self._power(1), ring.known, k, wide(m.numel()))
        return m

    def switching(self, polys: int, seed: bytes, entropy: Entropy, tokens: int = 1) -> U32:
        """c_0 of switching keys for ciphertexts of up to so many polynomials, and for turns of tokens, (m, K, K, N)."""
        check_entropy(entropy)
        many = polys - 2 + Turns(tokens).count
        errors = ring_on_card(self.params).noise(entropy.bytes(32), many * self.params.count, 1, 1)
        return self.switching_with(errors, seed, tokens)

    def switching_with(self, errors: Tensor, seed: bytes, tokens: int = 1) -> U32:
        """The same with errors (m·K, 1, N) that are given."""
        K, ring = self.params.count, ring_on_card(self.params)
        many = len(errors) // K
        c0 = self._less_product(ring.forward_small(errors, K)[:, 0].contiguous(), seed).view(many, K, K, -1)
        plain = many - Turns(tokens).count
        self._power(plain + 1)
        for m, key in enumerate(self._powers[1 : plain + 1] + self._turned(tokens)):
            for i, q in enumerate(ring.primes):
                c0[m, i, i] = ((c0[m, i, i].long() + key[i]) % q).int()
        return cuda_device.host(c0)

    def _turned(self, tokens: int) -> list[Tensor]:
        """σ_r(s) and s·σ_r(s) for every turn that has keys."""
        q, found = torch.tensor(primes_of(self.params), device=cuda_device.DEVICE)[:, None], []
        for turn in Turns(tokens).every:
            turned = torch.index_select(self._s, -1, turned_order(self.params.degree, tokens, turn))
            found += [turned, turned * self._s % q]
        return found

    def hide(self, m: Tensor, seed: bytes) -> Tensor:
        """c_0 of encryptions of coefficients m (n, k, N) that carry their error, in place."""
        return self._less_product(ring_on_card(self.params).forward(m), seed)

    def encrypt(self, x: F64 | Tensor, seed: bytes, entropy: Entropy) -> Tensor:
        """Values (n, samples) → c_0 of each, (n, K, N), at scale Δ."""
        check_entropy(entropy)
        p, ring = self.params, ring_on_card(self.params)
        values = torch.as_tensor(x, dtype=torch.float64, device=cuda_device.DEVICE)
        n = len(values)
        m = encoded(values, p.degree, p.scale)
        m += ring.noise(entropy.bytes(32), n, 1, 1)[:, 0]
        residues = torch.stack([torch.remainder(m, q) for q in ring.primes], dim=1).int()
        return self.hide(residues, seed)

    def opened(self, cts: Tensor) -> Tensor:
        """The message polynomials of ciphertexts (n, p, k, N), in coefficients (n, k, N)."""
        return ring_on_card(self.params).opened(cts, self._power(cts.shape[1] - 1))

    def refresh(self, cts: Tensor, how: Opening, seed: bytes, entropy: Entropy) -> Tensor:
        """c_0 of fresh encryptions of what is under the masks, rescaled: two for each ciphertext."""
        check_entropy(entropy)
        return self.refreshed(cts, how, seed, ring_on_card(self.params).noise(entropy.bytes(32), 2 * len(cts), 1, 1))

    def refreshed(self, cts: Tensor, how: Opening, seed: bytes, errors: Tensor) -> Tensor:
        """The same with errors (2n, 1, N) that are given."""
        ring = ring_on_card(self.params)
        return self.hide(ring.halves(ring.words(self.opened(cts)), how, errors), seed)

    def read(self, cts: Tensor, scale: float, count: int) -> F64:
        """Slots of ciphertexts that were sent to be read, (n, count)."""
        return np.stack([decode(centred(self.params, m), scale, count) for m in cuda_device.host(self.opened(cts))])


def encoded(values: Tensor, degree: int, scale: float) -> Tensor:
    """`rotations.encode` of real slots (n, up to N/2): coefficients (n, N), 64-bit integers."""
    n, count = values.shape
    slots = torch.zeros((n, degree), dtype=torch.complex128, device=cuda_device.DEVICE)
    slots[:, :count], slots[:, degree - count :] = values, values.flip(-1)
    turn = torch.arange(degree, dtype=torch.float64, device=cuda_device.DEVICE) * (-torch.pi / degree)
    return torch.round((torch.fft.fft(slots) / degree * torch.exp(1j * turn)).real * scale).long()


@functools.lru_cache(maxsize=256)
def turned_order(degree: int, tokens: int, r: int) -> Tensor:
    return torch.from_numpy(order(degree, tokens, r)).to(cuda_device.DEVICE)


def _factors(params: Parameters, w: Tensor) -> Tensor:
    """64-bit residues (m, K, N) with their quotients, as bytes of the kernels' factors."""
    q = torch.tensor(primes_of(params), device=cuda_device.DEVICE)[:, None]
    return torch.stack([w, (w << 32) // q], dim=-1).int()


def centred(params: Parameters, residues: U32) -> F64:
    """Coefficients (k, N) in (-Q/2, Q/2), rounded to float64."""
    k = len(residues)
    Q = modulus(params, k)
    whole = np.zeros(residues.shape[1], object)
    for row, q in zip(residues, primes_of(params)[:k], strict=True):
        whole = whole + row.astype(object) * (Q // q * pow(Q // q, -1, q))
    whole %= Q
    return np.array([float(x - Q if x > Q // 2 else x) for x in whole])
