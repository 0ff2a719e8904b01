"""The configuration: what cannot be used or is risky. Clients in this shell: whether they go past the gateway."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from gateway.admin.formatting import size_text
from gateway.config import Settings
from gateway.config.fields import is_loopback
from gateway.config.loading import LoadedSettings
from gateway.config.problems import SettingsError
from gateway.doctor import Area, Finding
from gateway.serve.listeners import url

AREA, CLIENTS = Area("configuration"), Area("clients here")

_ADVICE: Mapping[str, str] = {
    "the admin port listens": "set admin.token, or listen on 127.0.0.1",
    "INSECURE": "add [[credentials]], or listen on 127.0.0.1 (server.host)",
    "there are no [[credentials]]": "add [[credentials]] that say who may call, and for which prefixes",
    "is not a setting": "spell it as docs/configuration.md does, or unset it",
    "the file system of": "make cache.capacity or the buffers smaller, or give them a larger disk",
    "is not in force": "set what it needs, or remove it",
}
"""Words of a warning -> what to do."""

_ABOUT_THE_DISK = "LOSES ACKNOWLEDGED WRITES"
"""The disk's own check says so."""


def unusable(problems: SettingsError) -> Iterator[Finding]:
    """Every setting that cannot be used."""
    for problem in problems.problems:
        where = problem.source or "the file"
        yield AREA.error(str(problem), f"change {problem.key} in {where}; docs/configuration.md has every key")


def configuration(file: Path | None, loaded: LoadedSettings) -> Iterator[Finding]:
    """Yield the settings in force, and every warning of the start."""
    settings = loaded.settings
    origin = "no file, so variables and defaults" if file is None else str(file)
    slots = len(settings.slots)
    yield AREA.ok(
        f"{origin}: {slots} slot{'' if slots == 1 else 's'}, cache of {size_text(settings.cache.capacity_bytes)} in "
        f"{settings.cache.directory}, origin {settings.origin.endpoint_url}"
    )
    for text in loaded.warnings:
        if _ABOUT_THE_DISK in text:
            continue
        advice = next((advice for words, advice in _ADVICE.items() if words in text), "see docs/configuration.md")
        yield AREA.warning(text, advice)
    yield from _slots(settings)


def _slots(settings: Settings) -> Iterator[Finding]:
    if not settings.slots:
        yield AREA.note(
            "no [[slots]]: each GET asks the origin by HEAD whether the object is the same, and writes go through",
            'give data that does not change a slot with mode = "read-only" and consistency = "immutable"',
        )
    for slot in settings.slots:
        if slot.write == "scratch":
            yield AREA.note(
                f"slot {slot.name}: write = scratch sends nothing to the origin", "keep nothing there that must last"
            )


def clients(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Endpoint variables, AWS's configuration file, proxies."""
    scheme = "https" if settings.server.certificate_file else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)
    gateway = url(scheme, host, settings.server.port or 9000)
    variable, endpoint = _endpoint(environment)
    if environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        yield CLIENTS.warning(
            "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is true: SDKs go past the gateway", "unset it in the shell of jobs"
        )
    elif not endpoint:
        yield CLIENTS.note(
            "AWS_ENDPOINT_URL_S3 is not set: SDKs in this shell go past the gateway",
            f"export AWS_ENDPOINT_URL_S3={gateway}",
        )
    elif _is_same(endpoint, gateway):
        yield CLIENTS.ok(f"{variable} names the gateway: {gateway}")
    elif _is_same(endpoint, settings.origin.endpoint_url):
        yield CLIENTS.note(
            f"{variable} names the origin: right for the gateway itself, and past it for jobs",
            f"in the shell of jobs: export AWS_ENDPOINT_URL_S3={gateway}",
        )
    else:
        shown = "(hidden)" if "@" in endpoint or "?" in endpoint else endpoint
        yield CLIENTS.warning(
            f"{variable} names {shown}, and the gateway is at {gateway}", f"export AWS_ENDPOINT_URL_S3={gateway}"
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


def _proxies(host: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Their values may hold passwords: only their names are told."""
    named = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)]
    around = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    spared = [one.strip().lstrip(".") for one in around.split(",")]
    is_spared = "*" in spared or host in spared or (is_loopback(host) and {"localhost", "127.0.0.1"} & {*spared})
    if named and not is_spared:
        yield CLIENTS.warning(
            f"{named[0]} is set, and no_proxy does not spare {host}: SDKs ask the proxy for the gateway",
            f"export no_proxy={','.join(filter(None, [*spared, host]))}",
        )
