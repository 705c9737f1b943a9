"""Where a provider with a card puts ciphertexts between two stretches: there, or in the host's memory (`shelf`).

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
        """What does not fit is divided; what is read `rarely` always, and it leaves room for as much at 7 primes."""
        one = p * k * degree * 4
        fits = not rarely or n * one * (1 + 7 / k) <= self.memory
        whole = not rarely and CardPool.taken + n * one <= self.memory
        step = n if whole else max(1, PIECE // one)  # ciphertexts of a piece
        made = CardShelf(step, self.memory)
        for lo in range(0, n, step):
            made.add((min(step, n - lo), p, k, degree), here=fits)
        weakref.finalize(made, CardPool._free, made.inside)
        return made

    def make_room(self, shelf: CardShelf, n: int, p: int, k: int, degree: int) -> None:
        """Put a shelf aside, if that many ciphertexts would not fit beside it."""
        if CardPool.taken + n * p * k * degree * 4 > self.memory:
            shelf.aside()

    @staticmethod
    def _free(inside: list[int]) -> None:
        CardPool.taken -= inside[0]


def piece(shape: tuple[int, ...], *, inside: bool) -> Tensor:
    pinned = not inside and card.DEVICE == "cuda"
    return torch.empty(shape, dtype=torch.int32, device=card.DEVICE if inside else "cpu", pin_memory=pinned)


@final
class CardShelf:
    """Ciphertexts (p, k, N), written and read by number; they come out on the card."""

    def __init__(self, step: int, memory: int) -> None:
        self.pieces: list[Tensor] = []
        self.inside = [0]  # bytes on the card
        self._step, self._memory = step, memory
        self._here: list[int] = []  # pieces on the card, or put aside for now
        self._away = False

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
