"""Rules over several settings, and rules that need to look at the machine."""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config.azure_checks import azure_problems
from gateway.config.cluster_checks import cluster_problems, not_among_members
from gateway.config.defaults import aws_endpoint_url, aws_endpoint_variable
from gateway.config.directory_checks import directory_problems
from gateway.config.entries import (
    BucketSettings,
    EventSourceSettings,
    OriginCredentialSettings,
    ReplicaSettings,
    SlotSettings,
)
from gateway.config.fields import azure_url, is_loopback, is_s3, origin_url, valid_endpoint_url
from gateway.config.problems import Hidden, shown
from gateway.config.settings import OriginSettings, Settings
from gateway.config.slot_checks import (
    BLOCKS_MIN,
    buffer_problems,
    enough_blocks,
    guarantee_problems,
    index_problems,
    not_fitting,
    not_lasting,
    slot_problems,
)
from gateway.config.units import format_size
from gateway.core.errors import ConfigError
from gateway.disk.pem import PemFile

RESERVED_CALLERS = ("none", "anonymous", "gateway", "admin", "signal", "(gone)")
"""Names in metrics and the audit log that stand for no credential."""


def check(settings: Settings, environment: Mapping[str, str]) -> list[ConfigError]:
    """Return every problem that single values do not show."""
    rules: tuple[Callable[[Settings], Iterator[ConfigError]], ...] = (
        _listening,
        _certificate,
        _origin_endpoint,
        _origin_credentials,
        _origin_proxy,
        _named_origin_credentials,
        _buckets,
        _references_to_origin_credentials,
        _event_sources,
        _log_files,
        _tracing,
        _capacity,
        _credentials,
        _caller_classes,
        slot_problems,
        guarantee_problems,
        index_problems,
        buffer_problems,
        cluster_problems,
        directory_problems,
        azure_problems,
    )
    problems = [problem for rule in rules for problem in rule(settings)]
    if any(problem.key.endswith("endpoint_url") for problem in problems):
        return problems
    own = own_address_problem(settings, environment)
    return [*problems, own] if own else problems


def _listening(settings: Settings) -> Iterator[ConfigError]:
    server, admin = settings.server, settings.admin
    if server.allow_unsigned and settings.credentials:
        yield ConfigError(
            "server.allow_unsigned",
            True,
            "must be false with [[credentials]]: callers that do not sign would have more rights than those that do",
        )
    if not is_loopback(server.host) and not settings.credentials and not server.insecure:
        yield ConfigError(
            "server.host", server.host, "a loopback address; any other needs [[credentials]], or server.insecure = true"
        )
    if not is_loopback(admin.host) and admin.token is None and not admin.insecure:
        yield ConfigError(
            "admin.host", admin.host, "a loopback address; any other needs admin.token, or admin.insecure = true"
        )
    if (
        server.port
        and server.port == admin.port
        and (server.host == admin.host or {"0.0.0.0", "::"} & {server.host, admin.host})
    ):
        yield ConfigError("admin.port", admin.port, "server.port has this port already: choose another")


def _certificate(settings: Settings) -> Iterator[ConfigError]:
    server = settings.server
    if (server.certificate_file is None) != (server.key_file is None):
        missing = "key_file" if server.key_file is None else "certificate_file"
        yield ConfigError(f"server.{missing}", None, "certificate_file and key_file go together")
    elif server.certificate_file and server.key_file:
        yield from _unusable_pair(server.certificate_file, server.key_file)


def _unusable_pair(certificate: PemFile, key: PemFile) -> Iterator[ConfigError]:
    for name, file in (("certificate_file", certificate), ("key_file", key)):
        if file.content is None:
            yield ConfigError(f"server.{name}", str(file.path), "this file cannot be read")
    if certificate.content is None or key.content is None:
        return
    try:
        with certificate.in_memory() as certificate_path, key.in_memory() as key_path:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_path, key_path)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or "not PEM"
        yield ConfigError(
            "server.certificate_file", str(certificate.path), f"must be a PEM certificate that fits key_file ({reason})"
        )


