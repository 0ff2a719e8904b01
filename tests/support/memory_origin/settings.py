"""Settings of buckets that a document is put for and read again: they change nothing else here."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element, ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from gateway.origin.client import OriginRequest
from gateway.origin.stores.listing import parameter
from gateway.origin.stores.response import StoreResponse
from gateway.s3.error_codes import s3_error
from tests.support.memory_origin.store import Bucket

_NOT_SET: Mapping[str, tuple[str, str]] = {
    "encryption": (
        "ServerSideEncryptionConfigurationNotFoundError",
        "The server side encryption configuration was not found",
    ),
    "tagging": ("NoSuchTagSet", "The TagSet does not exist"),
    "object-lock": (
        "ObjectLockConfigurationNotFoundError",
        "Object Lock configuration does not exist for this bucket",
    ),
}
"""Sub-resource → code and message of the 404 while there is no document."""

_LASTING = frozenset({"object-lock"})
"""Settings that have no DELETE."""


def parse_xml(data: bytes) -> Element:
    """The root element, its namespace and its children's taken off; S3Error MalformedXML."""
    try:
        root: Element = fromstring(data, forbid_dtd=True)
    except (ParseError, DefusedXmlException):
        raise s3_error("MalformedXML") from None
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root


def setting_of(request: OriginRequest) -> str | None:
    """The setting that the request is about."""
    if request.key is not None:
        return None
    return next((name for name in _NOT_SET if parameter(request, name) is not None), None)


def bucket_setting(request: OriginRequest, bucket: Bucket, name: str, data: bytes) -> StoreResponse:
    """Get, put or delete the document of one setting."""
    if request.method == "PUT":
        parse_xml(data)
        bucket.settings[name] = data
        return StoreResponse(200)
    if request.method == "DELETE" and name not in _LASTING:
        bucket.settings.pop(name, None)
        return StoreResponse(204)
    if request.method != "GET":
        raise s3_error("MethodNotAllowed")
    if name not in bucket.settings:
        code, message = _NOT_SET[name]
        raise s3_error(code, message, status=404, BucketName=bucket.name)
    return StoreResponse(200, {"content-type": "application/xml"}, bucket.settings[name])
