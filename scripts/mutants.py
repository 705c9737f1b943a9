"""Security mutants: weaken a protocol in one place, and see which behaviour notices.

    python scripts/mutants.py --list               all mutants
    python scripts/mutants.py --only secure_sum    those whose name contains a word
    python scripts/mutants.py --table              what is known so far

A mutant is either drawn from the code (a check that is no longer called, a condition that no longer aborts) or written
down in `mutants.toml` (a mask that is left out, a key that is used twice). For each, the tests that import the file
run with stored vectors switched off: a mutant that only other bytes give away counts as alive. The first test that
fails is the behaviour that killed it; one that took far longer than usual must pass without the mutant, too, so that a
busy machine kills none. Only tests that reach the weakened function are run, those that name what is weakened and the
quick ones first; one run without any mutant tells which they are (build/mutants-reach.jsonl). Every mutant is judged in
a forked child of one process that has all tests loaded, where the functions get the mutant's code (weaken.py). Results
are kept in benchmarks/logs/mutants.jsonl by what was tested, so that a run that was stopped goes on where it was, and
a change runs only what it concerns; docs/measured/one-liar.md sums them up by protocol. (Linux and macOS.)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
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
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from weaken import LIST, PACKAGE, ROOT, Mutant, all_mutants, functions_of, listen, stale, weaken

STORE = ROOT / "benchmarks" / "logs" / "mutants.jsonl"
REACH = ROOT / "build" / "mutants-reach.jsonl"
ALSO, REASONS = LIST["also"], LIST["reasons"]

QUICK = ("one_thing_wrong", "roles_check", "what_is_drawn", "what_shares_hide", "sealed_links")
BROKEN, ENDLESS = "could not run", "time"
LIAR = "test_one_liar.py"
OUTSIDE = (
    "tests/deploy/test_flare",
    "tests/workflows/map_labels/test_oracle",
    "tests/mpc/threshold_ckks/test_oracle",
    "tests/workflows/compare_groups/test_oracle",
)
Row = dict[str, Any]
Rows = dict[str, Row]  # of mutants by `digests`, of tests by name


# ---- tests -----------------------------------------------------------------------------------------------------------


@functools.cache
def tests_of(file: str) -> list[str]:
    """Test files that import the module: the quick ones about security alone, those of its name, its sixth question."""
    module = file.rpartition("/")[2]
    dotted = "cloister." + file.replace("/", ".")
    parent = dotted.rpartition(".")[0]
    found = []
    for name, text in _test_files().items():
        block = re.search(rf"from {re.escape(parent)} import (\([^)]*\)|[^\n]*)", text)
        if dotted in text or (block is not None and re.search(rf"\b{module}\b", block[1])):
            found.append(name)
    found = [n for n in [*found, *ALSO.get(file, ())] if not n.startswith(OUTSIDE)]
    quick = [n for word in (*QUICK, "one_liar_sums") for n in found if word in n]
    own = [n for n in dict.fromkeys(found) if module in n or n in ALSO.get(file, ())]
    folder = [n for n in found if n.startswith(f"tests/{file.rpartition('/')[0]}/")]
    ordered = dict.fromkeys([*quick, *(own or folder or found), *(n for n in found if n.endswith(LIAR))])
    tests = [one for name in ordered for one in (_questions(module) if name.endswith(LIAR) else [name])]
    if not tests:
        raise SystemExit(f"no test imports {dotted}; name one under [also] in mutants.toml")
    return tests


@functools.cache
def _test_files() -> dict[str, str]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _questions(module: str) -> list[str]:
    """The cases of the sixth question that are about this module."""
    text = (ROOT / "tests" / "protocols" / LIAR).read_text(encoding="utf-8")
    names = [n for n in re.findall(r'^    "([a-z_ ]+)": \(', text, flags=re.MULTILINE) if n.split()[0] == module]
    return [f"tests/protocols/{LIAR}::test_one_lie_per_kind_of_message[{n}]" for n in names]


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
    row = {"id": source, "tests": looks, "file": mutant.file, "mutant": mutant.key, "killed": killed}
    rows[source] = row | {"seconds": round(took, 1)}
    with STORE.open("a", encoding="utf-8") as f:
        f.write(json.dumps(rows[source]) + "\n")
    print(f"{mutant.key}: {killed or 'ALIVE'} ({took:.0f} s)", flush=True)


def tidy(mutants: list[Mutant], rows: Rows) -> None:
    """Keep what is known of the mutants that there are, in their order; of those not run, what killed them once."""
    once = {row["mutant"]: row.get("killed") or row.get("once") for row in rows.values()}
    found = []
    for m in mutants:
        blank = {"id": f"not run: {m.key}", "mutant": m.key, "killed": None}
        found.append((known(m, rows) or blank | {"once": once.get(m.key)}) | {"file": m.file})
    STORE.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


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

    def __init__(self, mutants: list[Mutant], rows: Rows, limit: float, *, quick: bool, jobs: int) -> None:
        self.mutants, self.rows, self.limit, self.quick, self.jobs = mutants, rows, limit, quick, jobs
        self.files = list(dict.fromkeys(m.file for m in all_mutants()))

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # one failing example is enough: it is not made smaller

        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, max_examples=20)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Several workers take one file after the other, from a pipe that holds their numbers."""
        files = list(dict.fromkeys(m.file for m in self.mutants))
        reader, writer = os.pipe()
        os.write(writer, bytes(range(len(files))))
        os.close(writer)
        workers = [pid for _ in range(self.jobs) if (pid := self._worker(reader, files, session.items))]
        for pid in workers:
            os.waitpid(pid, 0)
        self.rows |= kept(STORE, "id")
        return True

    def _worker(self, reader: int, files: list[str], items: list[pytest.Item]) -> int:
        if pid := os.fork():
            return pid
        try:
            while number := os.read(reader, 1):
                self.weaken_file(files[number[0]], items)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)

    def weaken_file(self, file: str, items: list[pytest.Item]) -> None:
        tests = tests_of(file)
        items = [i for i in items if i.nodeid.startswith(tuple(tests))]
        quick = [i for i in items if any(word in i.nodeid for word in QUICK)]
        mine = [m for m in self.mutants if m.file == file]
        alive = [m for m in mine if not self.again(m, tests, items)]
        spent = dict.fromkeys(alive, 0.0)
        for some in (quick, [i for i in items if i not in quick and not self.quick]):
            reach = self.reach(some, file) if alive and some else {}
            for mutant in list(alive):
                began = time.monotonic()
                found = self.judge(mutant, [i for i in some if i.nodeid in reach], reach)
                spent[mutant] += time.monotonic() - began
                if found:
                    alive.remove(mutant)
                    note(mutant, tests, found, spent[mutant], self.rows)
        for mutant in alive if not self.quick else ():
            note(mutant, tests, "", spent[mutant], self.rows)

    def again(self, mutant: Mutant, tests: list[str], items: list[pytest.Item]) -> bool:
        """Whether the test that killed the mutant once, before the lines around it changed, still does."""
        before = {row["killed"] or row.get("once") for row in self.rows.values() if row["mutant"] == mutant.key}
        some = [i for i in items if i.nodeid in before and (not self.quick or any(word in i.nodeid for word in QUICK))]
        began = time.monotonic()
        found = in_child(functools.partial(first_failure, mutant, some), self.limit).partition("\t")[0] if some else ""
        if found and self.passes(found, some):
            note(mutant, tests, found, time.monotonic() - began, self.rows)
            return True
        return False

    def reach(self, items: list[pytest.Item], file: str) -> Rows:
        """What is known of those of the tests that pass without a mutant, as they are now, and with this file."""

        def passed(rows: Rows) -> Rows:
            mine = {i.nodeid: rows[i.nodeid] for i in items if rows.get(i.nodeid, {}).get("passed")}
            return {n: row for n, row in mine.items() if row.get("text") == text_of(n) and file in row["files"]}

        before = passed(kept(REACH, "test"))
        if new := [i for i in items if i.nodeid not in before]:
            in_child(functools.partial(reached, new, self.files), 8 * self.limit)
        found = passed(kept(REACH, "test"))
        for name in (i.nodeid for i in items if i.nodeid not in found):
            print(f"{name} fails without any mutant, or takes too long; it is left out", flush=True)
        return found

    def judge(self, mutant: Mutant, items: list[pytest.Item], reach: Rows) -> str:
        """Run the tests that reach what is weakened, the most promising first; all if that is not known."""
        where = functions_of(mutant)
        reaching = {i.nodeid for i in items if where & set(reach[i.nodeid]["ran"])}
        files = {n.partition("::")[0] for n in reaching}
        files = {f for f in files if "scope=" in (ROOT / f).read_text(encoding="utf-8")}  # what one sets up, all use
        chosen = [i for i in items if i.nodeid in reaching or i.nodeid.partition("::")[0] in files or not where]
        usual = {i.nodeid: reach[i.nodeid]["seconds"] for i in chosen}
        chosen.sort(key=lambda i: (i.nodeid not in reaching, usual[i.nodeid] * (0.1 if names(i, mutant) else 1.0)))
        limit = max(self.limit, 3 * sum(usual.values()))
        while chosen:
            found, _, took = in_child(functools.partial(first_failure, mutant, chosen), limit).partition("\t")
            if found not in usual or float(took) < 1 + 2 * usual[found] or self.passes(found, chosen):
                return found
            chosen = chosen[[i.nodeid for i in chosen].index(found) + 1 :]
        return ""

    def passes(self, test: str, items: list[pytest.Item]) -> bool:
        """Whether a test passes without a mutant, now."""
        one = [i for i in items if i.nodeid == test]
        return in_child(functools.partial(first_failure, None, one), self.limit) == ""


