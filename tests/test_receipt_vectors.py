"""Receipts for other implementations: ours and the independent verifier accept the valid ones and reject the others."""

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from cloister.errors import CloisterError, ReceiptError
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net.receipts import Entry, Receipt, _link, _row
from cloister.session import SIGNED

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "vectors" / "receipts"
INDEX = json.loads((FOLDER / "index.json").read_text())
NODE = shutil.which("node")


def verify(path):
    receipt = Receipt.load(path)
    receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
    if receipt.status == "running":
        raise ReceiptError("the run has not ended")
    return receipt


def by_node(*words):
    command = [NODE, str(ROOT / "verifiers" / "receipt.mjs"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, {Path(line.partition(": ")[0]).name: line for line in done.stdout.splitlines()}


def test_the_files_are_what_the_script_makes():
    made = runpy.run_path(str(ROOT / "scripts" / "make_receipt_vectors.py"))["files"]()
    assert {p.name for p in FOLDER.iterdir()} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run scripts/make_receipt_vectors.py"


@pytest.mark.parametrize("row", INDEX["receipts"], ids=lambda row: row["file"])
def test_cloister_judges_every_vector(row):
    if row["valid"]:
        verify(FOLDER / row["file"])
    else:
        with pytest.raises(CloisterError):
            verify(FOLDER / row["file"])


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_independent_verifier_judges_every_vector(tmp_path):
    files = {row["file"]: row["valid"] for row in INDEX["receipts"]}
    code, lines = by_node("--key", INDEX["public"], *(FOLDER / name for name in files))
    assert code == 1
    assert {name: line.startswith(f"{FOLDER / name}: VALID") for name, line in lines.items()} == files
    valid = [FOLDER / name for name, good in files.items() if good]
    assert by_node(*valid)[0] == 0
    assert by_node("--key", "00" * 32, *valid)[0] == 1
    assert by_node()[0] == by_node("--key", "short", *valid)[0] == 2


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_independent_verifier_accepts_the_receipts_of_a_run(tmp_path):
    from cloister.cells.demo import demo_sites
    from cloister.rehearsal.rehearsal import rehearse

    run = rehearse("bin-values", data=demo_sites())
    paths = [receipt.save(tmp_path / f"{party}.json") for party, receipt in run.receipts.items()]
    code, lines = by_node(*paths)
    assert code == 0, lines


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.builds(Entry, TEXT, TEXT, TEXT, TEXT, TEXT, st.integers(0, 2**53 - 1), TEXT, TEXT))
def test_an_entry_is_hashed_as_canonical_json(entry):
    import hashlib

    previous = "ab" * 32
    wanted = hashlib.sha256(bytes.fromhex(previous) + rfc8785.dumps(_row(entry))).hexdigest()
    assert _link(previous, entry) == wanted


def test_numbers_that_json_does_not_carry_become_text():
    header = Receipt({"parameters": {"seed": 2**60, "worst": float("inf"), "both": (1, 2)}}).header
    assert header["parameters"] == {"seed": str(2**60), "worst": "inf", "both": [1, 2]}


def test_receipts_of_format_2_still_verify():
    found = verify(ROOT / "tests" / "old_receipts" / "format-2.receipt.json")
    assert found.header["format"] == "cloister-receipt/2"
    assert found.header["parameters"] == {"fraction": 1.0, "layer": None}
    found.header["parameters"]["fraction"] = 1
    with pytest.raises(ReceiptError):
        found.check()
