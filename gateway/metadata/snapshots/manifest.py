"""The manifest of a snapshot, which lies beside its objects; docs/on-disk-format.md.

"forebay snapshot 2", the CRC32C of the rest in hexadecimal digits, LF, the manifest as JSON
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from awscrt import checksums

from gateway.core.errors import SnapshotUnusable
from gateway.metadata.snapshots.object_file import Layout, ObjectFileExtent
from gateway.policy.slots import Prefix

FORMAT_VERSION = 1
_MAGIC = "forebay snapshot"

SNAPSHOT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ALLOWED = "letters, digits, `-`, `_`, `.`; at most 64, the first a letter or a digit"

TIME_MAX = 253_402_300_799
"""The last second of the year 9999: what dates are written in goes no further."""

BYTES_MAX = 2**63 - 1

_NAME = re.compile(SNAPSHOT_NAME[:-1] + r"\Z")


def valid_name(name: str) -> str:
    """Return the name; ValueError when it is invalid. It becomes a directory's: no other may ever reach the disk."""
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is no name of a snapshot: {ALLOWED.replace('`', '')}")
    return name


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot.

    It holds the `objects` whose keys began with `prefix` (`s3://bucket/prefix`) at `origin`, listed between
    `started_at` and `ended_at` (seconds since 1970), `size_bytes` all together. `digest` is the SHA-256, in hexadecimal
    digits, of key, NUL, ETag, NUL, size, LF of each object in the order of their keys: two snapshots of the same
    objects have the same. `id` is another for every snapshot ever made, and names its data, whose `layout` says where
    what lies in it, with checksums. `made_by` is the job that has made it, empty for an imported one.
    """

    id: str
    name: str
    prefix: str
    origin: str
    started_at: float
    ended_at: float
    objects: int
    size_bytes: int
    digest: str
    layout: Layout
    made_by: str = ""

    @property
    def scope(self) -> Prefix:
        """`prefix`, parsed."""
        return Prefix.parse(self.prefix)

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prefix": self.prefix,
            "origin": self.origin,
            "objects": self.objects,
            "bytes": self.size_bytes,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "digest": self.digest,
        }


def pack(manifest: Manifest) -> bytes:
    layout = manifest.layout
    data = {"size_bytes": layout.size_bytes, "root": list(layout.root), "forms": list(layout.templates)}
    document = orjson.dumps(asdict(manifest) | {"layout": data}, option=orjson.OPT_INDENT_2) + b"\n"
    return f"{_MAGIC} {FORMAT_VERSION} {checksums.crc32c(document):08x}\n".encode() + document


def unpack(content: bytes, name: str) -> Manifest:
    """Return the manifest; SnapshotUnusable for what this version has not written."""
    head, _, document = content.partition(b"\n")
    words = head.decode("latin-1").rpartition(" ")
    kind = words[0].rpartition(" ")
    if kind[0] == _MAGIC and kind[2] != str(FORMAT_VERSION):
        raise SnapshotUnusable(
            f"snapshot {name!r} has format {kind[2][:20]!r}, this version reads {FORMAT_VERSION}: "
            "run the version that wrote it; it is left as it is"
        )
    if kind[0] != _MAGIC or words[2] != f"{checksums.crc32c(document):08x}":
        raise SnapshotUnusable(f"the manifest of snapshot {name!r} is damaged; it is left as it is")
    try:
        fields = orjson.loads(document)
        data = fields.pop("layout")
        layout = Layout(data["size_bytes"], ObjectFileExtent(*data["root"]), ObjectFileExtent(*data["forms"]))
        manifest = Manifest(**fields, layout=layout)
    except (ValueError, TypeError, KeyError) as error:
        raise SnapshotUnusable(f"the manifest of snapshot {name!r} cannot be read: {error}") from None
    if manifest.name != name:
        raise SnapshotUnusable(f"the directory of snapshot {manifest.name!r} has been renamed to {name!r}")
    return manifest
