"""s3fs file systems as people make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.clients.conftest import Endpoint
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY


def s3_filesystem(endpoint: Endpoint) -> Any:
    """With an endpoint and keys; one attempt only, and no listing kept between calls."""
    import s3fs

    return s3fs.S3FileSystem(
        key=ACCESS_KEY_ID,
        secret=SECRET_ACCESS_KEY,
        endpoint_url=endpoint.url,
        client_kwargs={"region_name": REGION, "verify": str(endpoint.ca_file) if endpoint.ca_file else None},
        config_kwargs={"retries": {"total_max_attempts": 1}, "proxies": {}},
        use_listings_cache=False,
        skip_instance_cache=True,
    )


@contextmanager
def closed(filesystem: Any) -> Iterator[Any]:
    """Its connections are closed when the block is left."""
    import s3fs

    try:
        yield filesystem
    finally:
        s3fs.S3FileSystem.close_session(filesystem.loop, filesystem.s3)
