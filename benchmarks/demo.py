"""Play the demo several times and store what came out, so that pages can give ranges.

    python benchmarks/demo.py               three runs, into benchmarks/logs/demo.json
    python benchmarks/demo.py --runs 1      one more run; results are added to those of the same commit

Secret randomness and noise differ between runs; cells, donors and labels are the same. `scripts/pieces.py` makes the
README's rows from the log, `scripts/together.py` its figure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from cloister.demo import run_demo
from cloister.demo.rows import HEADER

ROOT = Path(__file__).parents[1]
LOG = ROOT / "benchmarks" / "logs" / "demo.json"
SHOWN = ("workflow", "mode", "measure", "alone", "together", "pooled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of the whole demo; 3 by default")
    runs = parser.parse_args().runs
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    stored = json.loads(LOG.read_text(encoding="utf-8")) if LOG.exists() else {}
    if stored.get("commit") != commit.stdout.strip():
        stored = {"commit": commit.stdout.strip(), "runs": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            table, _ = run_demo(Path(folder))
        stored["runs"].append([{key: row[HEADER.index(key)] for key in SHOWN} for row in table[1:]])
        LOG.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    for row in stored["runs"][-1]:
        print("  ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
