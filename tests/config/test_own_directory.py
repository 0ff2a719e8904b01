"""Which directory Forebay works in, whatever the given one is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.config.defaults import is_own, others_files, own_directory
from gateway.serve.claim import prepare_directory
from tests.support.cache_directory import begun


def test_one_that_is_not_there_is_made_and_stays_the_one(tmp_path: Path) -> None:
    """From the first moment on: a start that fails for another reason leaves nothing but the lock."""
    given = tmp_path / "cache"
    assert own_directory(given) == given
    prepare_directory(given)
    assert own_directory(given) == given
    begun(given)
    (given / "anything").touch()
    assert own_directory(given) == given


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o1777])
@pytest.mark.parametrize(
    "name", ["thesis.pdf", ".hidden", "lock", "FORMAT", "blocks", "catalog", "run", "writeback", "slots.json"]
)
def test_one_with_files_of_others_is_theirs(tmp_path: Path, mode: int, name: str) -> None:
    """Also where they have the names of Forebay's; a start makes its own below it, again and again the same."""
    (tmp_path / name).write_bytes(b"4711\n")
    tmp_path.chmod(mode)
    for _ in range(2):
        own = own_directory(tmp_path)
        assert own == tmp_path / "forebay"
        begun(own)
        (own / "more").touch()
    assert own.stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_mode & 0o7777 == mode
    assert (tmp_path / name).read_bytes() == b"4711\n"
    assert sorted(os.listdir(tmp_path)) == sorted([name, "forebay"])


@pytest.mark.parametrize(("mode", "is_used"), [(0o700, True), (0o755, False), (0o2770, False), (0o1777, False)])
@pytest.mark.parametrize("content", [[], ["lost+found"]])
def test_an_empty_one_is_used_itself_where_nobody_else_can_enter(
    tmp_path: Path, mode: int, is_used: bool, content: list[str]
) -> None:
    """Forebay need not close it then. A fresh mount is empty but for lost+found."""
    for name in content:
        (tmp_path / name).mkdir()
    tmp_path.chmod(mode)
    assert own_directory(tmp_path) == (tmp_path if is_used else tmp_path / "forebay")


@pytest.mark.parametrize(
    ("name", "content"), [("blocks/FORMAT", b"forebay blocks 3\n"), ("writeback/FORMAT", b"forebay writeback 1\n")]
)
def test_one_that_an_older_version_has_used_goes_on_being_used(tmp_path: Path, name: str, content: bytes) -> None:
    """Its lock has nothing but a number in it. Files beside Forebay's, and any mode, do not matter."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "lock").write_bytes(b"4711\n")
    (tmp_path / "thesis.pdf").touch()
    tmp_path.chmod(0o1777)
    assert own_directory(tmp_path) == tmp_path
    assert others_files(tmp_path) == []


def test_what_is_no_file_is_no_mark(tmp_path: Path) -> None:
    """A link is not followed, and a pipe not waited for."""
    begun(tmp_path / "cache")
    (tmp_path / "lock").symlink_to(tmp_path / "cache" / "lock")
    (tmp_path / "blocks").mkdir()
    os.mkfifo(tmp_path / "blocks" / "FORMAT")
    assert not is_own(tmp_path)
    assert own_directory(tmp_path) == tmp_path / "forebay"
