"""boto3 listing a bucket: through a server, and out of bytes that it need not wait for.

What boto3 itself takes for a page (building and signing the request, parsing 1,000 entries) is the same for both, and
is most of it: canned pages tell how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from loadtests.harness.content import BUCKET
from loadtests.harness.lister import Lister
from tests.support.gateway_process import ORIGIN_KEYS


class BotoLister:
    """One client. `pages` of a listing at most; `send` answers in the server's place, where it is given."""

    def __init__(self, url: str, prefix: str, pages: int) -> None:
        config = Config(s3={"addressing_style": "path"}, proxies={}, retries={"total_max_attempts": 1})
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id=ORIGIN_KEYS[0],
            aws_secret_access_key=ORIGIN_KEYS[1],
            config=config,
        )
        self._prefix = prefix
        self._pages = pages

    def seconds(self, answers: Callable[[Any], AWSResponse] | None = None) -> float:
        """Wall time of a listing; with `answers`, no request leaves the process."""
        if answers is not None:
            self._client.meta.events.register("before-send.s3.ListObjectsV2", answers)
        try:
            started = time.perf_counter()
            listed = sum(page["KeyCount"] for page in self._paginated())
            taken = time.perf_counter() - started
        finally:
            if answers is not None:
                self._client.meta.events.unregister("before-send.s3.ListObjectsV2", answers)
        if not listed:
            raise RuntimeError("boto3 has listed nothing")
        return taken

    def _paginated(self) -> Iterator[Any]:
        paginator = self._client.get_paginator("list_objects_v2")
        arguments = {"MaxItems": 1000 * self._pages, "PageSize": 1000}
        yield from paginator.paginate(Bucket=BUCKET, Prefix=self._prefix, PaginationConfig=arguments)


class Canned:
    """A listing's answers, kept; they are given again in order, as often as they are asked for."""

    def __init__(self, through: Lister, prefix: str, pages: int) -> None:
        self._bodies = [bytes(body) for body in through.pages(prefix, pages)]
        self._at = 0

    def __call__(self, request: Any, **_: Any) -> AWSResponse:
        body = self._bodies[self._at % len(self._bodies)]
        self._at += 1
        headers = {"content-type": "application/xml", "content-length": str(len(body))}
        return AWSResponse(request.url, 200, headers, _Raw(body))


class _Raw:
    """As much of urllib3's response as botocore uses."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self._body
