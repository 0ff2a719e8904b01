"""From a TOML file and the environment to checked `Settings`, with every error reported at once.

Environment beats file. `FOREBAY_SERVER__PORT=9000` is `server.port`; `FOREBAY_CREDENTIALS__0__SECRET_ACCESS_KEY` is a
key of the first `[[credentials]]`; lists are JSON or comma separated; `FOREBAY_SLOTS` as a whole is JSON.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import SecretStr, ValidationError

from gateway.config.checks import check, warnings_of
from gateway.config.defaults import aws_endpoint_variable, complete
from gateway.config.entries import BucketSettings, CredentialSettings, ReplicaSettings
from gateway.config.fields import Section
from gateway.config.problems import (
    Hidden,
    SettingsError,
    allowed_of,
    dotted,
    problems_of,
    shown,
    table_of,
    toml_names,
    with_tables_around,
)
from gateway.config.settings import Settings
from gateway.core.errors import ConfigError
from gateway.disk.pem import PemFile

CONFIGURATION_BYTES_MAX = 4 * 2**20
"""Ten thousand slots."""

SECRET_BYTES_MAX = 64 * 1024

OVERLAY_BYTES_MAX = 128 * 2**20
"""The gateway wrote it itself, but it may have been changed since."""


def content_of(path: Path, bytes_max: int) -> bytes:
    """Return what a file holds; raise OSError, or ValueError for a file that cannot be the one. Blocks."""
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ValueError(f"it has more than {bytes_max} bytes")
    if content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it begins with a byte order mark (BOM): save it as UTF-8 without one")
    return content


Sources = dict[str, str]
"""Dotted key -> the variable, or the option of a command, that its value came from."""

PREFIX = "FOREBAY_"
CONFIG_VARIABLE = "FOREBAY_CONFIG"
_LISTS = {"BUCKETS", "CREDENTIALS", "ORIGIN_CREDENTIALS", "SLOTS"}

# What Kubernetes puts into every container of a namespace that has a Service named forebay or forebay-something.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class CommandEnvironment(dict[str, str]):
    """Environment variables with a command's options laid over them, so that options win, also on a reload.

    `options` are variable -> (option, value); values of None are options that were not given.
    """

    def __init__(self, environment: Mapping[str, str], options: Mapping[str, tuple[str, str | None]]) -> None:
        given = {variable: (option, value) for variable, (option, value) in options.items() if value is not None}
        super().__init__(dict(environment) | {variable: value for variable, (_, value) in given.items()})
        self.options = {variable: option for variable, (option, _) in given.items()}


_PLACE = re.compile("[0-9]{1,6}")


def merge_environment(document: dict[str, object], environment: Mapping[str, str]) -> tuple[list[str], Sources]:
    """Lay the variables over `document`, in place.

    Return warnings about variables that mean nothing, and where the values of the others went. Raises SettingsError for
    variables that are meant as settings and cannot be.
    """
    warnings: list[str] = []
    sources: Sources = {}
    options = environment.options if isinstance(environment, CommandEnvironment) else {}
    problems: list[ConfigError] = []
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or variable == CONFIG_VARIABLE:
            continue
        try:
            if "__" in name or name in _LISTS:
                path = name.lower().split("__")
                _assign(document, variable, path, environment[variable])
                sources[dotted([int(part) if _PLACE.fullmatch(part) else part for part in path])] = options.get(
                    variable, variable
                )
            elif not (_SERVICE_LINK.search(f"_{name}") or _SERVICE_ADDRESS.match(environment[variable])):
                warnings.append(_about_unknown(variable, name, environment[variable]))
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return warnings, sources


def _about_unknown(variable: str, name: str, text: str) -> str:
    for table, field in Settings.model_fields.items():
        model = table_of(field.annotation)
        for key in toml_names(model) if model else ():
            if name == f"{table}_{key}".upper():
                spelling = f"{PREFIX}{table}__{key}".upper()
                raise ConfigError(
                    variable, shown(key, text), f"write two underscores between table and key: {spelling}"
                )
    return f"{variable} is not a setting and is ignored (settings are spelt like FOREBAY_SERVER__PORT)"


def _assign(document: dict[str, object], variable: str, path: list[str], text: str) -> None:
    """Put `text` where `path` leads, making tables on the way; a number is a place in a list."""
    here: Any = document
    for part, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(here, list):
            here = _place_in(here, variable, part, text, last=following is None)
        elif not isinstance(here, dict):
            raise ConfigError(
                variable, shown(path[-1], text), "the file has a plain value where this variable needs a table"
            )
        elif following is None:
            here[part] = _value(variable, path, text)
        else:
            here = here.setdefault(part, [] if _PLACE.fullmatch(following) else {})


def _place_in(entries: list[Any], variable: str, part: str, text: str, *, last: bool) -> Any:
    if not _PLACE.fullmatch(part) or int(part) > len(entries):
        allowed = f"the number in its name must be 0 to {len(entries)}: there are {len(entries)} entries so far"
        raise ConfigError(variable, Hidden(), allowed)
    if last:
        raise ConfigError(variable, Hidden(), "name a key within the entry, as in FOREBAY_SLOTS__0__NAME")
    if int(part) == len(entries):
        entries.append({})
    return entries[int(part)]


def _value(variable: str, path: list[str], text: str) -> object:
    """JSON where the setting is a list and the text looks like it, comma separated otherwise; plain text else."""
    if not _is_list(path):
        return text
    if not text.lstrip().startswith(("[", "{")):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(variable, Hidden(), f"must be a JSON list ({error.msg} at {error.pos})") from None


def _is_list(path: list[str]) -> bool:
    annotation: object = Settings
    for part in path:
        if _PLACE.fullmatch(part):
            continue
        model = table_of(annotation)
        fields = model.model_fields if model else {}
        field = next((field for name, field in fields.items() if part in (name, field.alias)), None)
        if field is None:
            return False
        annotation = field.annotation
    return str(annotation).startswith(("list[", "tuple["))


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings that passed every check, and what the operator must be told about them all the same."""

    settings: Settings
    warnings: tuple[str, ...]


