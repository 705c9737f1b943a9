"""Files appear whole or not at all, and private ones are private from the first byte."""

import stat

import pytest

from cloister import files


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
