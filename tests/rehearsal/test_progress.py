"""Progress: what is done of how much, rounds, bytes, time left; on a terminal, and nowhere else."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.cells.progress import Pace, told_to
from cloister.mpc.net.events import Event
from cloister.rehearsal.progress import Standing, Watch, passes_of
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.study import Party

BASEL = Party("basel")
STEP = Event(BASEL, "step", "reading", "-", "adata.X", "", 0, 0, 0, 0, 100)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_pass_says_how_much_is_done_and_how_long_the_rest_takes():
    clock = Clock()
    watch = Watch(clock)
    said = []
    for clock.now, done in ((0.0, 20), (5.0, 30), (10.0, 40), (40.0, 100)):
        said.append(str(watch.hear(replace(STEP, done=done))))
    assert said == [
        "reading adata.X, 20%",
        "reading adata.X, 30%",
        "reading adata.X, 40%",
        "reading adata.X, 100%",
    ]
    clock.now = 50.0  # the next pass over the same cells: its time is its own
    assert str(watch.hear(replace(STEP, done=10))) == "reading adata.X, 10%"
    clock.now = 52.0
    assert watch.hear(replace(STEP, done=20)).left == pytest.approx(16.0)


def test_lines_of_the_modes_own_protocol_are_counted_and_those_of_others_are_not():
    clock = Clock()
    watch = Watch(clock)
    sent = Event(BASEL, "sent", "shared_pca", "L1", "x.Names", "hub", 10, 1000, 3)
    clock.now = 1.0
    assert str(watch.hear(sent)) == "shared_pca L1 Names, round 3, 1.0 kB sent"
    inner = replace(sent, protocol="secure_sum", line="L2", name="secure_sum.MaskedInput", total=2000, rounds=5)
    now = watch.hear(inner)
    assert (now.doing, now.done, now.of, now.rounds, now.sent) == ("secure_sum L2 MaskedInput", 1, 7, 5, 2000)
    clock.now = 9.0
    now = watch.hear(replace(sent, line="L5", total=3000, rounds=6))
    assert (now.count, now.left) == ("line 5 of 7", pytest.approx(8 * 2 / 5))
    assert watch.hear(replace(sent, line="L4")).done == 5  # a loop goes back, the bar does not


def test_where_steps_are_counted_lines_are_not():
    watch = Watch(Clock())
    step = Event(BASEL, "step", "federated_training", "L7", "training, round 3 of 10", "", 0, 0, 0, 3, 10)
    assert watch.hear(step).count == "step 3 of 10"
    sent = replace(step, kind="sent", name="federated_training.Update", done=0, of=0)
    assert watch.hear(sent).count == "step 3 of 10"


def test_after_a_pass_its_count_is_not_shown_any_more():
    watch = Watch(Clock())
    watch.hear(replace(STEP, done=60))
    assert watch.hear(replace(STEP, kind="sent", protocol="common_genes", name="x.Genes", of=0)).count == ""


def test_hours_are_told_in_minutes():
    assert Standing("x", left=7200.0).time_left == "about 120 min left"


def test_a_short_pass_says_nothing_and_a_long_one_says_its_end(monkeypatch):
    heard = []
    with told_to(lambda *said: heard.append(said)):
        Pace("reading", "adata.X").tell(10, 10)
        assert heard == []
        monkeypatch.setattr("cloister.cells.progress._TELL", 0.0)
        pace = Pace("writing", "binned")
        monkeypatch.setattr("cloister.cells.progress._TELL", 60.0)
        pace._said = float("-inf")
        for done in (1, 2, 12):
            pace.tell(done, 10)
    assert heard == [("writing", "binned", 1, 10), ("writing", "binned", 10, 10)]
    assert passes_of("basel", None) is None


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Three sites on disk, read in pieces, every one of which is told."""
    sites = demo_sites()
    for site, adata in sites.items():
        write_cells(adata, tmp_path / f"{site}.h5ad")
    return {site: tmp_path / f"{site}.h5ad" for site in sites}


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_tells_of_reading_protocol_and_writing(processes, files, tmp_path, monkeypatch):
    monkeypatch.setattr("cloister.cells.progress._TELL", 0.0)
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 0)
    events = []
    run = rehearse("bin-values", files, processes=processes, on_event=events.append)
    save_run(run, tmp_path / "out", on_event=events.append)
    watch = Watch()
    seen = {(e.party, watch.hear(e).doing.split(" ")[0]) for e in events}
    for site in files:
        assert {(site, stage) for stage in ("reading", "writing", "pooled_quantiles", "secure_sum")} <= seen
    assert ("report", "reading") in seen  # of the sample that is drawn
    assert all(watch.standings[site].rounds > 3 and watch.standings[site].sent > 10_000 for site in files)
    sent = [e for e in events if e.party == "basel" and e.kind == "sent"]
    assert [e.rounds for e in sent] == sorted(e.rounds for e in sent)
    assert sent[-1].total == run.cost["basel"]["bytes"]


