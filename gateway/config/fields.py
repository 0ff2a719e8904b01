"""The parts of settings: the field with its help and range, and the types that parse sizes, durations and names."""

from __future__ import annotations

import ipaddress
import os
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FieldSerializationInfo,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from gateway.config.units import (
    SIZE_UNITS,
    parse_bandwidth_bytes_per_second,
    parse_duration_seconds,
    parse_link_bandwidth,
    parse_size_bytes,
)
from gateway.core.checkpoint_patterns import BUILT_IN, parse_pattern
from gateway.core.prefixes import Prefix
from gateway.disk.pem import PemFile

SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
BANDWIDTH_BYTES_PER_SECOND_MIN = 64 * 2**10
"""Below it, a few connections at a ceiling are so slow that origins and clients take them for dead."""

BandwidthBytesPerSecond = Annotated[
    int, BeforeValidator(parse_bandwidth_bytes_per_second), Field(ge=BANDWIDTH_BYTES_PER_SECOND_MIN)
]


def _link_bandwidth(value: object) -> int | Literal["auto"]:
    parsed = parse_link_bandwidth(value)
    if parsed != "auto" and parsed < BANDWIDTH_BYTES_PER_SECOND_MIN:
        raise ValueError("at least 64KiB/s")
    return parsed


LinkBandwidth = Annotated[int | Literal["auto"], BeforeValidator(_link_bandwidth)]
"""Bytes per second, or "auto": what the link bears is found out."""

DurationSeconds = Annotated[float, BeforeValidator(parse_duration_seconds)]


_TOKEN_CHARACTERS_MIN = 16


def _bearer_token(value: SecretStr) -> SecretStr:
    token = value.get_secret_value()
    is_sendable = token.isascii() and token.isprintable() and token == token.strip()
    if len(token) < _TOKEN_CHARACTERS_MIN or not is_sendable:
        raise ValueError("no client could send it, or too short")
    return value


BearerToken = Annotated[SecretStr, AfterValidator(_bearer_token)]
"""A value for a header `Authorization: Bearer …` (RFC 6750, without spaces) that cannot be guessed."""


def _pem_file(value: object) -> PemFile:
    """By its path; or with what it held, as one process gives it to another."""
    if isinstance(value, PemFile):
        return value
    if isinstance(value, dict) and value.keys() == {"path", "content"}:
        content = value["content"]
        return PemFile(Path(value["path"]), None if content is None else content.encode("latin-1"))
    if isinstance(value, str | Path):
        return PemFile(Path(value))
    raise ValueError("the path of a file")


def _pem_document(file: PemFile, info: FieldSerializationInfo) -> object:
    """JSON is for people, and has the path alone."""
    if info.mode == "json":
        return str(file.path)
    return {"path": str(file.path), "content": None if file.content is None else file.content.decode("latin-1")}


PemFileSetting = Annotated[PemFile, PlainValidator(_pem_file), PlainSerializer(_pem_document)]
"""A file of certificates or keys, which loading reads."""


def setting(default: Any = ..., help: str = "", *, allowed: str, toml: str | None = None, **constraints: Any) -> Any:
    """One setting: `help` says what it does, `allowed` its form, unit and range (errors and documentation quote it).

    `toml` is its name in files where that is not the attribute's without its unit. A range at the beginning of
    `allowed`, such as `1s to 1h`, is the rule itself.
    """
    if (found := _RANGE.match(allowed)) is not None:
        constraints |= {"ge": _number(found[1]), "le": _number(found[2])}
    return Field(default, alias=toml, description=help, json_schema_extra={"allowed": allowed}, **constraints)


_RANGE = re.compile(r"(?:a power of two, )?([\d.]+[A-Za-z]*) to ([\d.]+[A-Za-z]*)(?:;|$)")


def _number(text: str) -> float:
    is_size = text.lstrip("0123456789.") in SIZE_UNITS
    number = parse_size_bytes(text) if is_size else parse_duration_seconds(text)
    return int(number) if number == int(number) else number


