"""How stores that speak S3 differ from it: a table.

The signer, the bodies of requests (request_body.py) and conditional_writes.py carry out what it says.

Each row is from the store's own documents, or from what others measured at the real store; none of it was tried there
by us. What a row does not say is as in S3, or is found out at run time: which conditions are honoured, what ETags are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.s3.requests import Operation

HeaderField = tuple[str, str]

GENERATION = ("x-goog-if-generation-match", "")
"""Stands for the header with the generation that a HEAD tells."""

IF_NONE_MATCH, IF_MATCH = "if-none-match", "if-match"

_GENERATIONS: Mapping[str, HeaderField | None] = {
    IF_NONE_MATCH: ("x-goog-if-generation-match", "0"),
    IF_MATCH: GENERATION,
}
_REFUSED: Mapping[str, HeaderField | None] = {IF_NONE_MATCH: None, IF_MATCH: None}


def _create_only(header: str) -> Mapping[Operation, Mapping[str, HeaderField | None]]:
    """Return the conditions of a store that can refuse to overwrite, but cannot name a version."""
    new: Mapping[str, HeaderField | None] = {IF_NONE_MATCH: (header, "true"), IF_MATCH: None}
    written = (Operation.PUT_OBJECT, Operation.COPY_OBJECT, Operation.COMPLETE_MULTIPART_UPLOAD)
    return {**dict.fromkeys(written, new), Operation.DELETE_OBJECT: _REFUSED}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Describes how a store differs from S3. `hosts`: endpoints that have it unless another is configured.

    `auto_addressing`: where the bucket is named, unless that is configured. Without `has_checksums`, no
    `x-amz-checksum-*` and no trailer is sent: this gateway has verified them. `conditions`: of an operation, the header
    that stands for `If-None-Match: *` and `If-Match` (None: the store has none, and takes no notice of S3's). An
    operation that is not named has S3's own. `is_google`: conditions need Google's own signature, which must not be
    mixed with `x-amz-*`. Without `lists_uploads`, nobody asks for the open uploads of a key. `unsent` are parameters of
    listings that it does not know. `unsigned` headers go with each read of an object. `request_id` and `length` are its
    headers for `x-amz-request-id`, and for a Content-Length that it does not tell.
    """

    name: str
    hosts: re.Pattern[str] | None = None
    auto_addressing: Literal["path", "virtual"] = "path"
    has_checksums: bool = True
    conditions: Mapping[Operation, Mapping[str, HeaderField | None]] = field(default_factory=dict)
    is_google: bool = False
    lists_uploads: bool = True
    unsent: frozenset[str] = frozenset()
    unsigned: Mapping[str, str] = field(default_factory=dict)
    request_id: str = "x-amz-request-id"
    length: str = "content-length"

    @property
    def is_plain(self) -> bool:
        """Return whether requests and answers are S3's own as they are."""
        return self.has_checksums and self.lists_uploads and not (self.conditions or self.unsent)


S3 = Dialect("s3")

