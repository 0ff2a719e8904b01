"""What was acknowledged for one origin goes to no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import BufferUnavailable, StartupError
from gateway.writeback.opening import FORMAT, Recovered, recover
from gateway.writeback.origin_name import FILE, keep_to_origin

HERE, THERE = "https://s3.here.example", "https://s3.there.example"
NOTHING = Recovered(0, 0, 0, 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A buffer of HERE."""
    directory = tmp_path / "writeback"
    keep_to_origin(directory, HERE, recover(directory, 0.0))
    return directory


def test_a_buffer_says_whose_it_is(directory: Path) -> None:
    """For its owner only to read, as all that lies in it; and stays so."""
    assert (directory / FILE).read_text() == f"{HERE}\n"
    assert (directory / FILE).stat().st_mode & 0o777 == 0o600
    keep_to_origin(directory, HERE, Recovered(3, 1, 1, 0))
    assert (directory / FILE).read_text() == f"{HERE}\n"


@pytest.mark.parametrize("held", [Recovered(1, 0, 0, 0), Recovered(0, 1, 0, 0), Recovered(0, 0, 1, 0)])
def test_what_it_holds_is_not_taken_elsewhere(directory: Path, held: Recovered) -> None:
    """Objects, open uploads, and uploads to be aborted. The message names the key, both values and the ways out."""
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    with pytest.raises(StartupError) as refused:
        keep_to_origin(directory, THERE, held)
    for said in ("origin.endpoint_url", repr(HERE), repr(THERE), "forebay flush --wait", str(directory / FILE)):
        assert said in str(refused.value)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_where_it_holds_nothing_all_is_forgotten(directory: Path) -> None:
    """What is known of buckets and keys is not true of those of the same names elsewhere."""
    keep_to_origin(directory, THERE, NOTHING)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        "FORMAT": FORMAT,
        FILE: f"{THERE}\n".encode(),
    }
    assert recover(directory, 0.0) == NOTHING


def test_whose_it_is_can_be_said_by_hand(directory: Path) -> None:
    """One store has two names: nothing is forgotten then."""
    (directory / FILE).write_text(THERE)
    keep_to_origin(directory, THERE, Recovered(1, 0, 0, 0))
    assert (directory / "journal").exists()


def test_a_disk_that_does_not_say_is_no_other_origin(directory: Path) -> None:
    """It may be well tomorrow."""
    (directory / FILE).unlink()
    (directory / FILE).mkdir()
    with pytest.raises(BufferUnavailable, match="cannot be used"):
        keep_to_origin(directory, HERE, NOTHING)
