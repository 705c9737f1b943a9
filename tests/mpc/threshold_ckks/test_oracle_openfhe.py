"""Against OpenFHE, where an interpreter that has it is named: CLOISTER_OPENFHE_PYTHON=/path/to/python.

OpenFHE's wheels fit few versions of Python and of the C++ library, so it lives in an environment of its own.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from collective import HUB, entropy, names, secrets

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.threshold_ckks import collective_key, collective_relin, collective_rotation, threshold_decrypt
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.train_cellcnn.level_schedule import PRODUCT, chain

OPENFHE = os.environ.get("CLOISTER_OPENFHE_PYTHON", "")
PEER = Path(__file__).parents[1] / "openfhe_peer.py"
RING = chain(16384, scale_bits=88, parties=3)
STEPS, WIDTH = 5, 64


def made(module, shares, **extra):
    params = module.Params(names(3), HUB, RING, **extra)
    run = run_protocol(module, Case(params, {p: (s,) for p, s in shares.items()}), timeout=120)
    check_no_errors(run)
    return values(run)[HUB]


def opened(shares, ct, holders):
    """Threshold decryption by these holders."""
    c = ckks.context(RING)
    params = threshold_decrypt.Params(holders, HUB, RING, "a product", RING.base, RING.scale, 2.0**13)
    (c0, c1), _ = c.raw(c.drop(ct, RING.base))
    case = Case(params, {HUB: (ct,)} | {p: (shares[p], c1, *([c0] if p == holders[0] else [])) for p in holders})
    run = run_protocol(threshold_decrypt, case, timeout=60)
    check_no_errors(run)
    return values(run)[HUB][:WIDTH]


@pytest.mark.slow
@pytest.mark.skipif(not OPENFHE, reason="CLOISTER_OPENFHE_PYTHON names no interpreter that has OpenFHE")
def test_keys_products_rotations_and_openings_agree_with_openfhe(tmp_path):
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(2, WIDTH))
    (tmp_path / "in.json").write_text(json.dumps({"x": x.tolist(), "m": m.tolist(), "steps": STEPS}))
    subprocess.run([OPENFHE, str(PEER), str(tmp_path / "in.json"), str(tmp_path / "out.json")], check=True, timeout=300)
    theirs = json.loads((tmp_path / "out.json").read_text())

    shares, c = secrets(RING, 3, "openfhe"), ckks.context(RING)
    public, relin = made(collective_key, shares), c.held(made(collective_relin, shares))
    turning = c.held(made(collective_rotation, shares, steps=(STEPS,))[STEPS])
    k = RING.base + PRODUCT
    room = c.dropped(k, PRODUCT)

    def encrypt(v, scale, label):  # every WIDTH slots again, as OpenFHE fills the ring: rotations are cyclic in them
        return c.encrypt(public, np.tile(v, RING.slots // WIDTH), k, scale, entropy(label))

    product = c.times(encrypt(x, RING.scale, "x"), encrypt(m, room, "m"), relin, PRODUCT)
    product.scale = RING.scale
    turned = c.rotate(product, STEPS, turning)
    np.testing.assert_allclose(opened(shares, product, names(3)), theirs["product"], atol=1e-4)
    np.testing.assert_allclose(opened(shares, turned, names(3)), theirs["turned"], atol=1e-4)
    assert theirs["of_two"] is None or np.abs(np.array(theirs["of_two"]) - x * m).max() > 1
    assert np.abs(opened(shares, product, names(2)) - x * m).max() > 1  # two of three see noise, here as there
