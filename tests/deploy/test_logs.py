"""How far a run is: the log and the file of its process, and who is not told."""

import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloister.deploy import control_socket, logs
from cloister.deploy.kit import RUNS
from cloister.deploy.logs import PROGRESS, Teller, last_event, standing_of
from cloister.mpc.net.events import Event
from cloister.study import Party

STEP = Event(Party("basel"), "step", "reading", "-", "adata.X", "", 0, 0, 0, 40, 100)


@pytest.fixture
def kit(tmp_path):
    return SimpleNamespace(path=tmp_path)


@pytest.fixture
def lines():
    """What the runtime logs, and whether a pipe would get it."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.getMessage(), hasattr(record, "progress")))
    logger = logging.getLogger("cloister.deploy")
    before = logger.level
    logger.setLevel(logging.INFO)  # not the attribute: loggers remember what they let through
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_the_last_event_is_there_for_who_waits_until_the_run_ends(kit, monkeypatch):
    monkeypatch.setattr(logs, "EVERY", 600.0)
    assert last_event(kit) is None
    tell = Teller(kit, "3f2a9c1e00")
    tell(STEP)
    assert last_event(kit) == STEP
    tell(replace(STEP, done=50))  # too soon after the first
    assert last_event(kit) == STEP
    tell._filed -= 600.0
    tell(replace(STEP, done=60))
    assert last_event(kit).done == 60
    tell.end()
    assert last_event(kit) is None
    assert list((kit.path / RUNS).iterdir()) == []


def test_where_a_run_stands_is_told_by_its_id_with_what_only_the_process_knows(kit):
    assert standing_of(kit, "aa") is None
    tell = Teller(kit, "aa")
    tell(replace(STEP, done=20))
    tell._filed -= 1.0
    tell._watch._series["basel"] = (("reading", "adata.X"), time.monotonic() - 40.0, 0)  # for 40 s
    tell(replace(STEP, done=40, total=2000, rounds=3))
    now = standing_of(kit, "aa")
    assert (now.doing, now.count, now.sent, now.rounds) == ("reading adata.X", "40%", 2000, 3)
    assert 59 < now.left < 120  # 40 s for 40 of 100
    assert standing_of(kit, "bb") is None
    (kit.path / RUNS / "aa.progress").write_text("[1]")
    assert standing_of(kit, "aa") is None


def test_of_two_runs_the_latest_is_followed_and_what_is_no_event_is_passed_over(kit):
    for i, run in enumerate(("aa", "bb")):
        Teller(kit, run)(replace(STEP, done=i))
        os.utime(kit.path / RUNS / f"{run}.progress", (time.time() + i, time.time() + i))
    assert last_event(kit).done == 1
    assert last_event(kit, time.time() + 10.0) is None  # of a run that was killed before
    (kit.path / RUNS / "bb.progress").write_text("{")
    assert last_event(kit) is None


def test_the_log_hears_of_a_long_run_every_ten_seconds(kit, lines):
    tell = Teller(kit, "3f2a9c1e00")
    for _ in range(5):
        tell(STEP)
    assert lines == []
    tell._logged -= logs.EVERY_LINE
    tell(replace(STEP, done=50))
    tell(replace(STEP, done=60))
    assert lines == [("run 3f2a9c1e: reading adata.X, 50%", True)] or lines[0][0].startswith(
        "run 3f2a9c1e: reading adata.X, 50%, about"
    )
    assert len(lines) == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_goes_to_a_terminal_and_to_the_log_but_to_no_pipe(terminal, tmp_path, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.getLogger("cloister")
    before, level = list(logger.handlers), logger.level
    try:
        logs.log_to(tmp_path)
        logging.getLogger("cloister.deploy").info("a run begins")
        logging.getLogger("cloister.deploy").info("reading, 50%%", extra=PROGRESS)
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
    kept = Path(tmp_path / "log.txt").read_text()
    assert "a run begins" in kept
    assert "reading, 50%" in kept
    assert "a run begins" in stream.getvalue()
    assert ("reading, 50%" in stream.getvalue()) == terminal


def test_who_follows_an_order_hears_how_far_it_is(kit):
    import socket

    ours, theirs = socket.socketpair()
    heard, said, seen = [], [], threading.Event()

    def hear(event):
        heard.append(event)
        seen.set()

    def service():
        while not seen.wait(0.05):
            Teller(kit, "aa")(STEP)  # again: what was told before somebody followed is not for him
        theirs.sendall(b'{"status": "run aa running"}\n')
        theirs.sendall(b'{"ended": {"run": "aa", "party": "hub", "status": "done"}}\n')

    threading.Thread(target=service, daemon=True).start()
    with ours, theirs:
        ended = control_socket._follow(kit, ours, time.monotonic() + 60.0, said.append, hear)
    assert ended.status == "done"
    assert said == ["run aa running"]
    assert heard
    assert set(heard) == {STEP}


# ---- for programs that collect logs ----------------------------------------------------------------------------------


def test_json_lines_and_journald_fields(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(logs.HOW, "json")
    logger = logging.getLogger("cloister")
    before = [*logger.handlers]
    home = tmp_path / "basel"
    home.mkdir()
    try:
        logs.log_to(home)
        logging.getLogger("cloister.deploy").warning('run 705d38af: a "quoted"\nword')
        console = capsys.readouterr().err
    finally:
        for handler in [h for h in logger.handlers if h not in before]:
            logger.removeHandler(handler)
            handler.close()
    for text in ((home / "log.txt").read_text(), console):
        (line,) = text.splitlines()
        said = json.loads(line)
        assert said["message"] == 'run 705d38af: a "quoted"\nword'
        assert (said["level"], said["kit"], said["run"]) == ("warning", "basel", "705d38af")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])


def test_a_line_for_journald_has_its_own_protocols_fields(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.settimeout(10)
        handler = logs.Journald("basel", str(tmp_path / "journal"))
        record = logging.LogRecord("cloister.deploy", logging.ERROR, "f", 1, "run 705d38af: two\nlines", (), None)
        handler.emit(record)
        handler.close()
        data = journal.recv(1 << 16)
    message = b"run 705d38af: two\nlines"
    assert data.startswith(b"MESSAGE\n" + len(message).to_bytes(8, "little") + message + b"\n")
    assert data.endswith(b"PRIORITY=3\nSYSLOG_IDENTIFIER=cloister\nCLOISTER_KIT=basel\nCLOISTER_RUN=705d38af\n")
