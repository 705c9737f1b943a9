"""Invitations: only the coordinator's, for this party, of now, once; and words that are a party's own."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from cloister.deploy import invitation
from cloister.deploy.invitation import FRESH, Invitation, Seen, read_word, say_word
from cloister.deploy.kit import Kit
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.study import Study

HUB, BASEL, LUGANO = (Identity.create(Entropy()) for _ in range(3))
STUDY = Study(
    "s",
    "bin-values",
    {"hub": "coordinator", "basel": "site", "lugano": "site"},
    keys={"hub": HUB.public, "basel": BASEL.public, "lugano": LUGANO.public},
)
NOW = 1_800_000_000
GOOD = Invitation(bytes(range(16)), STUDY.digest, "basel", NOW)


@pytest.fixture
def kit(tmp_path):
    return Kit(tmp_path, STUDY, "basel", BASEL)


def code(data, kit, now=NOW):
    with pytest.raises(ProtocolAbort) as caught:
        Invitation.check(data, kit, now)
    return caught.value.code


def test_what_the_coordinator_signs_for_this_party_is_an_invitation(kit):
    assert Invitation.check(GOOD.sign(HUB), kit, NOW + 5) == GOOD


def test_nobody_elses_and_no_others_is(kit):
    assert code(GOOD.sign(LUGANO), kit) == "bad-signature"
    assert code(GOOD.sign(BASEL), kit) == "bad-signature"
    assert code(dataclasses.replace(GOOD, to="lugano").sign(HUB), kit) == "bad-signature"
    assert code(GOOD.sign(HUB), kit, NOW + FRESH + 1) == "stale"
    assert code(GOOD.sign(HUB), kit, NOW - FRESH - 1) == "stale"
    data = GOOD.sign(HUB)
    for i in range(0, len(data), 7):
        assert code(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], kit) == "bad-signature"
    for bad in (b"", data[:-1], data + b"x"):
        assert code(bad, kit) == "malformed"


def test_a_run_is_answered_once_even_after_a_restart(tmp_path):
    file = tmp_path / "invitations.json"
    Seen(file).admit(GOOD.run, NOW)
    with pytest.raises(ProtocolAbort) as caught:
        Seen(file).admit(GOOD.run, NOW + 2 * FRESH - 1)  # for as long as an invitation could pass as fresh
    assert caught.value.code == "replay"
    assert file.stat().st_mode & 0o777 == 0o600
    Seen(file).admit(bytes(16), NOW + 2 * FRESH + 1)
    assert [*json.loads(file.read_text())] == ["00" * 16]  # what is too old to be repeated is forgotten
    file.write_text("{")
    with pytest.raises(ParameterError, match="damaged"):
        Seen(file).admit(GOOD.run, NOW)


def test_a_coordinator_cannot_fill_the_disk_with_invitations(tmp_path, monkeypatch):
    monkeypatch.setattr(invitation, "MOST_SEEN", 10)
    seen = Seen(tmp_path / "invitations.json")
    for i in range(10):
        seen.admit(i.to_bytes(16, "big"), time.time())
    with pytest.raises(ProtocolAbort) as caught:
        seen.admit(bytes([255] * 16), time.time())
    assert caught.value.code == "flood"


def test_a_word_is_a_partys_own(kit):
    said = say_word(BASEL, GOOD.run, "basel", "done")
    assert read_word(BASEL.public, GOOD.run, "basel", said) == "done"
    for public, run, party in ((LUGANO.public, GOOD.run, "basel"), (BASEL.public, bytes(16), "basel")):
        with pytest.raises(ProtocolAbort):
            read_word(public, run, party, said)
    with pytest.raises(ProtocolAbort):
        read_word(BASEL.public, GOOD.run, "lugano", said)
    with pytest.raises(ProtocolAbort):
        read_word(BASEL.public, GOOD.run, "basel", said[:-4] + b"lost")
    assert read_word(BASEL.public, bytes(16), "basel", say_word(BASEL, bytes(16), "basel", "a\x1b[31mb")) == "a[31mb"
