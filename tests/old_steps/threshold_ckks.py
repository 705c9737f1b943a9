"""Steps of encrypted training and prediction before outputs were checked: what the attacks N1, N2 and N6 need."""

import math

import numpy as np

from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.rns.ring import SIGMA
from cloister.mpc.crypto.rns.slots import SlotMap, embedding
from cloister.workflows.train_cellcnn.cellcnn_circuit import add_over_markers, gradient
from cloister.workflows.train_cellcnn.level_schedule import PRODUCT


def gradient_ciphers(c, L, model, X, Y, keys, entropy):
    """N2, N4: what a site sent, sample by sample; all batches fit one chunk."""
    ciphers = []
    for M, group in zip(model, L.groups, strict=True):
        ct = gradient(L, M, X, Y[:, list(group)], keys.relin, keys.rotation)
        ciphers.append(c.raw(c.rerandomise(keys.public, ct, entropy))[0])
    return ciphers


def kernel_mask(p, m, entropy):
    """A mask of 46 bits that a refresh's map of sums sends to zero, which came after that: bounded."""
    r, e = ckks.context(p.ckks).ring, embedding(p.ckks.degree)
    count, replaced = len(m.place), {}
    for a, b in zip(m.start, m.start[1:], strict=False):
        replaced[int(m.source[b - 1])] = m.source[a : b - 1]
    read = [replaced.get(s, np.array([s])) for s in range(count)]
    signs = [np.full(len(x), -1.0 if s in replaced else 1.0) for s, x in enumerate(read)]
    start = np.concatenate([[0], np.cumsum([len(x) for x in read])]).astype(np.int64)
    kernel = SlotMap(start, np.concatenate(read).astype(np.int64), np.concatenate(signs), np.arange(count))
    slots = kernel.apply(e.to_slots(r.spread(entropy.prg(), p.mask_bits)), np.ones(1))
    return r.forward(r.of_integers(e.to_coefficients(slots), p.ckks.base))


async def no_check(*args, **kwargs):
    """Copies of [M] and switching keys were not checked."""


def sample_scale(c, L):
    """N1: a query spent two primes."""
    return c.dropped(L.ladder.one, PRODUCT)


def evaluate(c, L, M, x, keys):
    """N1: [U], for any [M]: nobody checked its range."""
    U = add_over_markers(c, L, c.times(M, x, keys.relin, PRODUCT), keys.rotation)
    U.scale = L.ckks.scale
    return U


def query_noise(L):
    """N1: assumed that [M] is what an honest training makes."""
    fresh = 3 * SIGMA * math.sqrt(L.parties)
    return math.sqrt(L.J) * math.hypot(56.0 * fresh, 2 * ckks.rounding_noise(L.ckks, L.parties))


def answer(found, largest=64.0):
    """N6: whether the querier goes on depends on its logits and on what a helping site added."""
    if not abs(found).max() <= largest:
        raise ProtocolAbort("oblivious_prediction", "L4", "diverged", "logits beyond ±64")
    return found
