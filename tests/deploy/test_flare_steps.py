"""A study of several steps on FLARE: approved once, run in one go, and whole up to where it fails."""

from __future__ import annotations

from pathlib import Path

import chat
import pytest
from federation import PARTIES, SIZES, Federation, cells

from cloister.cells.files import read_cells
from cloister.deploy.join import take_away
from cloister.errors import CloisterError, ProtocolAbort
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import load_runs
from cloister.study import Step

chat.register()  # the kits are made for it, and get their steps then
pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
FINE = Step("bin-values", options={"n_bins": 9, "min_values": 50}, name="fine")
COARSE = Step(
    "bin-values", options={"n_bins": 4, "min_values": 50, "layer": "binned", "key_added": "coarse"}, name="coarse"
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("steps"), timeout=60.0)
    made.agree(workflow="", steps=(FINE, COARSE))
    made.start(*PARTIES)
    try:
        yield made
    finally:
        made.close()


def test_steps_on_flare_give_what_their_rehearsal_gives(federation, tmp_path):
    study = federation.agree(workflow="", steps=(FINE, COARSE))
    ended = federation.run(limit=400.0)
    assert ended.parties == dict.fromkeys((p for p in PARTIES if p != "hub"), "done")
    assert [*ended.result] == ["fine", "coarse"]
    series = rehearse(study, cells())
    for site in SIZES:
        at_site = federation.ended(site)
        folder = Path(at_site.folder)
        made = read_cells(take_away(at_site, tmp_path / f"{site}.h5ad"))
        for layer in ("binned", "coarse"):
            assert (made.layers[layer] != series.data[site].layers[layer]).sum() == 0
        one, two = load_runs(folder)
        assert [one.study.place, two.study.place] == ["step 1 of 2 (fine)", "step 2 of 2 (coarse)"]
        receipt = Receipt.load(folder / "02-coarse" / f"{site}.receipt.json")
        receipt.check()
        assert receipt.header["whole_study"] == study.digest.hex()


def test_a_coordinator_with_the_steps_in_another_order_is_refused_by_name(federation):
    study = federation.agree(workflow="", steps=(FINE, COARSE))
    other = {"layer": None, "key_added": "coarse", "n_bins": 4, "min_values": 50}
    apart = (Step("bin-values", options=other, name="coarse"), FINE)
    federation.hand_over("hub", federation.agree(workflow="", steps=apart))
    for p in study.parties:
        if p != "hub":
            federation.hand_over(p, study)
    with pytest.raises(ProtocolAbort, match="came with another study file than hub; nothing was sent"):
        federation.run(limit=400.0)


def test_a_step_that_fails_leaves_the_one_before_whole_and_says_which(federation):
    greedy = Step("bin-values", options=dict(COARSE.options) | {"min_values": 10**6}, name="greedy")
    federation.agree(workflow="", steps=(FINE, greedy))
    with pytest.raises(CloisterError, match=r"step 2 of 2 \(greedy\)"):
        federation.run(limit=400.0)
    at_site = federation.ended("basel")
    assert (at_site.status, at_site.step) == ("aborted", "step 2 of 2 (greedy)")
    assert at_site.error["type"] == "DataError"
    one, two = load_runs(at_site.folder)
    assert one.abort is None
    assert two.abort is not None
    assert "binned" in read_cells(Path(at_site.folder) / "01-fine" / "basel.h5ad").layers
