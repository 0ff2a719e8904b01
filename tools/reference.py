"""The generated parts of the documentation, from the declarations themselves.

`python -m tools.reference docs/configuration.md docs/metrics.md` rewrites what stands between the markers
`<!-- generated: settings -->` or `<!-- generated: metrics -->` and `<!-- end -->`; a test fails when it was not run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.config import Settings
from gateway.config.problems import table_of
from gateway.telemetry.metrics import DECLARED

_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_reference() -> str:
    """One section per table: key, default, what is allowed, what it does."""
    return "\n".join(_sections("", Settings))


def _sections(within: str, model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = table_of(field.annotation)
        if inner is not None:
            yield _section(within + name, field)
            yield from _sections(f"{within}{name}.", inner)


def _section(table: str, field: FieldInfo) -> str:
    model = table_of(field.annotation)
    if model is None:
        raise TypeError(f"{table} is not a table")
    title = f"[[{table}]]" if str(field.annotation).startswith("list[") else f"[{table}]"
    rows = [_row(one.alias or name, one) for name, one in model.model_fields.items()]
    head = "| key | default | allowed | what it does |\n|---|---|---|---|\n"
    return f"### `{title}`\n\n{model.__doc__}\n\n{head}" + "".join(rows)


def _row(key: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    allowed = extra["allowed"] if isinstance(extra, dict) else ""
    return f"| `{key}` | {_default(field)} | {allowed} | {field.description} |\n"


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined:
        return "required"
    if default in (None, "", 0, Path()) and not isinstance(default, bool) and "Omitted:" in (field.description or ""):
        return "omitted"
    if default is None:
        return "none"
    if isinstance(default, list | tuple) and default:
        return f"`{json.dumps(default)}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def metrics_reference() -> str:
    """One row per metric."""
    rows = [
        f"| `{one.name}` | {one.kind} | {one.unit} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |\n"
        for one in DECLARED
    ]
    return "| metric | kind | unit | labels | what it counts |\n|---|---|---|---|---|\n" + "".join(rows)


REFERENCES: Mapping[str, Callable[[], str]] = {"settings": settings_reference, "metrics": metrics_reference}


def with_references(document: str) -> str:
    """`document` with every generated part as it should be."""
    return _GENERATED.sub(lambda match: f"{match[1]}\n{REFERENCES[match[2]]()}\n{match[3]}", document)


def main(paths: list[str]) -> None:
    """Rewrite the documents."""
    for path in map(Path, paths):
        path.write_text(with_references(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
