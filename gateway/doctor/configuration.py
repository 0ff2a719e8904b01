"""The configuration: what cannot be used, what is not in force, what is risky."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.admin.formatting import size_text
from gateway.config import Settings
from gateway.config.loading import LoadedSettings
from gateway.config.problems import SettingsError
from gateway.doctor.findings import Finding, error, note, ok, warning

AREA = "configuration"

_ADVICE: Mapping[str, str] = {
    "the admin port listens": "set admin.token, or listen on 127.0.0.1",
    "INSECURE": "add [[credentials]], or listen on 127.0.0.1 (server.host)",
    "there are no [[credentials]]": "add [[credentials]] that say who may call, and for which prefixes",
    "is not a setting": "spell it as docs/configuration.md does, or unset it",
    "the file system of": "make cache.capacity or the buffers smaller, or give them a larger disk",
    "is not in force": "set what it needs, or remove it",
}
"""Words of a warning -> what to do."""

_ABOUT_THE_DISK = "LOSES ACKNOWLEDGED WRITES"
"""The disk's own check says so."""


def unusable(problems: SettingsError) -> Iterator[Finding]:
    """Every setting that cannot be used."""
    for problem in problems.problems:
        where = problem.source or "the file"
        yield error(AREA, str(problem), f"change {problem.key} in {where}; docs/configuration.md has every key")


def configuration(file: Path | None, loaded: LoadedSettings) -> Iterator[Finding]:
    """Yield the settings in force, and every warning of the start."""
    settings = loaded.settings
    origin = "no file, so variables and defaults" if file is None else str(file)
    slots = len(settings.slots)
    yield ok(
        AREA,
        f"{origin}: {slots} slot{'' if slots == 1 else 's'}, cache of {size_text(settings.cache.capacity_bytes)} in "
        f"{settings.cache.directory}, origin {settings.origin.endpoint_url}",
    )
    for text in loaded.warnings:
        if _ABOUT_THE_DISK in text:
            continue
        advice = next((advice for words, advice in _ADVICE.items() if words in text), "see docs/configuration.md")
        yield warning(AREA, text, advice)
    yield from _slots(settings)


def _slots(settings: Settings) -> Iterator[Finding]:
    if not settings.slots:
        yield note(
            AREA,
            "no [[slots]]: each GET asks the origin by HEAD whether the object is the same, and writes go through",
            'give data that does not change a slot with mode = "read-only" and consistency = "immutable"',
        )
    for slot in settings.slots:
        if slot.write == "scratch":
            yield note(
                AREA,
                f"slot {slot.name}: write = scratch sends nothing to the origin",
                "keep nothing there that must last",
            )
