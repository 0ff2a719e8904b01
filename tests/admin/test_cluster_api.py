"""`/api/v1/cluster`: the members of the cluster as this node knows them."""

from __future__ import annotations

from pathlib import Path

import httpx

from gateway import __version__
from gateway.admin.app import control_app, describe
from gateway.admin.backends import Backends, StateHolder
from gateway.cluster.hello import block_sizes_of, digests_of
from gateway.cluster.members import Member
from gateway.cluster.polling import Polling
from gateway.config import ClusterSettings, Settings, SlotSettings
from gateway.config.live import LiveSettings
from gateway.core.prefixes import Prefix
from gateway.disk.pem import PemFile
from gateway.shared.peer_bytes import PeerBytes
from tests.support.polled_node import FIRST, SECOND, THIRD, PolledNode

PATH = "/api/v1/cluster"


SLOTS = [SlotSettings(name="data", prefix=Prefix("b", "data/")), SlotSettings(name="rest", prefix=Prefix("b"))]


async def answered(directory: Path, polling: Polling | None, *, is_alone: bool = False) -> httpx.Response:
    cluster = ClusterSettings(
        name="train",
        secret_file=PemFile(directory / "secret"),
        members=[FIRST],
        node="gpu-1",
        advertise=FIRST,
        zone="a",
    )
    live = LiveSettings(Settings(cluster=None if is_alone else cluster, slots=SLOTS))
    app = control_app(live, StateHolder(), directory, Backends(cluster=polling))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9001") as client:
        return await client.get(PATH)


async def test_all_that_is_known_of_the_members_is_told(tmp_path: Path) -> None:
    """A share is of the blocks of the zone; a node that owns nothing has none. Each state has its name."""
    node = PolledNode(tmp_path, [FIRST, SECOND, THIRD, "10.0.0.4:9002"], SECOND, THIRD)
    node.peers.change(SECOND, zone="a", weight=1, name="gpu-2", version="7")
    node.peers.change(THIRD, caches=False, zone="a")
    usual = Settings().cache.block_size_bytes
    sizes = block_sizes_of([("", usual), ("s3://b/data/", 65536), ("s3://b/", usual), ("s3://b/data/sub/", 131072)])
    node.peers.change(SECOND, block_sizes=sizes)
    node.peers.ahead_seconds = 3.0
    node.own = Member(FIRST, FIRST, "a", 2)
    for process in (0, 1):
        PeerBytes(tmp_path, "sent", process).add(THIRD, 10 + 90 * process)
    PeerBytes(tmp_path, "received", 256).add(THIRD, 5)
    async with node.running():
        document = (await answered(tmp_path, node.polling)).json()
        me, second, third, fourth = document["members"]
        assert (document["name"], document["node"], document["address"]) == ("train", "gpu-1", FIRST)
        assert (me["name"], me["this_node"], me["state"], me["version"]) == ("gpu-1", True, "up", __version__)
        assert (second["name"], second["state"], second["version"], second["share"]) == ("gpu-2", "up", "7", 0.2)
        assert me["share"] == 0.4
        assert (document["sent_bytes"], document["received_bytes"]) == (0, 0)
        assert [(one["sent_bytes"], one["received_bytes"]) for one in document["members"]] == [
            (0, 0),
            (0, 0),
            (110, 5),
            (0, 0),
        ]
        assert second["clock_seconds"] == 3.0
        assert (second["same_homes"], second["reaches_this_node"]) == (False, True)
        assert second["differing_blocks"] == [{"slot": "data", "here_bytes": usual, "there_bytes": 65536}]
        assert second["heard_at"] == node.clock.now()
        assert (third["state"], third["share"]) == ("closed", 0.0)
        assert (fourth["state"], fourth["problem"], fourth["share"]) == ("unknown", "refused", 0.4)
        del node.peers.hellos[SECOND]
        node.peers.change(THIRD, protocol="9", homes=digests_of(Settings().homes), silent=(FIRST,))
        await node.turn()
        _, second, third, _ = (await answered(tmp_path, node.polling)).json()["members"]
        assert (second["state"], second["name"], second["share"]) == ("silent", "gpu-2", 0.2)
        assert (third["same_homes"], third["reaches_this_node"]) == (True, False)
        assert third["problem"] == "it speaks version 9 of the protocol between nodes, this node 1"
    described = describe()["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(described["properties"]) == set(document)


async def test_a_node_without_a_cluster_says_so(tmp_path: Path) -> None:
    assert (await answered(tmp_path, None)).status_code == 503, "the cache directory is not open"
    answer = await answered(tmp_path, None, is_alone=True)
    assert answer.status_code == 404
    assert answer.json() == {"error": "this node is in no cluster: its settings have no [cluster]"}
