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


class Area(str):
    """A part of the machine that is looked at; it makes findings."""

    def ok(self, found: str) -> Finding:
        return Finding(self, Level.OK, found)

    def note(self, found: str, advice: str = "") -> Finding:
        return Finding(self, Level.NOTE, found, advice)

    def warning(self, found: str, advice: str) -> Finding:
        return Finding(self, Level.WARNING, found, advice)

    def error(self, found: str, advice: str) -> Finding:
        return Finding(self, Level.ERROR, found, advice)