def _origin_endpoint(settings: Settings) -> Iterator[ConfigError]:
    """Check the endpoint, which may come from an AWS variable; the file's value was checked when it was read."""
    yield from _certificates("origin.ca_bundle", settings.origin.ca_bundle)
    try:
        origin_url(settings.origin.endpoint_url)
    except ValueError as error:
        url = settings.origin.endpoint_url
        yield ConfigError("origin.endpoint_url", shown("origin.endpoint_url", url), str(error))


def _origin_credentials(settings: Settings) -> Iterator[ConfigError]:
    origin = settings.origin
    yield from _key_pair("origin", origin)
    if origin.profile is not None and origin.access_key_id is not None:
        yield ConfigError("origin.profile", origin.profile, "remove this or access_key_id: both say which key signs")


def _key_pair(key: str, one: OriginSettings | OriginCredentialSettings) -> Iterator[ConfigError]:
    if (one.access_key_id is None) != (one.secret_access_key is None):
        missing = "secret_access_key" if one.secret_access_key is None else "access_key_id"
        yield ConfigError(f"{key}.{missing}", None, "access_key_id and a secret go together")
    if one.session_token is not None and one.access_key_id is None:
        yield ConfigError(f"{key}.session_token", Hidden(), "needs access_key_id")


_OF_ROLES = (
    "role_session_name",
    "external_id",
    "role_duration_seconds",
    "web_identity_token_file",
    "source_profile",
    "sts_endpoint_url",
)


def _named_origin_credentials(settings: Settings) -> Iterator[ConfigError]:
    seen: set[str] = set()
    for i, one in enumerate(settings.origin_credentials):
        key = f"origin_credentials[{i}]"
        if one.name in seen:
            yield ConfigError(f"{key}.name", one.name, "another of [[origin_credentials]] has this name")
        seen.add(one.name)
        ways = [name for name in ("access_key_id", "profile", "role_arn") if getattr(one, name) is not None]
        if len(ways) != 1:
            found = " and ".join(ways) or "none"
            yield ConfigError(f"{key} ({one.name})", found, "exactly one of access_key_id, profile and role_arn")
        yield from _key_pair(key, one)
        yield from _role(key, one)


def _role(key: str, one: OriginCredentialSettings) -> Iterator[ConfigError]:
    if one.role_arn is None:
        for name in _OF_ROLES:
            if getattr(one, name) is not None:
                toml = type(one).model_fields[name].alias or name
                yield ConfigError(f"{key}.{toml}", Hidden(), "needs role_arn")
        return
    if one.web_identity_token_file is not None:
        for name in ("source_profile", "external_id"):
            if getattr(one, name) is not None:
                yield ConfigError(f"{key}.{name}", Hidden(), "remove this or web_identity_token_file")
        if not os.access(one.web_identity_token_file, os.R_OK):
            yield ConfigError(
                f"{key}.web_identity_token_file", str(one.web_identity_token_file), "this file cannot be read"
            )
    try:
        valid_endpoint_url(one.sts_endpoint_url or "")
    except ValueError as error:  # the file's value was checked when it was read
        yield ConfigError(f"{key}.sts_endpoint_url", Hidden(), str(error), "AWS_ENDPOINT_URL_STS")


def _buckets(settings: Settings) -> Iterator[ConfigError]:
    seen: set[str] = set()
    for i, bucket in enumerate(settings.buckets):
        if bucket.name in seen:
            yield ConfigError(f"buckets[{i}].name", bucket.name, "another of [[buckets]] has this name")
        seen.add(bucket.name)
        yield from _certificates(f"buckets[{i}].ca_bundle", bucket.ca_bundle)
        for j, one in enumerate(bucket.replicas):
            key = f"buckets[{i}].replicas[{j}]"
            yield from _certificates(f"{key}.ca_bundle", one.ca_bundle)
            if not is_s3(bucket.endpoint_url):
                yield ConfigError(key, one.endpoint_url, "remove this: only a bucket at an S3 has replicas")
            elif (one.endpoint_url, one.name) == (bucket.endpoint_url, bucket.name):
                yield ConfigError(f"{key}.endpoint_url", one.endpoint_url, "another place than the bucket's own")


