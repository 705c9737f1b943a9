"""`compare-groups` on FLARE: a coordinator and three sites, each a service of its own on loopback."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from federation import serving

from cloister.cells.demo import demo_cohort
from cloister.cells.files import read_cells
from cloister.rehearsal.rehearsal import rehearse

pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
OPTIONS = {"groups": ("control", "case"), "donor_key": "donor", "label_key": "cell_type"}


@pytest.fixture(scope="module")
def sites():
    return demo_cohort(n_cells=60)


@pytest.fixture(scope="module")
def federation(tmp_path_factory, sites):
    with serving(tmp_path_factory.mktemp("groups"), "compare-groups", sites, OPTIONS) as made:
        yield made


def test_a_run_gives_what_the_rehearsal_gives(federation, sites):
    federation.agree()
    federation.run(limit=240.0)
    wanted = rehearse("compare-groups", sites, **OPTIONS)
    for party in (*sites, "hub"):
        folder = Path(federation.ended(party).folder)
        for name in ("expression", "composition"):
            table = pd.read_csv(folder / f"{party}.{name}.csv")
            seen = wanted.data["basel"].uns["groups"][name]
            pd.testing.assert_frame_equal(table, seen, check_dtype=False, rtol=1e-9)
    found = read_cells(Path(federation.ended("basel").folder) / "basel.h5ad").uns["groups"]
    assert found["summary"] == wanted.data["basel"].uns["groups"]["summary"]
