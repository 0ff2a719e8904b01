"""The answer to ListObjectsV2 and ListObjects (S3 API, pages of those names), by string formatting."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.s3.list_query import ListQuery
from gateway.s3.list_token import ListPlace, encode_token
from gateway.s3.xml_writer import NAMESPACE, PROLOG, encode_list_key


def list_document(
    bucket: str, query: ListQuery, contents: str, prefixes: Iterable[str], *, count: int, following: ListPlace | None
) -> bytes:
    """`contents` is XML, `prefixes` are encoded as it is; `count` is the number of both together.

    `following` is the place from which the listing goes on; None: this is all.
    """
    fields = _of_v2(query, count, following) if query.is_v2 else _of_v1(query, following)
    fields += f"<MaxKeys>{query.limit}</MaxKeys>"
    if query.delimiter:
        fields += f"<Delimiter>{_encoded(query, query.delimiter)}</Delimiter>"
    if query.is_url_encoded:
        fields += "<EncodingType>url</EncodingType>"
    rolled_up = "".join([f"<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>" for prefix in prefixes])
    return (
        f'{PROLOG}<ListBucketResult xmlns="{NAMESPACE}"><Name>{bucket}</Name>'
        f"<Prefix>{_encoded(query, query.prefix)}</Prefix>{fields}"
        f"<IsTruncated>{'false' if following is None else 'true'}</IsTruncated>{contents}{rolled_up}</ListBucketResult>"
    ).encode()


def _of_v2(query: ListQuery, count: int, following: ListPlace | None) -> str:
    fields = ""
    if query.start_after:
        fields += f"<StartAfter>{_encoded(query, query.start_after)}</StartAfter>"
    if query.token is not None:
        fields += f"<ContinuationToken>{query.token}</ContinuationToken>"
    if following is not None:
        fields += f"<NextContinuationToken>{encode_token(following)}</NextContinuationToken>"
    return fields + f"<KeyCount>{count}</KeyCount>"


def _of_v1(query: ListQuery, following: ListPlace | None) -> str:
    """NextMarker comes only with a delimiter: without, the last key is the marker."""
    fields = f"<Marker>{_encoded(query, query.start_after)}</Marker>"
    if following is not None and query.delimiter:
        fields += f"<NextMarker>{_encoded(query, following.last.decode())}</NextMarker>"
    return fields


def _encoded(query: ListQuery, text: str) -> str:
    return encode_list_key(text, query.is_url_encoded)