def _event_sources(settings: Settings) -> Iterator[ConfigError]:
    seen: set[str] = set()
    for i, one in enumerate(settings.event_sources):
        if one.queue_url in seen:
            yield ConfigError(f"event_sources[{i}].queue_url", one.queue_url, "another event source has this queue")
        seen.add(one.queue_url)
        if one.canary is not None and not one.canary.bucket:
            yield ConfigError(f"event_sources[{i}].canary", str(one.canary), "a prefix that names a bucket")


def _references_to_origin_credentials(settings: Settings) -> Iterator[ConfigError]:
    names = {one.name for one in settings.origin_credentials}
    tables: list[tuple[str, Sequence[BucketSettings | EventSourceSettings | ReplicaSettings | SlotSettings]]] = [
        ("buckets", settings.buckets),
        ("slots", settings.slots),
        ("event_sources", settings.event_sources),
        *((f"buckets[{i}].replicas", bucket.replicas) for i, bucket in enumerate(settings.buckets)),
    ]
    for table, entries in tables:
        for i, one in enumerate(entries):
            if one.origin_credentials is not None and one.origin_credentials not in names:
                allowed = f"no [[origin_credentials]] have this name (there are: {', '.join(sorted(names)) or 'none'})"
                yield ConfigError(f"{table}[{i}].origin_credentials", one.origin_credentials, allowed)


def _origin_proxy(settings: Settings) -> Iterator[ConfigError]:
    proxy = settings.origin.proxy
    if proxy is not None and not re.fullmatch(r"http://[^/?#\s]+/?", proxy.get_secret_value()):
        yield ConfigError("origin.proxy", Hidden(), "http://[user:password@]host:port")


def _log_files(settings: Settings) -> Iterator[ConfigError]:
    audit, access = settings.logging.audit_file, settings.logging.access_file
    for key, path in (("logging.audit_file", audit), ("logging.access_file", access)):
        if path is None:
            continue
        if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
            yield ConfigError(
                key, str(path), "this file cannot be written: its directory must exist, and both must be writable"
            )
        elif path.is_symlink() or (path.exists() and not path.is_file()):
            yield ConfigError(key, str(path), "must be a plain file, not a link")
    if access is not None and audit is not None and _is_same_file(access, audit):
        yield ConfigError("logging.access_file", str(access), "must be another file than logging.audit_file")


def _is_same_file(one: Path, other: Path) -> bool:
    """Compare by all names, even of a file that does not exist yet."""
    with suppress(OSError):
        return one.samefile(other)
    return one.name == other.name and one.parent.resolve() == other.parent.resolve()


_TRACING_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def _traces_can_be_sent() -> bool:
    try:
        return all(find_spec(name) for name in _TRACING_PACKAGES)
    except ModuleNotFoundError:
        return False


def _tracing(settings: Settings) -> Iterator[ConfigError]:
    endpoint_url = settings.tracing.endpoint_url
    if endpoint_url is not None and not _traces_can_be_sent():
        yield ConfigError("tracing.endpoint_url", endpoint_url, "needs the extra: pip install '.[otel]' in a clone")


def _certificates(key: str, bundle: PemFile | None) -> Iterator[ConfigError]:
    if bundle is None:
        return
    try:
        with bundle.in_memory() as path:
            ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError):
        yield ConfigError(key, str(bundle.path), "this file cannot be read, or holds no PEM certificates")


def _capacity(settings: Settings) -> Iterator[ConfigError]:
    cache = settings.cache
    largest = max(cache.block_size_bytes, *(slot.block_size_bytes or 0 for slot in settings.slots), 0)
    if cache.capacity_bytes < BLOCKS_MIN * largest:
        yield ConfigError("cache.capacity", format_size(cache.capacity_bytes), enough_blocks(largest))
    if cache.daily_writes_bytes is not None and cache.daily_writes_bytes < BLOCKS_MIN * largest:
        yield ConfigError("cache.daily_writes", format_size(cache.daily_writes_bytes), enough_blocks(largest))
    promised = sum(slot.capacity_bytes or 0 for slot in settings.slots)
    if promised > cache.capacity_bytes:
        allowed = f"all slots together may have at most cache.capacity, {format_size(cache.capacity_bytes)}"
        yield ConfigError("slots[].capacity", format_size(promised), allowed)


