"""From a request line and headers to one parsed S3 request, and the operation that it means.

    target → bucket, key, query → operation → S3Request

A key is the raw path percent-decoded once. `+` stays `+`; `//`, `.` and `..` mean themselves (S3 API, "Object key
names"). Nothing here normalises.

An operation is handled here only when every query parameter is one that is known to belong to it. Anything else, above
all a sub-resource that did not exist when this was written, is FORWARD: answering `GET /b/k?somethingNew` with the
object's bytes would be worse than not understanding it. So is a parameter that appears twice, because two servers may
pick different ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import name_set

KEY_SIZE_BYTES_MAX = 1024

_PERCENT = ord("%")
"""A number is found in bytes at a tenth of what looking for bytes costs."""

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_BUCKET = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:\-]{1,255}")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9\-._~/]*")
_PORT = re.compile(r":\d*\Z")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class CopySource(NamedTuple):
    """Which object, and which version of it, `x-amz-copy-source` names."""

    key: ObjectKey
    version_id: str | None


def split_absolute(target: bytes) -> tuple[str | None, bytes]:
    """Return authority and path of a request target; no authority in origin form (RFC 9112, 3.2.2)."""
    if target[:1] == b"/":
        return None, target
    found = _ABSOLUTE.match(target)
    if found is None or not found[1]:
        raise s3_error("InvalidURI", "The request target must begin with / or be an absolute http or https URI.")
    authority = found[1].rpartition(b"@")[2]
    return authority.decode("latin-1"), target[found.end() :] or b"/"


def bucket_of_host(host: str, base_domains: tuple[str, ...]) -> str | None:
    """Return the bucket that `host` names below the longest base domain that fits; None means path style."""
    find = _bucket_of_host if len(host) <= _HOST_CHARACTERS_MAX else _bucket_of_host.__wrapped__
    return find(host, base_domains)


_HOST_CHARACTERS_MAX = 320
"""The longest host name with its port. Caches keep these values, so strangers must not choose their length."""


@lru_cache(maxsize=1024)
def _bucket_of_host(host: str, base_domains: tuple[str, ...]) -> str | None:
    name = _PORT.sub("", host).lower().rstrip(".")
    for base in sorted(base_domains, key=len, reverse=True):
        domain = base.lower().strip(".")
        if name == domain:
            return None
        if domain and name.endswith("." + domain):
            return name[: -len(domain) - 1]
    return None


def split_path(raw_path: bytes, host_bucket: str | None) -> tuple[str | None, str | None]:
    """Bucket and key of a path that begins with `/`; checked, decoded. `/bucket/` is the bucket itself."""
    if host_bucket is not None:
        return check_bucket(host_bucket), _key(raw_path[1:])
    raw_bucket, _, raw_key = raw_path[1:].partition(b"/")
    if not raw_bucket:
        if len(raw_path) > 1:
            raise s3_error("InvalidBucketName", "The request path has an empty bucket name.", BucketName="")
        return None, None
    return _bucket(raw_bucket), _key(raw_key)


@lru_cache(maxsize=1024)
def _bucket(raw_bucket: bytes) -> str:
    return check_bucket(decode(raw_bucket))


def _key(raw_key: bytes) -> str | None:
    return check_key(decode(raw_key)) if raw_key else None


def decode(raw: bytes) -> str:
    """`raw` percent-decoded once, as strict UTF-8; raises S3Error InvalidURI."""
    if _PERCENT in raw:
        if _BAD_ESCAPE.search(raw):
            raise s3_error("InvalidURI", "The request target has a % that two hexadecimal digits do not follow.")
        raw = unquote_to_bytes(raw)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise s3_error(
            "InvalidURI", "The request target is not UTF-8 once percent-decoded; S3 keys and parameters are UTF-8."
        ) from None


def check_bucket(name: str) -> str:
    """`name`, if any S3 could have a bucket of that name; raises S3Error InvalidBucketName.

    Lenient on purpose, as old and foreign buckets break AWS's rules: letters, digits, `.`, `_`, `-`, and the `:` of RGW
    tenants, at most 255.
    """
    if not _BUCKET.fullmatch(name):
        raise s3_error("InvalidBucketName", BucketName=name)
    return name


def check_key(key: str) -> str:
    """`key`, if it is at most 1,024 bytes of UTF-8; raises S3Error KeyTooLongError."""
    if len(key) * 4 > KEY_SIZE_BYTES_MAX:
        size_bytes = len(key.encode())
        if size_bytes > KEY_SIZE_BYTES_MAX:
            raise s3_error("KeyTooLongError", Size=str(size_bytes), MaxSizeAllowed=str(KEY_SIZE_BYTES_MAX))
    return key


def parse_query(raw_query: bytes) -> list[tuple[str, str | None]]:
    """Return decoded (name, value) pairs in order; value None where there was no `=`.

    A literal `+` is a space, unlike in a path: every S3 server reads it so, and this gateway must check the values that
    the origin goes by.
    """
    pairs: list[tuple[str, str | None]] = []
    for part in raw_query.replace(b"+", b" ").split(b"&"):
        if part:
            name, equals, value = part.partition(b"=")
            pairs.append((decode(name), decode(value) if equals else None))
    return pairs


def encode_key(key: str) -> str:
    """Percent-encode a key as S3 does: everything but letters, digits, `-_.~` and `/`."""
    return key if _PLAIN_KEY.fullmatch(key) else quote(key, safe="/-_.~")


def encode_path(bucket: str | None, key: str | None) -> str:
    """Return the path-style path, in the canonical form that signatures cover. Without a bucket it is `/`.

    For virtual-hosted style use `"/" + encode_key(key)`.
    """
    if bucket is None:
        return "/"
    path = "/" + _encode_bucket(bucket)
    return path if key is None else f"{path}/{encode_key(key)}"


@lru_cache(maxsize=1024)
def _encode_bucket(bucket: str) -> str:
    return quote(bucket, safe="-_.~")


def encode_query(pairs: Iterable[tuple[str, str | None]]) -> str:
    """Encode decoded pairs; a value of None is written without `=`."""
    return "&".join(
        quote(name, safe="-_.~") if value is None else f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in pairs
    )


_FOREIGN_SOURCE = re.compile(r"x-(?!amz-)(.*)(copy|rename|move)-(source|from)")


def names_foreign_source(headers: Iterable[str]) -> bool:
    """Tell whether a header names a second object in another dialect of S3, such as `x-goog-copy-source`."""
    return any(_FOREIGN_SOURCE.fullmatch(name) for name in headers)


def parse_copy_source(value: str) -> CopySource:
    """Parse `x-amz-copy-source` (latin-1 decoded): `[/]bucket/key[?versionId=ID]`, percent-encoded.

    Here a literal `+` is a space, as at AWS, unlike in a path. Raises S3Error InvalidArgument for every other form,
    access point ARNs among them.
    """
    path, question, version = value.partition("?versionId=")
    try:
        name = decode(path.replace("+", " ").encode("latin-1")).removeprefix("/")
        version_id = decode(version.encode("latin-1"))
    except (S3Error, UnicodeEncodeError):
        raise _bad_copy_source(value) from None
    bucket, _, key = name.partition("/")
    is_object = _BUCKET.fullmatch(bucket) and not bucket.startswith("arn:") and key
    if not is_object or (question and not version_id) or "&" in version:
        raise _bad_copy_source(value)
    return CopySource(ObjectKey(bucket, check_key(key)), version_id or None)


def _bad_copy_source(value: str) -> S3Error:
    return s3_error(
        "InvalidArgument",
        "Copy Source must mention the source bucket and key: sourcebucket/sourcekey, percent-encoded UTF-8, "
        "with ?versionId=ID for one version.",
        ArgumentName="x-amz-copy-source",
        ArgumentValue=value,
    )


class Operation(StrEnum):
    """S3's operations by their API names. FORWARD stands for all that Forebay does not handle itself."""

    LIST_BUCKETS = "ListBuckets"
    CREATE_BUCKET = "CreateBucket"
    HEAD_BUCKET = "HeadBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    GET_BUCKET_VERSIONING = "GetBucketVersioning"
    GET_BUCKET_ENCRYPTION = "GetBucketEncryption"
    GET_BUCKET_TAGGING = "GetBucketTagging"
    GET_OBJECT_LOCK_CONFIGURATION = "GetObjectLockConfiguration"
    LIST_OBJECTS = "ListObjects"
    LIST_OBJECTS_V2 = "ListObjectsV2"
    LIST_MULTIPART_UPLOADS = "ListMultipartUploads"
    DELETE_OBJECTS = "DeleteObjects"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "HeadObject"
    PUT_OBJECT = "PutObject"
    COPY_OBJECT = "CopyObject"
    DELETE_OBJECT = "DeleteObject"
    CREATE_MULTIPART_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    UPLOAD_PART_COPY = "UploadPartCopy"
    COMPLETE_MULTIPART_UPLOAD = "CompleteMultipartUpload"
    ABORT_MULTIPART_UPLOAD = "AbortMultipartUpload"
    LIST_PARTS = "ListParts"
    FORWARD = "Forward"


