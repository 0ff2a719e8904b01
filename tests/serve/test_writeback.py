"""`forebay serve` with `write = "back"`, as a whole: what it acknowledges is there, and gets to the origin."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.living_files import living_files
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

PATIENCE_SECONDS = 60.0
PART_BYTES = 5 * 1024 * 1024


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


def gateway_of(origin: StrictOrigin, directory: Path, write: str = "back", **changed: Any) -> GatewayProcess:
    return GatewayProcess(
        {
            "server": {"workers": 2, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {"persistent": True},
            "slots": [{"name": "back", "prefix": "s3://bucket/back/", "write": write}],
            **changed,
        },
        directory=directory,
    )


class Client:
    """Asks for keys of the slot; each request on a connection of its own, so that any worker may answer."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway

    def ask(self, method: str, target: str, content: bytes = b"") -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
            return client.request(method, f"{self._gateway.s3_url}/bucket/{target}", content=content)

    def put(self, name: str, content: bytes) -> httpx.Response:
        answer = self.ask("PUT", f"back/{name}", content)
        assert answer.status_code == 200, answer.text
        return answer

    def upload(self, name: str, parts: list[bytes]) -> str:
        """An object in parts; its ETag."""
        created = self.ask("POST", f"back/{name}?uploads")
        upload_id = created.text.partition("<UploadId>")[2].partition("<")[0]
        listed = ""
        for number, part in enumerate(parts, 1):
            etag = self.ask("PUT", f"back/{name}?partNumber={number}&uploadId={upload_id}", part).headers["etag"]
            listed += f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        answer = self.ask("POST", f"back/{name}?uploadId={upload_id}", body)
        assert answer.status_code == 200, answer.text
        return answer.text.partition("<ETag>")[2].partition("<")[0].replace("&quot;", '"')


def at_origin(origin: StrictOrigin, name: str) -> tuple[str, bytes] | None:
    found = origin.model.buckets["bucket"].objects.get(f"back/{name}")
    return None if found is None else (found.etag, found.content.read(0, found.content.size_bytes))


@pytest.mark.slow
def test_what_is_acknowledged_with_the_origin_away_survives_a_kill_and_reaches_it(
    origin: StrictOrigin, tmp_path: Path
) -> None:
    """A PUT and an upload, acknowledged while nobody else has them; then -9, a restart, and the origin is back."""
    small, parts = os.urandom(1000), [os.urandom(PART_BYTES), os.urandom(1234)]
    with gateway_of(origin, tmp_path / "cache") as gateway:
        client = Client(gateway)
        assert client.put("first", b"x").headers["x-forebay-cache"] == "forwarded"  # the bucket is learned by it
        origin.stop()
        answer = client.put("small", small)
        assert (answer.headers["x-forebay-cache"], answer.headers["etag"]) == (
            "absorbed",
            f'"{md5(small).hexdigest()}"',
        )
        etag = client.upload("large", parts)
        gateway.kill()
        gateway.start()
        assert client.ask("GET", "back/small").content == small
        assert client.ask("HEAD", "back/large").headers["etag"] == etag
        origin.start()
        eventually(lambda: at_origin(origin, "large") == (etag, b"".join(parts)))
        eventually(lambda: at_origin(origin, "small") == (answer.headers["etag"], small))
        assert client.ask("GET", "back/large").content == b"".join(parts)


def know(gateway: GatewayProcess, origin: StrictOrigin) -> None:
    """Have all be known of the bucket: no probe of it is under way, of which something may be left for a minute."""
    for name in ("first", "flushed"):
        Client(gateway).put(name, b"x")
    eventually(lambda: at_origin(origin, "flushed") is not None)


@pytest.mark.slow
def test_a_slot_that_is_no_longer_written_back_is_flushed_all_the_same(origin: StrictOrigin, tmp_path: Path) -> None:
    """Whoever takes `write = "back"` out of the configuration loses nothing; when all is flushed, the buffer goes."""
    directory = tmp_path / "cache"
    with gateway_of(origin, directory) as gateway:
        know(gateway, origin)
        origin.stop()
        Client(gateway).put("left", b"unflushed")
    with gateway_of(origin, directory, write="through") as gateway:
        assert Client(gateway).ask("GET", "back/left").content == b"unflushed"
        assert 'no slot has write = \\"back\\"' in gateway.log
        origin.start()
        eventually(lambda: at_origin(origin, "left") is not None)
        assert Client(gateway).put("next", b"y").headers["x-forebay-cache"] == "forwarded"
        eventually(lambda: Client(gateway).ask("HEAD", "back/left").headers["x-forebay-cache"] != "absorbed")
    with gateway_of(origin, directory, write="through"):
        assert not (directory / "writeback").exists()


@pytest.mark.slow
def test_nobody_else_can_read_what_was_acknowledged(origin: StrictOrigin, tmp_path: Path) -> None:
    """Files of the buffer, SQLite's own among them, have mode 0600, and directories 0700."""
    with gateway_of(origin, tmp_path / "cache") as gateway:
        Client(gateway).put("first", b"x")
        origin.stop()
        Client(gateway).put("second", b"y")
        found = dict(living_files(tmp_path / "cache" / "writeback"))
        for path, status in {**found, tmp_path / "cache": (tmp_path / "cache").stat()}.items():
            assert stat.S_IMODE(status.st_mode) == (0o700 if stat.S_ISDIR(status.st_mode) else 0o600), path
        origin.start()


@pytest.mark.slow
def test_a_buffer_of_another_version_ends_the_start_and_stays(origin: StrictOrigin, tmp_path: Path) -> None:
    """What this version cannot read it does not touch: somebody's acknowledged writes are in it."""
    with gateway_of(origin, tmp_path / "cache") as gateway:
        gateway.terminate()
        format_file = tmp_path / "cache" / "writeback" / "FORMAT"
        format_file.write_bytes(b"forebay writeback 2\n")
        with pytest.raises(AssertionError, match="no readiness line"):
            gateway.start()
        assert "is untouched" in gateway.log
        assert format_file.read_bytes() == b"forebay writeback 2\n"
        assert gateway.wait() == 1


@pytest.mark.slow
def test_a_buffer_of_another_origin_ends_the_start_and_stays(origin: StrictOrigin, tmp_path: Path) -> None:
    """Until what was acknowledged for the first is there; then the second is served."""
    with StrictOrigin() as other:
        other.model.create_bucket("bucket")
        with gateway_of(origin, tmp_path / "cache") as gateway:
            know(gateway, origin)
            origin.stop()
            Client(gateway).put("second", b"y")
            gateway.terminate()
        elsewhere = gateway_of(other, tmp_path / "cache")
        with pytest.raises(AssertionError, match=r"for 'http.* and is not there yet"), elsewhere:
            pass
        assert at_origin(other, "second") is None
        origin.start()
        with gateway_of(origin, tmp_path / "cache"):
            eventually(lambda: at_origin(origin, "second") is not None)
        with gateway_of(other, tmp_path / "cache") as gateway:
            Client(gateway).put("third", b"z")
            eventually(lambda: at_origin(other, "third") is not None)
