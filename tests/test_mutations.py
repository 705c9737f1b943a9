"""Damaged studies, files and messages: a sentence for the user, never a traceback, a hang or half a result.

The quick tests here do a few of each; the slow ones the whole count.
"""

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from cloister import workflows
from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.cli import main as cli
from cloister.errors import CloisterError, WireError
from cloister.mpc.net import wire
from cloister.mpc.net.mailbox import Mailbox
from cloister.rehearsal import rehearsal
from cloister.study import Study

STUDY = """\
name = "three-hospitals"
workflow = "bin-values"
mode = "hardened"
seed = 7
timeout = 20.0

[parties]
hub = "coordinator"
basel = "site"
lugano = "site"
vienna = "site"

[parameters]
n_bins = 21
min_values = 10

[network]
host = "localhost"
port = 8102
"""
TOKENS = ["=", "[", "]", '"', "\n", "{}", "[]", "-1", "0", "1e999", "nan", "true", "''", '"x"', "é", "\x7f", "\x00"]
TOKENS += ["[[a]]", "n_bins", "published", "mode = 3", "9" * 40, "[parties]", "coordinator", "2026-01-01"]


def mutated_text(text, rng):
    rows = text.splitlines()
    for _ in range(rng.randrange(1, 5)):
        way, at = rng.randrange(6), rng.randrange(len(rows)) if rows else 0
        if way == 0 and rows:
            del rows[at]
        elif way == 1 and rows:
            rows.insert(rng.randrange(len(rows)), rows[at])
        elif way == 2 and rows:
            key, eq, _ = rows[at].partition("=")
            rows[at] = f"{key}{eq} {rng.choice(TOKENS)}"
        elif way == 3 and rows:
            cut = rng.randrange(len(rows[at]) + 1)
            rows[at] = rows[at][:cut] + rng.choice(TOKENS) + rows[at][cut:]
        elif way == 4:
            rows = rows[:at]
        elif rows:
            rows[at] = "".join(chr((ord(c) ^ (1 << rng.randrange(7))) or 32) for c in rows[at])
    return "\n".join(rows)


def mutated_bytes(data, rng):
    """Flips, holes, repeats, cuts; single bytes more often than anything else."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        if not data:
            break
        at, way = rng.randrange(len(data)), rng.randrange(7)
        if way <= 2:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 3:
            data[at] = rng.choice([0, 0xFF, 0x7F, 0x80, data[at - 1]])
        elif way == 4:
            n = rng.choice([1, 4, 64, 512])
            data[at : at + n] = bytes(min(n, len(data) - at))
        elif way == 5:
            n = rng.choice([1, 8, 64])
            data[at:at] = data[at : at + n]
        else:
            del data[at : rng.choice([at + 1, at + 8, len(data)])]
    return bytes(data)


# ---- studies ---------------------------------------------------------------------------------------------------------


def try_studies(folder, count, seed, monkeypatch, capsys):
    rng = random.Random(seed)
    read, said = 0, []
    for i in range(count):
        path = folder / f"{i}.toml"
        path.write_text(mutated_text(STUDY, rng), encoding="utf-8", errors="replace")
        try:
            study = Study.load(path)
            workflows.check_plan(study)
            workflows.warnings_of(study)
            read += 1
        except CloisterError as e:
            said.append(str(e))
        if i % 10 == 0:  # the same through the command line, which also looks for the files
            words = ["cloister", "rehearse", "bin-values", str(path), "--data", "a=no.csv", "--data", "b=no.csv"]
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            told = capsys.readouterr()
            assert ended.value.code in (1, 2)
            assert "Traceback" not in told.err
            assert "bug in Cloister" not in told.err
    assert all(text and len(text) < 1000 for text in said)
    return read, len(said)


def test_a_few_mutated_studies(tmp_path, monkeypatch, capsys):
    _, refused = try_studies(tmp_path, 60, 1, monkeypatch, capsys)
    assert refused > 20


@pytest.mark.slow
def test_five_hundred_mutated_studies(tmp_path, monkeypatch, capsys):
    read, refused = try_studies(tmp_path, 500, 0, monkeypatch, capsys)
    assert min(read, refused) > 50


# ---- files -----------------------------------------------------------------------------------------------------------

READER = """
import contextlib, io, sys
from cloister.cli import main as cli
for path in sys.argv[1:]:
    told = io.StringIO()
    cli.err.file = cli.out.file = told
    sys.argv = ["cloister", "check", path, "--for", "bin-values"]
    try:
        cli.main()
    except SystemExit as e:
        code = e.code or 0
    wrong = "Traceback" in told.getvalue() or "bug in Cloister" in told.getvalue()
    print(path, code, "WRONG " + told.getvalue().strip() if wrong else "fine", flush=True)
