"""Requests that somebody may want to look at: which are kept, for how long, and what becomes of a process's death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.shared.recent_requests import (
    ERROR_ROWS,
    FILE_BYTES,
    MINUTES_SHOWN,
    NAME_BYTES_MAX,
    REFUSAL_ROWS,
    ROW_BYTES,
    SLOWEST_ROWS,
    RecentRequests,
    recent_requests,
    shown,
)
from tests.support.finished import FINISHED, finished


class Wall:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 6_000_000.0  # a minute begins

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


def found(directory: Path, wall: Wall, limit: int = 1000) -> dict[str, list[dict[str, Any]]]:
    return recent_requests(directory, limit, wall.now)


def seconds_of(directory: Path, wall: Wall) -> list[float]:
    return [one["seconds"] for one in found(directory, wall)["slowest"]]


def test_the_slowest_of_a_minute_are_kept(tmp_path: Path, wall: Wall) -> None:
    """Whatever order they come in; faster ones need not even be looked at then."""
    recent = RecentRequests(tmp_path, 0, wall)
    for number in (*range(0, 100, 2), *range(99, 0, -2)):
        recent.add(finished(number / 10))
    assert seconds_of(tmp_path, wall) == [number / 10 for number in range(99, 99 - SLOWEST_ROWS, -1)]
    assert recent.slow_seconds == seconds_of(tmp_path, wall)[-1]


def test_each_minute_has_its_own_and_old_ones_are_not_shown(tmp_path: Path, wall: Wall) -> None:
    """A slow minute does not hide the next; what is older than can be shown is not shown."""
    recent = RecentRequests(tmp_path, 0, wall)
    for minute in range(20):
        for number in range(2 * SLOWEST_ROWS):
            recent.look()
            recent.add(finished(100 - minute + number / 1000))
        fastest = {int(seconds) for seconds in seconds_of(tmp_path, wall)}
        assert fastest == {100 - one for one in range(max(0, minute - MINUTES_SHOWN), minute + 1)}
        wall.now += 60


def test_what_failed_and_what_was_refused_is_kept_apart(tmp_path: Path, wall: Wall) -> None:
    """The last of each, the latest first: a client that is refused all the time hides no error."""
    recent = RecentRequests(tmp_path, 0, wall)
    for number in range(SLOWEST_ROWS):
        recent.add(finished(1000.0 + number, "200"))
    recent.add(finished(status="503", key="early"))
    for number in range(100):
        wall.now += 0.1
        for status in ("403", "404", "412", "416", "304", "client-left"):
            recent.add(finished(status=status, key=f"{status}-{number}"))
    now = found(tmp_path, wall)
    assert [one["key"] for one in now["errors"]] == ["early"]
    assert [one["key"] for one in now["refusals"]] == [f"403-{number}" for number in range(99, 99 - REFUSAL_ROWS, -1)]
    for number in range(2 * ERROR_ROWS):
        wall.now += 0.1
        recent.add(finished(status="broken-off", key=str(number)))
    keys = [one["key"] for one in found(tmp_path, wall)["errors"]]
    assert keys == [str(number) for number in range(2 * ERROR_ROWS - 1, ERROR_ROWS - 1, -1)]
    assert len(found(tmp_path, wall, limit=3)["errors"]) == 3


def test_another_process_goes_on_where_one_has_died(tmp_path: Path, wall: Wall) -> None:
    """With the slowest of the same minute, and behind the last error."""
    for number in range(3):
        recent = RecentRequests(tmp_path, 7, wall)
        recent.add(finished(5.0 + number, "500", f"{number}"))
        recent.add(finished(1.0 + number))
        wall.now += 1
    for number in range(2 * SLOWEST_ROWS):
        recent.add(finished(4.0 - number / 100))
    assert seconds_of(tmp_path, wall)[:4] == [7.0, 6.0, 5.0, 4.0]
    assert len(seconds_of(tmp_path, wall)) == SLOWEST_ROWS
    assert [one["key"] for one in found(tmp_path, wall)["errors"]] == ["2", "1", "0"]
    assert {one["process"] for one in found(tmp_path, wall)["slowest"]} == {"worker7"}
    kept = seconds_of(tmp_path, wall)
    RecentRequests(tmp_path, 7, wall).add(finished(0.5))
    assert seconds_of(tmp_path, wall) == kept, "it was faster than all that the one before has kept"


def test_those_of_all_processes_are_shown_together(tmp_path: Path, wall: Wall) -> None:
    """Of the background process, too: it asks the origin."""
    for process in (0, 1, 256):
        recent = RecentRequests(tmp_path, process, wall)
        recent.origin_failed("PUT", "bucket", "key", "slot", "flush", "503", 0.5)
        recent.close()
        recent.origin_failed("PUT", "bucket", "key", "slot", "flush", "503", 0.5)
        recent.add(finished(status="500"))
    kept = found(tmp_path, wall)["origin_failures"]
    assert sorted(one.pop("process") for one in kept) == ["background", "worker0", "worker1"]
    expected = {"method": "PUT", "bucket": "bucket", "key": "key", "slot": "slot", "purpose": "flush", "status": "503"}
    assert kept == [{"at": wall.now, "seconds": 0.5, **expected}] * 3


@pytest.mark.slow
def test_a_row_with_any_other_byte_is_not_shown(tmp_path: Path, wall: Wall) -> None:
    """Nor does who goes on in the file go by its number."""
    requests = RecentRequests(tmp_path, 0, wall)
    requests.add(finished(status="500"))
    requests.close()
    path = tmp_path / "recent-requests-0"
    content = path.read_bytes()
    row = max(at for at in range(0, len(content), ROW_BYTES) if any(content[at : at + ROW_BYTES]))
    length = len(content[row : row + ROW_BYTES].rstrip(b"\0"))
    for place in range(row, row + length):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :])
        assert not recent_requests(tmp_path, 10, wall())["errors"], place - row
    path.write_bytes(content[:row] + b"\xff" * 8 + content[row + 8 :])
    requests = RecentRequests(tmp_path, 0, wall)
    requests.add(finished(status="500"))
    requests.close()
    assert len(recent_requests(tmp_path, 10, wall())["errors"]) == 1


def test_a_row_that_is_not_whole_is_not_shown(tmp_path: Path, wall: Wall) -> None:
    """Its writer was killed, or writes just now; a file that is being made has none."""
    recent = RecentRequests(tmp_path, 0, wall)
    recent.add(finished(2.0))
    recent.add(finished(1.0))
    path = tmp_path / "recent-requests-0"
    content = bytearray(path.read_bytes())
    at = content.index(b"GetObject")
    content[at : at + 3] = b"Put"
    path.write_bytes(content)
    (tmp_path / "recent-requests-1").write_bytes(b"\1" * ROW_BYTES)
    assert len(seconds_of(tmp_path, wall)) == 1


@pytest.mark.parametrize("text", ['"', "\\", "\x1b", "\ud800", "€", "é\n"])
def test_what_clients_have_named_is_short_and_harmless(tmp_path: Path, wall: Wall, text: str) -> None:
    """A row has room for whatever they name; nothing in it moves a cursor."""
    recent = RecentRequests(tmp_path, 0, wall)
    long = text * 100_000
    recent.add(FINISHED._replace(bucket=long, key=long, slot=long, operation=long, caller=long, error_code=long))
    (kept,) = found(tmp_path, wall)["slowest"]
    assert all(one.isprintable() for one in kept.values() if isinstance(one, str))
    assert len(kept["key"].encode()) <= NAME_BYTES_MAX
    assert (tmp_path / "recent-requests-0").stat().st_size == FILE_BYTES


def test_the_ends_of_a_long_key_tell_it_from_others() -> None:
    """Its middle is left out."""
    key = f"run-17/{'x' * 900}/checkpoint-000100/model.safetensors"
    text = shown(key)
    assert text is not None
    assert text.startswith("run-17/")
    assert text.endswith("/checkpoint-000100/model.safetensors")
    assert shown("short") == "short"
    assert shown(None) is None
