"""Sizes, bandwidths and durations as people write them: `8MiB`, `1.25GiB/s`, `5m`."""

from __future__ import annotations

import math
import re
from typing import Literal

SIZE_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE_FORM = 'a size such as "8MiB", "1.5TiB" or a number of bytes'
BANDWIDTH_FORM = 'a bandwidth such as "500MiB/s" or a number of bytes per second'
DURATION_FORM = 'a duration such as "500ms", "60s", "5m", "1h" or a number of seconds'

WHOLE_MAX = 2**60
"""Sizes and bandwidths stop here, at 1024PiB: sums of several are far from the end of a 64-bit integer, which is what
files, databases and messages between processes hold."""


class TooLarge(ValueError):
    """A quantity beyond what can be held; the message says what is allowed."""


class UnknownUnit(ValueError):
    """A quantity whose unit is unknown or missing: `why` says which; the message says the form as well."""

    def __init__(self, form: str, why: str) -> None:
        super().__init__(f"{form}; {why}")
        self.why = why


_QUANTITY = re.compile(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size_bytes(value: object) -> int:
    """Bytes from `"8MiB"` or a whole number. Raises ValueError that says the form, TooLarge."""
    return _whole(_quantity(value, {**SIZE_UNITS, "": 1}, SIZE_FORM), SIZE_FORM, "1024PiB")


def parse_bandwidth_bytes_per_second(value: object) -> int:
    """Bytes per second from `"1.25GiB/s"` or a whole number. Raises ValueError that says the form."""
    if isinstance(value, str):
        text = value.strip()
        if not text.endswith("/s") and not text.isdecimal():
            if _QUANTITY.fullmatch(text):
                raise UnknownUnit(BANDWIDTH_FORM, f'"/s" is missing behind {value!r}')
            raise ValueError(BANDWIDTH_FORM)
        value = text.removesuffix("/s")
    return _whole(_quantity(value, {**SIZE_UNITS, "": 1}, BANDWIDTH_FORM), BANDWIDTH_FORM, "1024PiB/s")


def parse_link_bandwidth(value: object) -> int | Literal["auto"]:
    """As `parse_bandwidth_bytes_per_second`, or "auto": it is found out."""
    return "auto" if value == "auto" else parse_bandwidth_bytes_per_second(value)


def parse_duration_seconds(value: object) -> float:
    """Seconds from `"5m"` or a number. Raises ValueError that says the form."""
    try:
        return float(_quantity(value, {**DURATION_UNITS, "": 1.0}, DURATION_FORM))
    except OverflowError:
        raise ValueError(DURATION_FORM) from None


def _whole(quantity: float, form: str, most: str) -> int:
    if quantity > WHOLE_MAX:
        raise TooLarge(f"{form}, at most {most}")
    return round(quantity)


def _quantity(value: object, units: dict[str, int] | dict[str, float], form: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < math.inf:
            raise ValueError(form)
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(form)
    if match[2] not in units:
        close = next((unit for unit in units if unit.lower() == match[2].lower()), None)
        hint = f"did you mean {close}?" if close else f"known are {', '.join(filter(None, units))}"
        raise UnknownUnit(form, f"the unit {match[2]!r} is not known, {hint}")
    number = match[1]
    # Whole numbers stay integers: a float would round sizes above 2**53.
    return (float(number) if "." in number else int(number)) * units[match[2]]


def format_size(size_bytes: int) -> str:
    """Return the shortest exact spelling in binary units, else bytes: 8388608 -> `8MiB`."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= SIZE_UNITS[unit] and size_bytes % SIZE_UNITS[unit] == 0:
            return f"{size_bytes // SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def format_duration(seconds: float) -> str:
    """300.0 -> `5m`, 75.0 -> `75s`, 0.5 -> `500ms`."""
    for unit in ("d", "h", "m"):
        if seconds >= DURATION_UNITS[unit] and seconds % DURATION_UNITS[unit] == 0:
            return f"{int(seconds // DURATION_UNITS[unit])}{unit}"
    return f"{int(seconds)}s" if seconds == int(seconds) else f"{seconds * 1000:g}ms"
