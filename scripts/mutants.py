"""Security mutants: weaken a protocol in one place, and see which behaviour notices.

    python scripts/mutants.py --list               all mutants
    python scripts/mutants.py --only secure_sum    those whose name contains a word
    python scripts/mutants.py --table              what is known so far

A mutant is either drawn from the code (a check that is no longer called, a condition that no longer aborts) or written
down in `mutants.toml` (a mask that is left out, a key that is used twice). For each, the tests that import the file
run with stored vectors switched off: a mutant that only other bytes give away counts as alive. The first test that
fails is the behaviour that killed it. Only tests that reach the weakened function are run, the quickest first; one run
without any mutant tells which they are (build/mutants-reach.jsonl). Every mutant is judged in a forked child of one
process that has all tests loaded, where the functions get the mutant's code. Results are kept in build/mutants.jsonl by
what was tested, so that a run that was stopped goes on where it was, and a change runs only what it concerns. (Linux
and macOS.)
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cloister"
STORE = ROOT / "build" / "mutants.jsonl"
REACH = ROOT / "build" / "mutants-reach.jsonl"
LIST = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
ALSO, REASONS = LIST["also"], LIST["reasons"]
WRITTEN = [(m["file"], m["name"], m["old"], m["new"]) for m in LIST["mutant"]]

QUICK = ("one_thing_wrong", "roles_check", "what_is_drawn", "what_shares_hide", "sealed_links")
BROKEN = "could not run"
CHECKS, AUDIT = ("verify", "heard", "still_there"), "collective_audit.holder"  # beside all that is called check_…
LIAR = "test_one_liar.py"
OUTSIDE = (
    "tests/runtime/test_flare",
    *(f"tests/protocols/{folder}/test_oracle" for folder in ("knn", "ckks", "groups")),
)
Row = dict[str, Any]
Rows = dict[str, Row]  # of mutants by `digests`, of tests by name


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/cloister, without .py
    name: str
    source: str  # the whole file, weakened

    @property
    def key(self) -> str:
        return f"{self.file.rpartition('/')[2]}: {self.name}"

    @property
    def lines(self) -> range:
        """The lines of the whole file that are weakened, counted from 1."""
        old = (PACKAGE / f"{self.file}.py").read_text(encoding="utf-8").splitlines()
        new = self.source.splitlines()
        head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
        tail = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
        return range(head + 1, max(len(old) - tail, head + 1) + 1)


# ---- mutants ---------------------------------------------------------------------------------------------------------


def drawn(file: str) -> Iterator[Mutant]:
    """One mutant per call of a check that is dropped, and per condition of an abort that never holds."""
    text = (PACKAGE / f"{file}.py").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    seen: dict[str, int] = {}

    def named(what: str) -> str:
        seen[what] = seen.get(what, 0) + 1
        return what if seen[what] == 1 else f"{what} ({seen[what]})"

    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    for function in (f for f in functions if f.name != "cost"):
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and (called := _called(node.value)):
                yield Mutant(file, named(f"{function.name} without {called}"), _blank(lines, node, "pass"))
            elif isinstance(node, ast.If) and (code := _abort(node)):
                test = node.test
                head = lines[test.lineno - 1][: test.col_offset]
                tail = lines[(test.end_lineno or 0) - 1][test.end_col_offset :]
                changed = [*lines[: test.lineno - 1], f"{head}False{tail}", *lines[test.end_lineno :]]
                yield Mutant(file, named(f"{function.name} never aborts with '{code}'"), "".join(changed))


def _called(call: ast.expr) -> str:
    """The name of a check that is called for nothing but to raise, or to be part of one that follows."""
    call = call.value if isinstance(call, ast.Await) else call
    if not isinstance(call, ast.Call):
        return ""
    whole = ast.unparse(call.func)
    name = whole.rpartition(".")[2]
    return name if name.startswith("check") or name in CHECKS else "audit" if whole == AUDIT else ""


def _abort(node: ast.If) -> str:
    """The code of the ProtocolAbort that is all this condition is for."""
    if len(node.body) != 1 or node.orelse:
        return ""
    only = node.body[0]
    if isinstance(only, ast.Expr) and isinstance(only.value, ast.Call) and ast.unparse(only.value.func) == "reject":
        return "rejected"
    raised = only.exc if isinstance(only, ast.Raise) else None
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


@functools.cache
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
    quick = [n for word in (*QUICK, "one_liar_sums") for n in found if word in n]
    own = [n for n in dict.fromkeys(found) if module in n or n in ALSO.get(file, ())]
    folder = [n for n in found if n.startswith(f"tests/{file.rpartition('/')[0]}/")]
    ordered = dict.fromkeys([*quick, *(own or folder), *(n for n in found if n.endswith(LIAR))])
    tests = [one for name in ordered for one in (_questions(module) if name.endswith(LIAR) else [name])]
    if not tests:
        raise SystemExit(f"no test imports {dotted}; name one under [also] in mutants.toml")
    return tests


def _questions(module: str) -> list[str]:
    """The cases of the sixth question that are about this module."""
    text = (ROOT / "tests" / "protocols" / LIAR).read_text(encoding="utf-8")
    names = [n for n in re.findall(r'^    "([a-z_ ]+)": \(', text, flags=re.MULTILINE) if n.split()[0] == module]
    return [f"tests/protocols/{LIAR}::test_one_lie_per_kind_of_message[{n}]" for n in names]


# ---- weakening what is loaded ----------------------------------------------------------------------------------------


def weaken(mutant: Mutant) -> bool:
    """Give the functions of a loaded module the code of the mutant; False if more than functions differ."""
    path = PACKAGE / f"{mutant.file}.py"
    old = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    new = compile(mutant.source, str(path), "exec", dont_inherit=True)
    before, after = _functions(old), _functions(new)
    if _does(old, inside=False) != _does(new, inside=False) or before.keys() != after.keys():
        return False
    loaded = {f.__qualname__: f for f in _loaded(importlib.import_module("cloister." + mutant.file.replace("/", ".")))}
    changed = [name for name in before if _does(before[name]) != _does(after[name])]
    if not changed or not set(changed) <= loaded.keys():
        return False
    for name in changed:
        loaded[name].__code__ = after[name]
    return True


def _does(code: CodeType, *, inside: bool = True) -> tuple[object, ...]:
    """What a piece of code does, wherever its lines are; with or without the functions in it."""
    parts = (c for c in code.co_consts if isinstance(c, CodeType) and (inside or _is_class(c)))
    plain = tuple(repr(c) for c in code.co_consts if not isinstance(c, CodeType))
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, names, plain, tuple(_does(c, inside=inside) for c in parts)


def _is_class(code: CodeType) -> bool:
    return not code.co_flags & inspect.CO_OPTIMIZED


def _functions(code: CodeType) -> dict[str, CodeType]:
    """Functions of a module and methods of its classes, by qualified name; not what is inside of them."""
    found: dict[str, CodeType] = {}
    for c in code.co_consts:
        if isinstance(c, CodeType):
            found |= _functions(c) if _is_class(c) else {c.co_qualname: c}
    return found


def _loaded(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a loaded module defines, under whatever decorates them."""
    spaces = [vars(module), *(vars(c) for c in vars(module).values() if inspect.isclass(c))]
    for thing in [t for space in spaces for t in space.values()]:
        inner = getattr(thing, "fget", None) or getattr(thing, "__func__", None) or thing
        inner = inspect.unwrap(inner) if callable(inner) else inner
        if isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
            yield inner


