"""What is in deploy/ is accepted by linter and schema, and agrees with itself and with what Forebay reads."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml

from gateway import __version__
from gateway.config.defaults import DiskUsage
from gateway.config.loading import load_settings
from gateway.config.settings import Settings
from gateway.config.units import parse_duration_seconds, parse_size_bytes

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES_VERSION = "1.37"

every_manifest = pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)


def _hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, dockerfile], capture_output=True, text=True, timeout=60, check=False)


def _documents(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))


def _of_kind(manifest: Path, kind: str) -> list[dict[str, Any]]:
    return [document for document in _documents(manifest) if document["kind"] == kind]


def _pod(manifest: Path) -> dict[str, Any]:
    """The one pod template."""
    [workload] = [document for document in _documents(manifest) if document["kind"] in ("Job", "DaemonSet")]
    return cast("dict[str, Any]", workload["spec"]["template"]["spec"])


def _containers(manifest: Path) -> list[dict[str, Any]]:
    pod = _pod(manifest)
    return [*pod.get("initContainers", []), *pod["containers"]]


def _forebay(manifest: Path) -> dict[str, Any]:
    [container] = [one for one in _containers(manifest) if one["name"] == "forebay"]
    return container


def _environment(manifest: Path) -> list[tuple[str, str]]:
    """The variables of Forebay's container that stand in the manifest."""
    return [(one["name"], one["value"]) for one in _forebay(manifest)["env"]]


def _toml(manifest: Path) -> str:
    [config] = _of_kind(manifest, "ConfigMap")
    return str(config["data"]["forebay.toml"])


@pytest.fixture
def settings(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The ConfigMap's file as Forebay reads it, each secret of the manifest where its volume would put it."""
    for secret in _of_kind(manifest, "Secret"):
        for name, value in secret["stringData"].items():
            (tmp_path / name).write_text(value, encoding="utf-8")
            (tmp_path / name).chmod(0o440)
    path = tmp_path / "forebay.toml"
    path.write_text(_toml(manifest).replace("/etc/forebay/keys", str(tmp_path)), encoding="utf-8")
    set_by_pod = {name: value.replace("/etc/forebay/keys", str(tmp_path)) for name, value in _environment(manifest)}
    environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"} | set_by_pod
    monkeypatch.setattr("gateway.config.slot_checks.disk_usage", lambda _: DiskUsage(2**50, 0, 2**50))
    loaded = load_settings(path, environment)
    assert loaded.warnings == ()
    return loaded.settings


def test_the_dockerfile_is_clean() -> None:
    """hadolint finds nothing, and no rule is switched off."""
    result = _hadolint(DOCKERFILE)
    assert result.returncode == 0, result.stdout
    assert "hadolint ignore" not in DOCKERFILE.read_text(encoding="utf-8")


def test_the_linter_would_find_something(tmp_path: Path) -> None:
    """A Dockerfile with an old mistake is refused: the test above can fail."""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN cd /tmp && apt-get install python3\n", encoding="utf-8")
    assert _hadolint(bad).returncode == 1


def test_the_bases_of_the_image_are_pinned() -> None:
    """By digest, of the same Python: the environment that the first stage makes runs in the second one."""
    bases = re.findall(
        r"^FROM python:(\d+\.\d+)\.\S+@sha256:[0-9a-f]{64}", DOCKERFILE.read_text(encoding="utf-8"), re.M
    )
    assert len(bases) == DOCKERFILE.read_text(encoding="utf-8").count("\nFROM ") == 2
    assert len(set(bases)) == 1


def test_the_image_copies_what_exists_and_what_the_builder_is_given() -> None:
    """Every file that the Dockerfile copies from the checkout is there, and is not kept back by the ignore file."""
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for source in sources for name in source.split()}
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert names == {line[1:] for line in ignore if line.startswith("!")}
    for name in names:
        assert (DEPLOY.parent / name).exists(), name
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert {
        project["project"]["readme"],
        *project["project"]["license-files"],
        "pyproject.toml",
        "hatch_build.py",
        "gateway",
        "forebay",
    } == names


@every_manifest
def test_manifests_follow_the_schema(manifest: Path) -> None:
    """Every document is one that this version of Kubernetes accepts, with no unknown field."""
    for document in _documents(manifest):
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@every_manifest
def test_the_schema_would_find_something(manifest: Path) -> None:
    """A misspelt field and a wrong type are refused: the test above can fail."""
    for name, value in (("readynessProbe", {}), ("image", 7)):
        documents = _documents(manifest)
        pod = documents[-1]["spec"]["template"]["spec"]
        pod["containers"][0][name] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(documents[-1], KUBERNETES_VERSION, strict=True)