def _credentials(settings: Settings) -> Iterator[ConfigError]:
    seen: set[str] = set()
    for i, credential in enumerate(settings.credentials):
        if credential.access_key_id in RESERVED_CALLERS:
            allowed = (
                f"reserved, like {', '.join(RESERVED_CALLERS)}: these mean other callers in metrics and the audit log"
            )
            yield ConfigError(f"credentials[{i}].access_key_id", credential.access_key_id, allowed)
        if credential.access_key_id in seen:
            allowed = "another of [[credentials]] has this key id"
            yield ConfigError(f"credentials[{i}].access_key_id", credential.access_key_id, allowed)
        seen.add(credential.access_key_id)


def _caller_classes(settings: Settings) -> Iterator[ConfigError]:
    names, matched = set[str](), set[tuple[str | None, str | None]]()
    for i, one in enumerate(settings.caller_classes):
        if one.name in names:
            yield ConfigError(f"caller_classes[{i}].name", one.name, "another of [[caller_classes]] has this name")
        if one.app is not None and one.product is not None:
            yield ConfigError(f"caller_classes[{i}].product", one.product, "remove this or app")
        elif (one.app, one.product) in matched:
            key = "app" if one.app is not None else "product"
            allowed = "another class has the same one; at most one class may have neither app nor product"
            yield ConfigError(f"caller_classes[{i}].{key}", one.app or one.product, allowed)
        names.add(one.name)
        matched.add((one.app, one.product))


def warnings_of(settings: Settings) -> Iterator[str]:
    """Yield what the operator must be told although the settings can be used."""
    for found in (not_in_force, not_protected, not_private, not_fitting, not_lasting, not_among_members):
        yield from found(settings)


def not_in_force(settings: Settings) -> list[str]:
    """Return one loud warning per key that does nothing, in this version or without another, or is not guaranteed."""
    origin = settings.origin
    link = (origin.read_bandwidth_bytes_per_second, origin.write_bandwidth_bytes_per_second)
    is_link_known = any(one is not None for one in link)
    unchecked = [
        f"slots[{i}].{direction}_guarantee"
        for direction, of_link in zip(("read", "write"), link, strict=True)
        for i, slot in enumerate(settings.slots)
        if of_link == "auto" and getattr(slot, f"{direction}_guarantee_bytes_per_second") is not None
    ]
    return [
        *(
            f"{key} goes first, but nobody can say beforehand whether the link bears all guarantees together: Forebay "
            "finds out what it bears"
            for key in unchecked
        ),
        *(
            f"slots[{i}].weight is not in force without origin.read_bandwidth or origin.write_bandwidth: nobody knows "
            "what the link bears"
            for i, slot in enumerate(settings.slots)
            if slot.weight != 1 and not is_link_known
        ),
        *(
            f'slots[{i}].authorization = "origin" asks nothing without [[credentials]]: callers sign with the '
            "gateway's own key pair"
            for i, slot in enumerate(settings.slots)
            if slot.authorization == "origin" and not settings.credentials
        ),
    ]


def not_protected(settings: Settings) -> list[str]:
    """Return warnings about ports that anyone can use."""
    warnings = []
    if not is_loopback(settings.server.host) and not settings.credentials:
        warnings.append(
            f"INSECURE: {settings.server.host} is not a loopback address and callers are not held to [[credentials]]: "
            "whoever reaches the S3 port acts with the gateway's own rights at the origin"
            if settings.server.allow_unsigned
            else f"INSECURE: {settings.server.host} is not a loopback address and there are no [[credentials]]: "
            "whoever has the gateway's own key pair can use the S3 port"
        )
    used = {one.origin_credentials for one in settings.buckets} | {one.origin_credentials for one in settings.slots}
    used -= {None}
    if used and not settings.credentials:
        who = (
            "whoever reaches the S3 port"
            if settings.server.allow_unsigned
            else "whoever signs with the key of [origin]"
        )
        warnings.append(
            f"there are no [[credentials]]: {who} acts with all of [[origin_credentials]] that buckets and slots name "
            f"({', '.join(sorted(map(str, used)))}), whatever the key of [origin] itself may do there"
        )
    if not is_loopback(settings.admin.host) and settings.admin.token is None:
        warnings.append(f"INSECURE: the admin port listens on {settings.admin.host} without a token")
    return warnings


