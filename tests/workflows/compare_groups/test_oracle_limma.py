"""limma itself, from Debian's r-bioc-limma and r-bioc-edger, where `make oracle` finds it: CLOISTER_LIMMA=1.

Its answers are stored in `tests/vectors/limma.json`, against which `test_pooled_contrasts.py` runs everywhere;
CLOISTER_LIMMA=write stores them anew.
"""

import json
import os

import pytest
from group_cases import CASES, NONE, VECTORS, ask_limma, case, same_as_limma, stored, written

from cloister.testing import check_no_errors, run_protocol, values
from cloister.workflows.compare_groups import pooled_contrasts

LIMMA = os.environ.get("CLOISTER_LIMMA", "")
pytestmark = pytest.mark.skipif(not LIMMA, reason="CLOISTER_LIMMA is not set: no R with limma and edgeR")


@pytest.mark.parametrize("name", CASES)
def test_stored_answers_are_limmas(name, tmp_path):
    if LIMMA == "write":
        c = case(**CASES[name], thresholds=NONE)
        kept = json.loads(VECTORS.read_text()) if VECTORS.exists() else {}
        kept[name] = {"donors": written(c), "limma": ask_limma(c, tmp_path)}
        VECTORS.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    c, answer = stored(name)
    found = ask_limma(c, tmp_path)
    for mine, theirs in zip(found["result"], answer["result"], strict=True):
        assert (mine["row"], mine["contrast"]) == (theirs["row"], theirs["contrast"])
        assert float(mine["p"]) == pytest.approx(float(theirs["p"]), rel=1e-8)


@pytest.mark.parametrize("name", [n for n in CASES if "shares" not in n])
def test_other_donors_than_the_stored(name, tmp_path):
    c = case(**(CASES[name] | {"seed": 1000, "g": 300}), thresholds=NONE)
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    (result,) = values(run)[c.params.coordinator].results
    same_as_limma(result, ask_limma(c, tmp_path), c.params)