def load_settings(
    path: Path | None,
    environment: Mapping[str, str],
    *,
    more_slots: Sequence[Mapping[str, object]] = (),
    running: Settings | None = None,
    only: str | None = None,
) -> LoadedSettings:
    """Read `path` (None: no file), let `environment` override it, add `more_slots`, check everything.

    With `only`, that table of the file alone is looked at: for who needs no other.
    What is omitted and depends on the machine is taken from `running`, where there is such, so that it stays the same.
    Raises SettingsError with all problems found.
    """
    document = read_document(path) if path is not None else {}
    if only is not None:
        document = {name: table for name, table in document.items() if name == only}
    in_file = list(_keys(document))
    warnings, sources = merge_environment(document, environment)
    for key in in_file:
        if not any(above in sources for above in with_tables_around(key)):
            sources[key] = str(path)
    variable = aws_endpoint_variable(environment)
    if variable is not None:
        sources.setdefault("origin.endpoint_url", variable)
    try:
        loaded = _loaded(document, environment, more_slots, running)
    except SettingsError as error:
        raise SettingsError([_as_written(one, document) for one in error.problems]).with_sources(sources) from None
    return replace(loaded, warnings=(*warnings, *loaded.warnings))


def _as_written(problem: ConfigError, document: object) -> ConfigError:
    value = document
    for part in re.findall(r"[^.\[\]]+", problem.key):
        inner = value[int(part)] if part.isdecimal() and isinstance(value, list) and int(part) < len(value) else None
        value = value.get(part) if isinstance(value, dict) else inner
    if problem.problem != f"{problem.key} = {problem.value!r}" or isinstance(problem.value, Hidden):
        return problem
    written = shown(problem.key, value) if isinstance(value, str | int | float) else problem.value
    return ConfigError(problem.key, written, problem.allowed, problem.source)


