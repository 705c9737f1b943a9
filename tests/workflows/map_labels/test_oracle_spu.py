"""Against SecretFlow SPU, where an interpreter that has it is named: CLOISTER_SPU_PYTHON=/path/to/python.

SPU pins NumPy < 2, so it lives in an environment of its own; `benchmarks/mapping_peers.py` runs there.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from knn_cases import ASK, NAMES, case

from cloister.testing import Case, run_protocol, values
from cloister.workflows.map_labels import nearest_labels, private_knn

SPU = os.environ.get("CLOISTER_SPU_PYTHON", "")
PEERS = Path(__file__).parents[3] / "benchmarks" / "mapping_peers.py"


@pytest.mark.slow
@pytest.mark.skipif(not SPU, reason="CLOISTER_SPU_PYTHON names no interpreter that has SPU")
def test_spu_gives_the_same_labels(tmp_path):
    c = case(m=20, rows=(60, 50), dims=5, labels=6, k=5, pads=0, bits=32, seed=7)
    q = nearest_labels.encode(c.params, c.inputs[ASK][0])
    r = np.concatenate([nearest_labels.encode(c.params, c.inputs[p][0]) for p in NAMES[:2]])
    y = np.concatenate([c.inputs[p][1] for p in NAMES[:2]])
    np.savez(tmp_path / "in.npz", q=q, r=r, labels=y, k=5, count=6)
    subprocess.run(
        [SPU, str(PEERS), "spu", str(tmp_path / "in.npz"), str(tmp_path / "out.json")], check=True, timeout=300
    )
    theirs = json.loads((tmp_path / "out.json").read_text())["labels"]
    ours = values(run_protocol(private_knn, Case(c.params, c.inputs)))[ASK].labels
    np.testing.assert_array_equal(ours, theirs)
