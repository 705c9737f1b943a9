"""Where a provider with a card puts ciphertexts between two stretches: there, or in the host's memory (`shelf`).

Of many fresh ciphertexts a shelf keeps c_0 and the public seed of c_1, which is drawn again when it is read: half of
the memory, and AES is faster than the way to the host.

What lies outside is in pinned pieces a little below 2^30 bytes: PyTorch rounds each up to a power of two. Reading
them takes ten to thirty times as long as reading what lies on the card, so activations, which attention does not need,
are put aside for it as a whole and brought back, if there is no room for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from cloister.errors import ParameterError
from cloister.provider.gpu import cuda_device
from cloister.provider.gpu.cuda_device import Tensor
from cloister.provider.gpu.gpu_ring import CardRing, key_words

SHARE, WORK = 0.3, 24 << 30  # of the card's free memory, bytes: the less of them is for what is computed at the time
PIECE = 1 << 30  # bytes
MANY = 0.125  # of a pool: more than that, of fresh ciphertexts, is kept by halves


@final
class CardPool:
    """Shelves on the card up to a limit that all pools share, in the host's memory beyond."""

    taken = 0  # bytes on the card, by the shelves of all pools

    def __init__(self, memory: int = 0, ring: CardRing | None = None) -> None:
        """Without a ring nothing is drawn again, and everything is kept whole."""
        free = cuda_device.free_memory() + CardPool.taken
        self.memory = memory or int(free - min(SHARE * free, WORK))
        self.ring = ring

    def polys(self, n: int, p: int, k: int, degree: int, *, fresh: bool) -> int:
        """How many polynomials of each ciphertext are kept."""
        many = n * p * k * degree * 4 > MANY * self.memory
        return 1 if fresh and many and p == 2 and self.ring is not None else p

    def size(self, n: int, p: int, k: int, degree: int, *, fresh: bool) -> int:
        """Bytes."""
        return n * self.polys(n, p, k, degree, fresh=fresh) * k * degree * 4

    def shelf(self, n: int, p: int, k: int, degree: int, *, rarely: bool = False, fresh: bool = False) -> CardShelf:
        """What does not fit is divided; what is read `rarely` always, and it leaves room for as much at 7 primes."""
        polys = self.polys(n, p, k, degree, fresh=fresh)
        one = polys * k * degree * 4
        fits = not rarely or n * one + self.size(n, p, 7, degree, fresh=True) <= self.memory
        whole = not rarely and CardPool.taken + n * one <= self.memory
        step = n if whole else max(1, PIECE // one)  # ciphertexts of a piece
        made = CardShelf(n, step, self.memory, self.ring if polys < p else None)
        for lo in range(0, n, step):
            made.add((min(step, n - lo), polys, k, degree), here=fits)
        weakref.finalize(made, CardPool._free, made.inside)
        return made

    def make_room(self, shelf: CardShelf, n: int, k: int, degree: int) -> None:
        """Put a shelf aside, if that many fresh ciphertexts would not fit beside it."""
        if CardPool.taken + self.size(n, 2, k, degree, fresh=True) > self.memory:
            shelf.aside()

    @staticmethod
    def _free(inside: list[int]) -> None:
        CardPool.taken -= inside[0]


def piece(shape: tuple[int, ...], *, inside: bool) -> Tensor:
    pinned = not inside and cuda_device.DEVICE == "cuda"
    return torch.empty(shape, dtype=torch.int32, device=cuda_device.DEVICE if inside else "cpu", pin_memory=pinned)


@final
class CardShelf:
    """Ciphertexts (p, k, N), written and read by number; they come out on the card."""

    def __init__(self, n: int, step: int, memory: int, ring: CardRing | None = None) -> None:
        self.pieces: list[Tensor] = []
        self.inside = [0]  # bytes on the card
        self._step, self._memory = step, memory
        self._here: list[int] = []  # pieces on the card, or put aside for now
        self._away = False
        self._ring = ring  # that draws c_1 again
        self._seeds: list[Tensor] = []
        self._drawn = np.full((2, n if ring else 0), -1)  # of every ciphertext, which seed, and where in its stream

    def add(self, shape: tuple[int, ...], *, here: bool) -> None:
        """A piece, on the card if it is to lie there and fits."""
        size = 4 * int(np.prod(shape))
        here = here and CardPool.taken + size <= self._memory
        self.pieces.append(piece(shape, inside=here))
        if here:
            self._here.append(len(self.pieces) - 1)
            self._count(size)

    def _count(self, size: int) -> None:
        self.inside[0] += size
        CardPool.taken += size

    def aside(self) -> None:
        """Into the host's memory, to make room."""
        self._move(away=True)

    def back(self) -> None:
        """Onto the card again, as far as there is room."""
        self._move(away=False)

    def _move(self, *, away: bool) -> None:
        if away == self._away:
            return
        self._away, inside = away, not away
        for number, i in enumerate(self._here):
            old = self.pieces[i]
            size = old.numel() * 4
            if inside and CardPool.taken + size > self._memory:
                del self._here[number:]
                return
            self.pieces[i] = piece(tuple(old.shape), inside=inside).copy_(old)
            self._count(size if inside else -size)

    def put(self, start: int, cts: Tensor, seed: bytes = b"") -> None:
        """Ciphertexts from number `start` on; of fresh ones also the seed whose first uniform halves are their c_1."""
        stop = start + len(cts)
        if self._ring is not None:
            if not seed:
                raise ParameterError("only fresh ciphertexts, with their seed, are kept by halves")
            self._drawn[:, start:stop] = np.stack([np.full(len(cts), len(self._seeds)), np.arange(len(cts))])
            self._seeds.append(cuda_device.upload(key_words(seed)))
        for number in range(start // self._step, -(-stop // self._step)):
            lo, held = number * self._step, self.pieces[number]
            a, b = max(start, lo), min(stop, lo + self._step)
            held[a - lo : b - lo].copy_(cts[a - start : b - start, : held.shape[1]])

    def read(self, which: Sequence[int], k: int) -> Tensor:
        """Ciphertexts (len(which), p, k, N) at their first k primes."""
        at = np.asarray(which, np.int64)
        if self._ring is not None:
            return self._drawn_again(at, k, self._ring)
        if len(self.pieces) == 1 and len(self._cuts(at)) > 8:
            held = self.pieces[0]
            return held[torch.from_numpy(at).to(held.device)].to(cuda_device.DEVICE)[:, :, :k].contiguous()
        _, p, _, degree = self.pieces[0].shape
        out = cuda_device.empty(len(at), p, k, degree)
        self._copy(at, out)
        return out

    def _cuts(self, at: np.ndarray) -> np.ndarray:
        """Where numbers do not go on, or in another piece."""
        return np.flatnonzero((np.diff(at) != 1) | (np.diff(at // self._step) != 0)) + 1

    def _copy(self, at: np.ndarray, out: Tensor) -> None:
        """What is kept of ciphertexts, run by run, into the first polynomials of `out`."""
        (_, p, _, _), cuts = self.pieces[0].shape, self._cuts(at)
        for run, start in zip(np.split(at, cuts), (0, *cuts.tolist()), strict=True):
            number, lo = divmod(int(run[0]), self._step)
            rows = self.pieces[number][lo : lo + len(run)].to(
                cuda_device.DEVICE
            )  # as it lies: only such copies are fast
            out[start : start + len(run), :p].copy_(rows[:, :, : out.shape[2]])

    def _drawn_again(self, at: np.ndarray, k: int, ring: CardRing) -> Tensor:
        """The same where c_1 is drawn again."""
        seeds, places = self._drawn[:, at]
        if (seeds < 0).any():
            raise ParameterError("a ciphertext is read that was never written")
        _, _, most, degree = self.pieces[0].shape
        out = cuda_device.empty(len(at), 2, k, degree)
        self._copy(at, out)
        cuts = np.flatnonzero((np.diff(places) != 1) | (np.diff(seeds) != 0)) + 1
        for a, b in zip((0, *cuts.tolist()), (*cuts.tolist(), len(at)), strict=True):
            ring.again(out[a:b], self._seeds[seeds[a]], most, int(places[a]))
        return out