_TO_OTHERS = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def not_private(settings: Settings) -> list[str]:
    """Return warnings about files of secrets that others may read or change. A group may read them, as in a pod."""
    files = {
        "server.key_file": settings.server.key_file.path if settings.server.key_file is not None else None,
        "origin.secret_access_key_file": settings.origin.secret_access_key_file,
        "admin.token_file": settings.admin.token_file,
        "cluster.secret_file": settings.cluster.secret_file.path if settings.cluster is not None else None,
    }
    for name in ("redis_password_file", "sentinel_password_file") if settings.cluster is not None else ():
        files[f"cluster.{name}"] = getattr(settings.cluster, name)
    for table in ("credentials", "origin_credentials"):
        of_table = enumerate(getattr(settings, table))
        files |= {f"{table}[{i}].secret_access_key_file": one.secret_access_key_file for i, one in of_table}
    warnings = []
    for key, file in files.items():
        with suppress(OSError):
            mode = file.stat().st_mode if file is not None else 0
            if stat.S_ISREG(mode) and mode & _TO_OTHERS:
                shown_mode = f"mode {stat.S_IMODE(mode):04o}"
                warnings.append(f"{key}: others may read or change {file} ({shown_mode}): chmod go-w,o-r {file}")
    return warnings


def own_address_problem(settings: Settings, environment: Mapping[str, str]) -> ConfigError | None:
    """Report a gateway that is its own origin: it would forward every request to itself."""
    for i, bucket in enumerate(settings.buckets):
        homes = {f"buckets[{i}].replicas[{j}]": one.endpoint_url for j, one in enumerate(bucket.replicas)}
        if bucket.endpoint_url != settings.origin.endpoint_url:
            homes[f"buckets[{i}]"] = bucket.endpoint_url
        for key, url in homes.items():
            if _is_own_address(settings, url):
                return ConfigError(
                    f"{key}.endpoint_url", url, "this is the gateway's own address: name where the bucket is"
                )
    for i, one in enumerate(settings.origin_credentials):
        if one.sts_endpoint_url and _is_own_address(settings, one.sts_endpoint_url):
            return ConfigError(
                f"origin_credentials[{i}].sts_endpoint_url",
                one.sts_endpoint_url,
                "this is the gateway's own address, and it is no STS: name where STS is",
            )
    if not _is_own_address(settings, settings.origin.endpoint_url):
        return None
    if aws_endpoint_url(environment).rstrip("/") == settings.origin.endpoint_url:
        allowed = (
            f"this is the gateway's own address; {aws_endpoint_variable(environment)} tells clients where the gateway "
            "is. Set origin.endpoint_url (or FOREBAY_ORIGIN__ENDPOINT_URL) to where the bucket is"
        )
    else:
        allowed = "this is the gateway's own address: name where the bucket is"
    return ConfigError("origin.endpoint_url", settings.origin.endpoint_url, allowed)


def _is_own_address(settings: Settings, endpoint_url: str) -> bool:
    parts = urlsplit(azure_url(endpoint_url) or endpoint_url)
    port = parts.port if parts.port is not None else {"https": 443}.get(parts.scheme, 80)
    ours = [one.host for one in (settings.server, settings.admin) if one.port == port]
    return bool(parts.hostname) and any(_reaches(parts.hostname or "", host) for host in ours)


def _reaches(origin_host: str, own_host: str) -> bool:
    """Return whether a connection to `origin_host` may end at a listener on `own_host`; the ports are equal."""
    own = _addresses(own_host)
    for address in _addresses(origin_host):
        target = "127.0.0.1" if address == "0.0.0.0" else "::1" if address == "::" else address
        if target in own or (own & {"0.0.0.0", "::"} and _is_of_this_machine(target)):
            return True
    return False


def _addresses(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()  # a name that does not resolve now is an origin that is down now


def _is_of_this_machine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
