"""What an origin says of the bytes that it sends: a checksum of the whole object, which a whole body must have."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.errors import S3Error
from gateway.s3.checksums import ALGORITHMS, PREFIX, Checksum, decode_checksum

_HEADERS = frozenset(PREFIX + algorithm for algorithm in ALGORITHMS)


class BodyCheck:
    """Sees the bytes of a whole object in order, and says in the end whether they are those that were promised."""

    def __init__(self, algorithm: str, expected: bytes) -> None:
        self._running = Checksum(algorithm)
        self._expected = expected
        self.update = self._running.update

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> BodyCheck | None:
        """The check that an answer's headers allow, if any. A checksum of checksums of parts is none."""
        if _HEADERS.isdisjoint(headers) or headers.get("x-amz-checksum-type", "FULL_OBJECT").upper() != "FULL_OBJECT":
            return None
        for algorithm in ALGORITHMS:
            value = headers.get(PREFIX + algorithm)
            if value is not None and "-" not in value:
                try:
                    return cls(algorithm, decode_checksum(algorithm, value))
                except S3Error:
                    return None  # none that can be understood: the origin may know others
        return None

    def holds(self) -> bool:
        """Whether the bytes seen are the whole object, as it was promised."""
        return self._running.digest() == self._expected
