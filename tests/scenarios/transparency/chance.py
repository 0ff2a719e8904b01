"""Random histories of a few keys: what no table thinks of is the order in which things happen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.scenarios.transparency.steps import (
    Payload,
    Step,
    checksum,
    complete,
    create_upload,
    delete,
    etag,
    get,
    head,
    md5_header,
    pattern,
    post,
    put,
    put_part,
)

_KEYS = ("a", "a/b", "a/b/%C3%A9%20+c", "b")
_BODIES = tuple(pattern(size) for size in (0, 1, 1000, 70_000, 300_000, 1_100_000))
_PAST = "Sat, 01 Jan 2000 00:00:00 GMT"
_UPLOADS_MAX = 3


class History:
    """One random history; everything follows from the dice. The bucket is fresh."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._uploads: list[tuple[str, str]] = []
        self._parts: dict[str, dict[int, str]] = {}
        self._moves = {
            self._get: 14,
            self._head: 3,
            self._put: 6,
            self._delete: 1,
            self._delete_many: 1,
            self._copy: 3,
            self._list: 3,
            self._tagging: 1,
            self._begin: 2,
            self._part: 5,
            self._copied_part: 1,
            self._complete: 3,
            self._abort: 1,
            self._list_upload: 1,
        }

    def steps(self, count: int) -> Iterator[Step]:
        """A few objects to begin with, then `count` requests."""
        for key in _KEYS[:3]:
            yield put(f"/{{bucket}}/{key}", self._body())
        moves, weights = list(self._moves), list(self._moves.values())
        for _ in range(count):
            step = self._dice.choices(moves, weights)[0]()
            yield self._presigned_at_times(step)

    def _presigned_at_times(self, step: Step) -> Step:
        plain = step.payload == "hash" and not step.http_chunks
        return replace(step, auth="query") if plain and self._dice.random() < 0.1 else step

    def _key(self) -> str:
        return f"/{{bucket}}/{self._dice.choice(_KEYS)}"

    def _body(self) -> bytes:
        return self._dice.choice(_BODIES)

    def _etag(self) -> str:
        return self._dice.choice([etag(self._body()), "*", '"0123456789abcdef0123456789abcdef"'])

    def _some(self, *lines: str) -> list[str]:
        return [line for line in lines if self._dice.random() < 0.25]

    def _read_lines(self) -> list[str]:
        first = self._dice.choice((0, 1, 999, 65_536, 1_048_575, 1_048_576))
        last = first + self._dice.choice((0, 1, 1000, 200_000))
        ranges = (f"bytes={first}-{last}", f"bytes={first}-", f"bytes=-{last}", "bytes=5-2", "bytes=0-1,3-4")
        return self._some(
            f"range: {self._dice.choice(ranges)}",
            f"if-match: {self._etag()}",
            f"if-none-match: {self._etag()}",
            f"if-modified-since: {_PAST}",
            f"if-unmodified-since: {_PAST}",
            "x-amz-checksum-mode: ENABLED",
        )

    def _get(self) -> Step:
        queries = ("", "", "", "", "?partNumber=1", "?partNumber=2", "?response-content-type=a/b", "?versionId=null")
        query = self._dice.choice(queries)
        return get(self._key() + query, *self._read_lines())

    def _head(self) -> Step:
        return head(self._key() + self._dice.choice(("", "", "?partNumber=1")), *self._read_lines())

    def _put(self) -> Step:
        body = self._body()
        lines = self._some(
            "content-type: text/plain",
            f"x-amz-meta-a: {self._dice.random()}",
            "content-encoding: gzip",
            md5_header(body),
            "x-amz-tagging: a=b",
            f"if-match: {self._etag()}",
            "if-none-match: *",
        )
        return self._framed(put(self._key(), body, *lines))

    def _framed(self, step: Step) -> Step:
        payloads: tuple[Payload, ...] = ("hash", "unsigned", "signed-chunks", "unsigned-chunks-trailer")
        payload = self._dice.choice(payloads)
        algorithm = self._dice.choice(("crc32", "crc32c", "crc64nvme", "sha256"))
        value = checksum(algorithm, step.body)
        if payload == "unsigned-chunks-trailer":
            return replace(step, payload=payload, trailer=f"x-amz-checksum-{algorithm}:{value}")
        if self._dice.random() < 0.3:
            step = replace(step, headers=(*step.headers, f"x-amz-checksum-{algorithm}: {value}"))
        return replace(step, payload=payload, http_chunks=payload == "signed-chunks" and self._dice.random() < 0.5)

    def _delete(self) -> Step:
        return delete(self._key(), *self._some(f"if-match: {self._etag()}")[:1])

    def _delete_many(self) -> Step:
        keys = self._dice.sample(("a", "a/b", "a/b/é +c", "b", "absent"), self._dice.randint(1, 3))
        quiet = "<Quiet>true</Quiet>" if self._dice.random() < 0.3 else ""
        objects = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
        document = f"<Delete>{objects}{quiet}</Delete>".encode()
        return post("/{bucket}?delete", document, md5_header(document))

    def _copy(self) -> Step:
        lines = self._some(
            "x-amz-metadata-directive: REPLACE",
            "x-amz-meta-copied: 1",
            f"x-amz-copy-source-if-match: {self._etag()}",
            f"x-amz-copy-source-if-none-match: {self._etag()}",
        )
        return put(self._key(), b"", self._source(), *lines)

    def _source(self) -> str:
        return f"x-amz-copy-source: {self._key().replace('+', '%2B')}"

    def _list(self) -> Step:
        queries = self._some(
            "prefix=a", "delimiter=/", "max-keys=2", "start-after=a", "encoding-type=url", "list-type=2"
        )
        return get("/{bucket}?" + "&".join(queries))

    def _tagging(self) -> Step:
        document = b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>"
        target = f"{self._key()}?tagging"
        return self._dice.choice((get(target), delete(target), put(target, document, md5_header(document))))

    def _begin(self) -> Step:
        name = f"upload{len(self._parts)}"
        key = self._key()
        self._uploads = [*self._uploads, (name, key)][-_UPLOADS_MAX:]
        self._parts[name] = {}
        return create_upload(key, *self._some("content-type: a/b", "x-amz-meta-b: c"), name=name)

    def _upload(self) -> tuple[str, str]:
        return self._dice.choice(self._uploads) if self._uploads else ("none", self._key())

    def _part(self) -> Step:
        name, key = self._upload()
        number, body = self._dice.choice((1, 1, 1, 2)), self._body()
        self._parts.setdefault(name, {})[number] = etag(body)
        return self._framed(put_part(key, number, body, name=name))

    def _copied_part(self) -> Step:
        name, key = self._upload()
        lines = self._some("x-amz-copy-source-range: bytes=0-99")
        return put(f"{key}?partNumber=1&uploadId={{{name}}}", b"", self._source(), *lines)

    def _complete(self) -> Step:
        name, key = self._upload()
        parts = sorted(self._parts.get(name, {}).items()) or [(1, etag(b""))]
        lines = tuple(self._some("if-none-match: *"))
        return complete(key, *parts, headers=lines, name=name)

    def _abort(self) -> Step:
        name, key = self._upload()
        return delete(f"{key}?uploadId={{{name}}}")

    def _list_upload(self) -> Step:
        name, key = self._upload()
        return self._dice.choice((get(f"{key}?uploadId={{{name}}}"), get("/{bucket}?uploads")))
