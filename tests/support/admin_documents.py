"""Documents of the admin API for tests that care for a few of their fields."""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin

from gateway.api.documents import Document, Status

D = TypeVar("D", bound=Document)


def filled(kind: type[D], given: dict[str, Any] | None = None, **more: Any) -> D:
    """Return a document with these fields; all others are empty."""
    return kind.model_validate(_filled(kind, (given or {}) | more))


def status(**given: Any) -> Status:
    """Return the status of a gateway that runs, with nothing to tell."""
    well = {
        "gateway": {"ready": True, "version": "1", "s3_url": "u"},
        "origin": {"endpoint_url": "o", "reachable": True, "state": "well"},
        "cache": {"directory": "/c", "capacity_bytes": 1, "disk": {"state": "well"}},
    }
    return filled(Status, well | given)


def _filled(kind: type[Document], given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: _value(field.annotation, given.get(name, ...)) for name, field in kind.model_fields.items()}


def _value(annotation: Any, given: Any) -> Any:
    """Return what is given, completed; `...` is nothing."""
    kinds = get_args(annotation)
    if isinstance(given, Document):
        return given
    if isinstance(annotation, type) and issubclass(annotation, Document):
        return _filled(annotation, {} if given is ... else given)
    if get_origin(annotation) is list and given is not ...:
        return [_value(kinds[0], one) for one in given]
    if type(None) in kinds:
        return None if given in (None, ...) else _value(kinds[0], given)
    if given is not ...:
        return given
    return (get_origin(annotation) or annotation)()
