"""MD5s of streams that several threads hash at the same moment: the ones that hashlib computes, whatever meets."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.md5_lanes import build
from gateway.md5_lanes.streams import LANES, Hashlib, Implementation, Md5Library, found_at

REPOSITORY = Path(__file__).resolve().parents[2]

RFC_1321 = {
    b"": "d41d8cd98f00b204e9800998ecf8427e",
    b"a": "0cc175b9c0f1b6a831c399e269772661",
    b"abc": "900150983cd24fb0d6963f7d28e17f72",
    b"message digest": "f96b697d7cb7938d525a2f31aaf161d0",
    b"abcdefghijklmnopqrstuvwxyz": "c3fcd3d76192e4007dfb496cca67e13b",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789": "d174ab98d277d9f5a5611c2c9f419d9f",
    b"1234567890" * 8: "57edf4a22be3c955ac49da2e2107b67a",
}
"""Its appendix A.5."""

NOISE = random.Random(1321).randbytes(3 * 1024 * 1024)

MEETS_BYTES = 8192
"""What a piece has at least that is hashed beside others (ROOM_BYTES_MIN)."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Implementation:
    """Of the source as it is; where no compiler or no AVX2 is, what is used then."""
    library = tmp_path_factory.mktemp("md5") / "library"
    build.build(library)
    return found_at(library)


@pytest.fixture(params=["built", "hashlib"])
def md5s(request: pytest.FixtureRequest) -> Implementation:
    """Either of the two."""
    if request.param == "hashlib":
        return Hashlib()
    library: Implementation = request.getfixturevalue("built")
    return library


