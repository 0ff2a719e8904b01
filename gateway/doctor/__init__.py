"""`forebay doctor`: what is wrong, risky or slow here. Each check yields findings with advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, and is risky or slow."""
    ERROR = "error"
    """Something that the configuration asks for does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what was found, and one of what to do: empty where that is nothing. Neither holds a secret."""

    area: str
    level: Level
    found: str
    advice: str = ""


def ok(area: str, found: str) -> Finding:
    """All is well."""
    return Finding(area, Level.OK, found)


def note(area: str, found: str, advice: str = "") -> Finding:
    """Worth knowing."""
    return Finding(area, Level.NOTE, found, advice)


def warning(area: str, found: str, advice: str) -> Finding:
    """Risky or slow."""
    return Finding(area, Level.WARNING, found, advice)


def error(area: str, found: str, advice: str) -> Finding:
    return Finding(area, Level.ERROR, found, advice)
