"""The findings of an export, as lines of its manifest and as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gateway.core.model import ObjectKey
from gateway.writeback.journal.records import Write

VERSION = 1


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A damaged row of the journal: its keys, as far as they are credible, and the damage."""

    sequence: int
    key: ObjectKey
    reason: str


@dataclass(slots=True)
class Findings:
    """The findings of an export. `damaged` counts objects that could not be exported; `warnings` name other faults.

    `unnamed_files` are staged files that no readable row names: never acknowledged, unless the journal is damaged.
    """

    objects: int = 0
    size_bytes: int = 0
    tombstones: int = 0
    damaged: int = 0
    uploads: int = 0
    unnamed_files: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Return whether all that was acknowledged was found undamaged."""
        return self.damaged == 0 and not self.warnings

    def document(self) -> dict[str, Any]:
        return asdict(self)


def header_line(buffer: str, exported_at: float) -> dict[str, Any]:
    return {"type": "export", "version": VERSION, "buffer": buffer, "exported_at": exported_at}


def object_line(pending: Write, file: str) -> dict[str, Any]:
    """`parts` are number and length: with the same boundaries the object has the same ETag at the origin."""
    return _line("object", pending.sequence, pending.key) | {
        "etag": pending.etag,
        "size_bytes": pending.size_bytes,
        "file": file,
        "headers": dict(pending.spec.headers),
        "multipart": pending.multipart,
        "parts": [[part.number, part.file.size_bytes] for part in pending.parts],
        "checksums": dict(pending.checksums),
        "acknowledged_at": pending.acknowledged_at,
        "state": pending.state.name.lower(),
        "slot": pending.spec.slot,
    }


def tombstone_line(pending: Write) -> dict[str, Any]:
    return _line("tombstone", pending.sequence, pending.key) | {"acknowledged_at": pending.acknowledged_at}


def damaged_line(sequence: int, key: ObjectKey, reason: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """`files` are the staged files, as far as they are known, for inspection."""
    return _line("damaged", sequence, key) | {"reason": reason, "files": list(files)}


def upload_line(upload: Write, parts: int, size_bytes: int) -> dict[str, Any]:
    """Describe an upload that was never completed; its parts are not exported."""
    key = upload.spec.key
    named = {"type": "upload", "upload_id": upload.upload_id, "bucket": key.bucket, "key": key.key}
    return named | {"parts": parts, "size_bytes": size_bytes}


def end_line(findings: Findings) -> dict[str, Any]:
    return {"type": "end"} | findings.document()


def _line(kind: str, sequence: int, key: ObjectKey) -> dict[str, Any]:
    return {"type": kind, "sequence": sequence, "bucket": key.bucket, "key": key.key}
