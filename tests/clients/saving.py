"""A gateway whose clients write into its buffer, in front of an origin that can be taken away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from tests.clients.boto import boto3_client, cache_header, read
from tests.clients.origins import REGION
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

BUCKET = "checkpoints"

Objects = dict[str, tuple[str, bytes]]
"""Key → the ETag that HEAD says, and bytes."""


@dataclass(frozen=True, slots=True)
class Saving:
    """`through` and `direct` are boto3 clients of the gateway and of the origin."""

    origin: StrictOrigin
    gateway: GatewayProcess
    through: Any
    direct: Any

    @contextmanager
    def origin_away(self, *keys: str) -> Iterator[None]:
        """Nothing answers where the origin was. When the block ends it is back, and gets these keys as they were
        acknowledged meanwhile: bytes and ETags.
        """
        self.origin.stop()
        try:
            yield
            acknowledged = self._objects(self.through, keys)
        finally:
            self.origin.start()
        eventually(lambda: self._found(self.direct, keys) == acknowledged)
        eventually(lambda: self._found(self.through, keys) == acknowledged)
        eventually(self._nothing_is_open)

    def arrived(self, prefix: str) -> list[str]:
        """The keys under a prefix, once the origin has there what the gateway says."""
        keys = self._listed(self.through, prefix)
        acknowledged = self._objects(self.through, keys)
        eventually(lambda: self._listed(self.direct, prefix) == keys and self._found(self.direct, keys) == acknowledged)
        eventually(self._nothing_is_open)
        return keys

    def _listed(self, client: Any, prefix: str) -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def _found(self, client: Any, keys: Iterable[str]) -> Objects | None:
        """None while the origin lacks one, or a worker has not noticed yet that it is back."""
        try:
            return self._objects(client, keys)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (404, 503):
                raise
            return None

    def _objects(self, client: Any, keys: Iterable[str]) -> Objects:
        return {key: (client.head_object(Bucket=BUCKET, Key=key)["ETag"], read(client, BUCKET, key)) for key in keys}

    def _nothing_is_open(self) -> bool:
        return not self.direct.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


@contextmanager
def saving(directory: Path) -> Iterator[Saving]:
    """Two workers, and a bucket that is known to the gateway by a first write."""
    with StrictOrigin(region=REGION) as origin:
        origin.model.create_bucket(BUCKET)
        config: dict[str, Any] = {
            "server": {"workers": 2},
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "region": REGION,
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "cache": {"capacity": "1GiB", "persistent": True},
            "slots": [{"name": "saved", "prefix": f"s3://{BUCKET}/", "write": "back"}],
        }
        with GatewayProcess(config, directory=directory) as gateway:
            through, direct = boto3_client(gateway.s3_url), boto3_client(origin.endpoint_url)
            assert cache_header(through.put_object(Bucket=BUCKET, Key="first", Body=b"x")) == "forwarded"
            yield Saving(origin, gateway, through, direct)
