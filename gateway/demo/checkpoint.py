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
_ARRIVAL_SECONDS = 60.0
_LOOK_SECONDS = 0.02


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

    def wait_for(self, saved: StoredObject, etag: str) -> None:
        """Until this endpoint has what another one has acknowledged, as the same version; DemoError if never."""
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        while self._etag(saved.key) != etag:
            if time.monotonic() > deadline:
                raise DemoError(f"{saved.key} has not arrived after {_ARRIVAL_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)

    def etag(self, key: str) -> str:
        """Return the ETag of an existing object."""
        found = self._etag(key)
        if found is None:
            raise DemoError(f"{key} is not there")
        return found

    def _etag(self, key: str) -> str | None:
        page = self.client.list_objects_v2(Bucket=self.bucket, Prefix=key, MaxKeys=1)
        return next((one["ETag"] for one in page.get("Contents", []) if one["Key"] == key), None)

    def restore(self, key: str, state: bytes, advance: Advance) -> Reading:
        """Download by ranges into a file; DemoError unless it holds exactly `state`."""
        path = self.scratch / "restored"
        self.tally.take()
        begun = time.perf_counter()
        self.client.download_file(self.bucket, key, str(path), Config=_transfer_config(), Callback=advance)
        reading = Reading(time.perf_counter() - begun, path.stat().st_size, self.tally.take())
        if path.read_bytes() != state:
            raise DemoError(f"wrong bytes: the restored {key} is not what was saved")
        path.unlink()
        return reading

    def _require_multipart(self, key: str) -> None:
        etag = self.etag(key)
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
