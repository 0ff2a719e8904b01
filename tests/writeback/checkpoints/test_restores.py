"""How far a checkpoint has been read, from what workers count of its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.api import documents as to
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.checkpoints import reads as counting
from gateway.writeback.checkpoints.reads import (
    CheckpointReads,
    ReadPass,
    checkpoint_id,
    counted_file,
    file_id,
    reads_by_checkpoint,
)
from gateway.writeback.checkpoints.state import ObjectFacts, restore_of
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot

BACK = Slot("back", Prefix.parse("s3://bucket/"), write="back")
RANKS = [ObjectFacts(f"s-1/__{rank}_0.distcp", 1000, 0.0, 0.0, rank) for rank in range(4)]
FILES = [*RANKS, *(ObjectFacts(f"s-1/{name}", 10, 0.0, 0.0) for name in (".metadata", "README.md"))]


def restored(now: float, *read: tuple[int, ReadPass]) -> to.Restore | None:
    """Of FILES, by their numbers."""
    passes: dict[str, list[ReadPass]] = {}
    for number, one in read:
        passes.setdefault(FILES[number].key, []).append(one)
    return restore_of(FILES, passes, now)


def behind(facts: to.Restore | None) -> Sequence[int]:
    assert facts is not None
    return facts.behind.ranks


def test_a_restore_in_which_one_rank_lags_is_stalled() -> None:
    """11.8 Once nothing has come for a minute; what nobody reads of its kind is not waited for."""
    read = [(rank, ReadPass(1000, 0.0, 9.0)) for rank in range(3)]
    going = restored(50.0, *read, (3, ReadPass(100, 1.0, 5.0)))
    assert going is not None
    assert (going.state, going.files, going.files_begun, going.bytes_read, going.bytes) == (
        "reading",
        4,
        4,
        3100,
        4000,
    )
    stalled = restored(70.0, *read, (3, ReadPass(100, 1.0, 5.0)))
    assert stalled is not None
    assert (stalled.state, behind(stalled), stalled.behind.objects[0].bytes_read) == ("stalled", [3], 100)
    never = restored(70.0, *read)
    assert never is not None
    assert (never.state, behind(never), never.behind.objects[0].last_at) == ("stalled", [3], None)
    whole = restored(70.0, *read, (3, ReadPass(950, 1.0, 5.0)), (4, ReadPass(10, 0.0, 0.1)))
    assert whole is not None
    assert (whole.state, behind(whole)) == ("over", [])


def test_what_is_being_sent_is_no_stall() -> None:
    """An answer that takes long is counted when it ends."""
    facts = restored(500.0, (0, ReadPass(1000, 0.0, 9.0)), (1, ReadPass(0, 0.0, 0.0, open=1)))
    assert facts is not None
    assert facts.state == "reading"


def test_who_reads_half_of_every_file_is_done_with_it() -> None:
    """A model without its optimizer."""
    facts = restored(100.0, *((rank, ReadPass(500 + rank, 0.0, 9.0)) for rank in range(4)))
    assert facts is not None
    assert (facts.state, facts.bytes_read) == ("over", 2006)


def test_the_restore_before_does_not_count() -> None:
    """A job that reads again what it had read shows how far it is now; one that pauses goes on."""
    before = [(rank, ReadPass(1000, 0.0, 9.0)) for rank in range(4)]
    again = restored(300.0, *before, *((rank, ReadPass(1000, 200.0, 209.0)) for rank in range(3)))
    assert again is not None
    assert (again.state, again.began_at, behind(again)) == ("stalled", 200.0, [3])
    went_on = restored(300.0, *before[:3], (3, ReadPass(400, 0.0, 5.0)), (3, ReadPass(600, 100.0, 109.0)))
    assert went_on is not None
    assert (went_on.state, went_on.began_at, went_on.last_at) == ("over", 0.0, 109.0)
    assert behind(restored(2000.0, *before[:3], (3, ReadPass(400, 1900.0, 1905.0)))) == [0, 1, 2]


def test_it_is_forgotten_after_an_hour() -> None:
    """Shown as over before; nothing read is no restore."""
    assert restored(3600.0, (0, ReadPass(1000, 0.0, 9.0))) is not None
    assert restored(3610.0, (0, ReadPass(1000, 0.0, 9.0))) is None
    assert restored(0.0) is None


def test_workers_count_in_memory_that_others_read(tmp_path: Path) -> None:
    """Files of checkpoints in slots that write back, in passes; a worker that comes again goes on."""
    clock = ManualClock()
    key = ObjectKey("bucket", "run/step-1/__0_0.distcp")
    of_checkpoint = checkpoint_id("bucket", "run/step-1/")
    file = counted_file(key, BACK)
    assert file == file_id(of_checkpoint, key.key)
    assert counted_file(ObjectKey("bucket", "run/log.txt"), BACK) is None
    assert counted_file(key, Slot("plain", Prefix.parse("s3://bucket/"))) is None
    first, second = (CheckpointReads(tmp_path, number, clock) for number in range(2))
    began = clock.now()
    first.begin(file)
    [shown] = reads_by_checkpoint(tmp_path)[of_checkpoint][file]
    assert shown == ReadPass(0, began, began, 1)
    first.end(file, 10)
    second.begin(file)
    second.end(file, 5)
    assert [one.read_bytes for one in reads_by_checkpoint(tmp_path)[of_checkpoint][file]] == [10, 5]
    clock.set_wall(counting.PAUSE_SECONDS)
    first.begin(file)
    first.close()
    first.end(file, 7)  # of a worker that ends
    first = CheckpointReads(tmp_path, 0, clock)
    first.begin(file)
    first.end(file, 3)
    [latest, before, other] = reads_by_checkpoint(tmp_path)[of_checkpoint][file]
    assert (latest.read_bytes, latest.open, before.read_bytes, other.read_bytes) == (3, 0, 10, 5)
    first.close()
    second.close()
    assert reads_by_checkpoint(None) == {}


def test_a_worker_remembers_so_many_files_and_no_more(tmp_path: Path) -> None:
    """Those that were read last; the memory stays as large as it was."""
    clock = ManualClock()
    reads = CheckpointReads(tmp_path, 0, clock)
    of_checkpoint = checkpoint_id("bucket", "run/step-1/")
    files = [file_id(of_checkpoint, str(number)) for number in range(counting.FILES_MAX + 10)]
    for file in [*files, files[11]]:
        reads.begin(file)
        reads.end(file, 1)
    reads.end(files[0], 1)
    found = reads_by_checkpoint(tmp_path)[of_checkpoint]
    assert set(found) == set(files[10:])
    assert found[files[11]][0].read_bytes == 2
    reads.close()