@every_manifest
def test_containers_are_restricted(manifest: Path) -> None:
    """Pod Security Standard `restricted`, and a file system that cannot be written to in Forebay's own container."""
    pod = _pod(manifest)["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}" in DOCKERFILE.read_text(encoding="utf-8")
    for container in _containers(manifest):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert _forebay(manifest)["securityContext"]["readOnlyRootFilesystem"] is True


@every_manifest
def test_the_configuration_is_accepted_and_agrees_with_the_pod(manifest: Path, settings: Settings) -> None:
    """Forebay starts with the ConfigMap's file: ports, probes, mounts and times are those of the pod around it."""
    container = _forebay(manifest)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports["admin"] == settings.admin.port
    assert ports.get("s3", settings.server.port) == settings.server.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "admin"
    assert settings.admin.host == "0.0.0.0", "the kubelet does not reach a loopback address"
    assert settings.admin.token is not None
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {
        str(settings.cache.directory),
        "/etc/forebay/keys",
        dict(_environment(manifest))["FOREBAY_CONFIG"],
    } <= mounts
    drain = container["lifecycle"]["preStop"]["exec"]["command"]
    assert drain[:4] == ["forebay", "flush", "s3://", "--wait"]
    drain_seconds = parse_duration_seconds(drain[drain.index("--timeout") + 1])
    grace_seconds = _pod(manifest)["terminationGracePeriodSeconds"]
    assert grace_seconds > drain_seconds + settings.server.shutdown_grace_seconds


@every_manifest
def test_every_mounted_volume_and_named_secret_is_there(manifest: Path) -> None:
    """Nothing refers to a volume, secret, key or config map that the manifest does not have."""
    pod = _pod(manifest)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    secrets = {one["metadata"]["name"]: one["stringData"] for one in _of_kind(manifest, "Secret")}
    used = {mount["name"] for container in _containers(manifest) for mount in container.get("volumeMounts", [])}
    assert used == volumes.keys()
    for reference in _secret_references(pod):
        assert reference["name"] in secrets
        assert reference.get("key", next(iter(secrets[reference["name"]]))) in secrets[reference["name"]]
    keys = secrets[volumes["forebay-keys"]["secret"]["secretName"]]
    named = re.findall(r'"/etc/forebay/keys/([^"]+)"', _toml(manifest))
    named += [Path(value).name for name, value in _environment(manifest) if name == "FOREBAY_ADMIN__TOKEN_FILE"]
    assert named
    assert set(named) <= keys.keys()


def _secret_references(node: Any) -> Iterator[dict[str, str]]:
    """Every secretRef and secretKeyRef below `node`."""
    if isinstance(node, list):
        for one in node:
            yield from _secret_references(one)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in ("secretRef", "secretKeyRef"):
                yield value
            else:
                yield from _secret_references(value)


@every_manifest
def test_the_image_is_this_version(manifest: Path) -> None:
    """A release that forgets the manifests is noticed."""
    assert _forebay(manifest)["image"] == f"forebay:{__version__}"


@pytest.mark.parametrize("manifest", [DEPLOY / "kubernetes" / "sidecar.yaml"], ids=["sidecar"])
def test_the_sidecar_is_one_and_the_trainer_uses_it(manifest: Path, settings: Settings) -> None:
    """Forebay is a native sidecar; the trainer's endpoint and key are what it listens on and what it accepts."""
    pod = _pod(manifest)
    assert _forebay(manifest) in pod["initContainers"]
    assert _forebay(manifest)["restartPolicy"] == "Always"
    [trainer] = pod["containers"]
    environment = {one["name"]: one.get("value") for one in trainer["env"]}
    assert environment["AWS_ENDPOINT_URL_S3"] == f"http://{settings.server.host}:{settings.server.port}"
    assert "AWS_ENDPOINT_URL" not in environment
    assert environment["AWS_ACCESS_KEY_ID"] in {one.access_key_id for one in settings.credentials}
    [cache] = [volume for volume in pod["volumes"] if volume["name"] == "forebay-cache"]
    assert settings.cache.capacity_bytes is not None
    assert parse_size_bytes(cache["emptyDir"]["sizeLimit"] + "B") > settings.cache.capacity_bytes


@pytest.mark.parametrize("manifest", [DEPLOY / "kubernetes" / "daemonset.yaml"], ids=["daemonset"])
def test_the_daemon_set_excludes_a_second_gateway_on_its_directory(manifest: Path, settings: Settings) -> None:
    """An update stops the old pod first, the service stays on the node, and the cache outlives the pod."""
    [workload] = _of_kind(manifest, "DaemonSet")
    assert workload["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    [service] = _of_kind(manifest, "Service")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert [port["port"] for port in service["spec"]["ports"]] == [settings.server.port]
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    assert settings.cache.persistent is True
    assert [slot.name for slot in settings.slots if slot.write == "back"] == ["job-a-checkpoints"]
