"""Purpose, permit, retention and expiry of a study: read, shown, hashed; and what is none is refused by its key."""

import dataclasses
import datetime

import pytest

from cloister import governance
from cloister.errors import ParameterError
from cloister.study import Study, format_study, parse_study

WORDS = {
    "purpose": "Which cell types differ between responders and others",
    "legal_basis": "Art. 9(2)(j) GDPR",
    "permit": "EKNZ 2026-01234",
    "contact": "privacy@hospital.example",
    "retention": "2 years, then deleted",
    "expires": "2027-12-31",
}
PLAIN = Study("n", "bin-values", {"h": "coordinator", "a": "site", "b": "site"})
STUDY = dataclasses.replace(PLAIN, governance=WORDS)
DAY = datetime.date.fromisoformat


def test_it_survives_the_file_and_changes_the_digest_word_by_word():
    assert parse_study(format_study(STUDY)) == STUDY
    assert PLAIN.digest != STUDY.digest
    for key in WORDS:
        other = {**WORDS, key: {"expires": "2027-12-30"}.get(key, WORDS[key] + ".")}
        assert dataclasses.replace(STUDY, governance=other).digest != STUDY.digest
        less = {k: v for k, v in WORDS.items() if k != key}
        assert dataclasses.replace(STUDY, governance=less).digest != STUDY.digest


def test_it_is_the_same_for_every_step():
    steps = 'name = "n"\n[parties]\nh = "coordinator"\na = "site"\n[governance]\nexpires = 2030-01-02\n'
    study = parse_study(steps + '[[step]]\nworkflow = "shared-pca"\n[[step]]\nworkflow = "integrate"\n')
    assert [dict(part.governance) for part in study.parts] == [{"expires": "2030-01-02"}] * 2  # a date of TOML's own
    assert parse_study(format_study(study.parts[1])) == study.parts[1]


@pytest.mark.parametrize(("table", "says"), [
    ({"purpos": "x"}, "unknown key 'purpos'; known are purpose, legal_basis"),
    ({"purpose": ""}, "purpose must be one line of text"),
    ({"purpose": "two\nlines"}, "purpose must be one line of text"),
    ({"purpose": "x" * 2001}, "purpose must be one line of text"),
    ({"permit": 17}, "permit must be one line of text"),
    ({"expires": "end of 2027"}, "expires must be a date as 2027-12-31"),
    ({"expires": "2027-02-30"}, "expires must be a date"),
    ({"expires": "2027-02-03 and later"}, "expires must be a date"),
    ({"retention": "as long as needed"}, "retention must begin with a time"),
    ({"retention": "2 yearsss"}, "retention must begin with a time"),
    ({"retention": "2027-13-01"}, "retention must begin with a time"),
])  # fmt: skip
def test_what_is_no_governance_is_named(table, says):
    with pytest.raises(ParameterError, match=says):
        dataclasses.replace(PLAIN, governance=table)


def test_a_table_is_wanted():
    with pytest.raises(ParameterError, match=r"\[governance\] must be a table"):
        parse_study('name = "n"\nworkflow = "w"\ngovernance = "mine"\n[parties]\nh = "coordinator"\na = "site"')


def test_a_study_may_run_on_its_last_day_and_not_after():
    assert not governance.expired(WORDS, DAY("2027-12-31"))
    assert governance.expired(WORDS, DAY("2028-01-01"))
    assert not governance.expired({}, DAY("9999-12-31"))


@pytest.mark.parametrize(("said", "made", "last"), [
    ("90 days", "2026-01-01", "2026-04-01"),
    ("1 month after the run", "2026-01-31", "2026-02-28"),
    ("24 months", "2026-11-30", "2028-11-30"),
    ("1 year", "2024-02-29", "2025-02-28"),
    ("2031-05-01, at the archive", "2026-01-01", "2031-05-01"),
    ("9999 years", "2026-01-01", "9999-12-31"),
])  # fmt: skip
def test_how_long_results_are_kept(said, made, last):
    assert governance.keep_until({"retention": said}, DAY(made)) == DAY(last)
    assert governance.keep_until({}, DAY(made)) is None
