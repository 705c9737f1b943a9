"""Every lie that one party can tell in one message, in every protocol of sums, forests, training and sharing.

    python benchmarks/lies.py [--quick] [--jobs 4] [--only secure_sum]

The cases, and what a right result is, are those of tests/protocols/test_one_liar*.py; `--quick` tells one lie per kind
of message, as the tests do, and keeps nothing. Lies tried; of these, how many ended in a named abort, how many in a
right result, and how many are among those that the protocol says, under *Assumes*, it does not notice. A wrong result,
a crash or a party that does not end in time is an error, and the row says which lie. Results go to
benchmarks/logs/lies.json; docs/measured/one-liar.md shows them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import runpy
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "benchmarks" / "logs" / "lies.json"


def questions() -> dict[str, Any]:
    """Protocol → the function that asks it."""
    files = sorted((ROOT / "tests" / "protocols").glob("test_one_liar*.py"))
    return {name: found["ask"] for found in map(runpy.run_path, map(str, files)) for name in found["QUESTIONS"]}


def ask(given: tuple[str, bool]) -> dict[str, Any]:
    """One question, in a process of its own."""
    from cloister.mpc.crypto import paillier

    name, quick = given
    paillier.LEAST_BITS = 1024  # the published forest's keys, as short as in the tests
    began, error = time.monotonic(), ""
    try:
        found = questions()[name](name, full=not quick, timeout=4.0, within=40.0)
        counts = {"tried": found.tried, "aborted": found.aborted, "right": found.right, "assumed": found.assumed}
    except AssertionError as e:
        counts, error = {}, " ".join(str(e).split())[:300] or "AssertionError"
    return {"name": name, **counts, "error": error, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="protocols whose name contains this")
    asked = parser.parse_args()
    chosen = [name for name in questions() if asked.only in name]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}; Python {platform.python_version()}; {asked.jobs} at a time; three sites, keys of 1024 bits")
    print(f"{'':22s}{'tried':>8s}{'aborted':>9s}{'right':>8s}{'assumed':>9s}{'s':>8s}")
    kept = {} if asked.quick or not LOG.exists() else json.loads(LOG.read_text(encoding="utf-8"))
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(asked.jobs, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(ask, [(name, asked.quick) for name in chosen], chunksize=1):
            name = row.pop("name")
            wrong += bool(row["error"])
            kept[name] = row | {"machine": machine, "date": time.strftime("%Y-%m-%d")}
            figures = "".join(f"{row.get(key, '–'):>{w}}" for key, w in (("tried", 8), ("aborted", 9), ("right", 8)))
            print(f"{name:22s}{figures}{row.get('assumed', '–'):>9}{row['seconds']:>8} {row['error']}", flush=True)
            if not asked.quick:
                LOG.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    return min(1, wrong)


if __name__ == "__main__":
    raise SystemExit(main())
