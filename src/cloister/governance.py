"""Governance: on what grounds a study is done and for how long, in words that a data protection officer signs.

    [governance]                        # in study.toml; every line may be left out
    purpose = "Which cell types differ between responders and non-responders to anti-TNF"
    legal_basis = "Art. 9(2)(j) GDPR, consent of the donors"
    permit = "EKNZ 2026-01234"          # of an ethics committee or another authority
    contact = "privacy@hospital.example"
    retention = "2 years, then deleted" # begins with days, months or years, or with a date; results are kept so long
    expires = "2027-12-31"              # the last day, in UTC, on which it may run

The words are hashed into the study's digest: whoever approves the study approves them, and a change asks again.
"""

from __future__ import annotations

import calendar
import datetime
import re
from collections.abc import Mapping
from typing import Any

from cloister.errors import ParameterError

FIELDS = {  # key → what people read
    "purpose": "Purpose",
    "legal_basis": "Legal basis",
    "permit": "Permit",
    "contact": "Contact",
    "retention": "Results are kept",
    "expires": "May run until",
}
LONGEST = 2000  # characters of one line
PERIOD = re.compile(r"(\d{1,4}) (day|month|year)s?\b")
DATE = re.compile(r"\d{4}-\d\d-\d\d\b")


def read_governance(raw: Mapping[str, Any]) -> dict[str, str]:
    """The table as it stands in TOML, whose own dates become text; the error names the key."""
    return {key: value.isoformat() if type(value) is datetime.date else value for key, value in raw.items()}


def check_governance(table: Mapping[str, Any]) -> None:
    """Raise `ParameterError` unless every line is known, a text, and says a time where one is meant."""
    for key, value in table.items():
        if key not in FIELDS:
            raise ParameterError(f"[governance] unknown key '{key}'; known are {', '.join(FIELDS)}")
        if not isinstance(value, str) or not value.strip() or len(value) > LONGEST or not value.isprintable():
            raise ParameterError(
                f"[governance] {key} must be one line of text, at most {LONGEST} characters, found {str(value)[:40]!r}"
            )
    if (said := table.get("expires")) is not None and _date(said) != said:
        raise ParameterError(f"[governance] expires must be a date as 2027-12-31, found {said!r}")
    if (said := table.get("retention")) is not None and keep_until(table, datetime.date(2000, 1, 1)) is None:
        raise ParameterError(
            f"[governance] retention must begin with a time as '90 days', '24 months', '2 years', or with a date as"
            f" 2027-12-31, found {said!r}"
        )


def expired(table: Mapping[str, str], today: datetime.date | None = None) -> bool:
    """Whether the last day has passed."""
    last = table.get("expires")
    return last is not None and (today or now()) > datetime.date.fromisoformat(last)


def keep_until(table: Mapping[str, str], made: datetime.date) -> datetime.date | None:
    """The last day on which results that were made then may be kept; None if the study does not say."""
    said = table.get("retention", "")
    if date := _date(said):
        return datetime.date.fromisoformat(date)
    if not (found := PERIOD.match(said)):
        return None
    number, unit = int(found[1]), found[2]
    try:
        if unit == "day":
            return made + datetime.timedelta(days=number)
        months = made.year * 12 + made.month - 1 + number * (12 if unit == "year" else 1)
        year, month = divmod(months, 12)
        return datetime.date(year, month + 1, min(made.day, calendar.monthrange(year, month + 1)[1]))
    except (OverflowError, ValueError):  # beyond the calendar
        return datetime.date.max


def in_words(table: Mapping[str, str]) -> list[tuple[str, str]]:
    """Rows of what people read: title and text, in the order of `FIELDS`."""
    return [(title, table[key]) for key, title in FIELDS.items() if key in table]


def now() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _date(text: str) -> str | None:
    """The date that a text begins with, if there is such a day."""
    if not (found := DATE.match(text)):
        return None
    try:
        return datetime.date.fromisoformat(found[0]).isoformat()
    except ValueError:
        return None
