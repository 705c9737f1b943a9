"""Run every benchmark in its quick form and keep what they print in benchmarks/logs/quick.json: `make bench`.

    python scripts/bench.py                      all of them, one after the other
    python scripts/bench.py secure_sum mapping   these; the others keep what was collected last

A benchmark is a file under benchmarks/ with an option `--quick`; it names its machine, sizes, threads and peers, and
prints its figures last. Here the command, the machine, the date, the load before and after, and the seconds are put
beside it. `make docs` makes a page of it. One that fails, or takes longer than the limit, is on the page as that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
THREADS = {name: "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
MOST = 6000  # characters of a benchmark's output that the page shows, from the end


def benchmarks(folder: Path) -> dict[str, Path]:
    """Name → file, of all that have a quick form."""
    return {
        p.stem: p for p in sorted(folder.glob("*.py")) if re.search(r"""add_argument\(\s*["']--quick""", p.read_text())
    }


def run(path: Path, limit: float) -> dict[str, Any]:
    """One benchmark: what it printed, how long it took, how busy the machine was."""
    env = {**os.environ, **{f"{k}_NUM_THREADS": v for k, v in THREADS.items()}}
    told: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "machine": machine()}
    told["load"] = [round(os.getloadavg()[0], 1)]
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(path), "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the processes it started
            out, err = process.communicate()
            code = None
    told |= {"seconds": round(time.perf_counter() - began), "code": code, "out": clean(out)}
    told["load"].append(round(os.getloadavg()[0], 1))
    if code:
        told["error"] = clean(err).strip().splitlines()[-1:] or ["no word"]
    return told


def clean(text: str) -> str:
    """Without colours, carriage returns and paths of this machine."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = "\n".join(line.rpartition("\r")[2].rstrip() for line in text.splitlines())
    return text.replace(str(ROOT), ".").replace(str(ROOT.parent), "..").replace(str(Path.home()), "~").strip()


def machine() -> str:
    def first(file: str, start: str) -> str:
        rows = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        return next(r.partition(":")[2].strip() for r in rows if r.startswith(start))

    try:
        model, memory = first("/proc/cpuinfo", "model name"), int(first("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    except (OSError, StopIteration):
        model, memory = platform.processor() or "unknown processor", 0.0
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}"


def page(told: dict[str, dict[str, Any]], folder: Path) -> str:
    lines = [
        "# Benchmarks",
        "",
        "`make bench` runs every benchmark in its quick form; this page is made from what it kept. Figures of the",
        "whole forms, and how to read them, stand on the pages under *measured*. One thread per process unless a",
        "benchmark says otherwise; seconds depend on what else the machine was doing: the load before and after is",
        "given (one per core is a busy machine).",
        "",
        *(f"Machine: {name}." for name in dict.fromkeys(t["machine"] for t in told.values())),
        "",
        "| benchmark | seconds | load before, after | date | ended |",
        "|---|---|---|---|---|",
    ]
    for name, t in told.items():
        ended = (
            "done"
            if t["code"] == 0
            else "stopped at the limit"
            if t["code"] is None
            else f"failed: {t['error'][0][:120]}"
        )
        load = ", ".join(map(str, t["load"]))
        lines.append(f"| [{name}](#{name}) | {t['seconds']} | {load} | {t['date']} | {ended.replace('|', '/')} |")
    for name in benchmarks(folder):
        if name not in told:
            lines.append(f"| {name} | – | – | – | not run |")
    for name, t in told.items():
        text = t["out"] if len(t["out"]) <= MOST else "…\n" + t["out"][-MOST:].partition("\n")[2]
        lines += [
            "",
            f"## {name}",
            "",
            f"`python benchmarks/{name}.py --quick` on {t['machine']}",
            "",
            "```text",
            text or "(nothing)",
            "```",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks.md")
    parser.add_argument("--kept", type=Path, default=ROOT / "benchmarks" / "logs" / "quick.json")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one benchmark may take")
    args = parser.parse_args()
    known = benchmarks(args.folder)
    if unknown := sorted(set(args.names) - set(known)):
        sys.exit(f"there is no benchmark '{unknown[0]}' with --quick; known are {', '.join(known)}")
    told = json.loads(args.kept.read_text()) if args.kept.exists() else {}
    for name in args.names or known:
        print(f"{name} ...", flush=True)
        told[name] = run(known[name], args.limit)
        ended = {0: "done", None: "stopped at the limit"}.get(told[name]["code"], "failed")
        print(f"{name}: {ended} after {told[name]['seconds']} s", flush=True)
        told = {n: told[n] for n in known if n in told}
        args.kept.parent.mkdir(exist_ok=True)
        args.out.parent.mkdir(exist_ok=True)
        args.kept.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
        args.out.write_text(page(told, args.folder), encoding="utf-8")  # what there is, should the rest be stopped
    return int(any(told[n]["code"] != 0 for n in args.names or known))


if __name__ == "__main__":
    sys.exit(main())
