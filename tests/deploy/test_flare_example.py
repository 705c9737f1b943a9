"""The filled-in study of docs/deploy.md, from its purpose to its RO-Crate, run as printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from federation import free_port

from cloister.mpc.net.receipts import Receipt
from cloister.study import Study

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
BLOCK = re.compile(r"^<!-- example -->\n```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_example_runs_as_printed(tmp_path):
    pytest.importorskip("nvflare")
    (_, toml), (_, console) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    toml = toml.replace("8102", str(free_port()))
    (tmp_path / "study.toml").write_text(toml)
    lines = [line.removeprefix("$ ") for line in console.splitlines()]
    assert all(line.startswith("$ ") for line in console.splitlines())
    script = "set -eu\ncloister() { " + sys.executable + ' -m cloister.cli.main "$@"; }\n' + "\n".join(lines)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    study = Study.load(tmp_path / "study.toml")
    for said in (
        f"Purpose: {study.governance['purpose']}",
        "by Dr. A. Muster, data protection, ",
        "basel: done",
        ", with the key that the study names",
        "the approval is withdrawn",
    ):
        assert said in done.stdout, said
    (path,) = (tmp_path / "kits" / "basel" / "results").glob("*/basel.receipt.json")
    receipt = Receipt.load(path)
    assert receipt.header["governance"] == study.governance
    assert receipt.header["approval"]["by"] == "Dr. A. Muster, data protection"
    page = path.with_name("report.html").read_text()
    for text in (study.governance["permit"], receipt.header["approval"]["data"]["matrix"], "Dr. A. Muster"):
        assert text in page
    graph = json.loads((tmp_path / "crate" / "ro-crate-metadata.json").read_text())["@graph"]
    by_id = {entity["@id"]: entity for entity in graph}
    assert by_id["#approving"]["name"] == "Dr. A. Muster, data protection"
    assert by_id["#sign-off"]["additionalType"] == {"@id": "https://w3id.org/shp#SignOff"}
    assert by_id["#run"]["actionStatus"].endswith("CompletedActionStatus")
