"""Small files replaced as a whole."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.disk.atomic_write import write_durably
from tests.support.disks import small_disk

ROOM_BYTES = 64 * 1024


def test_a_file_that_is_not_taken_whole_is_not_replaced(tmp_path: Path) -> None:
    """The kernel takes the beginning only, as a full disk does: that is an error, and the old content stays."""
    path = tmp_path / "PINS"
    write_durably(path, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_durably(path, bytes(2 * ROOM_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    write_durably(path, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600


_MANY_READERS = """
import sys
from pathlib import Path
from gateway.disk.lmdb_environment import NEW_ENGINE, open_environment
from tests.support.disks import fill_up
directory = Path(sys.argv[1])
environment, _ = open_environment(directory, [b"t"], map_bytes=2**24, engine=NEW_ENGINE)
fill_up(directory)
readers = [environment.begin() for _ in range(900)]
print(len(readers))
"""


@pytest.mark.root
def test_readers_of_an_index_live_on_a_full_disk(tmp_path: Path) -> None:
    """LMDB maps a file that has holes: who touches one that the disk has no room for is killed."""
    with small_disk(tmp_path / "disk", 2**20) as disk:
        command = [sys.executable, "-c", _MANY_READERS, str(disk)]
        for _ in range(2):  # what is there is opened again, too
            done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (0, "900\n"), done.stderr
