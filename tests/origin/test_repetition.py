"""A request that would contradict itself is never sent again unseen, and what comes of it is told as unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gateway.core.errors import OriginUnreachable, OutcomeUnknown
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.retry import Repetition, repetition
from gateway.s3.requests import Operation
from tests.origin.clients import Client, pieces, playing
from tests.support.memory_origin.faults import Answer, Effect, Unreachable, on
from tests.support.strict_origin import StrictOrigin

Query = Sequence[tuple[str, str | None]]
PUT = Operation.PUT_OBJECT
CREATE_ONLY = {"if-none-match": "*"}


@pytest.mark.parametrize(
    ("method", "key", "query", "headers", "body", "expected"),
    [
        ("GET", "k", (), {"if-match": '"x"'}, b"", Repetition.HARMLESS),
        ("HEAD", "k", (), {"if-none-match": '"x"'}, b"", Repetition.HARMLESS),
        ("PUT", "k", (), {}, b"x", Repetition.HARMLESS),
        ("PUT", "k", [("partNumber", "1"), ("uploadId", "u")], {}, b"x", Repetition.HARMLESS),
        ("PUT", None, [("policy", None)], {}, b"x", Repetition.HARMLESS),
        ("DELETE", "k", (), {}, b"", Repetition.HARMLESS),
        ("POST", None, [("delete", None)], {}, b"<Key>k</Key>", Repetition.HARMLESS),
        ("PUT", "k", (), {"x-amz-copy-source": "/b/o", "x-amz-copy-source-if-match": "e"}, b"", Repetition.HARMLESS),
        ("POST", "k", [("uploads", None)], {}, b"", Repetition.LITTER),
        ("POST", "k", [("uploadId", "u")], {}, b"x", Repetition.LITTER),
        ("DELETE", "k", [("uploadId", "u")], {}, b"", Repetition.LITTER),
        ("PUT", None, (), {}, b"", Repetition.LITTER),
        ("DELETE", None, (), {}, b"", Repetition.LITTER),
        ("PUT", "k", (), CREATE_ONLY, b"x", Repetition.WRONG_ANSWER),
        ("PUT", "k", (), {"if-match": '"x"'}, b"x", Repetition.WRONG_ANSWER),
        ("PUT", "k", (), {"x-goog-if-generation-match": "0"}, b"x", Repetition.WRONG_ANSWER),
        ("PUT", "k", (), {"x-amz-write-offset-bytes": "3"}, b"x", Repetition.WRONG_ANSWER),
        ("PUT", "k", [("renameObject", None)], {}, b"", Repetition.WRONG_ANSWER),
        (
            "PUT",
            "a b",
            (),
            {"x-amz-copy-source": "b/a%20b", "x-amz-copy-source-if-match": "e"},
            b"",
            Repetition.WRONG_ANSWER,
        ),
        ("POST", "k", [("uploadId", "u")], CREATE_ONLY, b"x", Repetition.WRONG_ANSWER),
        ("DELETE", "k", (), {"if-match": "*"}, b"", Repetition.WRONG_ANSWER),
        ("DELETE", "k", (), {"x-amz-if-match-size": "3"}, b"", Repetition.WRONG_ANSWER),
        ("POST", None, [("delete", None)], {}, b"<Key>k</Key><ETag>e</ETag>", Repetition.WRONG_ANSWER),
    ],
)
def test_what_a_second_time_does(
    method: str, key: str | None, query: Query, headers: Mapping[str, str], body: bytes, expected: Repetition
) -> None:
    """Every operation of S3 that is answered otherwise when it was carried out already."""
    assert repetition(OriginRequest(method, "b", key, query, headers, body)) is expected


@pytest.mark.parametrize("body", [b"x", None], ids=["in memory", "streamed"])
@pytest.mark.parametrize(
    "effect",
    [
        Unreachable(late=True),
        Answer(500, late=True),
        Answer(502, late=True),
        Answer(504, late=True),
        Answer(503, late=True, body=b"upstream reset"),
    ],
    ids=str,
)
async def test_a_conditional_put_is_not_repeated_where_it_may_be_done(
    strict: StrictOrigin, effect: Effect, body: bytes | None
) -> None:
    """Not even once: the second would be answered 412, which says that somebody else was there."""
    strict.model.inject(on(PUT), effect)
    async with playing(strict) as client:
        content = StreamedBody(pieces(b"x"), 1) if body is None else body
        with pytest.raises(OutcomeUnknown):
            await client.origin.send(OriginRequest("PUT", "bucket", "new", (), CREATE_ONLY, content))
    assert strict.model.count(PUT) == 1
    assert strict.model.data("bucket", "new") == b"x"


@pytest.mark.parametrize("effect", [Answer(503, "SlowDown"), Answer(429, "SlowDown")], ids=str)
async def test_a_conditional_put_that_is_sent_away_comes_again(strict: StrictOrigin, effect: Effect) -> None:
    """ "Later" means that nothing was done."""
    strict.model.inject(on(PUT), effect)
    async with (
        playing(strict) as client,
        await client.origin.send(OriginRequest("PUT", "bucket", "new", (), CREATE_ONLY, b"x")) as answer,
    ):
        assert answer.status == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_what_is_sent_once_does_not_come_again(strict: StrictOrigin, method: str) -> None:
    """Who has sent it looks first whether it is still right."""
    strict.model.inject(lambda call: call.key == "new", Answer(503, "SlowDown"), times=None)
    async with (
        playing(strict) as client,
        await client.origin.send(OriginRequest(method, "bucket", "new", sent_once=True)) as answer,
    ):
        assert answer.status == 503
    assert strict.model.count(key="new") == 1


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (412, "PreconditionFailed"), (403, "No")])
async def test_a_refusal_of_a_conditional_put_is_its_answer(strict: StrictOrigin, status: int, code: str) -> None:
    """Nothing is unknown there."""
    strict.model.inject(on(PUT), Answer(status, code))
    async with (
        playing(strict) as client,
        await client.origin.send(OriginRequest("PUT", "bucket", "new", (), CREATE_ONLY, b"x")) as answer,
    ):
        assert answer.status == status


async def test_a_conditional_put_that_was_never_sent_is_an_origin_that_is_away() -> None:
    """No connection: the client may well send it again."""
    with StrictOrigin() as gone:
        client = Client(gone)
    try:
        with pytest.raises(OriginUnreachable) as caught:
            await client.origin.send(OriginRequest("PUT", "bucket", "new", (), CREATE_ONLY, b"x"))
        assert not isinstance(caught.value, OutcomeUnknown)
    finally:
        await client.origin.aclose()