Query = Sequence[tuple[str, str | None]]

SIGNATURE_PARAMETERS = name_set(
    "x-amz-algorithm x-amz-credential x-amz-date x-amz-expires x-amz-signedheaders x-amz-signature "
    "x-amz-security-token x-amz-content-sha256 awsaccesskeyid signature expires"
)
"""Lower-cased names of the parameters that carry a presigned request's signature (versions 4 and 2)."""

_HARMLESS = SIGNATURE_PARAMETERS | {"x-id", "x-amz-te", "x-amz-user-agent", "content-type", "content-md5"}
"""Lower-cased names that change no operation: signatures, and what SDKs add, such as headers that they sign."""

_HEADERS_ONLY = ("x-amz-copy-source", "x-amz-rename-source")
"""Lower-cased beginnings of headers that SDKs can hoist into a presigned query. These name a second object, which
authorisation looks for in the headers: forwarded from the query, they would reach the origin unchecked."""

_STORING = (
    Operation.PUT_OBJECT,
    Operation.CREATE_MULTIPART_UPLOAD,
    Operation.UPLOAD_PART,
    Operation.COMPLETE_MULTIPART_UPLOAD,
)
"""Operations whose headers SDKs move into the query of a presigned request."""

BUCKET_SETTINGS: Mapping[str, Operation] = {
    "location": Operation.GET_BUCKET_LOCATION,
    "versioning": Operation.GET_BUCKET_VERSIONING,
    "encryption": Operation.GET_BUCKET_ENCRYPTION,
    "tagging": Operation.GET_BUCKET_TAGGING,
    "object-lock": Operation.GET_OBJECT_LOCK_CONFIGURATION,
}
"""Sub-resource of a bucket → the operation that reads it."""

