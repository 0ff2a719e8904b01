"""The Helm chart renders to what Kubernetes accepts, refuses what cannot work, and is what deploy/kubernetes/ shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway import __version__
from gateway.config.loading import load_settings
from tests.test_deploy import DEPLOY, KUBERNETES_VERSION
from tools.render_manifests import CHART, VALUES, ChartError, manifest, render

SIDECAR = ("--values", str(DEPLOY / "helm" / "values" / "sidecar.yaml"))
CLAIM = ("--set", "cache.volume.type=persistentVolumeClaim", "--set", "cache.volume.claimName=scratch-0")

WRITE_BACK = """
[[slots]]
name = "checkpoints"
prefix = "s3://checkpoints/"
write = "back"
buffer = "20GiB"
"""

PARENT = """
apiVersion: v1
kind: Pod
metadata:
  name: mine
  labels:
    {{- include "forebay.sidecarLabels" .Subcharts.forebay | nindent 4 }}
spec:
  terminationGracePeriodSeconds: {{ include "forebay.terminationGracePeriodSeconds" .Subcharts.forebay }}
  initContainers:
    {{- include "forebay.container" .Subcharts.forebay | nindent 4 }}
  containers:
    - name: mine
      image: mine:1
      env:
        {{- include "forebay.clientEnv" .Subcharts.forebay | nindent 8 }}
  volumes:
    {{- include "forebay.volumes" .Subcharts.forebay | nindent 4 }}
"""


def objects(*arguments: str, chart: Path = CHART) -> dict[str, Any]:
    """What is rendered, by kind; each document is one that Kubernetes accepts, with no unknown field."""
    documents = [one for one in yaml.safe_load_all(render(*arguments, chart=chart)) if one is not None]
    for document in documents:
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):  # its schema is not Kubernetes' own
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    by_kind = {document["kind"]: document for document in documents if document["kind"] != "Secret"}
    secrets = [document for document in documents if document["kind"] == "Secret"]
    return by_kind | {document["metadata"]["name"]: document for document in secrets}


def test_the_manifests_are_what_the_chart_renders() -> None:
    """Run `python -m tools.render_manifests` after a change of the chart."""
    assert {path.name for path in VALUES} == {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    for values in VALUES:
        assert (DEPLOY / "kubernetes" / values.name).read_text(encoding="utf-8") == manifest(values), values.name


def test_the_chart_is_this_version() -> None:
    """A release that forgets the chart is noticed."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.slow
def test_the_defaults_leave_secrets_to_their_owner() -> None:
    """No secret is made of placeholders, and the keys that the chart names are asked for."""
    found = objects()
    assert set(found) == {
        "ConfigMap",
        "DaemonSet",
        "NetworkPolicy",
        "PriorityClass",
        "Service",
        "ServiceAccount",
    }
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == found["PriorityClass"]["metadata"]["name"]
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


