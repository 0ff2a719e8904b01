"""`forebay cluster status`."""

from __future__ import annotations

from typing import Any

import orjson
from typer.testing import CliRunner

from gateway import cli
from tests.support.admin_double import admin_double

UP: dict[str, Any] = {"name": "gpu-1", "address": "10.0.0.1:9002", "this_node": True, "zone": "a", "weight": 1200}
UP |= {"share": 0.5, "state": "up", "version": "1.2.3", "age_seconds": 125.0, "clock_seconds": None, "problem": None}
UP |= {"sent_bytes": 0, "received_bytes": 0}
SILENT = UP | {"name": "gpu\x1b[2J", "address": "10.0.0.2:9002", "this_node": False, "state": "silent"}
SILENT |= {"clock_seconds": -2.25, "problem": "refused", "sent_bytes": 4096, "received_bytes": 8192}
CLUSTER: dict[str, Any] = {
    "name": "train",
    "node": "gpu-1",
    "address": "10.0.0.1:9002",
    "zone": "a",
    "members": [UP, SILENT],
}
CLUSTER |= {"sent_bytes": 2048, "received_bytes": 1024}


def test_each_member_has_a_line() -> None:
    """And nothing that a peer says of itself reaches the terminal."""
    with admin_double((200, CLUSTER)) as admin:
        result = CliRunner().invoke(cli.app, ["cluster", "status", "--admin-url", admin.url])
    assert (result.exit_code, admin.asked[0][1]) == (0, "/api/v1/cluster")
    text = result.stdout
    words = [
        "cluster train: 1 of 2 members up; this node is gpu-1 at 10.0.0.1:9002, zone a",
        "gave 2.0 KiB to others, took 1.0 KiB",
        "1,200",
    ]
    words += ["50.00%", "up", "1.2.3", "0:02:05", "gpu\\u001b[2J", "silent", "4.0 KiB", "8.0 KiB", "-2.2 s", "refused"]
    place = 0
    for word in words:
        place = text.index(word, place)
    assert "\x1b" not in text


def test_blocks_of_another_size_are_told_with_node_slot_and_sizes() -> None:
    differing = SILENT | {"differing_blocks": [{"slot": "data", "here_bytes": 8 << 20, "there_bytes": 4 << 20}]}
    with admin_double((200, CLUSTER | {"members": [UP, differing]})) as admin:
        result = CliRunner().invoke(cli.app, ["cluster", "status", "--admin-url", admin.url])
    assert "gpu\\u001b[2J (10.0.0.2:9002) has blocks of 4.0 MiB in slot data, this node of 8.0 MiB" in result.stdout


def test_a_node_outside_the_list_is_told_so() -> None:
    with admin_double((200, CLUSTER | {"members": [SILENT]})) as admin:
        result = CliRunner().invoke(cli.app, ["cluster", "status", "--admin-url", admin.url])
    assert "this node is not among the members" in result.stdout


def test_redis_is_believed_or_the_reason_is_told() -> None:
    for redis, said in (
        ({"believed": True, "since": 0.0, "version": "7.0.15"}, "Redis 7.0.15: believed for "),
        ({"believed": False, "problem": "no answer in time\x1b[2J"}, "Redis: not believed: no answer in time\\u001b"),
    ):
        with admin_double((200, CLUSTER | {"redis": redis})) as admin:
            result = CliRunner().invoke(cli.app, ["cluster", "status", "--admin-url", admin.url])
        assert said in result.stdout


def test_forgetting_a_node_is_asked_for_or_stated() -> None:
    """Nothing is forgotten where nobody can agree."""
    found = {"node": "gpu-2", "pending": 3, "forgotten": False}
    with admin_double((200, found), (200, found)) as admin:
        asked = CliRunner().invoke(cli.app, ["cluster", "forget", "gpu-2", "--admin-url", admin.url])
        assert asked.exit_code == 2
        assert [one[:2] for one in admin.asked] == [("POST", "/api/v1/cluster/forget")]
    with admin_double((200, found), (200, found | {"forgotten": True})) as admin:
        done = CliRunner().invoke(cli.app, ["cluster", "forget", "gpu-2", "--yes", "--admin-url", admin.url])
        assert (done.exit_code, done.stdout) == (0, "gpu-2 is forgotten, with 3 pending keys\n")
        assert len(admin.asked) == 2


def test_programs_get_the_document() -> None:
    with admin_double((200, CLUSTER)) as admin:
        result = CliRunner().invoke(cli.app, ["cluster", "status", "--json", "--admin-url", admin.url])
    assert orjson.loads(result.stdout) == CLUSTER
