"""What a client asks of a listing (S3 API, "ListObjectsV2" and "ListObjects")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.s3.error_codes import s3_error
from gateway.s3.list_token import ListPlace, decode_token
from gateway.s3.requests import Operation, S3Request

PAGE_KEYS_MAX = 1000

_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_NUMBER_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Of ListObjectsV2, or of ListObjects when not `is_v2`; what is None was not given.

    `limit` counts keys and common prefixes. `start_after` is V1's marker too. `place` is what the token stands for.
    """

    is_v2: bool
    prefix: str
    delimiter: str
    limit: int
    is_url_encoded: bool
    with_owner: bool
    start_after: str
    token: str | None = None
    place: ListPlace | None = None


def list_query(request: S3Request) -> ListQuery:
    """S3Error InvalidArgument for what cannot be meant."""
    is_v2 = request.operation is Operation.LIST_OBJECTS_V2
    given = {name: value or "" for name, value in request.query}
    token = given.get("continuation-token") if is_v2 else None
    return ListQuery(
        is_v2,
        given.get("prefix", ""),
        given.get("delimiter", ""),
        _limit(given.get("max-keys", "")),
        _is_url_encoded(given.get("encoding-type", "")),
        not is_v2 or given.get("fetch-owner", "").lower() == "true",
        given.get("start-after" if is_v2 else "marker", ""),
        token,
        decode_token(token) if token else None,
    )


def _limit(text: str) -> int:
    if not text:
        return PAGE_KEYS_MAX
    if not _NUMBER.fullmatch(text) or int(text) > _NUMBER_MAX:
        raise s3_error(
            "InvalidArgument",
            "Provided max-keys not an integer or within integer range",
            ArgumentName="max-keys",
            ArgumentValue=text,
        )
    return min(int(text), PAGE_KEYS_MAX)


def _is_url_encoded(text: str) -> bool:
    if text not in ("", "url"):
        raise s3_error(
            "InvalidArgument",
            "Invalid Encoding Method specified in Request",
            ArgumentName="encoding-type",
            ArgumentValue=text,
        )
    return text == "url"