def functions_of(mutant: Mutant) -> set[str]:
    """The functions in which a mutant differs, as `reached` notes them; none if it differs elsewhere too."""
    path = PACKAGE / f"{mutant.file}.py"
    before, after = (_functions(compile(t, "-", "exec")) for t in (path.read_text(encoding="utf-8"), mutant.source))
    return {f"{mutant.file}: {n}" for n in before if n not in after or _does(before[n]) != _does(after[n])}


# ---- results ---------------------------------------------------------------------------------------------------------


def digests(mutant: Mutant, tests: list[str]) -> tuple[str, str]:
    """Of the weakened place and the lines around it, and of the tests that look at it."""
    looks = hashlib.sha256()
    for name in dict.fromkeys(n.partition("::")[0] for n in tests):
        looks.update((ROOT / name).read_bytes())
    new, at = mutant.source.splitlines(), mutant.lines
    tail = len((PACKAGE / f"{mutant.file}.py").read_text(encoding="utf-8").splitlines()) - at.stop + 1
    around = "\n".join([mutant.key, *new[max(0, at.start - 9) : len(new) - tail + 8]])
    return hashlib.sha256(around.encode()).hexdigest()[:16], looks.hexdigest()[:16]


def known(mutant: Mutant, rows: Rows) -> Row | None:
    """What is known of a mutant: a killed one stays so, a living one until its tests change."""
    source, looks = digests(mutant, tests_of(mutant.file))
    row = rows.get(source)
    return row if row is not None and (row["killed"] or row["tests"] == looks) else None


