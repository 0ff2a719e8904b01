"""Clients in this shell: whether they go to the gateway, or past it."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config import Settings
from gateway.config.checks import is_loopback
from gateway.doctor.findings import Finding, note, ok, warning
from gateway.serve.listeners import url

AREA = "clients here"


def clients(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Endpoint variables, AWS's configuration file, proxies."""
    scheme = "https" if settings.server.certificate_file else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)
    gateway = url(scheme, host, settings.server.port or 9000)
    variable, endpoint = _endpoint(environment)
    if environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        yield warning(
            AREA,
            "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is true: SDKs go past the gateway",
            "unset it in the shell of jobs",
        )
    elif not endpoint:
        yield note(
            AREA,
            "AWS_ENDPOINT_URL_S3 is not set: SDKs in this shell go past the gateway",
            f"export AWS_ENDPOINT_URL_S3={gateway}",
        )
    elif _is_same(endpoint, gateway):
        yield ok(AREA, f"{variable} names the gateway: {gateway}")
    elif _is_same(endpoint, settings.origin.endpoint_url):
        yield note(
            AREA,
            f"{variable} names the origin: right for the gateway itself, and past it for jobs",
            f"in the shell of jobs: export AWS_ENDPOINT_URL_S3={gateway}",
        )
    else:
        yield warning(
            AREA,
            f"{variable} names {_harmless(endpoint)}, and the gateway is at {gateway}",
            f"export AWS_ENDPOINT_URL_S3={gateway}",
        )
    yield from _proxies(host, environment)


def _endpoint(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the endpoint that SDKs use, and the variable that sets it."""
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if environment.get(variable):
            return variable, environment[variable]
    file = Path(os.path.expanduser(environment.get("AWS_CONFIG_FILE") or "~/.aws/config"))  # as it is without a home
    profile = environment.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return "", ""
    section = profile if profile == "default" else f"profile {profile}"
    if not parser.has_section(section):
        return "", ""
    services = f"services {parser.get(section, 'services', fallback='')}"
    of_s3 = parser.get(services, "s3", fallback="") if parser.has_section(services) else ""
    nested = dict(line.split("=", 1) for line in of_s3.splitlines() if "=" in line)
    found = {name.strip(): value.strip() for name, value in nested.items()}.get("endpoint_url")
    return f"{file} ({section})", found or parser.get(section, "endpoint_url", fallback="") or ""


def _is_same(one: str, other: str) -> bool:
    first, second = urlsplit(one), urlsplit(other)
    try:
        hosts = [(part.hostname or "").replace("localhost", "127.0.0.1") for part in (first, second)]
        return (first.scheme, hosts[0], first.port) == (second.scheme, hosts[1], second.port)
    except ValueError:  # a port that is none
        return False


def _harmless(endpoint: str) -> str:
    return "(hidden)" if "@" in endpoint or "?" in endpoint else endpoint


def _proxies(host: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Their values may hold passwords: only their names are told."""
    named = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)]
    around = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    spared = [one.strip().lstrip(".") for one in around.split(",")]
    is_spared = "*" in spared or host in spared or (is_loopback(host) and {"localhost", "127.0.0.1"} & {*spared})
    if named and not is_spared:
        yield warning(
            AREA,
            f"{named[0]} is set, and no_proxy does not spare {host}: SDKs ask the proxy for the gateway",
            f"export no_proxy={','.join(filter(None, [*spared, host]))}",
        )