def expected(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def at_once(works: Sequence[Callable[[], bytes]]) -> list[bytes]:
    """What each returns; all begin at the same moment, each on a thread."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], bytes]) -> bytes:
        start.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def hashed(md5s: Implementation, data: bytes, piece_bytes: int) -> bytes:
    """In pieces of a length."""
    md5, view = md5s.new(), memoryview(data)
    for at in range(0, len(data), piece_bytes):
        md5.update(view[at : at + piece_bytes])
    return md5.digest()


@pytest.mark.slow
def test_what_can_be_built_is_used(built: Implementation) -> None:
    """Where there is a compiler and the processor has AVX2, eight streams are hashed at once."""
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    can = shutil.which("cc") is not None and " avx2 " in processor
    assert isinstance(built, Md5Library if can else Hashlib)
    assert built.lanes == (8 if can else 1)


@pytest.mark.parametrize(("data", "digest"), RFC_1321.items())
def test_known_digests(md5s: Implementation, data: bytes, digest: str) -> None:
    """Those of RFC 1321."""
    md5 = md5s.new()
    md5.update(data)
    assert md5.digest().hex() == digest


def test_each_length_around_blocks(md5s: Implementation) -> None:
    """The padding has one block or two, and a tail is carried on: every length up to three blocks, cut everywhere."""
    for length in range(200):
        data = NOISE[:length]
        for cut in {0, 1, length // 2, max(0, length - 1), length}:
            md5 = md5s.new()
            md5.update(memoryview(data)[:cut])
            md5.update(data[cut:])
            assert md5.digest() == expected(data), (length, cut)


def test_a_digest_ends_nothing(md5s: Implementation) -> None:
    """It may be asked for at any time, twice too; what comes afterwards counts."""
    md5 = md5s.new()
    md5.update(NOISE[:100_000])
    assert md5.digest() == md5.digest() == expected(NOISE[:100_000])
    md5.update(NOISE[100_000:100_003])
    assert md5.digest() == expected(NOISE[:100_003])


LENGTHS = st.one_of(st.integers(0, 200), st.integers(MEETS_BYTES - 70, MEETS_BYTES + 70), st.integers(0, 200_000))
STREAMS = st.lists(
    st.tuples(st.integers(0, 64), st.lists(LENGTHS, max_size=6)),
    min_size=1,
    max_size=20,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(streams=STREAMS)
def test_any_streams_at_once(built: Implementation, streams: list[tuple[int, list[int]]]) -> None:
    """Streams of any lengths, cut anywhere, at any address, more of them than there are lanes: each has its own MD5."""

    def work(offset: int, lengths: list[int]) -> bytes:
        md5, view = built.new(), memoryview(NOISE)
        for length in lengths:
            md5.update(view[offset : offset + length])
            offset += length
        return md5.digest()

    works = [partial(work, offset, lengths) for offset, lengths in streams]
    digests = at_once(works)
    for (offset, lengths), digest in zip(streams, digests, strict=True):
        assert digest == expected(NOISE[offset : offset + sum(lengths)])


@pytest.mark.slow
def test_many_threads_for_long(built: Implementation) -> None:
    """Forty threads, five times the lanes, come and go with streams of their own lengths and pieces: nobody is
    forgotten, nobody is given what is another's."""
    dice = random.Random(7)
    jobs = [
        [(dice.randrange(1, 1_000_000), dice.choice((1000, 8192, 65536, 262_144, 1 << 20))) for _ in range(12)]
        for _ in range(40)
    ]

    def work(job: list[tuple[int, int]]) -> bytes:
        return b"".join(hashed(built, NOISE[:length], piece_bytes) for length, piece_bytes in job)

    digests = at_once([partial(work, job) for job in jobs])
    for job, digest in zip(jobs, digests, strict=True):
        assert digest == b"".join(expected(NOISE[:length]) for length, _ in job)


def test_one_that_ends_in_the_middle_is_nobody_elses_matter(built: Implementation) -> None:
    """Streams that are given up, with no digest asked for, beside others that go on."""

    def work(length: int) -> bytes:
        hashed(built, NOISE[: length // 2], 100_000)
        return hashed(built, NOISE[:length], 100_000)

    lengths = [300_000 + 100_000 * n for n in range(16)]
    digests = at_once([partial(work, length) for length in lengths])
    assert digests == [expected(NOISE[:length]) for length in lengths]


def test_other_threads_run_meanwhile(md5s: Implementation) -> None:
    """A thread that hashes holds no lock of the interpreter."""
    others_run, seen = threading.Event(), False

    def work() -> None:
        nonlocal seen
        md5 = md5s.new()
        for _ in range(300):
            md5.update(NOISE)
            if seen := others_run.is_set():
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # seconds: none is made to let go of the lock
    try:
        hashing = threading.Thread(target=work)
        hashing.start()
        others_run.set()
        hashing.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen


@pytest.mark.parametrize("data", [memoryview(bytes(100))[::2], "text"])
def test_what_is_no_bytes_is_refused(md5s: Implementation, data: object) -> None:
    """As hashlib does; the stream is as it was."""
    md5 = md5s.new()
    md5.update(b"abc")
    with pytest.raises((BufferError, TypeError)):
        md5.update(data)  # type: ignore[arg-type]
    assert md5.digest() == expected(b"abc")


def test_a_buffer_is_let_go_of(md5s: Implementation) -> None:
    """What was hashed may be changed in length afterwards."""
    data = bytearray(NOISE[:50_000])
    md5 = md5s.new()
    md5.update(memoryview(data))
    data += b"more"
    assert md5.digest() == expected(NOISE[:50_000])


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_without_a_library_hashlib_does_it(tmp_path: Path, content: bytes | None) -> None:
    """One that is missing, or broken, is no failure."""
    path = tmp_path / "library"
    if content is not None:
        path.write_bytes(content)
    assert isinstance(found_at(path), Hashlib)


def test_without_a_compiler_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said why, and no file is left."""
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    assert "no-compiler" in (build.build(tmp_path / "library") or "")
    monkeypatch.setenv("CC", "false")
    assert build.build(tmp_path / "library") is not None
    assert list(tmp_path.iterdir()) == []


def test_another_processor_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not even asked."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in (build.build(tmp_path / "library") or "")


def test_building_needs_nothing_that_is_installed() -> None:
    """It is done before anything of the gateway is."""
    code = (
        "import sys; import gateway.md5_lanes.build; print(sorted(m for m in sys.modules if m.startswith('gateway')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['gateway', 'gateway.md5_lanes', 'gateway.md5_lanes.build']"


def test_what_is_in_use_here_counts_its_lanes() -> None:
    """One with hashlib."""
    assert LANES in (1, 8)
