"""Every workflow in every mode over FLARE: each party a service of its own on loopback, with the cells of `test_modes`.

The options are those of the rehearsals in tests/workflows/test_modes.py. All parties must end with `done`, with a
signed receipt that names no protocol beyond the declared ones, and with the same broadcasts (`compare`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from federation import Federation, free_port

from cloister import workflows
from cloister.cells.files import write_cells
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net.receipts import UNDECLARED, Receipt, compare
from cloister.rehearsal.rehearsal import CONSENTS, plan, rehearse
from cloister.session import SIGNED

pytest.importorskip("nvflare")
from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.study import Study

pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
SPEC = importlib.util.spec_from_file_location(
    "modes_of_workflows", Path(__file__).parents[1] / "workflows" / "test_modes.py"
)
MODES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODES)


def cases():
    """Workflow and mode → options of its first rehearsal."""
    found = {}
    for case in MODES.CASES:
        name, mode, options = case.values if hasattr(case, "values") else case
        found.setdefault((name, mode), options)
    return found


CASES = cases()


class Consortium(Federation):
    """The parties of one study, each with a kit, its cells and every consent."""

    def __init__(self, folder: Path, study: Study, cells) -> None:
        self.folder, self.port, self.services = folder, free_port(), {}
        study = dataclasses.replace(study, name="modes", network={"host": "localhost", "port": self.port})
        self.kits = provision(study, folder / "kits")
        self.study = Study.load(folder / "kits" / "study.toml")
        self.marks = folder / "marks"
        self.marks.mkdir()
        for party, role in study.parties.items():
            if party in cells:
                write_cells(cells[party], self.kits[party] / "cells.h5ad")
            policy = Kit.open(self.kits[party]).policy_file
            text = policy.read_text().replace("consent = []", f"consent = {sorted(CONSENTS)}".replace("'", '"'))
            policy.write_text(text)
            if role != "coordinator":
                Kit.open(self.kits[party]).approve()


def prepared(name, mode, options, folder):
    """The cells of every site, and the options with the files that earlier steps leave."""
    if name in ("adapt-model", "serve-model"):
        options = options | MODES.provider(folder)
        cells = MODES.images(12 if mode == "hardened" else 8)
        if name == "serve-model":
            adapted = rehearse("adapt-model", cells, mode=mode, rounds=1, **options)
            adapted.model.save(folder / "adapter.npz")
            options = options | {"adapter": str(folder / "adapter.npz")}
        return cells, options
    if name in ("train-cellcnn", "predict-cellcnn"):
        pytest.importorskip("seal")
        cells = MODES.sites(MODES.SITES[:2])
        if name == "predict-cellcnn":
            rehearse("train-cellcnn", cells, **MODES.TRAINING, keep=str(folder / "model"))
            return cells, options | {"keep": str(folder / "model")}
        for a in cells.values():
            a.obs["donor"] = [f"d{i % 12}" for i in range(a.n_obs)]
        return cells, options
    return (MODES.partly_labelled() if name in ("propagate-labels", "fine-tune") else MODES.sites()), options


def test_every_workflow_and_mode_is_here():
    every = {(w, m) for w in workflows.SHIPPED for m in workflows.get(w).modes}
    assert set(CASES) == every


@pytest.mark.parametrize(("name", "mode"), [pytest.param(*case, id="-".join(case)) for case in CASES])
def test_a_run_between_services_ends_well(name, mode, tmp_path):
    cells, options = prepared(name, mode, CASES[name, mode], tmp_path)
    options = {k: v for k, v in options.items() if k != "timeout"}
    study = plan(name, cells, mode=mode, timeout=120.0, options=options)
    made = Consortium(tmp_path, study, cells)
    try:
        made.start(*made.study.parties)
        (hub,) = (p for p, role in made.study.parties.items() if role == "coordinator")
        from cloister.deploy.control_socket import run_study

        assert run_study(made.kits[hub], limit=400.0).status == "done"
        receipts = {}
        for party in made.study.parties:
            made.wait_until(lambda party=party: made._last(party)[0] > 0, 60.0)
            folder = made._last(party)[1].parent
            receipts[party] = Receipt.load(next(folder.glob(f"{party}.receipt.json")))
        declared = workflows.get(name).mode(mode).protocols
        for party, receipt in receipts.items():
            receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
            assert receipt.status == "done", party
            assert receipt.signature["public"] == made.study.keys[party].hex()
            assert UNDECLARED not in receipt.reveals.values()
            assert set(receipt.reveals) <= set(declared)
        first, *others = receipts.values()
        for other in others:
            assert compare(first, other).told > 0
    finally:
        made.close()
