"""HTTP dates (RFC 9110, 5.6.7), the one format to write and the three to read; ISO 8601 for XML."""

from __future__ import annotations

import re
from calendar import timegm
from datetime import datetime
from functools import lru_cache
from time import gmtime, strftime

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH_NUMBERS = {name: number for number, name in enumerate(_MONTHS, 1)}

_TIME = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {_TIME} (?:GMT|UTC)",
        rf"[A-Z][a-z]+day, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {_TIME} GMT",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})",
    )
)
"""IMF-fixdate, then the obsolete forms of RFC 850 and of C's asctime."""


def parse_http_date(text: str) -> float | None:
    """Seconds since the epoch; None when `text` is no date."""
    return _parse_http_date(text) if len(text) <= _CHARACTERS_MAX else None


_CHARACTERS_MAX = 40
"""More than any of the forms has: what is kept of strangers must be short."""


@lru_cache(maxsize=1024)
def _parse_http_date(text: str) -> float | None:
    for form in _FORMS:
        found = form.fullmatch(text)
        if found is not None:
            return _seconds(found)
    return None


def _seconds(found: re.Match[str]) -> float | None:
    month = _MONTH_NUMBERS.get(found["month"])
    day, year = int(found["day"]), int(found["year"])
    hour, minute, second = int(found["hour"]), int(found["minute"]), int(found["second"])
    if month is None or not 1 <= day <= 31 or hour > 23 or minute > 59 or second > 60:
        return None
    if len(found["year"]) == 2:
        year += 1900 if year >= 70 else 2000
    if year < 1900:
        return None
    return float(timegm((year, month, day, hour, minute, second)))


def format_http_date(seconds: float) -> str:
    """IMF-fixdate of `seconds` since the epoch, the fraction cut off: `Wed, 12 Oct 2009 17:50:00 GMT`."""
    at = gmtime(seconds)
    return (
        f"{_DAYS[at.tm_wday]}, {at.tm_mday:02} {_MONTHS[at.tm_mon - 1]} {at.tm_year:04} "
        f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02} GMT"
    )


def format_iso_date(seconds: float) -> str:
    """ISO 8601 as in S3's error documents, the fraction cut off: `2009-10-12T17:50:00Z`."""
    return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(seconds))


def parse_iso_date(text: str) -> float | None:
    """Seconds since the epoch of `2009-10-12T17:50:30.000Z`, as listings write dates; None when it is none."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return None
    return date.timestamp() if date.tzinfo is not None else None
