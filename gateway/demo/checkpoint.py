"""Saving and restoring the job's state, as multipart uploads and ranged downloads."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.demo.clients import CacheTally
from gateway.demo.dataset import StoredObject, describe
from gateway.demo.epochs import Advance, Reading
from gateway.demo.errors import DemoError

_PART_BYTES = 8 * 1024 * 1024
_PARTS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Writes to and reads from one endpoint with boto3's transfer manager."""

    client: Any
    tally: CacheTally
    bucket: str
    scratch: Path

    def save(self, key: str, state: bytes, advance: Advance) -> tuple[Reading, StoredObject]:
        """Upload in parts. The reading's bytes are those written."""
        self.tally.take()
        begun = time.perf_counter()
        self.client.upload_fileobj(io.BytesIO(state), self.bucket, key, Config=_transfer_config(), Callback=advance)
        seconds = time.perf_counter() - begun
        self._require_multipart(key)
        return Reading(seconds, len(state), self.tally.take()), describe(key, state)

    def restore(self, saved: StoredObject, advance: Advance) -> Reading:
        """Download by ranges into a file; DemoError unless it holds exactly what was saved."""
        path = self.scratch / "restored"
        self.tally.take()
        begun = time.perf_counter()
        self.client.download_file(self.bucket, saved.key, str(path), Config=_transfer_config(), Callback=advance)
        reading = Reading(time.perf_counter() - begun, path.stat().st_size, self.tally.take())
        if describe(saved.key, path.read_bytes()) != saved:
            raise DemoError(f"wrong bytes: the restored {saved.key} is not what was saved")
        path.unlink()
        return reading

    def _require_multipart(self, key: str) -> None:
        etag = self.client.head_object(Bucket=self.bucket, Key=key)["ETag"]
        if "-" not in etag:
            raise DemoError(f"{key} was not stored as a multipart upload: its ETag is {etag}")


def _transfer_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_PARTS_IN_FLIGHT,
        preferred_transfer_client="classic",  # the CRT client, chosen on some machines, refuses plain http
    )