def test_a_listener_that_fails_stops_neither_run_nor_writing(files, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("cloister.cells.progress._TELL", 0.0)
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 0)

    def broken(event):
        raise ValueError

    run = rehearse("bin-values", files, on_event=broken)
    assert (tmp_path / "out" / "basel.h5ad") in save_run(run, tmp_path / "out", on_event=broken)
    assert "progress is no longer shown" in caplog.text


# ---- what a person sees ----------------------------------------------------------------------------------------------


def shown_on_a_terminal(command, env):
    """Run a command whose standard error is a pseudo-terminal; what it wrote there, and to standard output."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=env) as child:
        os.close(theirs)
        said, end = b"", time.monotonic() + 600
        while time.monotonic() < end:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                more = os.read(ours, 1 << 16)
            except OSError:  # the terminal was closed
                break
            if not more:
                break
            said += more
        out = child.stdout.read()
        assert child.wait(120) == 0, said.decode()
    os.close(ours)
    return said.decode(errors="replace"), out.decode()


# a child of its own: pieces are small, every one is told, and all that is told is drawn (otherwise ten times a second)
COMMAND = (
    "import rich.progress\n"
    "update = rich.progress.Progress.update\n"
    "rich.progress.Progress.update = lambda bar, *args, **told: (update(bar, *args, **told), bar.refresh())[0]\n"
    "import sys, cloister.cells.files, cloister.cells.progress, cloister.cells.values\n"
    "cloister.cells.files.IN_MEMORY, cloister.cells.progress._TELL = 0, 0.0\n"
    "cloister.cells.values.blocks.__kwdefaults__['entries'] = 20_000\n"
    "from cloister.cli.main import main\n"
    "main()"
)
SIZED = {"COLUMNS": "180", "LINES": "40", "TERM": "xterm-256color"}


def rehearse_command(files, out):
    data = [word for site, path in files.items() for word in ("--data", f"{site}={path}")]
    return [sys.executable, "-c", COMMAND, "rehearse", "bin-values", *data, "--out", str(out)]


def test_rehearse_shows_progress_on_a_terminal_and_none_in_a_pipe(files, tmp_path):
    env = {**os.environ, **SIZED}
    said, out = shown_on_a_terminal(rehearse_command(files, tmp_path / "a"), env)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    for site in files:
        assert site in plain
    assert re.search(r"reading adata\.X .*\d+%", plain)
    assert re.search(r"pooled_quantiles L\d .* line \d of \d .*\d+ rounds, [\d.]+ kB", plain)
    assert re.search(r"writing (binned|copy of the file) .*\d+%", plain)
    assert re.search(r"report page", plain)
    assert re.search(r"about \d+ s left", plain)
    assert "rounds" in out  # the table
    piped = subprocess.run(rehearse_command(files, tmp_path / "b"), capture_output=True, env=env, check=True)
    assert b"reading" not in piped.stderr + piped.stdout
    assert b"\x1b" not in piped.stderr + piped.stdout


def test_check_shows_progress_on_a_terminal(files):
    said, _ = shown_on_a_terminal(
        [sys.executable, "-c", COMMAND, "check", str(files["basel"])], {**os.environ, **SIZED}
    )
    assert re.search(r"reading adata\.X .*\d+%", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said))


def test_no_event_holds_a_value_of_a_cell(files, monkeypatch):
    monkeypatch.setattr("cloister.cells.progress._TELL", 0.0)
    events = []
    rehearse("bin-values", files, on_event=events.append)
    passes = [e for e in events if e.protocol == "reading"]
    lengths = {n for site in demo_sites().values() for n in site.shape}
    assert {e.of for e in passes} <= lengths  # cells or genes, which whoever holds the file knows
    assert {e.name for e in passes} <= {"adata.X"}
