"""Manifests: the objects to warm, one `s3://bucket/key` a line, in the order in which they will be asked for."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.errors import ForebayError
from gateway.policy.prefixes import Prefix

LINE_BYTES_MAX = 4096
"""A bucket, a key of 1,024 bytes, and the scheme fit well."""


class BadManifest(ForebayError):
    """A line of a manifest names no object."""


class ManifestLines:
    """Turns a manifest's pieces into (bucket, key), whatever way the pieces cut it. Empty lines are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, str]]:
        """The objects of the lines that end in this piece; BadManifest names the line that is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise BadManifest(f"line {self._number + len(lines) + 1} is longer than {LINE_BYTES_MAX} bytes")
        for line in lines:
            yield from self._object(line)

    def end(self) -> Iterator[tuple[str, str]]:
        """The last line, where it has no line feed."""
        rest, self._rest = self._rest, b""
        yield from self._object(rest)

    def _object(self, line: bytes) -> Iterator[tuple[str, str]]:
        self._number += 1
        line = line.removesuffix(b"\r")
        if not line:
            return
        try:
            named = Prefix.parse(line.decode())
        except ValueError as error:  # UnicodeDecodeError is one
            raise BadManifest(f"line {self._number}: {error}") from None
        if not named.key_prefix:
            raise BadManifest(f"line {self._number} names no key: it should read s3://bucket/key")
        yield named.bucket, named.key_prefix
