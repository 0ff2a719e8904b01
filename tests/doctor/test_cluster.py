"""What `forebay doctor` finds of the other nodes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway import __version__
from gateway.api.documents import ClusterDocument
from gateway.doctor.running import of_cluster

ME = {"name": "gpu-1", "address": "10.0.0.1:9002", "this_node": True, "share": 0.5, "state": "up"}
OTHER: dict[str, Any] = {"name": "gpu-2", "address": "10.0.0.2:9002", "share": 0.5, "state": "up"}
OTHER |= {"version": __version__, "same_homes": True, "reaches_this_node": True, "clock_seconds": -2.0}


def found(*members: dict[str, Any], redis: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    document = {"name": "train", "address": "10.0.0.1:9002", "members": members, "redis": redis}
    cluster = ClusterDocument.model_validate(document)
    return [(one.level.value, one.found) for one in of_cluster(cluster)]


def test_a_cluster_in_order_is_one_line() -> None:
    [(level, text)] = found(ME, OTHER)
    assert (level, text.partition(":")[0]) == ("ok", "2 members of train")


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({"state": "silent", "problem": "refused"}, "error", "does not answer: refused"),
        ({"state": "unknown"}, "error", "does not answer: it was not asked yet"),
        ({"state": "closed"}, "warning", "its cache directory cannot be used"),
        ({"reaches_this_node": False}, "error", "gets no answer from this node"),
        ({"same_homes": False}, "error", "has other origins"),
        ({"version": "0"}, "note", "has version 0"),
        (
            {"differing_blocks": [{"slot": "data", "here_bytes": 8 << 20, "there_bytes": 4 << 20}]},
            "warning",
            "has blocks of 4.0 MiB in slot data, this node of 8.0 MiB: the two share few of them",
        ),
        ({"clock_seconds": 31.0}, "warning", "differs by 31 s"),
        ({"clock_seconds": -61.0}, "error", "differs by 61 s"),
    ],
)
def test_what_is_wrong_with_a_member_is_told(changed: dict[str, Any], level: str, text: str) -> None:
    [(found_level, found_text)] = found(ME, OTHER | changed)
    assert found_level == level
    assert found_text.replace("the clock of ", "").startswith("gpu-2 (10.0.0.2:9002) ")
    assert text in found_text


REDIS: dict[str, Any] = {"believed": True, "version": "7.0.15", "policy": "noeviction", "clients_max": 10_000}


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, "ok", "2 members of train"),
        ({"believed": False, "problem": "no answer in time"}, "error", "Redis is not believed: no answer in time"),
        ({"policy": "allkeys-lru"}, "error", "may drop entries"),
        ({"used_bytes": 800, "limit_bytes": 1000}, "warning", "uses 800 B of 1000 B"),
        ({"clients_max": 17}, "warning", "takes 17 clients; 2 nodes may need more"),
        ({"replicas": 1}, "warning", "goes on as a primary when its replicas are gone"),
        ({"replicas": 1, "waits_for_replicas": True, "clients_max": 18}, "ok", "2 members of train"),
        ({"clock_seconds": -40.0}, "note", "differs by 40 s; nothing depends on it"),
    ],
)
def test_what_is_wrong_with_redis_is_told(changed: dict[str, Any], level: str, text: str) -> None:
    findings = found(ME, OTHER, redis=REDIS | changed)
    assert [text in of_this for found_level, of_this in findings if found_level == level] == [True]
    assert len(findings) == (1 if level == "ok" else 2)


def test_a_redis_that_was_never_reached_is_one_finding() -> None:
    findings = found(ME, OTHER, redis={"believed": False, "problem": "refused"})
    assert findings[0] == ("error", "Redis is not believed: refused")
    assert len(findings) == 2


def test_a_node_outside_the_list_is_warned_of() -> None:
    [(level, text), _] = found(OTHER)
    assert (level, text.split(":")[0]) == ("warning", "10.0.0.1")


def test_a_thousand_silent_members_do_not_fill_the_terminal() -> None:
    findings = found(ME, *[OTHER | {"state": "silent"}] * 999)
    assert len(findings) == 21
    assert findings[-1] == ("note", "979 more findings about members")
