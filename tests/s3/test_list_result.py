"""Reading pages of ListObjectsV2."""

from __future__ import annotations

import pytest

from gateway.errors import OriginBodyError
from gateway.s3.list_result import ListedObject, parse_list_page

PAGE = (
    '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    "<Name>b</Name><IsTruncated>{truncated}</IsTruncated>{more}</ListBucketResult>"
)
CONTENTS = (
    "<Contents><Key>a+b%2Fc%26</Key><ETag>&quot;e&quot;</ETag><Size>5</Size>"
    "<StorageClass>GLACIER</StorageClass></Contents>"
)


def page(truncated: str = "false", more: str = CONTENTS) -> bytes:
    return PAGE.format(truncated=truncated, more=more).encode()


def test_keys_come_decoded() -> None:
    """`encoding-type=url` writes a space as `+`."""
    found = parse_list_page(page())
    assert found.objects == [ListedObject("a b/c&", '"e"', 5, "GLACIER")]
    assert found.next_token is None


def test_a_truncated_page_names_the_next() -> None:
    """And one that does not cannot be gone on from."""
    token = "<NextContinuationToken>t=</NextContinuationToken>"
    assert parse_list_page(page("true", token)).next_token == "t="
    assert parse_list_page(page("false", token)).next_token is None
    with pytest.raises(OriginBodyError, match="NextContinuationToken"):
        parse_list_page(page("true"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<Error/>",
        page(more="<Contents><Key></Key><Size>1</Size></Contents>"),
        page(more="<Contents><Key>k</Key><Size>-1</Size></Contents>"),
        page()[:-20],
    ],
)
def test_what_is_no_page_is_refused(body: bytes) -> None:
    """Half a listing must not pass for a whole one."""
    with pytest.raises(OriginBodyError):
        parse_list_page(body)
