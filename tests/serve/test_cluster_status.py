"""`forebay cluster status` of two whole gateways: they find each other, and one that ends is told silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.demo.ports import free_port
from tests.support.gateway_process import GatewayProcess
from tests.support.waiting import eventually

SECRET = "the secret of the cluster: 32 characters or more"


@pytest.mark.slow
def test_nodes_find_each_other_and_tell_who_is_there(tmp_path: Path) -> None:
    """By hellos that are signed and proved. What a node says of itself counts for all others: zone, weight, age."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def config(address: str, **more: Any) -> dict[str, Mapping[str, Any]]:
        cluster = {"name": "train", "secret_file": str(secret), "listen": address, "members": [first, second]}
        return {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "cluster": {**cluster, **more}}

    with GatewayProcess(config(first, node="gpu-1", weight=3), directory=tmp_path / "1") as one:

        def members() -> dict[str, dict[str, Any]]:
            shown = one.command("cluster", "status", "--json", "--config", str(one.config_file))
            assert shown.returncode == 0, shown.stderr
            return {member["address"]: member for member in orjson.loads(shown.stdout)["members"]}

        def wait_for(state: str) -> None:
            eventually(lambda: members()[second]["state"] == state, lambda: str(members()[second]))

        assert members()[first]["state"] == "up"
        wait_for("unknown")
        with GatewayProcess(config(second, node="gpu-2", weight=1), directory=tmp_path / "2"):
            wait_for("up")
            found = members()
            assert (found[second]["name"], found[second]["weight"], found[second]["share"]) == ("gpu-2", 1, 0.25)
            assert abs(found[second]["clock_seconds"]) < 30
            assert found[first]["name"] == "gpu-1"
            text = one.command("cluster", "status", "--config", str(one.config_file)).stdout
            assert "cluster train: 2 of 2 members up; this node is gpu-1" in text
        wait_for("silent")
        assert members()[second]["share"] == 0.25, "it stays a member"
