"""The peer port of a whole gateway: opened with the others, shared by the workers, and drained at the end."""

from __future__ import annotations

import os
import signal
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from gateway.demo.ports import free_port
from tests.serve.gated_origin import CONTENT, ETAG, GatedOrigin, gated_origin
from tests.support.gateway_process import GatewayProcess, wait_for_metric
from tests.support.peers import SECRET, of_node, of_version, signed

PATIENCE_SECONDS = 60.0
NEXT = b"the next secret of the cluster, 32 characters"


class Cluster:
    """The settings of a cluster of one node, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.secrets = directory / "secret"
        self.secrets.write_bytes(SECRET)
        self.address = f"127.0.0.1:{free_port()}"

    def settings(self, **more: Any) -> Mapping[str, Any]:
        settings = {"name": "train", "secret_file": str(self.secrets), "listen": self.address}
        return {**settings, "advertise": self.address, "members": [self.address], **more}

    def get(
        self, target: str, headers: Mapping[str, str] | None = None, *, secret: bytes = SECRET, **options: Any
    ) -> httpx.Response:
        scheme = "https" if "verify" in options else "http"
        said = signed("GET", target, of_node(headers, home=self.home), secret=secret, host=self.address)
        with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS, **options) as client:
            return client.get(f"{scheme}://{self.address}{target}", headers=said)

    home = ""


@pytest.mark.slow
def test_the_workers_share_the_port_and_refuse_each_others_replays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    config: dict[str, Mapping[str, Any]] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": {"workers": 2}}
    with GatewayProcess({**config, "cluster": cluster.settings()}) as gateway:
        said = signed("GET", "/-/hello", of_node(), host=cluster.address)
        statuses = []
        for _ in range(24):  # a connection each: some go to the other worker
            with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as client:
                statuses.append(client.get(f"http://{cluster.address}/-/hello", headers=said).status_code)
        assert statuses == [200] + [403] * 23
        status = httpx.get(f"{gateway.admin_url}/api/v1/status", timeout=PATIENCE_SECONDS).json()
        assert status["gateway"]["peer_address"] == cluster.address
        assert cluster.address in gateway.log
        wait_for_metric(gateway, 'forebay_cluster_peer_requests_total{outcome="refused"} 23')


def test_without_a_cluster_there_is_no_such_port() -> None:
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:1"}}) as gateway:
        status = httpx.get(f"{gateway.admin_url}/api/v1/status", timeout=PATIENCE_SECONDS).json()
        assert status["gateway"]["peer_address"] is None


@pytest.mark.slow
def test_a_secret_that_is_changed_counts_after_a_reload(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    config = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "cluster": cluster.settings()}
    with GatewayProcess(config) as gateway:
        assert cluster.get("/-/hello").status_code == 200
        cluster.secrets.write_bytes(NEXT)
        reloaded = gateway.command("reload", "--config", str(gateway.config_file))
        assert reloaded.returncode == 0, reloaded.stderr
        assert cluster.get("/-/hello").status_code == 403
        assert cluster.get("/-/hello", secret=NEXT).status_code == 200


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.slow
def test_the_port_speaks_tls_with_the_servers_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    cluster, certificate = Cluster(tmp_path), authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    server = {"certificate_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    config = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "server": server}
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with GatewayProcess({**config, "cluster": cluster.settings(tls=True)}):
        assert cluster.get("/-/hello", verify=trusting).status_code == 200


@pytest.mark.slow
def test_an_answer_under_way_is_finished_when_the_gateway_stops(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with gated_origin() as origin, ThreadPoolExecutor(1) as pool:
        config = {"origin": {"endpoint_url": origin.url}, "cluster": cluster.settings()}
        with GatewayProcess(config) as gateway:
            answer = pool.submit(_read, cluster, origin)
            assert origin.halfway.wait(PATIENCE_SECONDS)
            os.kill(gateway.pid, signal.SIGTERM)
            threading.Timer(0.2, origin.gate.set).start()
            assert answer.result().content == CONTENT


def _read(cluster: Cluster, origin: GatedOrigin) -> httpx.Response:
    cluster.home = origin.url
    return cluster.get("/bucket/key", of_version(ETAG, len(CONTENT), 0, len(CONTENT) - 1))
