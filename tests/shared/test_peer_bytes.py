"""Bytes to and from each node: each process has a table, which the next process of its number continues."""

from __future__ import annotations

from pathlib import Path

from gateway.shared import peer_bytes
from gateway.shared.peer_bytes import NODES_MAX, PeerBytes, bytes_by_peer, digest


def test_tables_of_all_processes_are_added_up(tmp_path: Path) -> None:
    for process in (0, 1, 256):
        PeerBytes(tmp_path, "sent", process).add("one:9002", 10)
    again = PeerBytes(tmp_path, "sent", 1)
    again.add("two:9002", 5)
    again.add("one:9002", 1)
    PeerBytes(tmp_path, "received", 1).add("one:9002", 7)
    assert bytes_by_peer(tmp_path, "sent") == {digest("one:9002"): 31, digest("two:9002"): 5}
    assert bytes_by_peer(tmp_path, "received") == {digest("one:9002"): 7}


def test_a_full_table_forgets_the_node_that_was_counted_longest_ago(tmp_path: Path) -> None:
    table = PeerBytes(tmp_path, "sent")
    for number in range(NODES_MAX):
        table.add(f"node {number}", 1)
    table.add("node 0", 1)
    table.add("another", 3)
    found = bytes_by_peer(tmp_path, "sent")
    assert len(found) == NODES_MAX
    assert [found[digest(one)] for one in ("node 0", "node 1", "node 2", "another")] == [2, 0, 1, 3]
    assert {file.stat().st_size for file in tmp_path.iterdir()} == {peer_bytes.FILE_BYTES}


def test_without_room_a_process_counts_for_itself(tmp_path: Path) -> None:
    table = PeerBytes(tmp_path / "absent", "sent")
    table.add("one", 1)
    assert not bytes_by_peer(tmp_path, "sent")
