"""Security mutants: weaken a protocol in one place, and see which behaviour notices.

    python scripts/mutants.py --list                      all mutants
    python scripts/mutants.py --only secure_sum --jobs 2  those whose name contains a word
    python scripts/mutants.py --table                     what is known so far

A mutant is either drawn from the code (a check that is no longer called, a condition that no longer aborts) or written
down in `mutants.toml` (a mask that is left out, a key that is used twice). For each, the tests that import the file
run against a copy of the package, with stored vectors switched off: a mutant that only other bytes give away counts as
alive. The first test that fails is the behaviour that killed it. Results are kept in build/mutants.jsonl by what was
tested, so that a run that was stopped goes on where it was, and a change runs only what it concerns. (Children are
forked: Linux and macOS.)
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
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
BROKEN = "could not run"
LIAR = "test_one_liar.py"
OUTSIDE = (
    "tests/runtime/test_flare",
    *(f"tests/protocols/{folder}/test_oracle" for folder in ("knn", "ckks", "groups")),
)
Row = dict[str, str | float]
Rows = dict[str, Row]  # by the weakened file


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


@dataclass
class Trial:
    """One run of tests in a child process, against a copy of the package."""

    mutant: Mutant | None
    tests: list[str]
    folder: tempfile.TemporaryDirectory[str]
    pid: int
    began: float

    def outcome(self, limit: float) -> str | None:
        """None while it runs; '' if all passed; else the first test that failed, or 'time'."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done and time.monotonic() - self.began < limit:
            return None
        if not done:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return "time"
        text = (Path(self.folder.name) / "log").read_text(encoding="utf-8", errors="replace")
        if os.waitstatus_to_exitcode(status) == 0:
            return ""
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
        return first[1] if first else BROKEN


def start(mutant: Mutant | None, tests: list[str]) -> Trial:
    """Fork a child that has the libraries loaded already, and the package not."""
    folder = tempfile.TemporaryDirectory()
    source = Path(folder.name) / "src"
    shutil.copytree(PACKAGE, source / "cloister", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        (source / "cloister" / f"{mutant.file}.py").write_text(mutant.source, encoding="utf-8")
    began = time.monotonic()
    if pid := os.fork():
        return Trial(mutant, tests, folder, pid, began)
    os.setsid()
    code = 70
    try:
        log = os.open(Path(folder.name) / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(source))
        os.chdir(ROOT)
        import pytest

        import cloister.testing as kit

        kit.check_vectors = lambda *args, **kwargs: None
        words = ["-p", "no:cacheprovider", "-n", "0", "-x", "-q", "--no-header", "-m", "not slow", "--tb", "no"]
        code = int(pytest.main([*words, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- results ---------------------------------------------------------------------------------------------------------


def digests(mutant: Mutant, tests: list[str]) -> tuple[str, str]:
    """Of the weakened place and the lines around it, and of the tests that look at it."""
    looks = hashlib.sha256()
    for name in dict.fromkeys(n.partition("::")[0] for n in tests):
        looks.update((ROOT / name).read_bytes())
    old, new = (PACKAGE / f"{mutant.file}.py").read_text(encoding="utf-8").splitlines(), mutant.source.splitlines()
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    tail = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
    around = "\n".join([mutant.key, *new[max(0, head - 8) : len(new) - tail + 8]])
    return hashlib.sha256(around.encode()).hexdigest()[:16], looks.hexdigest()[:16]


def known(mutant: Mutant, rows: Rows) -> Row | None:
    """What is known of a mutant: a killed one stays so, a living one until its tests change."""
    source, looks = digests(mutant, tests_of(mutant.file))
    row = rows.get(source)
    return row if row is not None and (row["killed"] or row["tests"] == looks) else None


def kept() -> Rows:
    rows = STORE.read_text(encoding="utf-8").splitlines() if STORE.exists() else []
    return {row["id"]: row for row in map(json.loads, rows)}


def table(mutants: list[Mutant], rows: Rows) -> int:
    """Print what killed what; returns how many live without a reason."""
    run = {m.key: row for m in mutants if (row := known(m, rows)) is not None}
    killed = {k: r for k, r in run.items() if r["killed"]}
    for key, row in sorted(run.items()):
        alive = f"ALIVE ({REASONS.get(key, 'no reason given')})"
        print(f"{key:<90} {str(row['killed']).rpartition('::')[2] if row['killed'] else alive}")
    open_ = [k for k in run.keys() - killed.keys() if k not in REASONS]
    share = 100 * len(killed) / max(1, len(run))
    print(
        f"\n{len(mutants)} mutants, {len(run)} run, {len(killed)} killed by behaviour ({share:.1f} %), "
        f"{len(run) - len(killed) - len(open_)} alive for a reason, {len(open_)} alive"
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
    preload()
    run_all([m for m in mutants if known(m, rows) is None], rows, asked.jobs, asked.limit)
    return min(1, table(mutants, rows))


def preload() -> None:
    """Libraries that most tests need: forked children have them at once."""
    for name in ("pytest", "numpy", "scipy.sparse", "scipy.linalg", "msgpack", "cryptography"):
        importlib.import_module(name)
    importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")


def run_all(mutants: list[Mutant], rows: Rows, jobs: int, limit: float) -> None:
    """Each file's tests once without a mutant, then its mutants; as many at a time as there are jobs."""
    todo = [(None, file) for file in dict.fromkeys(m.file for m in mutants)]
    queue: list[tuple[Mutant | None, str]] = []
    for _, file in todo:
        queue += [(None, file), *((m, m.file) for m in mutants if m.file == file)]
    broken: set[str] = set()
    going: list[tuple[Trial, str]] = []
    while queue or going:
        while queue and len(going) < jobs:
            mutant, file = queue.pop(0)
            if file not in broken:
                going.append((start(mutant, tests_of(file)), file))
        time.sleep(0.1)
        for trial, file in list(going):
            ended = trial.outcome(limit if trial.mutant else 4 * limit)
            if ended is None:
                continue
            going.remove((trial, file))
            trial.folder.cleanup()
            took = time.monotonic() - trial.began
            if trial.mutant is None:
                if ended:
                    broken.add(file)
                    print(f"{file}: its mutants are not run, since {ended} fails without them", flush=True)
                continue
            note(trial.mutant, trial.tests, ended, took, rows)


def note(mutant: Mutant, tests: list[str], killed: str, took: float, rows: Rows) -> None:
    source, looks = digests(mutant, tests)
    row = {"id": source, "tests": looks, "mutant": mutant.key, "killed": killed, "seconds": round(took, 1)}
    rows[source] = row
    with STORE.open("a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")
    print(f"{mutant.key}: {killed or 'ALIVE'} ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
