"""Slots of tests."""

from __future__ import annotations

from typing import Any

from gateway.config import SlotSettings
from gateway.core.prefixes import Prefix


class Slot(SlotSettings):
    """A slot whose values are not checked: buffers of tests are smaller than any that a configuration may have."""

    def __init__(
        self,
        name: str,
        prefix: Prefix,
        mode: str = "read-write",
        consistency: str = "strict",
        metadata_ttl_seconds: float = 60.0,
        negative_ttl_seconds: float = 0.0,
        stale_if_unreachable_seconds: float = 0.0,
        **more: Any,
    ) -> None:
        super().__init__(name="slot", prefix=prefix)
        self.__dict__.update(
            {
                "name": name,
                "mode": mode,
                "stated_consistency": consistency,
                "metadata_ttl_seconds": metadata_ttl_seconds,
                "negative_ttl_seconds": negative_ttl_seconds,
                "stale_if_unreachable_seconds": stale_if_unreachable_seconds,
                **more,
            }
        )


def slot_with(slot: Slot, **values: Any) -> Slot:
    """Return the slot with other values, which are not checked."""
    if "consistency" in values:
        values["stated_consistency"] = values.pop("consistency")
    copy = slot.model_copy(update=values)
    copy.__dict__.pop("consistency", None)
    return copy
