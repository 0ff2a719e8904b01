"""What is fuzzed: every parser of client bytes, and whole connections. Each takes bytes and raises for a defect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.connections import Recorder, check_answers, check_framing, connections
from tests.support.client_parsers import PARSERS, ClientParser

CORPUS = Path(__file__).parent / "corpus"
Target = Callable[[bytes], None]

_HEADS: tuple[bytes, ...] = (
    b"GET /bucket/key HTTP/1.1\r\nHost: h\r\n\r\n",
    b"HEAD /bucket/key HTTP/1.1\r\nHost: h\r\n\r\nGET /bucket?list-type=2 HTTP/1.1\r\nHost: h\r\n\r\n",
    b"PUT /bucket/new HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabcGET /bucket/new HTTP/1.1\r\nHost: h\r\n\r\n",
    b"PUT /bucket/new HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n",
    b"POST /bucket?delete HTTP/1.1\r\nHost: h\r\nContent-Length: 60\r\n\r\n"
    b"<Delete><Object><Key>a</Key></Object><Quiet>true</Quiet></Delete>",
    b"PUT /bucket/new HTTP/1.1\r\nHost: h\r\nContent-Length: 15\r\nx-amz-decoded-content-length: 1\r\n"
    b"x-amz-content-sha256: STREAMING-UNSIGNED-PAYLOAD-TRAILER\r\n\r\n1\r\na\r\n0\r\n\r\n",
    b'GET http://h/bucket/key?partNumber=1 HTTP/1.1\r\nHost: h\r\nRange: bytes=0-1\r\nIf-None-Match: "a", *\r\n\r\n',
    b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /bucket/key HTTP/1.0\r\n\r\n",
    b"PUT /bucket/new HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na",
)

_seeds_of_connections: Mapping[str, tuple[bytes, ...]] = {"connection": _HEADS, "framing": _HEADS}
NAMES: tuple[str, ...] = (*PARSERS, *_seeds_of_connections)


@contextmanager
def target(name: str) -> Iterator[Target]:
    """The target, and what it needs while it is used."""
    if name == "connection":
        with connections() as made:
            yield lambda data: check_answers(made.talk(data))
    elif name == "framing":
        recorder = Recorder()
        with connections(recorder) as made:

            def compare(data: bytes) -> None:
                recorder.seen.clear()
                made.talk(data)
                check_framing(data, recorder.seen)

            yield compare
    else:
        parser = PARSERS[name]
        yield lambda data: _parse(parser, data)


def _parse(parser: ClientParser, data: bytes) -> None:
    """With what leads past its first look, and without."""
    parser.parse(data)
    if parser.begin or parser.end:
        parser.parse(parser.begin + data + parser.end)


def seeds(name: str) -> list[bytes]:
    """Inputs to begin with: words of the grammar, and what is in the corpus."""
    found = list(_seeds_of_connections.get(name, ()))
    if name in PARSERS:
        words = PARSERS[name].words
        found += [*words, b"".join(words), *(word * 3 for word in words)]
    directory = CORPUS / directory_name(name)
    return found + [path.read_bytes() for path in sorted(directory.glob("*"))]


def directory_name(name: str) -> str:
    return name.lower().replace(" ", "-").replace(",", "")
