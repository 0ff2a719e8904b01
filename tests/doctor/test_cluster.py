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


def found(*members: dict[str, Any]) -> list[tuple[str, str]]:
    cluster = ClusterDocument.model_validate({"name": "train", "address": "10.0.0.1:9002", "members": members})
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
        ({"clock_seconds": 31.0}, "warning", "differs by 31 s"),
        ({"clock_seconds": -61.0}, "error", "differs by 61 s"),
    ],
)
def test_what_is_wrong_with_a_member_is_told(changed: dict[str, Any], level: str, text: str) -> None:
    [(found_level, found_text)] = found(ME, OTHER | changed)
    assert found_level == level
    assert found_text.replace("the clock of ", "").startswith("gpu-2 (10.0.0.2:9002) ")
    assert text in found_text


def test_a_node_outside_the_list_is_warned_of() -> None:
    [(level, text), _] = found(OTHER)
    assert (level, text.split(":")[0]) == ("warning", "10.0.0.1")


def test_a_thousand_silent_members_do_not_fill_the_terminal() -> None:
    findings = found(ME, *[OTHER | {"state": "silent"}] * 999)
    assert len(findings) == 21
    assert findings[-1] == ("note", "979 more findings about members")
