"""What noise is worth: ε of a run, as all workflows with `dp_noise` count it."""

from __future__ import annotations

import math

from cloister.errors import MissingExtra


def privacy_budget(noise: float, delta: float, sums: int) -> float:
    """Return ε of so many sums with Gaussian noise, by Opacus's accountant, rounded up to two digits; 0 without noise.

    `noise` is the standard deviation divided by what one site or donor can change; its data are compared with none.
    Against other data a sum may change by twice as much, and ε is that of half the noise. Everybody may take part in
    every sum, and who does is no secret, so sampling counts for nothing.
    """
    if not noise:
        return 0.0
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise MissingExtra("opacus", "privacy") from None
    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, sums)]
    alphas = [1 + x / 20 for x in range(1, 400)] + [float(x) for x in range(21, 512)]
    return math.ceil(float(accountant.get_epsilon(delta, alphas=alphas)) * 100) / 100
