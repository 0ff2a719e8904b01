"""`FOREBAY_*` variables as an overlay on the file's tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.config.problems import Hidden, SettingsError, dotted, shown, table_of, toml_names
from gateway.config.settings import Settings
from gateway.core.errors import ConfigError

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
            elif not _is_service_link(name, environment[variable]):
                warnings.append(_about_unknown(variable, name, environment[variable]))
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return warnings, sources


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(f"_{name}") or _SERVICE_ADDRESS.match(value))


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