BUCKET_SUBRESOURCES = frozenset(BUCKET_SETTINGS) | name_set(
    "abac accelerate acl analytics cors intelligent-tiering inventory lifecycle logging metadataConfiguration "
    "metadataInventoryTable metadataJournalTable metadataTable metrics notification ownershipControls policy "
    "publicAccessBlock replication requestPayment website"
)
"""Sub-resources of a bucket by which a setting of it is changed, and no object (S3 API, "Actions")."""

_OBJECT_SUBRESOURCES = name_set("acl annotation encryption legal-hold renameObject restore retention select tagging")
"""Sub-resources of an object by which something else of it is changed than its bytes (S3 API, "Actions")."""


CHANGES_NO_OBJECT = frozenset(
    {
        Operation.CREATE_MULTIPART_UPLOAD,
        Operation.UPLOAD_PART,
        Operation.UPLOAD_PART_COPY,
        Operation.ABORT_MULTIPART_UPLOAD,
    }
)
"""Operations that leave the key's object as it was."""

READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class _Form(NamedTuple):
    """An operation, the parameter by which it is recognised (empty: none), and all that may come with it."""

    operation: Operation
    mark: str
    parameters: frozenset[str]


def _form(operation: Operation, mark: str = "", parameters: str = "") -> _Form:
    return _Form(operation, mark, name_set(f"{mark} {parameters}"))


_LISTING = "prefix delimiter encoding-type"
_READ = (
    "versionId partNumber x-amz-checksum-mode response-cache-control response-content-disposition "
    "response-content-encoding response-content-language response-content-type response-expires"
)