def _keys(value: object, key: str = "") -> Iterator[str]:
    """Dotted keys of all values of a document, and of the tables in lists."""
    if isinstance(value, dict) and (value or not key):
        for name, one in value.items():
            yield from _keys(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for i, one in enumerate(value):
            yield f"{key}[{i}]"
            yield from _keys(one, f"{key}[{i}]")
    else:
        yield key


def _loaded(
    document: dict[str, object],
    environment: Mapping[str, str],
    more_slots: Sequence[Mapping[str, object]],
    running: Settings | None,
) -> LoadedSettings:
    if more_slots:
        slots = document.get("slots", [])
        document["slots"] = [*(slots if isinstance(slots, list) else [slots]), *map(dict, more_slots)]
    settings = complete(_with_files(validated(document), running), environment, running)
    problems = check(settings, environment)
    if problems:
        raise SettingsError(problems)
    return LoadedSettings(settings, tuple(warnings_of(settings)))


def read_document(path: Path) -> dict[str, object]:
    """Return the tables of a TOML file."""
    try:
        return tomllib.loads(content_of(path, CONFIGURATION_BYTES_MAX).decode())
    except OSError as error:
        problem = f"the configuration {path} cannot be read"
        raise SettingsError([ConfigError("config", str(path), str(error.strerror), problem=problem)]) from error
    except (ValueError, RecursionError) as error:
        # No TOML, no UTF-8, numbers of thousands of digits, deep nesting; or a file too large to be it.
        problem = f"the configuration {path} is not TOML"
        raise SettingsError([ConfigError("config", str(path), str(error), problem=problem)]) from None


def validated(document: dict[str, object]) -> Settings:
    """Return a document's settings, not completed yet and without their files' content. SettingsError."""
    try:
        return Settings.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SettingsError(problems_of(error)) from None


T = TypeVar("T", bound=Section)


def _with_files(settings: Settings, running: Settings | None) -> Settings:
    """Read the files named by settings, so that all processes have the same content, even if the files change.

    The gateway keeps trusting what it trusted at the start.
    """
    problems: list[ConfigError] = []
    origin, server, admin = settings.origin, settings.server, settings.admin
    known = dict[Path, PemFile]()
    if running is not None:
        of_replicas = [one.ca_bundle for bucket in running.buckets for one in bucket.replicas]
        bundles = (running.origin.ca_bundle, *(bucket.ca_bundle for bucket in running.buckets), *of_replicas)
        known = {bundle.path: bundle for bundle in bundles if bundle is not None}
    pem = {"certificate_file": _content(server.certificate_file), "key_file": _content(server.key_file)}

    def with_secret(key: str, section: T, name: str = "secret_access_key") -> T:
        return section.model_copy(update=_secret(key, section, name, problems))

    origin_credentials = [
        with_secret(f"origin_credentials[{i}]", one) for i, one in enumerate(settings.origin_credentials)
    ]
    credentials = [with_secret(f"credentials[{i}]", one) for i, one in enumerate(settings.credentials)]
    origin, admin = with_secret("origin", origin), with_secret("admin", admin, "token")
    trusted = _content(origin.ca_bundle, known)
    buckets = [
        _trusting(one, known).model_copy(update={"replicas": [_trusting(copy, known) for copy in one.replicas]})
        for one in settings.buckets
    ]
    cluster = settings.cluster
    if cluster is not None:
        cluster = with_secret("cluster", with_secret("cluster", cluster, "redis_password"), "sentinel_password")
        cluster = cluster.model_copy(update={"secret_file": _content(cluster.secret_file)})
    problems += _missing_secrets(credentials, problems)
    if problems:
        raise SettingsError(problems)
    return settings.model_copy(
        update={
            "server": server.model_copy(update=pem),
            "origin": origin.model_copy(update={"ca_bundle": trusted}),
            "admin": admin,
            "cluster": cluster,
            "credentials": credentials,
            "buckets": buckets,
            "origin_credentials": origin_credentials,
        }
    )


HomeT = TypeVar("HomeT", BucketSettings, ReplicaSettings)


def _trusting(one: HomeT, known: Mapping[Path, PemFile]) -> HomeT:
    return one.model_copy(update={"ca_bundle": _content(one.ca_bundle, known)})


def _content(file: PemFile | None, known: Mapping[Path, PemFile] | None = None) -> PemFile | None:
    if file is not None and known is not None:
        file = known.get(file.path, file)
    if file is None or file.content is not None:
        return file
    try:
        return file.read()
    except (OSError, ValueError):
        return file


def _secret(table: str, section: Section, name: str, problems: list[ConfigError]) -> dict[str, SecretStr | None]:
    """Return a table's secret by its name: as given, or its file's content, which keeps to the same rule."""
    given: SecretStr | None = getattr(section, name)
    file: Path | None = getattr(section, f"{name}_file")
    if file is None:
        return {name: given}
    if given is not None:
        problems.append(ConfigError(f"{table}.{name}_file", str(file), f"remove this or {name}"))
        return {name: given}
    text, problem = "", None
    try:
        text = content_of(file, SECRET_BYTES_MAX).decode().strip()
    except UnicodeDecodeError:  # it repeats what is in the file
        problem = "this file is not text in UTF-8"
    except OSError as error:
        problem = f"this file cannot be read ({error.strerror or type(error).__name__})"
    except ValueError as error:
        problem = f"this file cannot be used: {error}"
    else:
        problem = _problem_of_secret(section, name, text)
    if problem is not None:
        problems.append(ConfigError(f"{table}.{name}_file", str(file), problem))
    return {name: SecretStr(text)}


def _problem_of_secret(section: Section, name: str, text: str) -> str | None:
    if not text:
        return "this file is empty"
    if not text.isprintable():
        return "this file must hold one line of text"
    try:
        type(section).model_validate({name: text})
    except ValidationError as error:  # others are missing, which does not matter
        if any(one["loc"][:1] == (name,) for one in error.errors(include_input=False)):
            return f"this file must hold {allowed_of(type(section), name).partition(';')[0]}"
    return None


def _missing_secrets(credentials: Sequence[CredentialSettings], problems: Sequence[ConfigError]) -> list[ConfigError]:
    reported = {problem.key.removesuffix("_file") for problem in problems}
    keys = [f"credentials[{i}].secret_access_key" for i, one in enumerate(credentials) if one.secret_access_key is None]
    return [ConfigError(key, None, "give it, or secret_access_key_file") for key in keys if key not in reported]
