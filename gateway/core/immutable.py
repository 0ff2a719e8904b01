"""Frozen dataclasses that are cheap to make: a request makes many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(described: type[T]) -> type[T]:
    """Make a dataclass with slots that the type checker holds to be frozen, and that is not at run time.

    `dataclass(frozen=True)` sets each field past its own guard: 6,600 instructions for one of four fields, instead of
    1,500.
    """
    return dataclass(slots=True, unsafe_hash=True)(described)