_FORMS: Mapping[str, Mapping[str, Sequence[_Form]]] = {
    "SERVICE": {
        "GET": [_form(Operation.LIST_BUCKETS, "", "max-buckets continuation-token prefix bucket-region")],
        "POST": [],
    },
    "BUCKET": {
        "GET": [
            _form(
                Operation.LIST_OBJECTS_V2,
                "list-type",
                f"{_LISTING} max-keys continuation-token start-after fetch-owner",
            ),
            *(_form(operation, name) for name, operation in BUCKET_SETTINGS.items()),
            _form(Operation.LIST_MULTIPART_UPLOADS, "uploads", f"{_LISTING} max-uploads key-marker upload-id-marker"),
            _form(Operation.LIST_OBJECTS, "", f"{_LISTING} max-keys marker"),
        ],
        "HEAD": [_form(Operation.HEAD_BUCKET)],
        "PUT": [_form(Operation.CREATE_BUCKET)],
        "POST": [_form(Operation.DELETE_OBJECTS, "delete")],
        "DELETE": [],
        "OPTIONS": [],
    },
    "OBJECT": {
        "GET": [
            _form(Operation.LIST_PARTS, "uploadId", "max-parts part-number-marker encoding-type"),
            _form(Operation.GET_OBJECT, "", _READ),
        ],
        "HEAD": [_form(Operation.HEAD_OBJECT, "", _READ)],
        "PUT": [_form(Operation.UPLOAD_PART, "uploadId", "partNumber"), _form(Operation.PUT_OBJECT)],
        "POST": [
            _form(Operation.CREATE_MULTIPART_UPLOAD, "uploads"),
            _form(Operation.COMPLETE_MULTIPART_UPLOAD, "uploadId"),
        ],
        "DELETE": [
            _form(Operation.ABORT_MULTIPART_UPLOAD, "uploadId"),
            _form(Operation.DELETE_OBJECT, "", "versionId"),
        ],
        "OPTIONS": [],
    },
}
"""Resource type → each method that S3 uses on it → what that may mean: the first that fits (S3 API, "Actions")."""

_COPIES = {Operation.PUT_OBJECT: Operation.COPY_OBJECT, Operation.UPLOAD_PART: Operation.UPLOAD_PART_COPY}
"""A write means this when it has `x-amz-copy-source`."""


def classify(method: str, bucket: str | None, key: str | None, query: Query, headers: Mapping[str, str]) -> Operation:
    """Return the operation meant.

    Raises S3Error: MethodNotAllowed when none can be, InvalidArgument for half a part address, InvalidRequest for a
    second object named in the query.
    """
    resource = "SERVICE" if bucket is None else "BUCKET" if key is None else "OBJECT"
    forms = _FORMS[resource].get(method)
    if forms is None:
        raise _method_not_allowed(method, resource)
    names = _meaningful_names(query) if query else []
    is_put = method == "PUT" and key is not None
    if is_put and ("partNumber" in names) != ("uploadId" in names):
        given, missing = ("partNumber", "uploadId") if "partNumber" in names else ("uploadId", "partNumber")
        raise s3_error("InvalidArgument", f"{given} needs {missing}: both address one part.", ArgumentName=missing)
    for form in forms:
        if not form.mark or form.mark in names:
            break
    else:
        if method == "POST" and key is not None and not names:
            raise _method_not_allowed(method, resource)
        return Operation.FORWARD
    operation = form.operation
    if is_put and "x-amz-copy-source" in headers:
        operation = _COPIES[operation]
    if not names:
        return operation
    is_known = len(set(names)) == len(names) and form.parameters.issuperset(names)
    if not is_known or (operation is Operation.LIST_OBJECTS_V2 and ("list-type", "2") not in query):
        return Operation.FORWARD
    return operation


def _meaningful_names(query: Query) -> list[str]:
    names = [name for name, _ in query if name.lower() not in _HARMLESS]
    for name in names:
        if name.lower().startswith(_HEADERS_ONLY):
            raise s3_error("InvalidRequest", f"{name} is accepted as a header only.", ArgumentName=name)
    return names


def _method_not_allowed(method: str, resource: str) -> S3Error:
    allow = {"Allow": ", ".join(_FORMS[resource])}
    return s3_error("MethodNotAllowed", headers=allow, Method=method, ResourceType=resource)