DIALECTS: tuple[Dialect, ...] = (
    S3,
    Dialect("s3", re.compile(r"(?:.+\.)?amazonaws\.com(?:\.cn)?"), auto_addressing="virtual"),
    # Google Cloud Storage, XML API with HMAC keys.
    # cloud.google.com/storage/docs/request-preconditions: If-Match and If-None-Match are for reads;
    #   x-goog-if-generation-match is for writes.
    # cloud.google.com/storage/docs/aws-simple-migration: AWS4 signatures go with x-amz-*. "Requests cannot specify both
    #   x-amz and x-goog headers" (400 ExcessHeaderValues: carrierwave#2356), so conditions are signed with GOOG4.
    #   Others have measured at the real store that GOOG4 with the same keys holds for PUT, copy and DELETE, that a
    #   Complete takes no notice of a generation, and that listings of uploads and DeleteObjects work.
    # cloud.google.com/storage/docs/transcoding: objects stored with gzip come decompressed, without range and length,
    #   unless the request accepts gzip. The front end appends ",gzip(gfe)" to accept-encoding before the signature is
    #   verified (rclone#6670, litestream#1386, aws-sdk-go-v2#1816): so that header is never signed.
    # Trailers are refused (milvus-storage#480).
    Dialect(
        "gcs",
        re.compile(r"(?:[^.]+-)?storage(?:-[^.]+)?\.(?:[^.]+\.)*googleapis\.com"),
        has_checksums=False,
        conditions={
            Operation.PUT_OBJECT: _GENERATIONS,
            Operation.COPY_OBJECT: _GENERATIONS,
            Operation.COMPLETE_MULTIPART_UPLOAD: _REFUSED,
            Operation.DELETE_OBJECT: {IF_NONE_MATCH: None, IF_MATCH: GENERATION},
        },
        is_google=True,
        unsigned={"accept-encoding": "gzip"},
        request_id="x-guploader-uploadid",
        length="x-goog-stored-content-length",
    ),
    # Alibaba Cloud OSS.
    # help.aliyun.com/en/oss/developer-reference/compatibility-with-amazon-s3: virtual-hosted style only;
    #   ListMultipartUploads is not among the operations.
    # help.aliyun.com/en/oss/user-guide/0017-00000804: aws-chunked only with signed chunks, so no trailers without.
    # help.aliyun.com/en/oss/user-guide/0026-00000002 and 0042-00000214: x-oss-forbid-overwrite of PutObject, CopyObject
    #   and CompleteMultipartUpload, 409 FileAlreadyExists. It has no effect in a bucket that has ever had versions.
    Dialect(
        "oss",
        re.compile(r"(?:.+\.)?oss-[a-z0-9-]+\.aliyuncs\.com"),
        auto_addressing="virtual",
        has_checksums=False,
        conditions=_create_only("x-oss-forbid-overwrite"),
        lists_uploads=False,
        request_id="x-oss-request-id",
    ),
    # Tencent Cloud COS.
    # cloud.tencent.com/document/faq/436/102489: buckets since 2024 refuse path style (PathStyleDomainForbidden).
    # tencentcloud.com/document/api/436/7749 (PUT Object), /7742 (Complete): x-cos-forbid-overwrite, 409
    #   FileAlreadyExists; no effect in a bucket that has ever had versions.
    Dialect(
        "cos",
        re.compile(r"(?:.+\.)?cos(?:-internal)?\.[a-z0-9-]+\.(?:myqcloud\.com|tencentcos\.cn)"),
        auto_addressing="virtual",
        has_checksums=False,
        conditions=_create_only("x-cos-forbid-overwrite"),
        request_id="x-cos-request-id",
    ),
    # Huawei Cloud OBS.
    # huaweicloud.com/notice/2022/20231106133534969.html: no path style since 2023-12-30; PutObject then gets 404
    #   NoSuchKey, and HEAD works (WeKnora#3269).
    # x-obs-forbid-overwrite of PutObject, 409 ObjectAlreadyExists: Huawei's SDKs. Trailers: not documented.
    Dialect(
        "obs",
        re.compile(r"(?:.+\.)?obs\.[a-z0-9-]+\.myhuaweicloud\.(?:com|eu)"),
        auto_addressing="virtual",
        has_checksums=False,
        conditions=_create_only("x-obs-forbid-overwrite"),
        request_id="x-obs-request-id",
    ),
    # Baidu BOS.
    # cloud.baidu.com/doc/BOS/s/Njwvyq8ho: ListObjectsV2 without fetch-owner. Conditions are not documented for its S3
    #   interface: the probe finds them out.
    Dialect(
        "bos",
        re.compile(r"s3\.[a-z0-9-]+\.bcebos\.com"),
        has_checksums=False,
        unsent=frozenset({"fetch-owner"}),
        request_id="x-bce-request-id",
    ),
    # Volcano Engine TOS.
    # volcengine.com/docs/6349/147050: virtual-hosted style only (403 InvalidPathAccess, opendal#6549).
    Dialect(
        "tos",
        re.compile(r"tos-s3-[a-z0-9-]+\.(?:i?volces|bytepluses)\.com"),
        auto_addressing="virtual",
        has_checksums=False,
        request_id="x-tos-request-id",
    ),
    # Cloudflare R2.
    # developers.cloudflare.com/r2/api/s3/extensions: conditions on the target of a copy have headers of their own.
    Dialect(
        "r2",
        re.compile(r"[0-9a-f]+(?:\.[a-z]+)?\.r2\.cloudflarestorage\.com"),
        conditions={
            Operation.COPY_OBJECT: {
                IF_NONE_MATCH: ("cf-copy-destination-if-none-match", ""),
                IF_MATCH: ("cf-copy-destination-if-match", ""),
            }
        },
    ),
    # Backblaze B2.
    # backblaze.com/docs/cloud-storage-s3-compatible-api: x-amz-checksum-* and x-amz-sdk-checksum-algorithm are not
    #   supported. Conditions on writes get 501, which the probe finds out.
    Dialect("b2", re.compile(r"s3\.[a-z0-9-]+\.backblazeb2\.com"), has_checksums=False),
)


AZURE = Dialect("azure", request_id="x-ms-request-id")
"""Azure Blob is no S3: of it, this is what counts below the store (stores/azure). Nobody configures it."""


def dialect_of(name: str, host: str) -> Dialect:
    """Return the dialect with this name; `auto`: the one of this host, without port; else S3."""
    if name == AZURE.name:
        return AZURE
    of_host = next((one for one in DIALECTS if one.hosts is not None and one.hosts.fullmatch(host)), S3)
    if name in ("auto", of_host.name):
        return of_host
    return next(one for one in DIALECTS if one.name == name)