def host_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", value):
        raise ValueError("a host name in lower case, without port")
    return value


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class NoPattern(ValueError):
    """A value that is no pattern of keys; the message says why."""


def power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("a power of two")
    return value


def s3_prefix(value: object) -> Prefix:
    """`s3://` for everything, else `s3://bucket/` and any prefix of keys behind it."""
    if isinstance(value, Prefix):
        return value
    if not isinstance(value, str) or (value != "s3://" and not re.match(r"s3://[^/]+/", value)):
        raise ValueError("s3://, s3://bucket/ or s3://bucket/prefix")
    return Prefix.parse(value)


def s3_object_url(value: str) -> str:
    """`s3://bucket/key`."""
    if not re.match(r"s3://[^/]+/.", value):
        raise ValueError("s3://bucket/key")
    return value


def valid_endpoint_url(value: str) -> str:
    """Scheme, host and port only; empty stands for omitted."""
    match = re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[^/?#@:\s\[\]]+)(?::(\d{1,5}))?/?", value)
    if value and (match is None or int(match[2] or 80) not in range(1, 65536)):
        raise ValueError("http://host[:port] or https://host[:port], without user, path or query")
    return value.rstrip("/")


FILE_SCHEME = "file://"


_WEBHDFS = re.compile(
    r"s?webhdfs://(?:[A-Za-z_][\w.-]*\$?@)?(?:\[[0-9a-f:.]+\]|[^/?#@:\s\[\]]+):\d{1,5}(?:/[^/?#%:\s]+)*/?"
)


_AZURE = re.compile(r"azure(\+http)?(://(?:\[[0-9A-Fa-f:.]+\]|[^/?#@:\s\[\]]+)(?::\d{1,5})?(?:/[a-z0-9]{3,24})?)/?")

AZURE_FORM = (
    "azure://ACCOUNT.blob.core.windows.net, or azure+http://host[:port]/ACCOUNT without TLS, such as Azurite's "
    "azure+http://127.0.0.1:10000/devstoreaccount1"
)


def azure_url(endpoint_url: str) -> str | None:
    """Return where an Azure Blob service answers HTTP; None: it is none."""
    found = _AZURE.fullmatch(endpoint_url)
    return f"http{'' if found[1] else 's'}{found[2]}" if found is not None else None


def origin_url(value: str) -> str:
    """As `valid_endpoint_url`; or a directory, HDFS or Azure Blob: `file:///mnt/nas`, `webhdfs://…`, `azure://…`."""
    if value.startswith(("webhdfs:", "swebhdfs:")):
        if _WEBHDFS.fullmatch(value) is None or any(name in (".", "..") for name in value.split("/")):
            raise ValueError(
                "webhdfs://[user@]host:port[/path] or swebhdfs://, without query and without % in the path"
            )
        return value.rstrip("/")
    if value.startswith("azure"):
        found = urlsplit(azure_url(value) or "")
        if not found.hostname or not _has_port(found):
            raise ValueError(AZURE_FORM)
        return value.rstrip("/")
    if not value.startswith("file:"):
        return valid_endpoint_url(value)
    path = value.removeprefix(FILE_SCHEME)
    names = path.removesuffix("/").split("/")
    is_plain = names[0] == "" and len(names) > 1 and not any(name in ("", ".", "..") for name in names[1:])
    if not value.startswith(FILE_SCHEME) or not is_plain or re.search(r"[%?#\0]", path):
        raise ValueError("file:///path of a directory: absolute, without . or .. and without %, ? and #")
    return value.rstrip("/")


def _has_port(url: SplitResult) -> bool:
    try:
        return url.port != 0
    except ValueError:
        return False


def directory_of(endpoint_url: str) -> Path | None:
    """Return the directory that an origin is; None: it is an S3."""
    return Path(endpoint_url.removeprefix(FILE_SCHEME)) if endpoint_url.startswith(FILE_SCHEME) else None


_SOCKET_PATH_BYTES_MAX = 107
"""Limit of the kernel (unix(7))."""


def socket_path(value: Path) -> Path:
    if not value.is_absolute() or len(os.fsencode(value)) > _SOCKET_PATH_BYTES_MAX:
        raise ValueError("an absolute path of at most 107 bytes")
    return value


def is_webhdfs(endpoint_url: str) -> bool:
    return endpoint_url.startswith(("webhdfs://", "swebhdfs://"))


def is_store(endpoint_url: str) -> bool:
    """Return whether an origin is no S3: nothing is signed there."""
    return directory_of(endpoint_url) is not None or is_webhdfs(endpoint_url)


def is_s3(endpoint_url: str) -> bool:
    return not is_store(endpoint_url) and azure_url(endpoint_url) is None


def _host_pattern(value: str) -> str:
    if not re.fullmatch(r"(?:\*\.)?[a-z0-9](?:[a-z0-9.:-]*[a-z0-9])?", value):
        raise ValueError("a host name or address in lower case, or *.domain")
    return value


def checkpoint_pattern(value: str) -> str:
    """`built-in`, or a pattern of keys (checkpoint_patterns.py)."""
    try:
        if value != BUILT_IN:
            parse_pattern(value)
    except ValueError as error:
        raise NoPattern(str(error).removeprefix(f"{value!r}: ")) from error  # the problem names it already
    return value


DialectName = Literal["auto", "s3", "b2", "bos", "cos", "gcs", "obs", "oss", "r2", "tos"]
DIALECT_NAMES = "auto, s3, b2, bos, cos, gcs, obs, oss, r2 or tos"
SocketPath = Annotated[Path, AfterValidator(socket_path)]

HostPattern = Annotated[str, AfterValidator(_host_pattern)]

Symlinks = Literal["read", "follow"]


def _file_mode(value: object) -> int:
    """As text of octal digits; as a number, where TOML has 0o640, or one process tells another."""
    is_text = isinstance(value, str) and re.fullmatch("0?[0-7]{3}", value) is not None
    mode = int(str(value), 8) if is_text else value
    if not isinstance(mode, int) or not 0 <= mode <= 0o777 or mode & 0o600 != 0o600:
        raise ValueError('octal digits as text, "0600" to "0777", with 6 or 7 for the owner')
    return mode


FileMode = Annotated[int, BeforeValidator(_file_mode)]
"""Rights of a file. The gateway must read and write what it has made."""
HostName = Annotated[str, AfterValidator(host_name)]
S3Prefix = Annotated[Prefix, PlainValidator(s3_prefix), PlainSerializer(str)]
S3ObjectUrl = Annotated[str, AfterValidator(s3_object_url)]
CheckpointPatternText = Annotated[str, AfterValidator(checkpoint_pattern)]
Port = Annotated[int, Field(ge=0, le=65535)]
PORT = "a whole number 0 to 65535; 0 picks a free port"


class Section(BaseModel):
    """A table of the file: immutable, unknown keys refused; constructed by attribute names in code."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: re.sub("_(seconds|bytes|bytes_per_second)$", "", name),
        populate_by_name=True,
        hide_input_in_errors=True,
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what only a programming language takes for a number: `true` for 1, `8.0` for 8, `1_000`, `٣`."""
        kinds = _numbers(cls, info.field_name or "")
        is_whole, is_odd = kinds == {"int"}, isinstance(value, bool)
        if isinstance(value, str):
            is_odd = bool((_NO_WHOLE_NUMBER if is_whole else _NO_NUMBER).search(value))
        if kinds and (is_odd or (is_whole and isinstance(value, float))):
            raise ValueError("this is no number")
        return value


@cache
def _numbers(section: type[Section], name: str) -> set[str]:
    """Return which kinds of number a setting may be: `int`, `float`."""
    return set(re.findall(r"\b(?:int|float)\b", str(section.model_fields[name].annotation)))


_NO_NUMBER = re.compile(r"[+_]|^[-\s]|\s$|[^\x00-\x7f]")
_NO_WHOLE_NUMBER = re.compile(rf"{_NO_NUMBER.pattern}|^\d+\.\d*$")