def is_form(request: S3Request) -> bool:
    """Tell whether this may be a browser's form, with its key in its body: some servers go by the content type."""
    if request.method != "POST":
        return False
    return request.headers.get("content-type", "").strip().lower().startswith("multipart/form-data")


def is_about_objects(request: S3Request) -> bool:
    """Tell whether the answer about a bucket depends on its objects, or the request changes them.

    So do ListObjectVersions, all that changes more than a setting of the bucket, such as DeleteBucket, and POST Object,
    which names its key in its body. LIST, DeleteObjects and the lists of uploads are operations of their own.
    """
    if request.bucket is None or request.key is not None or request.operation is not Operation.FORWARD:
        return False
    said = {name for name, _ in request.query}
    if request.method in READ_METHODS:
        return "versions" in said
    return is_form(request) or BUCKET_SUBRESOURCES.isdisjoint(said)


def is_preflight(request: S3Request) -> bool:
    """Tell whether a browser asks, by itself, what the bucket's rules let a page do. It cannot sign that."""
    headers = request.headers
    is_asked = "origin" in headers and "access-control-request-method" in headers
    return request.method == "OPTIONS" and is_asked and "authorization" not in headers


def with_hoisted_headers(request: S3Request) -> S3Request:
    """Return the write with the `x-amz-*` headers that SDKs move into the query when they presign.

    Return the request as it is if it has none, means another operation, or says something twice.
    """
    hoisted = {name.lower(): value or "" for name, value in request.query if _is_hoisted(name)}
    query = [(name, value) for name, value in request.query if not _is_hoisted(name)]
    if len(hoisted) + len(query) != len(request.query) or not hoisted.keys().isdisjoint(request.headers):
        return request
    hoisted.pop("x-amz-sdk-checksum-algorithm", None)  # what an SDK meant to compute, and nobody has
    headers = {**request.headers, **hoisted}
    operation = classify(request.method, request.bucket, request.key, query, headers)
    return replace(request, headers=headers, query=query, operation=operation) if operation in _STORING else request


def may_store_object(request: S3Request) -> bool:
    """Return whether a PUT or POST with any parameters stores an object or a part of one, as S3 takes it."""
    names = {name for name, _ in request.query}
    is_write = request.method == "PUT" or (request.method == "POST" and not names.isdisjoint(("uploads", "uploadId")))
    return is_write and request.key is not None and names.isdisjoint(_OBJECT_SUBRESOURCES)


def _is_hoisted(name: str) -> bool:
    return name.lower().startswith("x-amz-") and name.lower() not in _HARMLESS


def strip_signature_parameters(query: Query) -> list[tuple[str, str | None]]:
    """Return the query that goes on to the origin, signed anew: without the parameters of a presigned signature."""
    return [(name, value) for name, value in query if name.lower() not in SIGNATURE_PARAMETERS]


_NAME_KEPT_BYTES_MAX = 64
"""Field names up to this length are kept decoded: the same few come with every request."""

_NAMES_KEPT_MAX = 1024

_NEVER_REPEATED = ("host", "authorization", "x-amz-date", "x-amz-content-sha256", "content-length")


@dataclass(slots=True)
class S3Request:
    """One parsed request. What the signature covers is kept as it was on the wire (`raw_*`, `headers`).

    `raw_path` and `raw_query` are the bytes of the request target between host, `?` and `#`; an absolute-form target
    has lost its scheme and authority. `headers` are lower-case names → latin-1 decoded values, trimmed, repeated ones
    joined by `,` in order of arrival (RFC 9110, 5.3). `host` is the Host header, or the authority of an absolute-form
    target. `query` holds decoded (name, value) pairs in order, value None where there was no `=`.

    Headers and query stay out of the repr: signatures and session tokens travel in them.
    """

    method: str
    raw_path: bytes
    raw_query: bytes = field(repr=False)
    host: str
    headers: Mapping[str, str] = field(repr=False)
    bucket: str | None
    key: str | None
    query: Sequence[tuple[str, str | None]] = field(repr=False)
    operation: Operation

    def parameter(self, name: str) -> str | None:
        """Return a query parameter's first value; empty when it came without one, None when it is absent."""
        for candidate, value in self.query:
            if candidate == name:
                return value or ""
        return None