def names(item: pytest.Item, mutant: Mutant) -> bool:
    """Whether a test speaks of the check that is weakened, or of the code of its abort."""
    words = re.findall(r"'([\w-]+)'|without (\w+)", mutant.name)
    text = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
    return any(word in text for pair in words for word in pair if word)


def in_child(work: Callable[[], str], limit: float) -> str:
    """What `work` returns in a forked child; ENDLESS if it does not end."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            in_time = select.select([pipe], [], [], limit)[0]
            answer = pipe.read().decode() if in_time else ENDLESS
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


@functools.cache
def text_of(test: str) -> str:
    return hashlib.sha256((ROOT / test.partition("::")[0]).read_bytes()).hexdigest()[:16]


def reached(items: list[pytest.Item], files: list[str]) -> str:
    """Run tests without a mutant, and note for each how long it took, whether it passed, and what it ran."""
    ran: set[str] = set()
    listen(files, ran.add)
    for item, after in zip(items, [*items[1:], None], strict=True):
        began = time.monotonic()
        reports = runtestprotocol(item, nextitem=after, log=False)
        row = {"test": item.nodeid, "seconds": round(time.monotonic() - began, 2), "ran": sorted(ran)}
        row |= {"text": text_of(item.nodeid), "files": files}  # what was tested, and where it was listened
        with REACH.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row | {"passed": not any(r.failed for r in reports)}) + "\n")
        ran.clear()
    return ""


def first_failure(mutant: Mutant | None, items: list[pytest.Item]) -> str:
    """The first of the tests that fails with the mutant, and the seconds that it took; '' if none."""
    if mutant is not None and not weaken(mutant):
        found = from_a_copy(mutant, [i.nodeid for i in items])
        return f"{found}\t0" if found else ""
    for item, after in zip(items, [*items[1:], None], strict=True):
        began = time.monotonic()
        if any(r.failed for r in runtestprotocol(item, nextitem=after, log=False)):
            return f"{item.nodeid}\t{time.monotonic() - began:.2f}"
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
    parser.add_argument("--jobs", type=int, default=1, help="files that are weakened at the same time")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument(
        "--tidy", action="store_true", help="write the log in order, with one row per mutant; run nothing"
    )
    parser.add_argument("--table", action="store_true", help="what is known so far; run nothing")
    asked = parser.parse_args()
    mutants = [m for m in all_mutants() if asked.only in m.key or asked.only in m.file]
    if asked.list:
        print("\n".join(m.key for m in mutants), f"\n{len(mutants)} mutants")
        return 0
    rows = kept(STORE, "id")
    if asked.tidy:
        tidy(all_mutants(), rows)
        return 0
    if asked.table:
        return min(1, table(mutants, rows))
    todo = [m for m in mutants if known(m, rows) is None]
    if todo:
        REACH.parent.mkdir(exist_ok=True)
        looking = dict.fromkeys(t for file in dict.fromkeys(m.file for m in todo) for t in tests_of(file))
        tests = [t for t in looking if not asked.quick or any(word in t for word in QUICK)]
        loop = Loop(todo, rows, asked.limit, quick=asked.quick, jobs=asked.jobs)
        run_pytest([*tests, "--continue-on-collection-errors"], (loop,))
    if not asked.only:
        tidy(mutants, rows)
    return min(1, table(mutants, rows))


if __name__ == "__main__":
    raise SystemExit(main())