def kept(store: Path, key: str) -> Rows:
    rows = store.read_text(encoding="utf-8").splitlines() if store.exists() else []
    return {row[key]: row for row in map(json.loads, rows)}


def note(mutant: Mutant, tests: list[str], killed: str, took: float, rows: Rows) -> None:
    source, looks = digests(mutant, tests)
    row = {"id": source, "tests": looks, "mutant": mutant.key, "killed": killed, "seconds": round(took, 1)}
    rows[source] = row
    with STORE.open("a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")
    print(f"{mutant.key}: {killed or 'ALIVE'} ({took:.0f} s)", flush=True)


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


# ---- running ---------------------------------------------------------------------------------------------------------


class Loop:
    """In place of pytest's loop: for each file what its tests run, then its mutants, each in a forked child."""

    def __init__(self, mutants: list[Mutant], rows: Rows, limit: float, *, quick: bool) -> None:
        self.mutants, self.rows, self.limit, self.quick = mutants, rows, limit, quick

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # one failing example is enough: it is not made smaller

        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for file in dict.fromkeys(m.file for m in self.mutants):
            tests = tests_of(file)
            items = [i for i in session.items if i.nodeid.startswith(tuple(tests))]
            quick = [i for i in items if any(word in i.nodeid for word in QUICK)]
            alive = [m for m in self.mutants if m.file == file]
            spent = dict.fromkeys(alive, 0.0)
            for some in (quick, [i for i in items if i not in quick and not self.quick]):
                reach = self.reach(some) if alive and some else {}
                for mutant in list(alive):
                    began = time.monotonic()
                    found = self.judge(mutant, [i for i in some if i.nodeid in reach], reach)
                    spent[mutant] += time.monotonic() - began
                    if found:
                        alive.remove(mutant)
                        note(mutant, tests, found, spent[mutant], self.rows)
            for mutant in alive if not self.quick else ():
                note(mutant, tests, "", spent[mutant], self.rows)
        return True

    def reach(self, items: list[pytest.Item]) -> Rows:
        """What is known of those of the tests that pass without a mutant."""
        if new := [i for i in items if i.nodeid not in kept(REACH, "test")]:
            in_child(functools.partial(reached, new), 8 * self.limit)
        reach = kept(REACH, "test")
        passed = {i.nodeid: reach[i.nodeid] for i in items if reach.get(i.nodeid, {}).get("passed")}
        for name in (i.nodeid for i in items if i.nodeid not in passed):
            print(f"{name} fails without any mutant, or takes too long; it is left out", flush=True)
        return passed

    def judge(self, mutant: Mutant, items: list[pytest.Item], reach: Rows) -> str:
        """Run the tests that reach what is weakened, the quickest before the others; all if that is not known."""
        where = functions_of(mutant)
        reaching = {i.nodeid for i in items if where & set(reach[i.nodeid]["ran"])}
        files = {n.partition("::")[0] for n in reaching}
        files = {f for f in files if "scope=" in (ROOT / f).read_text(encoding="utf-8")}  # what one sets up, all use
        chosen = [i for i in items if i.nodeid in reaching or i.nodeid.partition("::")[0] in files or not where]
        chosen.sort(key=lambda i: (i.nodeid not in reaching, reach[i.nodeid]["seconds"]))
        usual = sum(reach[i.nodeid]["seconds"] for i in chosen)
        return in_child(lambda: first_failure(mutant, chosen), max(self.limit, 3 * usual)) if chosen else ""


