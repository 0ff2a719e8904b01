"""The origin does what was judged here: nothing else in a request names a method, a key or a right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gateway.policy.slots import EVERYTHING, Grant, Prefix
from tests.support.asgi import Answer, call
from tests.support.gateway_app import gateway_app
from tests.support.slots import Slot

JOB = Grant((Prefix("bucket", "job/"),))
WRITER = Grant((Prefix("bucket"),))
READER = Grant((Prefix("bucket"),), read_only=True)


async def ask(
    directory: Path,
    grant: Grant,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    slots: Sequence[Slot] = (),
) -> tuple[Answer, int]:
    """The answer, and how many requests the origin got to see."""
    async with gateway_app(directory, grant=grant, slots=slots) as gateway:
        gateway.origin.put("bucket", "secret", b"x")
        answer = await call(gateway.app, method, target, headers, body)
        return answer, len(gateway.origin.calls)


@pytest.mark.parametrize("name", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
async def test_a_header_cannot_change_the_method(tmp_path: Path, name: str) -> None:
    """Whatever an origin makes of such a header, a read-only credential deletes nothing by it."""
    answer, calls = await ask(tmp_path, READER, "GET", "/bucket/secret?acl", {name: "DELETE"})
    assert (answer.status, calls) == (400, 0)


@pytest.mark.parametrize(
    "name", ["x-goog-copy-source", "x-oss-copy-source", "x-cos-copy-source", "x-copy-from", "x-bce-rename-source"]
)
async def test_copy_sources_of_other_dialects_need_a_credential_for_everything(tmp_path: Path, name: str) -> None:
    """They are not read here, so nobody could say whether the caller may read what they name."""
    refused, calls = await ask(tmp_path / "job", JOB, "PUT", "/bucket/job/copy", {name: "/bucket/secret"})
    assert (refused.status, calls) == (403, 0)
    allowed, _ = await ask(tmp_path / "all", EVERYTHING, "PUT", "/bucket/job/copy", {name: "/bucket/secret"})
    assert allowed.status == 200


async def test_a_form_needs_a_credential_for_the_bucket(tmp_path: Path) -> None:
    """A browser's upload form names the key in its body, wherever its target points."""
    form = {"content-type": "Multipart/Form-Data; boundary=x"}
    refused, calls = await ask(tmp_path / "job", JOB, "POST", "/bucket/job/k?anything", form, b"--x--")
    assert (refused.status, calls) == (403, 0)
    _, calls = await ask(tmp_path / "writer", WRITER, "POST", "/bucket/job/k?anything", form, b"--x--")
    assert calls == 1


LIFECYCLE = b"<LifecycleConfiguration><Rule><Status>Enabled</Status></Rule></LifecycleConfiguration>"
SIDE_DOORS: list[tuple[str, str, Mapping[str, str], bytes]] = [
    ("PUT", "/bucket/free?renameObject", {"x-amz-rename-source": "/bucket/kept/k"}, b""),
    ("PUT", "/bucket/free?renameObject", {"x-amz-rename-source": "kept/k"}, b""),
    ("POST", "/bucket", {"content-type": "multipart/form-data; boundary=x"}, b"--x--"),
    ("POST", "/bucket/free?anything", {"content-type": "multipart/form-data; boundary=x"}, b"--x--"),
    ("POST", "/bucket/free?select&select-type=2", {"content-type": "Multipart/form-data; boundary=x"}, b"--x--"),
    ("PUT", "/bucket?lifecycle", {}, LIFECYCLE),
    ("PUT", "/bucket?replication", {}, b"<ReplicationConfiguration/>"),
]


@pytest.mark.parametrize(("method", "target", "headers", "body"), SIDE_DOORS)
async def test_what_may_change_any_key_changes_none_that_is_read_only(
    tmp_path: Path, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> None:
    """Neither for a credential that is read-only nor where a part of the bucket is, whatever else it may do."""
    kept = Slot("kept", Prefix("bucket", "kept/"), "read-only")
    for name, grant, slots in (("reader", READER, ()), ("slot", EVERYTHING, (kept,))):
        refused, calls = await ask(tmp_path / name, grant, method, target, headers, body, slots)
        assert (refused.status, calls) == (403, 0)
    _, calls = await ask(tmp_path / "writer", WRITER, method, target, headers, body)
    assert calls == 1


async def test_a_read_only_credential_gets_no_session(tmp_path: Path) -> None:
    """CreateSession is a GET that answers with keys of the origin itself, which may write."""
    refused, calls = await ask(tmp_path / "reader", READER, "GET", "/bucket?session", {})
    assert (refused.status, calls) == (403, 0)
    _, calls = await ask(tmp_path / "writer", WRITER, "GET", "/bucket?session", {})
    assert calls == 1


async def test_an_unsigned_header_takes_nothing_from_a_signed_request(tmp_path: Path) -> None:
    """`Connection: x-amz-copy-source` on a copy must not make the origin store an empty object instead."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"content")
        headers = {"x-amz-copy-source": "/bucket/k", "connection": "keep-alive, X-Amz-Copy-Source"}
        answer = await call(gateway.app, "PUT", "/bucket/copy", headers)
        assert b"<CopyObjectResult" in answer.body
        assert gateway.origin.data("bucket", "copy") == b"content"
