"""Security mutants: weaken a protocol in one place, and see which behaviour notices.

    python scripts/mutants.py --list                      all mutants
    python scripts/mutants.py --only secure_sum --jobs 2  those whose name contains a word
    python scripts/mutants.py --table                     what is known so far

A mutant is either drawn from the code (a check that is no longer called, a condition that no longer aborts) or written
down in `mutants.toml` (a mask that is left out, a key that is used twice). For each, the tests that import the file
run against a copy of the package, with stored vectors switched off: a mutant that only other bytes give away counts as
alive. The first test that fails is the behaviour that killed it. Results are kept in build/mutants.jsonl by what was
tested, so that a run that was stopped goes on where it was, and a change runs only what it concerns.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cloister"
STORE = ROOT / "build" / "mutants.jsonl"
LIST = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
ALSO, REASONS = LIST["also"], LIST["reasons"]
WRITTEN = [(m["file"], m["name"], m["old"], m["new"]) for m in LIST["mutant"]]

FIRST = ("one_thing_wrong", "roles_check", "what_is_drawn", "what_shares_hide", "one_liar_sums")
LIAR = "test_one_liar.py"
OUTSIDE = ("tests/runtime/test_flare", "tests/protocols/knn/test_oracle", "tests/protocols/ckks/test_oracle")
SWITCH_OFF = """
import cloister.testing as kit
kit.check_vectors = lambda *args, **kwargs: None
"""


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/cloister, without .py
    name: str
    source: str  # the whole file, weakened

    @property
    def key(self) -> str:
        return f"{self.file.rpartition('/')[2]}: {self.name}"


# ---- mutants ---------------------------------------------------------------------------------------------------------


def drawn(file: str) -> Iterator[Mutant]:
    """One mutant per call of a check that is dropped, and per condition of an abort that never holds."""
    text = (PACKAGE / f"{file}.py").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    seen: dict[str, int] = {}

    def named(what: str) -> str:
        seen[what] = seen.get(what, 0) + 1
        return what if seen[what] == 1 else f"{what} ({seen[what]})"

    for function in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called(node.value) != "":
                yield Mutant(file, named(f"{function.name} without {_called(node.value)}"), _blank(lines, node, "pass"))
            elif isinstance(node, ast.If) and (code := _abort(node)):
                test = node.test
                head = lines[test.lineno - 1][: test.col_offset]
                tail = lines[(test.end_lineno or 0) - 1][test.end_col_offset :]
                changed = [*lines[: test.lineno - 1], f"{head}False{tail}", *lines[test.end_lineno :]]
                yield Mutant(file, named(f"{function.name} never aborts with '{code}'"), "".join(changed))


def _called(call: ast.Call) -> str:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name if name.startswith("check") else ""


def _abort(node: ast.If) -> str:
    """The code of the ProtocolAbort that is all this condition is for."""
    if len(node.body) != 1 or not isinstance(node.body[0], ast.Raise) or node.orelse:
        return ""
    raised = node.body[0].exc
    if not isinstance(raised, ast.Call) or ast.unparse(raised.func) != "ProtocolAbort" or len(raised.args) < 3:
        return ""
    return str(raised.args[2].value) if isinstance(raised.args[2], ast.Constant) else ""


def _blank(lines: list[str], node: ast.Expr, instead: str) -> str:
    indent = " " * node.col_offset
    return "".join([*lines[: node.lineno - 1], f"{indent}{instead}\n", *lines[node.end_lineno :]])


def written() -> Iterator[Mutant]:
    """The mutants of the list; what fits nowhere any more is said, and fails at the end (`stale`)."""
    for file, name, old, new in WRITTEN:
        path = PACKAGE / f"{file}.py"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for before, after in zip(_several(old), _several(new), strict=True):
            text = text.replace(before, after) if text.count(before) == 1 else ""
        if text:
            yield Mutant(file, name, text)


def stale() -> list[str]:
    known = {m.key for m in written()}
    return [key for file, name, *_ in WRITTEN if (key := f"{file.rpartition('/')[2]}: {name}") not in known]


def _several(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def all_mutants() -> list[Mutant]:
    made = [m for file in LIST["files"] if (PACKAGE / f"{file}.py").exists() for m in drawn(file)] + list(written())
    keys = [m.key for m in made]
    if twice := {k for k in keys if keys.count(k) > 1}:
        raise SystemExit(f"two mutants have one name: {sorted(twice)[0]}")
    return made


# ---- tests -----------------------------------------------------------------------------------------------------------


def tests_of(file: str) -> list[str]:
    """Test files that import the module: the quick ones about security alone, those of its name, its sixth question."""
    module = file.rpartition("/")[2]
    dotted = "cloister." + file.replace("/", ".")
    parent = dotted.rpartition(".")[0]
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        block = re.search(rf"from {re.escape(parent)} import (\([^)]*\)|[^\n]*)", text)
        if dotted in text or (block is not None and re.search(rf"\b{module}\b", block[1])):
            found.append(name)
    found = [n for n in [*found, *ALSO.get(file, ())] if not n.startswith(OUTSIDE)]
    quick = [n for word in FIRST for n in found if word in n]
    own = [n for n in dict.fromkeys(found) if module in n or n in ALSO.get(file, ())]
    folder = [n for n in found if n.startswith(f"tests/{file.rpartition('/')[0]}/")]
    ordered = dict.fromkeys([*quick, *(own or folder), *(n for n in found if n.endswith(LIAR))])
    return [one for name in ordered for one in (_questions(module) if name.endswith(LIAR) else [name])]


def _questions(module: str) -> list[str]:
    """The cases of the sixth question that are about this module."""
    text = (ROOT / "tests" / "protocols" / LIAR).read_text(encoding="utf-8")
    names = [n for n in re.findall(r'^    "([a-z_ ]+)": \(', text, flags=re.MULTILINE) if n.split()[0] == module]
    return [f"tests/protocols/{LIAR}::test_one_lie_per_kind_of_message[{n}]" for n in names]


def run_tests(source: Path, tests: list[str], limit: float) -> tuple[str, float]:
    """'' if all pass; else the first test that failed, or 'time'."""
    plugin = source.parent / "no_stored_bytes.py"
    plugin.write_text(SWITCH_OFF, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{source.parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
    words = [sys.executable, "-m", "pytest", "-p", "no_stored_bytes", "-p", "no:cacheprovider", "-n", "0", "-x", "-q"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*words, "-m", "not slow", "--no-header", *tests],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return "time", limit
    took = time.monotonic() - began
    if done.returncode == 0:
        return "", took
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return (first[1] if first else "could not run"), took


def try_one(mutant: Mutant | None, tests: list[str], limit: float) -> tuple[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(PACKAGE, source / "cloister", ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            (source / "cloister" / f"{mutant.file}.py").write_text(mutant.source, encoding="utf-8")
        return run_tests(source, tests, limit)


# ---- results ---------------------------------------------------------------------------------------------------------


def digest(mutant: Mutant, tests: list[str]) -> str:
    """Of the weakened file and of the tests that look at it."""
    h = hashlib.sha256(mutant.source.encode())
    for name in tests:
        h.update((ROOT / name.partition("::")[0]).read_bytes())
    return h.hexdigest()[:16]


def kept() -> dict[str, dict[str, str | float]]:
    rows = STORE.read_text(encoding="utf-8").splitlines() if STORE.exists() else []
    return {row["id"]: row for row in map(json.loads, rows)}


def table(mutants: list[Mutant], rows: dict[str, dict[str, str | float]]) -> int:
    """Print what killed what; returns how many live without a reason."""
    known = {m.key: rows[d] for m in mutants if (d := digest(m, tests_of(m.file))) in rows}
    killed = {k: r for k, r in known.items() if r["killed"]}
    for key, row in sorted(known.items()):
        alive = f"ALIVE ({REASONS.get(key, 'no reason given')})"
        print(f"{key:<90} {str(row['killed']).rpartition('::')[2] if row['killed'] else alive}")
    open_ = [k for k in known.keys() - killed.keys() if k not in REASONS]
    share = 100 * len(killed) / max(1, len(known))
    print(
        f"\n{len(mutants)} mutants, {len(known)} run, {len(killed)} killed by behaviour ({share:.1f} %), "
        f"{len(known) - len(killed) - len(open_)} alive for a reason, {len(open_)} alive"
    )
    for key in stale():
        print(f"{key}: fits nowhere any more; bring mutants.toml up to date")
    return len(open_) + len(stale())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--table", action="store_true", help="what is known so far; run nothing")
    asked = parser.parse_args()
    mutants = [m for m in all_mutants() if asked.only in m.key or asked.only in m.file]
    if asked.list:
        print("\n".join(m.key for m in mutants), f"\n{len(mutants)} mutants")
        return 0
    rows = kept()
    if asked.table:
        return min(1, table(mutants, rows))
    STORE.parent.mkdir(exist_ok=True)
    lock = threading.Lock()
    sound: dict[str, str] = {}

    def work(mutant: Mutant) -> None:
        tests = tests_of(mutant.file)
        name = digest(mutant, tests)
        if name in rows:
            return
        with lock:
            if mutant.file not in sound:
                sound[mutant.file] = try_one(None, tests, 4 * asked.limit)[0]
        if sound[mutant.file]:
            print(f"{mutant.key}: not run, since {sound[mutant.file]} fails without it", flush=True)
            return
        killed, took = try_one(mutant, tests, asked.limit)
        row = {"id": name, "mutant": mutant.key, "killed": killed, "seconds": round(took, 1)}
        with lock:
            rows[name] = row
            with STORE.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        print(f"{mutant.key}: {killed or 'ALIVE'} ({took:.0f} s)", flush=True)

    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(work, mutants))
    return min(1, table(mutants, rows))


if __name__ == "__main__":
    raise SystemExit(main())
