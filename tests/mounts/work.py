"""What data preparation does with files: `python -m tests.mounts.work NAME DIRECTORY [ARGUMENT ...]`.

Each piece of work makes what it needs in the directory, checks what it reads back, and fails where anything differs.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

MIB = 2**20


def content(name: str, size_bytes: int) -> bytes:
    """The same for the same name, in every process."""
    return random.Random(name).randbytes(size_bytes)


def write_and_read(here: Path) -> None:
    """In pieces, with fsync; read from the start, the middle and the end."""
    data = content("large", 3 * MIB + 17)
    with (here / "large").open("wb") as file:
        for start in range(0, len(data), 100_000):
            file.write(data[start : start + 100_000])
        file.flush()
        os.fsync(file.fileno())
    assert (here / "large").read_bytes() == data
    with (here / "large").open("rb") as file:
        for start in (2 * MIB, 5, len(data) - 10):
            file.seek(start)
            assert file.read(1000) == data[start : start + 1000]


def read_of_others(here: Path) -> None:
    """Read what was put there by somebody else."""
    assert (here / "of-others").read_bytes() == content("of-others", 100_000)


def append(here: Path) -> None:
    for number in range(5):
        with (here / "log").open("a") as file:
            file.write(f"line {number}\n")
    assert (here / "log").read_text() == "".join(f"line {number}\n" for number in range(5))


def write_in_the_middle(here: Path) -> None:
    data = bytearray(content("middle", 6 * MIB))
    (here / "middle").write_bytes(data)
    data[3 * MIB : 3 * MIB + 4096] = b"x" * 4096
    with (here / "middle").open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"x" * 4096)
    assert (here / "middle").read_bytes() == data
    with (here / "middle").open("r+b") as file:
        file.truncate(1000)
    assert (here / "middle").read_bytes() == data[:1000]


def rename(here: Path) -> None:
    """A file, a file over another, and a directory with ten files in two levels."""
    for number in range(3):
        (here / "state.tmp").write_text(f"{number}")
        with (here / "state.tmp").open("r+b") as file:
            os.fsync(file.fileno())
        (here / "state.tmp").replace(here / "state")
        assert (here / "state").read_text() == f"{number}"
    (here / "old" / "inner").mkdir(parents=True)
    for number in range(10):
        (here / "old" / ("inner" if number % 2 else ".") / str(number)).write_text(str(number))
    (here / "old").rename(here / "new")
    assert sorted(os.listdir(here)) == ["new", "state"]
    found = {file.name: file.read_text() for file in (here / "new").rglob("*") if file.is_file()}
    assert found == {str(number): str(number) for number in range(10)}


def tar(here: Path) -> None:
    """Make an archive of a tree in the mount, unpack it there, compare, and remove the tree."""
    tree = {f"tree/{number % 3}/{number}.bin": content(str(number), 2000) for number in range(15)}
    for name, data in tree.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(data)
    _run(here, "tar", "czf", "tree.tar.gz", "tree")
    (here / "unpacked").mkdir()
    _run(here, "tar", "xzf", "tree.tar.gz", "-C", "unpacked")
    _run(here, "diff", "-r", "tree", "unpacked/tree")
    shutil.rmtree(here / "tree")
    assert sorted(os.listdir(here)) == ["tree.tar.gz", "unpacked"]


def git(here: Path) -> None:
    """Begin a repository, commit, clone it, commit there; without the samples of hooks, which are many files."""
    name = ("-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "safe.directory=*")
    (here / "first").mkdir()
    for number in range(4):
        (here / "first" / f"{number}.py").write_text(f"print({number})\n")
    _run(here / "first", "git", *name, "init", "-q", "--template=")
    _run(here / "first", "git", *name, "add", ".")
    _run(here / "first", "git", *name, "commit", "-q", "-m", "first")
    _run(here, "git", *name, "clone", "-q", "--template=", "--no-hardlinks", "first", "second")
    (here / "second" / "0.py").write_text("print('changed')\n")
    _run(here / "second", "git", *name, "commit", "-q", "-a", "-m", "second")
    assert _run(here / "second", "git", *name, "status", "--porcelain") == ""
    assert len(_run(here / "second", "git", *name, "log", "--oneline").splitlines()) == 2
    _run(here / "second", "git", *name, "fsck", "--strict")


def sqlite(here: Path) -> None:
    for number in range(3):
        with closing(sqlite3.connect(here / "index.db")) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS samples (number INTEGER, name TEXT)")
            database.executemany("INSERT INTO samples VALUES (?, ?)", [(number, str(one)) for one in range(100)])
    with closing(sqlite3.connect(here / "index.db")) as database:
        assert database.execute("SELECT count(*), max(number) FROM samples").fetchone() == (300, 2)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def pandas(here: Path) -> None:
    """CSV written over and appended to; Parquet of which one column is read."""
    import numpy
    from pandas import DataFrame, concat, read_csv, read_parquet

    frame = DataFrame({"number": numpy.arange(20_000), "value": numpy.random.default_rng(1).random(20_000)})
    for _ in range(2):
        frame.to_csv(here / "table.csv", index=False)
    frame.to_csv(here / "table.csv", index=False, header=False, mode="a")
    assert read_csv(here / "table.csv").round(9).equals(concat([frame, frame], ignore_index=True).round(9))
    frame.to_parquet(here / "table.parquet")
    assert read_parquet(here / "table.parquet", columns=["value"]).equals(frame[["value"]])


def checkpoint(here: Path) -> None:
    """A zip of uncompressed records, written with seeks back, as torch.save writes; read by mmap, as torch.load can."""
    tensors = {f"archive/data/{number}": content(str(number), 1_000_000) for number in range(6)}
    with zipfile.ZipFile(here / "step-1.pt", "w") as archive:
        for name, data in tensors.items():
            with archive.open(name, "w") as record:  # the sizes in its header are written when it is over
                record.write(data)
    with (here / "step-1.pt").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert all(mapped.find(data) > 0 for data in tensors.values())
    with zipfile.ZipFile(here / "step-1.pt") as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == tensors


def many_files(here: Path) -> None:
    """Write, list, find, read, and remove."""
    for number in range(30):
        (here / f"{number:02}.txt").write_text(str(number))
    assert sorted(os.listdir(here)) == [f"{number:02}.txt" for number in range(30)]
    assert len(_run(here, "find", ".", "-name", "*.txt", "-size", "-2k").splitlines()) == 30
    assert all((here / f"{number:02}.txt").read_text() == str(number) for number in range(30))
    for number in range(30):
        (here / f"{number:02}.txt").unlink()
    assert os.listdir(here) == []


def limits(here: Path) -> None:
    """Print what becomes of everything that a file system may lack: "works", "fails silently", or the error's name."""
    print(json.dumps({name: _outcome(one, here) for name, one in _LIMITS.items()}))


