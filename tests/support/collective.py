"""A small committee for the tests of the collective protocols: real 128-bit rings, as small as they carry the work."""

import numpy as np

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.study import Party

HUB = Party("hub")
SMALL = ckks.Parameters(8192, base=3, base_bits=42, levels=1, per_level=1, level_bits=30)


def names(n):
    return tuple(Party(f"site-{i}") for i in range(n))


def entropy(label="test"):
    return Entropy(Prg(label.encode().ljust(32, b".")[:32]).bytes)


def secrets(params, n, seed="secrets"):
    return {p: ckks.Secret.draw(params, entropy(f"{seed}/{p}")) for p in names(n)}


def whole(params, shares):
    """The sum that nobody may hold: only tests add it up."""
    r = ckks.context(params).ring
    total = r.zeros(len(params.bits))
    for s in shares.values():
        r.add(total, s.ntt)
    return total


def public(params, shares, seed=b"s" * 32):
    c = ckks.context(params)
    a = ckks.common(params, seed, "test", params.top)
    b = c.ring.error(entropy("pk").prg(), params.top)
    return ckks.PublicKey(c.ring.add_product(b, a, whole(params, shares), sign=-1), a)


def encrypt(params, shares, values, k=None, scale=None):
    c = ckks.context(params)
    full = np.zeros(params.slots)
    full[: len(values)] = values
    return c.encrypt(
        public(params, shares), full, k or params.top, scale or params.scale, entropy(f"encrypt/{full[0]:.9f}")
    )


def size(r, a):
    """Largest absolute coefficient of a polynomial in NTT form."""
    high, _ = r.lift(r.backward(a.copy()))
    return float(np.abs(high).max())


def own(shares):
    return {p: (s,) for p, s in shares.items()}


def faults_on(module, case, kinds=("drop", "duplicate", "truncate", "kill")):
    """Every kind of fault on every message of one link; each must end the run by name."""
    from cloister.testing import check_abort, check_no_errors, run_protocol

    clean = run_protocol(module, case())
    check_no_errors(clean)
    sent = {(p, e.to, e.name) for p, r in clean.receipts.items() for e, _ in r.entries if e.kind == "sent"}
    link = [(s, to, n) for s, to, n in sorted(sent) if "site-1" in (s, to) and not n.startswith("channel.")]
    for kind in kinds:
        for one in link:  # a fresh case each time: ledgers remember
            check_abort(module, case(), survived=lambda run: None, kinds=[kind], messages=[one], timeout=0.5)
    return len(link)
