"""Files appear whole or not at all, private ones are private from the first byte, and one run at a time has them."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from cloister import files
from cloister.errors import DataError


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_for_its_owner_only_while_it_is_written_and_after(tmp_path):
    with files.replacing(tmp_path / "key.bin") as part:
        assert mode(part) == 0o600
        part.write_bytes(b"secret")
    assert mode(tmp_path / "key.bin") == 0o600
    assert mode(files.write(tmp_path / "deep" / "page.html", "hello", private=False)) & 0o400


def test_a_file_that_stood_there_survives_a_writer_that_fails(tmp_path):
    path = files.write(tmp_path / "state.json", "old")

    def fail():
        with files.replacing(path) as part:
            part.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_link_left_beside_it_is_not_followed(tmp_path):
    """The name to write to cannot be guessed, and a file of that name is never opened."""
    path = tmp_path / "state.json"
    with files.replacing(path) as first, files.replacing(path) as second:
        assert first != second
        first.write_text("one")
        second.write_text("two")
    assert path.read_text() == "one"


def test_folders_that_are_made_for_private_files_are_private_all_the_way(tmp_path):
    made = files.private_folder(tmp_path / "a" / "b" / "c")
    assert [mode(p) for p in (made, made.parent, made.parent.parent)] == [0o700] * 3
    (tmp_path / "open").mkdir(mode=0o755)
    files.private_folder(tmp_path / "open" / "in")
    assert mode(tmp_path / "open") & 0o055 == 0o055  # what was there is left as it was


def test_a_new_name_is_on_disk_before_a_writer_goes_on(tmp_path, monkeypatch):
    done, replace, fsync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("name"), replace(a, b))[1])

    def synced(fd):
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    files.write(tmp_path / "state", "one")
    assert done == ["file", "name", "folder"]
    for code in (errno.EINVAL, errno.EIO):

        def fails(fd, code=code):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fails)
        if code == errno.EINVAL:  # a mounted folder that knows of no such thing
            files.write(tmp_path / "state", "two")
        else:
            with pytest.raises(OSError, match="error"):
                files.write(tmp_path / "state", "three")


@pytest.mark.parametrize("with_fcntl", [True, False])
def test_one_run_at_a_time(tmp_path, monkeypatch, with_fcntl):
    if not with_fcntl:
        monkeypatch.setattr(files, "fcntl", None)
    path = tmp_path / "deep" / "state.npz"

    def try_again():
        with files.locked(path):
            pass

    with files.locked(path):
        assert mode(path.parent) == 0o700
        with pytest.raises(DataError, match="state.npz is in use by another run; start again when that has ended"):
            try_again()
        with files.locked(tmp_path / "deep" / "other"):
            pass
    try_again()
    counted = []

    def count():
        with files.locked(path, wait=30.0):
            before = len(counted)
            counted.append(before)
            assert len(counted) == before + 1

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == list(range(8))


def test_a_lock_ends_with_its_process_and_what_that_left_half_written_goes(tmp_path):
    """Killed while it writes a key: the half of it is gone as soon as somebody else has the lock."""
    path = tmp_path / "own" / "key.npz"
    other, lies = tmp_path / "own" / f".other.{'0' * 32}.part", tmp_path / "own" / "key.npz" / f".in.{'1' * 32}.part"
    code = (
        "import os, signal, sys, pathlib\nfrom cloister import files\npath = pathlib.Path(sys.argv[1])\n"
        "with files.locked(path), files.replacing(path) as part:\n"
        "    part.write_bytes(b'half a key')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    other.touch()
    assert len(list(path.parent.glob(".key.npz.*.part"))) == 1
    with files.locked(path):
        assert list(path.parent.glob(".key.npz.*.part")) == []
    assert other.exists()  # of another file, which has a lock of its own
    path.mkdir()
    lies.touch()
    with files.locked(path):  # of a folder: all in it
        assert list(path.iterdir()) == []


def test_without_fcntl_a_killed_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    (tmp_path / "state.lock").touch()
    with pytest.raises(DataError, match=r"if that was killed, remove .*state\.lock"), files.locked(tmp_path / "state"):
        pass