def _outcome(attempt: Callable[[Path], bool], here: Path) -> str:
    directory = here / attempt.__name__
    directory.mkdir()
    (directory / "file").write_bytes(b"content")
    try:
        return "works" if attempt(directory) else "fails silently"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def _symbolic_link(here: Path) -> bool:
    (here / "link").symlink_to("file")
    return (here / "link").read_bytes() == b"content" and os.readlink(here / "link") == "file"


def _hard_link(here: Path) -> bool:
    os.link(here / "file", here / "link")
    return (here / "file").stat().st_nlink == 2


def _chmod(here: Path) -> bool:
    (here / "file").chmod(0o600)
    return stat.S_IMODE((here / "file").stat().st_mode) == 0o600


def _times(here: Path) -> bool:
    os.utime(here / "file", (1_000_000_000, 1_000_000_000))
    return (here / "file").stat().st_mtime == 1_000_000_000


def _extended_attribute(here: Path) -> bool:
    os.setxattr(here / "file", "user.name", b"value")
    return os.getxattr(here / "file", "user.name") == b"value"


def _fifo(here: Path) -> bool:
    os.mkfifo(here / "fifo")
    return stat.S_ISFIFO((here / "fifo").stat().st_mode)


def _truncate_by_path(here: Path) -> bool:
    os.truncate(here / "file", 3)
    return (here / "file").read_bytes() == b"con"


def _unlink_of_an_open_file(here: Path) -> bool:
    with (here / "file").open("r+b", buffering=0) as file:
        (here / "file").unlink()
        file.write(b"C")
        file.seek(0)
        return file.read() == b"Content"


def _write_while_it_is_read(here: Path) -> bool:
    with (here / "file").open("rb", buffering=0) as reader, (here / "file").open("ab", buffering=0) as writer:
        writer.write(b" and more")
        return reader.read(100) == b"content and more"


_LIMITS = {
    "symbolic link": _symbolic_link,
    "hard link": _hard_link,
    "chmod": _chmod,
    "times": _times,
    "extended attribute": _extended_attribute,
    "FIFO": _fifo,
    "truncate by path": _truncate_by_path,
    "unlink of an open file": _unlink_of_an_open_file,
    "write while it is read": _write_while_it_is_read,
}


def write_synced(here: Path, *stopped: str) -> None:
    """Write a file with fsync and close it, while these processes are stopped."""
    os.listdir(here)
    for pid in stopped:
        os.kill(int(pid), signal.SIGSTOP)
    with (here / "synced").open("wb") as file:
        file.write(content("synced", 10_000))
        file.flush()
        os.fsync(file.fileno())


def _run(here: Path, *command: str) -> str:
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout


WORK = [write_and_read, append, write_in_the_middle, rename, tar, git, sqlite, pandas, checkpoint, many_files]
_ALL = {one.__name__: one for one in [*WORK, read_of_others, limits, write_synced]}

if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    _ALL[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
