"""Policies of callers at a `MemoryOrigin`: as much of IAM as tests need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.core.errors import S3Error
from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, classify, parse_copy_source

_LISTINGS = frozenset({Operation.LIST_OBJECTS, Operation.LIST_OBJECTS_V2, Operation.LIST_MULTIPART_UPLOADS})


@dataclass
class Policy:
    """What one key pair may do, by the beginnings of keys; the answer to anything else is AccessDenied.

    `read`, `write`: of objects. `list`: prefixes that may be listed, longer ones included. `deny`: keys of which
    nothing may be done, whatever else is said. `decrypt`: whether objects with a KMS key may be read.
    """

    read: Sequence[str] = ()
    write: Sequence[str] = ()
    list: Sequence[str] = ()
    deny: set[str] = field(default_factory=set)
    limit_max: int | None = None
    """Of listings: they must name a limit, and no greater one."""

    def __call__(self, request: OriginRequest) -> S3Error | None:
        return None if self._allows(request) else s3_error("AccessDenied", "the policy of the bucket says no")

    def _allows(self, request: OriginRequest) -> bool:
        operation = classify(request.method, request.bucket, request.key, request.query, request.headers)
        said = dict(request.query)
        if operation in _LISTINGS:
            return self._covers(self.list, said.get("prefix") or "") and self._is_short(said.get("max-keys"))
        if request.key is None or _may_be_about_other_keys(request):
            return "" in self.read and "" in self.write and "" in self.list
        source = request.headers.get("x-amz-copy-source")
        if source is not None and (":" in source or not self._covers(self.read, parse_copy_source(source).key.key)):
            return False
        return self._covers(self.read if request.method in ("GET", "HEAD") else self.write, request.key)

    def _covers(self, beginnings: Sequence[str], key: str) -> bool:
        return key not in self.deny and any(key.startswith(one) for one in beginnings)

    def _is_short(self, limit: str | None) -> bool:
        return self.limit_max is None or (limit is not None and int(limit) <= self.limit_max)


def _may_be_about_other_keys(request: OriginRequest) -> bool:
    is_form = request.headers.get("content-type", "").startswith("multipart/form-data")
    return is_form or any(name in request.headers for name in ("x-amz-rename-source", "x-goog-copy-source"))