def in_child(work: Callable[[], str], limit: float) -> str:
    """What `work` returns in a forked child; 'time' if it does not end."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            in_time = select.select([pipe], [], [], limit)[0]
            answer = pipe.read().decode() if in_time else "time"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return answer
    os.setsid()
    answer = BROKEN
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        answer = work()
    finally:
        os.write(writer, answer.encode())
        os._exit(0)


def reached(items: list[pytest.Item]) -> str:
    """Run tests without a mutant, and note for each how long it took, whether it passed, and what it ran."""
    ran: set[str] = set()
    within = f"{PACKAGE}/"

    def trace(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(within):
            function = code.co_qualname.partition(".<locals>")[0]
            ran.add(f"{code.co_filename[len(within) : -3]}: {function}")

    threading.settrace(trace)
    for item, after in zip(items, [*items[1:], None], strict=True):
        began = time.monotonic()
        sys.settrace(trace)
        reports = runtestprotocol(item, nextitem=after, log=False)
        sys.settrace(None)
        row = {"test": item.nodeid, "seconds": round(time.monotonic() - began, 2), "ran": sorted(ran)}
        with REACH.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row | {"passed": not any(r.failed for r in reports)}) + "\n")
        ran.clear()
    return ""


def first_failure(mutant: Mutant, items: list[pytest.Item]) -> str:
    """The first of the tests that fails with the mutant; '' if none."""
    if not weaken(mutant):
        return from_a_copy(mutant, [i.nodeid for i in items])
    for item, after in zip(items, [*items[1:], None], strict=True):
        if any(r.failed for r in runtestprotocol(item, nextitem=after, log=False)):
            return item.nodeid
    return ""


def from_a_copy(mutant: Mutant, tests: list[str]) -> str:
    """The same for a mutant of which more than functions differ: a new interpreter, with a copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(PACKAGE, source / "cloister", ignore=shutil.ignore_patterns("__pycache__"))
        (source / "cloister" / f"{mutant.file}.py").write_text(mutant.source, encoding="utf-8")
        begin = f"import sys; sys.path[:0] = [{str(source)!r}, {str(Path(__file__).parent)!r}]; import mutants"
        env = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        words = [sys.executable, "-c", f"{begin}; sys.exit(mutants.run_pytest(sys.argv[1:]))", "-x", "-rfE", *tests]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return "" if done.returncode == 0 else first[1] if first else BROKEN


def run_pytest(words: list[str], plugins: tuple[object, ...] = ()) -> int:
    """Pytest, with stored bytes switched off."""
    import cloister.testing as kit

    kit.check_vectors = lambda *args, **kwargs: None
    os.chdir(ROOT)
    plain = ["-p", "no:cacheprovider", "-n", "0", "-q", "-s", "--no-header", "-m", "not slow", "--tb", "no"]
    return int(pytest.main([*plain, *words], plugins=list(plugins)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name or file contains this")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one mutant, or thrice its tests'")
    parser.add_argument("--quick", action="store_true", help="quick tests only; what they leave alive stays open")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--table", action="store_true", help="what is known so far; run nothing")
    asked = parser.parse_args()
    mutants = [m for m in all_mutants() if asked.only in m.key or asked.only in m.file]
    if asked.list:
        print("\n".join(m.key for m in mutants), f"\n{len(mutants)} mutants")
        return 0
    rows = kept(STORE, "id")
    if asked.table:
        return min(1, table(mutants, rows))
    todo = [m for m in mutants if known(m, rows) is None]
    if todo:
        STORE.parent.mkdir(exist_ok=True)
        looking = dict.fromkeys(t for file in dict.fromkeys(m.file for m in todo) for t in tests_of(file))
        tests = [t for t in looking if not asked.quick or any(word in t for word in QUICK)]
        run_pytest([*tests, "--continue-on-collection-errors"], (Loop(todo, rows, asked.limit, quick=asked.quick),))
    return min(1, table(mutants, rows))


if __name__ == "__main__":
    raise SystemExit(main())