@pytest.mark.slow
def test_the_drain_ends_before_the_pod_is_killed() -> None:
    """Whatever both times are; without a drain the pod waits for the requests in flight alone."""
    pod = objects("--set", "drain.timeoutSeconds=3600,shutdownGraceSeconds=60")["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == "3600s"
    assert pod["terminationGracePeriodSeconds"] == 3600 + 60 + 30
    pod = objects("--set", "drain.enabled=false")["DaemonSet"]["spec"]["template"]["spec"]
    assert "lifecycle" not in pod["containers"][0]
    assert pod["terminationGracePeriodSeconds"] == 60


@pytest.mark.slow
def test_the_network_policy_opens_what_is_served_and_the_way_out() -> None:
    """S3 for clients, the admin port for monitoring, names, https and the cloud's roles outward; nothing else."""
    found = objects()
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == found["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]] == [["s3"], ["admin"]]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["egress"]] == [[53, 53], [443], [80]]
    assert "NetworkPolicy" not in objects("--set", "networkPolicy.enabled=false")


@pytest.mark.slow
def test_a_cluster_opens_the_peer_port_for_its_own_pods_only(tmp_path: Path) -> None:
    """They find each other by a name that has all of them, ready or not; Forebay takes the settings as they are."""
    arguments = ("--set", "cluster.enabled=true,ports.peer=9102")
    found = objects(*arguments)
    services = [one for one in yaml.safe_load_all(render(*arguments)) if one is not None and one["kind"] == "Service"]
    [peers] = [one for one in services if one["metadata"]["name"].endswith("-peers")]
    assert (peers["spec"]["clusterIP"], peers["spec"]["publishNotReadyAddresses"]) == ("None", True)
    pods = {"podSelector": {"matchLabels": peers["spec"]["selector"]}}
    policy = found["NetworkPolicy"]["spec"]
    assert policy["ingress"][-1] == {"ports": [{"protocol": "TCP", "port": "peer"}], "from": [pods]}
    assert policy["egress"][-1] == {"ports": [{"protocol": "TCP", "port": 9102}], "to": [pods]}
    [container] = found["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "peer", "containerPort": 9102} in container["ports"]
    environment = {one["name"]: one.get("value", "node-1") for one in container["env"]}
    environment = {name: value for name, value in environment.items() if name.startswith("FOREBAY_CLUSTER__")}
    (tmp_path / "secret").write_text("0123456789abcdef" * 4, encoding="utf-8")
    (tmp_path / "secret").chmod(0o440)
    assert environment["FOREBAY_CLUSTER__SECRET_FILE"] == "/etc/forebay/cluster/secret"
    environment["FOREBAY_CLUSTER__SECRET_FILE"] = str(tmp_path / "secret")
    cluster = load_settings(None, environment).settings.cluster
    assert cluster is not None
    name = peers["metadata"]["name"]
    assert (cluster.members, cluster.listen, cluster.node) == ([f"dns://{name}:9102"], "0.0.0.0:9102", "node-1")


@pytest.mark.slow
def test_the_nodes_of_a_cluster_find_each_other_in_redis(tmp_path: Path) -> None:
    """Its address, user and passwords reach Forebay, and Forebay reaches it."""
    given = ("url=sentinels://s1\\,s2/ours", "user=forebay", "passwordKey=redis", "sentinelPasswordKey=sentinel")
    values = ("cluster.enabled=true", *(f"cluster.redis.{one}" for one in (*given, "ports={6380}")))
    found = objects("--set", ",".join(values))
    [container] = found["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value", "node-1") for one in container["env"]}
    environment = {name: value for name, value in environment.items() if name.startswith("FOREBAY_CLUSTER__")}
    for name, content in (("secret", "0123456789abcdef" * 4), ("redis", "word"), ("sentinel", "other-word")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        (tmp_path / name).chmod(0o440)
    environment = {
        name: value.replace("/etc/forebay/cluster", str(tmp_path)) for name, value in environment.items()
    } | {"FOREBAY_CLUSTER__ADVERTISE": "10.0.3.17:9002"}
    cluster = load_settings(None, environment).settings.cluster
    assert cluster is not None
    assert (cluster.redis, cluster.redis_user, cluster.members) == ("sentinels://s1,s2/ours", "forebay", [])
    passwords = [one.get_secret_value() for one in (cluster.redis_password, cluster.sentinel_password) if one]
    assert passwords == ["word", "other-word"]
    assert found["NetworkPolicy"]["spec"]["egress"][-1] == {"ports": [{"protocol": "TCP", "port": 6380}]}


def admits(policy: dict[str, Any], port: int, protocol: str = "TCP") -> list[Any]:
    """Whom its rules let through to a port of the pod; `everybody` where a rule names none."""
    found: list[Any] = []
    for rule in policy["ingress"]:
        ranges = [
            (one["port"], one.get("endPort", one["port"])) for one in rule["ports"] if one["protocol"] == protocol
        ]
        if any(first <= port <= last for first, last in ranges):
            found.append(rule.get("from", "everybody"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("admin", [9001, 1, 65535])
def test_the_network_policy_of_a_sidecar_holds_its_admin_port_only(admin: int) -> None:
    """The pod is the job's: whatever else its containers listen on, and where they go, is not Forebay's to forbid."""
    found = objects(*SIDECAR, "--set", f"ports.admin={admin}")
    policy = found["NetworkPolicy"]["spec"]
    pod = found["Job"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    [only] = admits(policy, admin)
    assert only == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    for port in {1, 22, admin - 1, admin + 1, 29500, 65535} - {0, admin, 65536}:
        assert admits(policy, port) == admits(policy, port, "UDP") == ["everybody"], port
    assert admits(policy, admin, "UDP") == ["everybody"]
    assert "NetworkPolicy" not in objects(*SIDECAR, "--set", "networkPolicy.enabled=false")


def test_the_network_policy_of_a_sidecar_may_hold_the_whole_pod() -> None:
    """Where the values say who may reach the job's own ports, and where it may go."""
    narrow = "networkPolicy.sidecar.others[0].podSelector.matchLabels.job=mine"
    out = "networkPolicy.sidecar.egress[0].to[0].ipBlock.cidr=10.0.0.0/8"
    policy = objects(*SIDECAR, "--set", f"{narrow},{out}")["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert admits(policy, 29500) == [[{"podSelector": {"matchLabels": {"job": "mine"}}}]]
    assert policy["egress"] == [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]


@pytest.mark.parametrize("mode", [(), SIDECAR], ids=["daemonset", "sidecar"])
def test_the_pod_monitor_carries_the_token(mode: tuple[str, ...]) -> None:
    """Prometheus asks the admin port's metrics with the secret that the gateway reads."""
    found = objects(*mode, "--set", "podMonitor.enabled=true,podMonitor.labels.release=prometheus")
    pod = found["Job" if mode else "DaemonSet"]["spec"]["template"]
    [endpoint] = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    [container] = pod["spec"]["initContainers" if mode else "containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    token = endpoint["authorization"]["credentials"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment["FOREBAY_ADMIN__TOKEN_FILE"] == f"/etc/forebay/keys/{token['key']}"
    [keys] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "forebay-keys"]
    assert keys["secret"]["secretName"] == token["name"]
    assert found["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert found["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.slow
def test_a_changed_setting_starts_the_pods_anew() -> None:
    """Their template names the settings by a digest, so that a rollout follows."""
    annotations = [
        objects(*changed)["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
        for changed in ((), ("--set", "config=[server]"))
    ]
    assert annotations[0] != annotations[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--set", "mode=deployment"), "mode"),
        (("--set", "drain.timeout=600"), "drain"),
        (("--set", "ports.s3=0"), "ports"),
        ((*SIDECAR, "--set", "networkPolicy.sidecar.clients[0].podSelector.a=b"), "clients"),
        (("--set", "image.digest=sha256:abc"), "digest"),
        (("--set", "cache.volume.type=emptyDir,cache.volume.sizeLimit=2Ti"), "outlives the pod"),
        ((*SIDECAR, "--set-string", f"config={WRITE_BACK}"), "outlives the pod"),
        (CLAIM, "would share one claim"),
        ((*SIDECAR, "--set", "cluster.enabled=true"), "needs mode daemonset"),
        ((*SIDECAR, "--set", "cache.volume.sizeLimit="), "sizeLimit"),
        (("--set-string", 'config=[admin]\ntoken = "0123456789abcdef"'), "holds a secret"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    """By the schema of the values, or by the chart, with a reason: not by pods that fail."""
    with pytest.raises(ChartError, match=reason):
        render(*arguments)


def test_a_sidecar_may_write_back_to_a_claim() -> None:
    """A disk that outlives the pod; Forebay is told that it does."""
    found = objects(*SIDECAR, *CLAIM, "--set-string", f"config={WRITE_BACK}")
    pod = found["Job"]["spec"]["template"]["spec"]
    [cache] = [volume for volume in pod["volumes"] if volume["name"] == "forebay-cache"]
    assert cache["persistentVolumeClaim"] == {"claimName": "scratch-0"}
    environment = {one["name"]: one["value"] for one in pod["initContainers"][0]["env"]}
    assert environment["FOREBAY_CACHE__PERSISTENT"] == "true"


def test_a_chart_of_ones_own_includes_the_sidecar(tmp_path: Path) -> None:
    """By the named templates that docs/installation.md names; settings and keys come from the chart as a dependency."""
    mine = tmp_path / "mine"
    (mine / "templates").mkdir(parents=True)
    shutil.copytree(CHART, mine / "charts" / "forebay")
    (mine / "Chart.yaml").write_text("apiVersion: v2\nname: mine\nversion: 1.0.0\n", encoding="utf-8")
    values = yaml.safe_load(Path(SIDECAR[1]).read_text(encoding="utf-8")) | {"exampleJob": {"enabled": False}}
    (mine / "values.yaml").write_text(yaml.safe_dump({"forebay": values}), encoding="utf-8")
    (mine / "templates" / "pod.yaml").write_text(PARENT, encoding="utf-8")
    found = objects(chart=mine)
    assert set(found) == {"Pod", "ConfigMap", "NetworkPolicy", "forebay-origin", "forebay-job"}
    selector = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= found["Pod"]["metadata"]["labels"].items()
    [sidecar] = found["Pod"]["spec"]["initContainers"]
    assert (sidecar["restartPolicy"], sidecar["args"]) == ("Always", ["serve"])
    assert found["Pod"]["spec"]["terminationGracePeriodSeconds"] == 660