def parse_request(
    method: str,
    target_path: bytes,
    raw_query: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    base_domains: Sequence[str],
) -> S3Request:
    """Return the S3 request that an HTTP request means.

    `target_path` is the request target up to `?`, still percent-encoded, in origin form (`/bucket/key`) or absolute
    form (`http://host/bucket/key`). `base_domains` are the names below which buckets are host names. Raises S3Error:
    InvalidURI, InvalidBucketName, KeyTooLongError, MethodNotAllowed, InvalidArgument, InvalidRequest.
    """
    authority, raw_path = split_absolute(target_path)
    fields = {_field_names[raw_name]: raw_value.decode("latin-1").strip(" \t") for raw_name, raw_value in headers}
    if len(fields) != len(headers):
        fields = _join_repeated(headers)
    host = authority if authority is not None else fields.get("host", "")
    return understood(method, raw_path, raw_query, host, fields, base_domains)


def understood(
    method: str,
    raw_path: bytes,
    raw_query: bytes,
    host: str,
    fields: Mapping[str, str],
    base_domains: Sequence[str],
) -> S3Request:
    """Parse a request from its parts. `raw_path` begins with `/`; `fields` are its headers."""
    host_bucket = bucket_of_host(host, tuple(base_domains)) if base_domains else None
    bucket, key = split_path(raw_path, host_bucket)
    query = parse_query(raw_query) if raw_query else []
    operation = classify(method, bucket, key, query, fields)
    return S3Request(method, raw_path, raw_query, host, fields, bucket, key, query, operation)


class FieldNames(dict[bytes, str]):
    """Raw field names → decoded, in lower case. A dictionary finds bytes at a third of what `lru_cache` costs."""

    def __missing__(self, raw_name: bytes) -> str:
        name = raw_name.decode("latin-1").lower()
        if len(raw_name) <= _NAME_KEPT_BYTES_MAX:
            if len(self) >= _NAMES_KEPT_MAX:
                self.clear()
            self[raw_name] = name
        return name


_field_names = FieldNames()


def _join_repeated(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    for raw_name, raw_value in headers:
        values.setdefault(_field_names[raw_name], []).append(raw_value.decode("latin-1").strip(" \t"))
    for name in _NEVER_REPEATED:
        if len(values.get(name, ())) > 1:
            raise s3_error("InvalidRequest", f"The header {name} came twice.")
    return {name: ",".join(joined) for name, joined in values.items()}


def another_service(request: S3Request) -> str | None:
    """Return the AWS service that a request was meant for, when that is not S3; None otherwise.

    The caller must tell the client to set `AWS_ENDPOINT_URL_S3` instead of `AWS_ENDPOINT_URL`, which moves every AWS
    client of a process here, STS too. Three signs: the credential scope, the `x-amz-target` header of the JSON
    services, an unsigned `Action` form on `POST /` (only STS takes those).
    """
    header = request.headers.get("authorization")
    credential = request.parameter("X-Amz-Credential") or ""
    if header is not None:
        is_signed = header.startswith("AWS4-HMAC-SHA256")
        credential = header.partition("Credential=")[2].partition(",")[0] if is_signed else ""
    scope = credential.strip().rsplit("/", 2)
    if len(scope) == 3 and scope[2] == "aws4_request":
        return None if scope[1] in ("s3", "s3express") else scope[1]
    target = request.headers.get("x-amz-target")
    if target is not None:
        return target.partition(".")[0].partition("_")[0].lower() or None
    is_form = request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
    asks_sts = (request.method == "POST" and is_form) or request.parameter("Action") is not None
    return "sts" if request.bucket is None and asks_sts else None


PARTS_COUNT_MAX = 10_000


def part_number(name: str, text: str) -> int:
    """Parse a part number of any length (Python converts 4,300 digits); S3Error InvalidArgument unless 1 to 10,000."""
    digits = text.lstrip("0")
    is_number = text.isascii() and digits.isdecimal() and len(digits) <= len(str(PARTS_COUNT_MAX))
    if not is_number or int(digits) > PARTS_COUNT_MAX:
        raise s3_error(
            "InvalidArgument",
            "Part number must be an integer between 1 and 10000, inclusive",
            ArgumentName=name,
            ArgumentValue=text,
        )
    return int(digits)
