"""Conditions of a start: the directory, its lock, the limit of files. A gateway without its directory leaves a mark."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.defaults import LOCK_NAME
from gateway.core.errors import StartupError
from gateway.serve import claim as claims
from gateway.serve.claim import claim, kept_from_gateways, leave_mark, lock_directory, prepare_directory
from gateway.serve.system import raise_descriptor_limit
from tests.support.cache_directory import begun

LIMITED = """
import resource, sys
from gateway.serve.system import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def with_limits(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def mode(directory: Path) -> int:
    return directory.stat().st_mode & 0o777


def test_a_new_directory_is_the_owners_alone(tmp_path: Path) -> None:
    """With its parents made, whatever the umask."""
    prepare_directory(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700


def test_files_of_others_end_the_start(tmp_path: Path) -> None:
    """The message names one. `cache.directory` itself is never such a one: see config/defaults.py."""
    (tmp_path / "thesis.pdf").touch()
    with pytest.raises(StartupError, match=r"not Forebay's \(thesis\.pdf\)"):
        prepare_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.pdf"]


@pytest.mark.parametrize("content", [[], ["lost+found"], ["thesis.pdf"]])
def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path, content: list[str]) -> None:
    """Also one in which a gateway is at work: whoever made it may want others to look into it."""
    begun(tmp_path)
    tmp_path.chmod(0o1777)
    for name in content:
        (tmp_path / name).mkdir()
    prepare_directory(tmp_path)
    os.close(lock_directory(tmp_path))
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have the gateway work in any directory of ours: others may make it in /tmp."""
    begun(tmp_path / "ours")
    (tmp_path / "forebay").symlink_to(tmp_path / "ours")
    prepare_directory(tmp_path / "forebay")
    found = os.stat
    lying = os.lstat(tmp_path / "forebay").st_ino

    def stat(path: os.PathLike[str], **options: bool) -> os.stat_result:
        status = found(path, **options)
        if status.st_ino != lying:
            return status
        values = list(status)
        values[4] = 4711
        return os.stat_result(values)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(StartupError, match="belongs to user 4711"):
        prepare_directory(tmp_path / "forebay")


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """The message names the setting."""
    (tmp_path / "cache").touch()
    with pytest.raises(StartupError, match=r"cache\.directory"):
        prepare_directory(tmp_path / "cache")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He could put any bytes in the place of cached ones. Fresh volumes belong to root, and are taken."""
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if owner == 0:
        prepare_directory(tmp_path)
        os.chown(tmp_path, 4712, -1)
    with pytest.raises(StartupError, match=r"belongs to user \d+, and forebay runs as 4711"):
        prepare_directory(tmp_path)


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    """In a directory that others can write to, it would have any file of ours emptied."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / LOCK_NAME).symlink_to(victim)
    with pytest.raises(StartupError, match=r"cache\.directory"):
        lock_directory(tmp_path)
    assert victim.read_text() == "precious"


def test_only_one_gateway_holds_the_lock(tmp_path: Path) -> None:
    """The second is told whose it is; once released it can be taken again."""
    lock = lock_directory(tmp_path)
    with pytest.raises(StartupError, match=rf"process {os.getpid()}\b"):
        lock_directory(tmp_path)
    os.close(lock)
    os.close(lock_directory(tmp_path))


def test_children_of_a_killed_supervisor_are_waited_for(tmp_path: Path) -> None:
    """They hold the lock for a moment longer than the process whose number it bears."""
    supervisor = subprocess.Popen([sys.executable, "-c", "pass"])
    supervisor.wait()
    lock = lock_directory(tmp_path)
    os.pwrite(lock, b"%-20d" % supervisor.pid, 0)
    orphan = subprocess.Popen(["sleep", "0.3"], pass_fds=(lock,))
    os.close(lock)
    os.close(lock_directory(tmp_path))
    assert orphan.wait(0) == 0


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    """Every connection needs a descriptor, every block that is read another."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert with_limits(100, hard).stdout.strip() == str(hard)
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.slow
def test_a_low_limit_is_warned_of_and_a_hopeless_one_refused() -> None:
    """The message says how to raise it."""
    low = with_limits(100, 1024)
    assert low.returncode == 0
    assert "LimitNOFILE" in low.stdout + low.stderr
    hopeless = with_limits(100, 100)
    assert hopeless.returncode == 1
    assert "StartupError: the limit of open files is 100" in hopeless.stderr


def test_a_directory_is_kept_from_gateways_while_somebody_reads_it(tmp_path: Path) -> None:
    """None starts meanwhile; one that is at work is told of, and one that was killed does not count."""
    with kept_from_gateways(tmp_path) as is_free:
        assert is_free  # no gateway was ever there
    assert list(tmp_path.iterdir()) == []
    lock = lock_directory(tmp_path)
    with kept_from_gateways(tmp_path) as is_free:
        assert not is_free
    os.close(lock)
    with kept_from_gateways(tmp_path) as is_free:
        assert is_free
        with pytest.raises(StartupError, match="another forebay serve"):
            lock_directory(tmp_path)
    os.close(lock_directory(tmp_path))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claims, "SHARED_MEMORY", tmp_path)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def remember(directory: Path) -> None:
    begun(directory)
    (directory / "catalog").mkdir(exist_ok=True)
    (directory / "catalog" / "BOOT").touch()


def remembers_after_start(directory: Path) -> bool:
    lock, _ = claim(directory)
    assert lock is not None
    os.close(lock)
    return (directory / "catalog" / "BOOT").exists()


def test_what_was_remembered_before_is_forgotten_once(cache: Path) -> None:
    """Own writes could not be noted in it; what is learned from then on is believed, until that happens again."""
    for _ in range(2):
        remember(cache)
        assert remembers_after_start(cache)
        leave_mark(cache)
        assert not remembers_after_start(cache)


def test_a_directory_at_the_same_path_does_not_heed_the_mark_for_another(cache: Path) -> None:
    """Containers that share /dev/shm each have one there: the mark of one is for that one, whoever starts first."""
    remember(cache)
    leave_mark(cache)
    cache.rename(cache.with_name("first"))
    cache.mkdir()
    assert not remembers_after_start(cache)
    cache.rename(cache.with_name("second"))
    cache.with_name("first").rename(cache)
    assert not remembers_after_start(cache)


def test_a_mark_that_somebody_else_put_there_is_heeded_every_time(cache: Path, tmp_path: Path) -> None:
    """It says nothing about who has forgotten."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"%d:%d" % (cache.stat().st_dev, cache.stat().st_ino))
    claims.closed_mark(cache).symlink_to(elsewhere)
    for _ in range(2):
        remember(cache)
        assert not remembers_after_start(cache)
