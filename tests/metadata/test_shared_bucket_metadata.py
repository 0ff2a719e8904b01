"""Small answers that several processes keep and read, and may be killed over."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gateway.core.model import Homes
from gateway.metadata.bucket_metadata import BucketMetadataFile
from gateway.metadata.opening import ANSWERS, open_directory
from tests.support.prepared_process import PreparedProcess

ROOT = Path(__file__).parents[2]

OTHER = """
import os, resource, signal, sys
from pathlib import Path
from gateway.metadata.bucket_metadata import BucketMetadataFile
file = BucketMetadataFile(Path(sys.argv[1]))
for step in sys.argv[2:]:
    if step == "keep":
        print(file.put(b"place", b"record"))
    elif step == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    elif step == "many":
        for number in range(200):
            file.put(b"place%d" % (number % 7), b"%d" % number * 50)
    elif step == "look":
        print(file.get(b"place"))
    elif step == "die":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
file.close()
"""


def other(directory: Path, *steps: str) -> subprocess.Popen[str]:
    """Another process that has the directory open, and does these things."""
    return PreparedProcess(["-c", OTHER, directory, *steps], stdout=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=60)[0].split()


@contextmanager
def answer_file(directory: Path) -> Iterator[BucketMetadataFile]:
    file = BucketMetadataFile(directory)
    try:
        yield file
    finally:
        file.close()


def test_processes_share_the_file_and_may_be_killed(tmp_path: Path) -> None:
    """What a process has kept is there for all, though it is killed right after."""
    directory = tmp_path / ANSWERS
    with answer_file(directory) as file:
        assert ended(other(directory, "keep", "die")) == ["None"]
        assert file.get(b"place") == b"record"
        assert file.put(b"place", b"new") is None
        assert ended(other(directory, "look")) == ["b'new'"]


def test_processes_that_keep_answers_at_once_do_not_harm_the_file(tmp_path: Path) -> None:
    """Some may not be kept for want of the lock; every record is one that was kept for its place."""
    directory = tmp_path / ANSWERS
    with answer_file(directory) as file:
        assert file.put(b"place", b"record") is None
        processes = [other(directory, "many") for _ in range(3)]
        for process in processes:
            assert ended(process) == []
        for number in range(7):
            record = file.get(b"place%d" % number)
            assert isinstance(record, bytes)
            assert int(record[: len(record) // 50]) % 7 == number
    with closing(sqlite3.connect(directory / "cache.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_full_disk_keeps_nothing_and_harms_nothing(tmp_path: Path) -> None:
    """Neither when the file is to be made, nor when it is there."""
    assert ended(other(tmp_path / "a", "full", "keep", "look")) == ["unavailable", "unavailable"]
    assert ended(other(tmp_path / "b", "keep", "full", "many", "look")) == ["None", "b'record'"]


def test_answers_go_with_the_epochs_that_they_are_held_against(tmp_path: Path) -> None:
    """Where the counters begin again at 0, an old answer could be taken for a new one: so it is dropped with them."""
    catalog = open_directory(tmp_path, Homes("origin"))
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.put(b"place", b"record") is None
    catalog.close()
    open_directory(tmp_path, Homes("origin")).close()
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.get(b"place") == b"record"
    (tmp_path / "epochs").unlink()
    open_directory(tmp_path, Homes("origin")).close()
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.get(b"place") is None
        assert file.put(b"place", b"record") is None
    open_directory(tmp_path, Homes("another origin")).close()
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.get(b"place") is None