"""


def make_files(folder):
    adata = demo_sites()["basel"][:60, :80].copy()
    for suffix in (".h5ad", ".csv", ".npz"):
        write_cells(adata, folder / f"good{suffix}")
    return {s: (folder / f"good{s}").read_bytes() for s in (".h5ad", ".csv", ".npz")}


def try_files(folder, count, seed, batch=25):
    """Mutated files through `cloister check`, many to a process; a process that dies is the failure we look for."""
    rng, good, paths = random.Random(seed), make_files(folder), []
    for i in range(count):
        suffix = rng.choice([".h5ad", ".h5ad", ".h5ad", ".csv", ".npz"])
        data = good[suffix]
        if suffix == ".csv" and rng.random() < 0.5:
            mutated = mutated_text(data.decode(), rng).encode("utf-8", "replace")
        elif suffix == ".h5ad" and rng.random() < 0.6:  # HDF5's own tables stand at the beginning of a small file
            mutated = mutated_bytes(data[:8192], rng) + data[8192:]
        else:
            mutated = mutated_bytes(data, rng)
        paths.append(folder / f"m{i}{suffix}")
        paths[-1].write_bytes(mutated)
    codes = {}
    for at in range(0, count, batch):
        part = [str(p) for p in paths[at : at + batch]]
        done = subprocess.run([sys.executable, "-c", READER, *part], capture_output=True, text=True, timeout=60 * batch)
        told = [line for line in done.stdout.splitlines() if line.startswith(str(folder))]
        assert len(told) == len(part), f"died ({done.returncode}) at {part[len(told)]}: {done.stderr[-500:]}"
        for line in told:
            path, code, word, *_ = line.split(" ", 3)
            assert word == "fine", line
            assert int(code) in (0, 1), line
            codes[path] = int(code)
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]  # nothing half-written
    return codes


def test_a_few_mutated_files(tmp_path):
    codes = try_files(tmp_path, 12, 3, batch=12)
    assert 1 in codes.values()


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_five_hundred_mutated_files(tmp_path, shard):
    codes = list(try_files(tmp_path, 125, 100 + shard).values())
    assert min(codes.count(0), codes.count(1)) > 10


def test_a_file_on_which_hdf5_hangs_or_crashes_is_one_sentence(tmp_path, monkeypatch):
    """The child is made to crash and to spin here; which damage does that to the library depends on its version."""
    from cloister.cells import probe as hdf5_probe
    from cloister.cells.files import read_cells
    from cloister.errors import DataError

    make_files(tmp_path)
    child = tmp_path / "child.py"
    spin = (  # the program by its path: its package takes long to import where the machine is busy
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('probe', {hdf5_probe.__file__!r})\n"
        "probe = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(probe)\n"
        "probe.walk = lambda path: max(iter(int, 1))\n"
        "probe.serve()"
    )
    monkeypatch.setattr(hdf5_probe, "__file__", str(child))
    monkeypatch.setattr(hdf5_probe, "SECONDS", 1.0)
    monkeypatch.setattr(hdf5_probe, "PATIENCE", 600.0)  # its second on the processor ends the child, no clock
    for code in ("import os; input(); os.abort()", spin):
        hdf5_probe._end()
        child.write_text(code)
        with pytest.raises(DataError, match="damaged or cut short"):
            read_cells(tmp_path / "good.h5ad")
    hdf5_probe._end()


def test_a_file_whose_trial_gets_no_processor_is_not_called_damaged(tmp_path, monkeypatch):
    """A busy machine: the child waits and does nothing, which says nothing about the file."""
    from cloister.cells import probe as hdf5_probe
    from cloister.cells.files import read_cells
    from cloister.errors import DataError

    make_files(tmp_path)
    hdf5_probe._end()
    (tmp_path / "child.py").write_text("import time; time.sleep(60)")
    with monkeypatch.context() as m:
        m.setattr(hdf5_probe, "__file__", str(tmp_path / "child.py"))
        m.setattr(hdf5_probe, "PATIENCE", 0.02)
        with pytest.raises(DataError, match="took too long to be tried"):
            read_cells(tmp_path / "good.h5ad")
    assert read_cells(tmp_path / "good.h5ad").n_obs > 0  # and is tried again


def test_a_child_that_left_is_replaced(tmp_path, monkeypatch):
    from cloister.cells import probe as hdf5_probe
    from cloister.cells.files import read_cells

    make_files(tmp_path)
    hdf5_probe._end()
    read_cells(tmp_path / "good.h5ad")
    child = hdf5_probe._child
    child.stdin.close()  # it leaves
    assert child.wait(timeout=120) == 0
    (tmp_path / "other.h5ad").write_bytes((tmp_path / "good.h5ad").read_bytes())
    read_cells(tmp_path / "other.h5ad")
    assert hdf5_probe._child is not child
    assert child.poll() == 0


def test_a_file_that_is_asked_about_while_the_child_leaves_is_not_called_damaged(tmp_path, monkeypatch):
    """The pipe of a process that ends closes before it has ended; who looked in between took the file for damaged."""
    from cloister.cells import probe as hdf5_probe
    from cloister.cells.files import read_cells

    make_files(tmp_path)
    hdf5_probe._end()
    leaves = "import os, time\ninput()\nos.close(1)\ntime.sleep(0.5)\n"
    serves = f"import runpy\nrunpy.run_path({hdf5_probe.__file__!r}, run_name='__main__')\n"
    (tmp_path / "child.py").write_text(
        "import pathlib\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        f"begun = first.exists()\nfirst.touch()\nexec({serves!r} if begun else {leaves!r})\n"
    )
    monkeypatch.setattr(hdf5_probe, "__file__", str(tmp_path / "child.py"))
    assert read_cells(tmp_path / "good.h5ad").n_obs > 0
    assert (tmp_path / "first").exists()
    hdf5_probe._end()


def test_results_are_whole_or_not_there(tmp_path, monkeypatch, capsys):
    """A rehearsal with one damaged file leaves no results."""
    good = make_files(tmp_path)
    (tmp_path / "bad.h5ad").write_bytes(good[".h5ad"][: len(good[".h5ad"]) // 2])
    out = tmp_path / "out"
    files = {"a": "good.h5ad", "b": "good.csv", "c": "bad.h5ad"}
    data = [w for site, name in files.items() for w in ("--data", f"{site}={tmp_path / name}")]
    monkeypatch.setattr(sys, "argv", ["cloister", "rehearse", "bin-values", *data, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "damaged or cut short" in capsys.readouterr().err
    assert not out.exists()


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frames():
    """Every frame of three real runs, with sender and recipient."""
    seen = []
    carry = rehearsal.Wires.carry
    patch = pytest.MonkeyPatch()
    patch.setattr(rehearsal.Wires, "carry", lambda self, s, t, d: (seen.append((s, t, d)), carry(self, s, t, d))[1])
    sites = {p: a[:60].copy() for p, a in demo_sites().items()}
    rehearsal.rehearse("bin-values", sites, min_values=10)
    rehearsal.rehearse("bin-values", sites, mode="published", min_values=10)
    rehearsal.rehearse("map-labels", sites, query="vienna", use_rep="X_pca", n_neighbors=3)
    patch.undo()
    return [f for f in seen if len(f[2]) < 200_000]


def try_frames(frames, count, seed):
    """What a mailbox makes of mutated frames, and the decoder of what passes: named errors, in bounded time."""
    rng, refused, read = random.Random(seed), 0, 0
    kinds = {spec.name: cls for cls in message_classes() for spec in [cls.__message__]}
    began = time.monotonic()
    for _ in range(count):
        sender, to, data = rng.choice(frames)
        box = Mailbox(to)
        data = mutated_bytes(data, rng)
        box.put(sender, data)
        if wrong := box.fatal or box.failed.get(sender):
            assert wrong.code
            refused += 1
            continue
        try:
            frame = wire.unpack(data)
            if frame.kind == "data" and frame.name in kinds:
                wire.from_fields(kinds[frame.name], frame.body)
            read += 1
        except WireError:
            refused += 1
    assert time.monotonic() - began < 60 + count / 20
    return read, refused


def message_classes():
    import sys

    from cloister.mpc.net import channel  # noqa: F401

    return {
        x
        for name, module in list(sys.modules.items())
        if name.startswith("cloister.")
        for x in vars(module).values()
        if isinstance(x, type) and hasattr(x, "__message__")
    }


def test_a_thousand_mutated_messages(frames):
    assert len({d for _, _, d in frames}) > 50
    assert try_frames(frames, 1000, 0)[1] > 100


@pytest.mark.slow
def test_ten_thousand_mutated_messages(frames):
    read, refused = try_frames(frames, 10_000, 1)
    assert min(read, refused) > 200


def play_with_one_damaged_message(rng, monkeypatch):
    """One run of bin-values in which one frame, any one, is damaged on its way."""
    left = [rng.randrange(60)]
    carry = rehearsal.Wires.carry

    def damaged(self, sender, to, data):
        if wire.unpack(data).kind == "data":
            left[0] -= 1
            if left[0] == 0:
                data = mutated_bytes(data, rng)
                self._deliver(sender, to, data)
                return
        carry(self, sender, to, data)

    sites = {p: a[:40, :60].copy() for p, a in demo_sites().items()}
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal.Wires, "carry", damaged)
        return rehearsal.rehearse("bin-values", sites, min_values=10, timeout=3.0, check=False)


def check_end(run, what):
    for party, error in run.errors.items():
        assert isinstance(error, CloisterError), f"{what}: {party} ended by {error!r}"
        assert str(error)
    if not run.errors:
        edges = [run.data[p].uns["cloister"]["bin_edges"] for p in run.data]
        assert all(np.array_equal(edges[0], e) for e in edges[1:])


@pytest.mark.slow
def test_a_damaged_message_in_a_live_run_ends_in_a_result_or_by_name(monkeypatch):
    rng = random.Random(5)
    for i in range(40):
        began = time.monotonic()
        check_end(play_with_one_damaged_message(rng, monkeypatch), i)
        assert time.monotonic() - began < 60
