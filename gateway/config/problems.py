"""Messages about unusable settings: dotted key, value unless it may be secret, allowed values."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.config.fields import NoPattern
from gateway.config.settings import Settings
from gateway.config.units import TooLarge, UnknownUnit
from gateway.core.errors import ConfigError, ForebayError

_SECRET_NAMES = re.compile(r"secret|token|password|proxy|credential|url", re.IGNORECASE)


class SettingsError(ForebayError):
    """One or more settings cannot be used; every one of them is told."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def with_sources(self, sources: Mapping[str, str]) -> SettingsError:
        """Return the error with each problem's source: that of its key, or of the nearest table around it."""
        return SettingsError([_with_source(problem, sources) for problem in self.problems])


def _with_source(problem: ConfigError, sources: Mapping[str, str]) -> ConfigError:
    source = next((sources[key] for key in with_tables_around(problem.key) if key in sources), None)
    if source is None:  # a table as a whole: who gave something in it
        source = next((sources[key] for key in sources if re.match(rf"{re.escape(problem.key)}[.\[]", key)), None)
    if problem.source is not None or source is None:
        return problem
    return ConfigError(problem.key, problem.value, problem.allowed, source, problem.problem)


def with_tables_around(key: str) -> Iterator[str]:
    """`slots[1].prefix` -> itself, `slots[1]`, `slots`."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]


class Hidden:
    """Stands in messages for a value that may be secret, or hold one."""

    def __init__(self, kind: str = "hidden") -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"({self._kind})"


def shown(key: str, value: object) -> object:
    """`value` as it may appear in a message: secrets, and whole tables that may hold some, do not."""
    if isinstance(value, dict | list):
        return Hidden("a table" if isinstance(value, dict) else "a list")
    leaf = key.rpartition(".")[2]
    if _SECRET_NAMES.search(leaf) and not leaf.endswith("_file"):
        return value if isinstance(value, str) and _harmless_url(leaf, value) else Hidden()
    return value if isinstance(value, str | int | float | bool) or value is None else Hidden("a date or time")


def _harmless_url(leaf: str, value: str) -> bool:
    return leaf in ("endpoint_url", "sts_endpoint_url") and "@" not in value and "?" not in value


def problems_of(error: ValidationError) -> list[ConfigError]:
    """Return the errors of pydantic in the words of the configuration."""
    return [_problem(detail) for detail in error.errors(include_url=False, include_context=True)]


def _problem(detail: ErrorDetails) -> ConfigError:
    key = dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        # Its value is not shown: a misspelt name may stand in front of a secret.
        return ConfigError(key, Hidden(), _known(detail["loc"]), problem=f"{key} is not a setting")
    cause = detail.get("ctx", {}).get("error")
    if detail["type"] in ("list_type", "model_type", "dict_type") and _model_at(detail["loc"]) is not None:
        return _of_another_shape(key, detail)
    says_why = isinstance(cause, TooLarge | NoPattern)
    allowed = str(cause) if says_why else _allowed(detail["loc"]) or detail["msg"]
    if isinstance(cause, UnknownUnit):
        allowed = f"{allowed}; {cause.why}"
    if detail["type"] == "missing":
        return ConfigError(key, None, allowed)
    return ConfigError(key, shown(key, detail["input"]), allowed)


def _of_another_shape(key: str, detail: ErrorDetails) -> ConfigError:
    """One table where there are several, or the other way round; or a value where a table belongs."""
    table = ".".join(part for part in detail["loc"] if isinstance(part, str))
    if detail["type"] == "list_type":
        allowed = f"a list of tables: write [[{table}]], with both brackets, before each"
    elif len(detail["loc"]) > 1:
        allowed = f"a table: write [[{table}]], and its keys below"
    else:
        allowed = f"one table: write [{table}], and its keys below"
    return ConfigError(key, shown(key, detail["input"]), allowed)


def dotted(location: Sequence[int | str]) -> str:
    """("slots", 1, "prefix") -> `slots[1].prefix`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _known(location: Sequence[int | str]) -> str:
    model = _model_at(location[:-1])
    names = toml_names(model) if model else []
    given = str(location[-1]).lower()
    close = difflib.get_close_matches(given, names, n=1)
    close += [name for name in names if given in name or name in given]
    tables = ((table, _model_at((table,))) for table in Settings.model_fields)
    close += [f"{table}.{given}" for table, one in tables if one is not None and given in toml_names(one)]
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}known here: {', '.join(names)}"


def toml_names(model: type[BaseModel]) -> list[str]:
    """Names of a table's keys as they stand in files."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _allowed(location: Sequence[int | str]) -> str | None:
    for depth in range(len(location), 0, -1):
        model = _model_at(location[: depth - 1])
        if model is None:
            continue
        for name, field in model.model_fields.items():
            if location[depth - 1] in (name, field.alias):
                return allowed_of(model, name) or None
    return None


def allowed_of(model: type[BaseModel], name: str) -> str:
    """Return a setting's own form, unit and range; empty if none is given."""
    extra = model.model_fields[name].json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) and "allowed" in extra else ""


def _model_at(location: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the table that `location` names; None when it names a plain value."""
    model: type[BaseModel] = Settings
    for part in location:
        if isinstance(part, int):
            continue
        found = next((f.annotation for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        table = table_of(found)
        if table is None:
            return None
        model = table
    return model


def table_of(annotation: object) -> type[BaseModel] | None:
    """Return the model within an annotation such as `list[SlotSettings]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, Annotated, types.UnionType):
        return next((table for table in map(table_of, get_args(annotation)) if table), None)
    return None
