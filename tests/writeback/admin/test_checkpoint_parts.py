"""Checkpoints of several nodes: what follows from the parts together, not from any of them."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.writeback.admin.checkpoint_parts import Part, Told, joined, part_of
from gateway.writeback.checkpoints.layouts import CheckpointName
from gateway.writeback.checkpoints.reads import ReadPass, checkpoint_id, file_id
from gateway.writeback.checkpoints.state import ObjectFacts, UploadFacts

NAME = CheckpointName("b", "run/step-1/", 1, "dcp")
NOW = 1000.0


def shard(rank: int, at: float = 900.0, **more: Any) -> ObjectFacts:
    return ObjectFacts(f"run/step-1/__{rank}_0.distcp", 100, at, at, rank, **more)


def told(node: str, *objects: ObjectFacts, ahead_seconds: float = 0.0, **more: Any) -> Told:
    """A node's word, as it comes over the wire."""
    began_at = min((one.began_at for one in objects), default=900.0)
    values: dict[str, Any] = {"began_at": began_at, "uploads": (), "ranks_before": (), **more}
    reads = values.pop("reads", {})
    part = part_of(NAME, "slot", objects=objects, **values)
    return Told(
        node, Part.model_validate_json(part.model_dump_json()), ahead_seconds, orjson.loads(orjson.dumps(reads))
    )


def test_a_rank_is_missing_if_no_node_has_it() -> None:
    a, b = told("a", shard(0), shard(1), ranks_before=range(4)), told("b", shard(2), ranks_before=())
    found = joined([a, b], NOW)
    assert (found.state, found.missing.ranks, found.ranks_seen) == ("stalled", [3], [0, 1, 2])
    assert (found.files, found.bytes, found.nodes) == (3, 300, ["a", "b"])


def test_it_is_durable_when_all_parts_are() -> None:
    marker = ObjectFacts("run/step-1/.metadata", 1, 910.0, 910.0, is_durable=True)
    for is_durable, state in ((False, "flushing"), (True, "durable")):
        parts = told("a", shard(0, is_durable=True), marker), told("b", shard(1, is_durable=is_durable))
        assert joined(parts, NOW).state == state


def test_a_key_that_two_nodes_have_had_counts_once() -> None:
    """As what is pending: the other node has flushed its own before."""
    for parts in ((shard(0, 950.0, is_durable=True), shard(0, 940.0)), (shard(0), shard(0, 940.0, is_durable=True))):
        found = joined([told("a", parts[0]), told("b", parts[1])], NOW)
        assert (found.files, found.bytes_flushed) == (1, 0)


def test_clocks_of_nodes_may_differ() -> None:
    upload = UploadFacts("run/step-1/__1_0.distcp", 1030.0, 1030.0, 1)
    found = joined([told("a", shard(0, 980.0)), told("b", uploads=[upload], began_at=1030.0, ahead_seconds=40.0)], NOW)
    assert (found.state, found.last_at, found.began_at, found.missing.open_uploads) == ("writing", 990.0, 980.0, 1)


def test_what_was_saved_before_under_the_same_name_is_no_part_of_the_save() -> None:
    old, new = shard(1, 100.0), shard(0, 990.0)
    found = joined([told("a", old, new, began_at=990.0), told("b", shard(2, 991.0), ranks_before=range(3))], NOW)
    assert (found.files, found.ranks_seen, found.missing.ranks) == (3, [0, 2], [1])


def test_a_restore_lags_where_no_node_has_read_on() -> None:
    """Each rank reads its own file through its own node."""
    objects = [shard(rank, 100.0, is_durable=True) for rank in range(3)]

    def read(rank: int, count: int, ahead_seconds: float = 0.0) -> dict[str, Any]:
        name = file_id(checkpoint_id("b", NAME.prefix), objects[rank].key).hex()
        return {name: [tuple(ReadPass(count, 900.0 + ahead_seconds, 910.0 + ahead_seconds))]}

    parts = [
        told("a", *objects, reads=read(0, 100)),
        told("b", reads=read(1, 100, 30.0), ahead_seconds=30.0),
        told("c", reads=read(2, 20)),
    ]
    restore = joined(parts, NOW).restore
    assert restore is not None
    assert (restore.state, restore.behind.ranks, restore.bytes_read, restore.last_at) == ("stalled", [2], 220, 910.0)
