"""Numbers from outside that nobody has reckoned with: refused, or taken as they are, and never a failure of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson
import pytest

from gateway.api import LINES_TYPE
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import StrictOrigin

NUMBERS = (
    "",
    "-1",
    "0",
    "1e18",
    "-1e18",
    "1e400",
    "1.5",
    "+1",
    " 1",
    "0x10",
    "1_0",
    "٣",
    "NaN",
    "Infinity",
    "2147483648",
    "9223372036854775808",
    "18446744073709551616",
    "9" * 400,
    "9" * 5000,
)
"""As text. The origin of these tests fails at what has more than 4,300 digits: there the log alone is looked at."""

JSON_NUMBERS = ("-1", "0", "1e18", "-1e18", "1e308", "1e400", "1.5", "2147483648", "9223372036854775808", "9" * 400)

IN_QUERIES = (
    ("GET", "bucket?list-type=2&max-keys={}"),
    ("GET", "bucket?max-keys={}"),
    ("GET", "bucket?versions&max-keys={}"),
    ("GET", "bucket?uploads&max-uploads={}"),
    ("GET", "bucket/back/key?partNumber={}"),
    ("HEAD", "bucket/key?partNumber={}"),
    ("GET", "bucket/back/key?uploadId={upload}&max-parts={}"),
    ("GET", "bucket/back/key?uploadId={upload}&part-number-marker={}"),
    ("PUT", "bucket/back/key?uploadId={upload}&partNumber={}"),
    ("GET", "bucket/key?AWSAccessKeyId=AKIASTRICTORIGIN&Signature=x&Expires={}"),
    (
        "GET",
        "bucket/key?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20260101T000000Z&X-Amz-SignedHeaders=host"
        "&X-Amz-Credential=AKIASTRICTORIGIN%2F20260101%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Signature=x&X-Amz-Expires={}",
    ),
)
IN_HEADERS = (
    ("GET", "bucket/key", "range", "bytes={}-"),
    ("GET", "bucket/key", "range", "bytes=-{}"),
    ("GET", "bucket/back/key", "range", "bytes=0-{}"),
    ("PUT", "bucket/back/other?uploadId={upload}&partNumber=1", "x-amz-copy-source-range", "bytes=0-{}"),
    ("PUT", "bucket/back/other", "x-amz-decoded-content-length", "{}"),
    ("PUT", "bucket/back/other", "expires", "{}"),
    ("PUT", "bucket/back/other", "x-amz-object-lock-retain-until-date", "{}"),
    ("GET", "bucket/key", "if-modified-since", "{}"),
    ("GET", "bucket/back/key", "if-unmodified-since", "{}"),
    ("GET", "bucket/key", "date", "{}"),
    ("GET", "bucket/key", "x-amz-date", "{}"),
    ("POST", "bucket/back/key?uploadId={upload}", "x-amz-mp-object-size", "{}"),
    ("GET", "bucket/key", "traceparent", "00-{}-1-1"),
)
IN_ADMIN_QUERIES = (
    "requests?limit={}",
    "writeback/objects?limit={}",
    "writeback/uploads?limit={}",
    "checkpoints?limit={}",
    "flush?prefix=s3://bucket/&through={}",
    "jobs/{}",
)
COMPLETE = "<CompleteMultipartUpload><Part><PartNumber>{}</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>"

SLOT_NUMBERS: tuple[str, ...] = (
    "capacity",
    "capacity_limit",
    "metadata_ttl",
    "negative_ttl",
    "weight",
    "read_bandwidth",
    "keep_last",
)
SLOT_NUMBERS += ("buffer", "block_size", "index_refresh", "scratch_expiry", "read_guarantee", "stale_if_unreachable")

DATES: tuple[str, ...] = ("0001-01-01T00:00:00+14:00", "1969-12-31T23:59:59.999Z", "9999-12-31T23:59:59.999Z")
DATES += ("9999-12-31T23:59:59-14:00", "10000-01-01T00:00:00Z", "2026-01-01", "2026-W01-1T00:00Z", "0000-00-00T00:00Z")

HEADER: dict[str, str] = {"snapshot": "1", "prefix": '"s3://bucket/"'}
LINE: dict[str, str] = {"key": '"key"', "etag": '"\\"e\\""', "size": "1"}


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.put("bucket", "key", b"x" * 1000)
        yield one


@pytest.fixture
def gateway(origin: StrictOrigin, tmp_path: Path) -> Iterator[GatewayProcess]:
    config: dict[str, Any] = {
        "server": {"allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"persistent": True},
        "slots": [{"name": "back", "prefix": "s3://bucket/back/", "write": "back"}],
    }
    with GatewayProcess(config, directory=tmp_path / "cache") as one:
        yield one
        assert "Traceback" not in one.log


def said(line: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}": {value}' for name, value in line.items()) + "}\n"


@pytest.mark.slow
def test_numbers_of_snapshots_have_a_range(gateway: GatewayProcess) -> None:
    """What is taken can be listed, exported, and brought in again."""
    url = f"{gateway.admin_url}/api/v1/snapshots"
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX, headers={"content-type": LINES_TYPE}) as client:

        def bring_in(name: str, header: dict[str, str], line: dict[str, str]) -> int:
            return client.put(f"{url}/{name}", content=(said(HEADER | header) + said(LINE | line)).encode()).status_code

        taken = []
        for number, value in enumerate(JSON_NUMBERS):
            for name in ("started_at", "ended_at", "objects", "snapshot"):
                made = f"{name}-{number}"
                status = bring_in(made, {name: value, **({"digest": '"x"'} if name == "objects" else {})}, {})
                assert status in (201, 400, 409), (name, value, status)
                if status == 201:
                    taken.append(made)
            for name in ("size", "form", "last_modified"):
                status = bring_in(f"{name}-{number}", {}, {name: value})
                assert status in (201, 400), (name, value, status)
        for number, date in enumerate(DATES):
            status = bring_in(f"date-{number}", {}, {"last_modified": f'"{date}"'})
            assert status in (201, 400), (date, status)
            if status == 201:
                taken.append(f"date-{number}")
        huge = "".join(said(LINE | {"key": f'"{number}"', "size": str(2**48 - 1)}) for number in range(70_000))
        refused = client.put(f"{url}/huge", content=(said(HEADER) + huge).encode())
        assert refused.status_code == 409, refused.text
        for name in taken:
            again = client.put(f"{url}/again-{name}", content=client.get(f"{url}/{name}/objects").content)
            assert again.status_code == 201, (name, again.text)
        for arguments in (["snapshot", "list"], ["snapshot", "list", "--json"]):
            listed = gateway.command(*arguments)
            assert listed.returncode == 0, listed.stderr


@pytest.mark.slow
def test_numbers_over_the_admin_port_have_a_range(gateway: GatewayProcess) -> None:
    """In queries, and in documents."""
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        for value in NUMBERS:
            for target in IN_ADMIN_QUERIES:
                answer = client.get(f"{gateway.admin_url}/api/v1/{target.format(quote(value))}")
                assert answer.status_code in (200, 307, 400, 404, 414), (target, value[:30], answer.status_code)
        for value in JSON_NUMBERS:
            for name in SLOT_NUMBERS:
                document = f'{{"prefix": "s3://bucket/s/", "{name}": {value}}}'
                answer = client.put(f"{gateway.admin_url}/api/v1/slots/s", content=document)
                assert answer.status_code in (200, 202, 400, 409), (name, value[:30], answer.text)
            for path in ("flush", "warm", "pin", "events", "snapshots", "writeback/resolve", "writeback/abort"):
                for document in (value, f'{{"prefix": {value}}}', f'{{"Records": [{{"eventVersion": {value}}}]}}'):
                    headers = {"content-type": "application/json"}
                    answer = client.post(f"{gateway.admin_url}/api/v1/{path}", content=document, headers=headers)
                    assert answer.status_code < 500, (path, document[:60], answer.text)
        assert orjson.loads(client.get(f"{gateway.admin_url}/api/v1/overview").content)


@pytest.mark.slow
def test_numbers_over_the_s3_port_have_a_range(gateway: GatewayProcess, origin: StrictOrigin) -> None:
    """In queries, header fields and documents; what is acknowledged all the same gets to the origin."""
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX, base_url=gateway.s3_url) as client:
        while client.put("/bucket/back/key", content=b"x").headers.get("x-forebay-cache") != "absorbed":
            pass
        created = client.post("/bucket/back/key?uploads").text
        upload = created.partition("<UploadId>")[2].partition("<")[0]
        for value in NUMBERS:
            for method, target in IN_QUERIES:
                answer = client.request(method, "/" + target.format(quote(value), upload=upload))
                assert answer.status_code < 500 or "<HostId>origin<" in answer.text or len(value) > 4300, (
                    target,
                    value[:30],
                    answer.text,
                )
            for method, target, name, pattern in IN_HEADERS:
                headers = [(name.encode(), pattern.format(value).strip().encode())]
                content = b"x" if method != "GET" else None
                answer = client.request(method, "/" + target.format(upload=upload), headers=headers, content=content)
                assert answer.status_code < 500 or len(value) > 4300, (target, name, value[:30], answer.text)
            content = COMPLETE.format(value).encode()
            answer = client.post(f"/bucket/back/key?uploadId={upload}", content=content)
            assert 400 <= answer.status_code < 500, (value[:30], answer.text)
    assert gateway.command("flush", "s3://bucket/", "--wait").returncode == 0
