"""Where a provider with a card puts ciphertexts between two stretches: there, or in the host's memory (`shelf`).

What lies outside is in pinned pieces a little below 2^30 bytes: PyTorch rounds each up to a power of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from cloister.crypto.owner_ckks import card
from cloister.crypto.owner_ckks.card import Tensor

SHARE, WORK = 0.3, 24 << 30  # of the card's free memory, bytes: the less of them is for what is computed at the time
PIECE = 1 << 30  # bytes


@final
class CardPool:
    """Shelves on the card up to a limit that all pools share, in the host's memory beyond."""

    taken = 0  # bytes on the card, by the shelves of all pools

    def __init__(self, memory: int = 0) -> None:
        free = card.free_memory() + CardPool.taken
        self.memory = memory or int(free - min(SHARE * free, WORK))

    def shelf(self, n: int, p: int, k: int, degree: int, *, rarely: bool = False) -> CardShelf:
        """What is read `rarely` takes a quarter of the memory at most; what does not fit is divided."""
        one, most = p * k * degree * 4, self.memory // 4 if rarely else self.memory
        whole = CardPool.taken + n * one <= self.memory and n * one <= most
        step = n if whole else max(1, PIECE // one)  # ciphertexts of a piece
        pieces, inside = [], 0
        for lo in range(0, n, step):
            size = min(step, n - lo)
            here = whole or (not rarely and CardPool.taken + size * one <= self.memory)
            pieces.append(piece((size, p, k, degree), inside=here))
            if here:
                inside += size * one
                CardPool.taken += size * one
        made = CardShelf(pieces, step)
        weakref.finalize(made, CardPool._free, inside)
        return made

    @staticmethod
    def _free(size: int) -> None:
        CardPool.taken -= size


def piece(shape: tuple[int, ...], *, inside: bool) -> Tensor:
    pinned = not inside and card.DEVICE == "cuda"
    return torch.empty(shape, dtype=torch.int32, device=card.DEVICE if inside else "cpu", pin_memory=pinned)


@final
class CardShelf:
    """Ciphertexts (p, k, N), written and read by number; they come out on the card."""

    def __init__(self, pieces: list[Tensor], step: int) -> None:
        self.pieces, self._step = pieces, step

    def put(self, start: int, cts: Tensor) -> None:
        stop = start + len(cts)
        for number in range(start // self._step, -(-stop // self._step)):
            lo = number * self._step
            a, b = max(start, lo), min(stop, lo + self._step)
            self.pieces[number][a - lo : b - lo].copy_(cts[a - start : b - start])

    def read(self, which: Sequence[int], k: int) -> Tensor:
        """Ciphertexts (len(which), p, k, N) at their first k primes."""
        at = np.asarray(which, np.int64)
        cuts = np.flatnonzero((np.diff(at) != 1) | (at[1:] // self._step != at[:-1] // self._step)) + 1
        if len(cuts) > 8 and len(self.pieces) == 1:
            held = self.pieces[0]
            return held[torch.from_numpy(at).to(held.device)].to(card.DEVICE)[:, :, :k].contiguous()
        _, p, _, degree = self.pieces[0].shape
        out = card.empty(len(at), p, k, degree)
        for run, start in zip(np.split(at, cuts), (0, *cuts.tolist()), strict=True):
            number, lo = divmod(int(run[0]), self._step)
            rows = self.pieces[number][lo : lo + len(run)].to(card.DEVICE)  # as it lies: only such copies are fast
            out[start : start + len(run)].copy_(rows[:, :, :k])
        return out
