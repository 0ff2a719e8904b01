"""What the composition root makes of changes that come while it opens what it builds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.app.node import background_services
from gateway.config import Settings
from gateway.config.live import LiveSettings, Step
from gateway.config.loading import load_settings
from tests.support.gateway_process import ORIGIN_KEYS, to_toml

MIB = 2**20


class _Watched(LiveSettings):
    """Tells when the first part follows."""

    def __init__(self, now: Settings) -> None:
        super().__init__(now)
        self.is_followed = asyncio.Event()

    def following(self, step: Step) -> Any:
        self.is_followed.set()
        return super().following(step)


def test_settings_that_change_while_the_background_process_opens_the_directory_are_followed(tmp_path: Path) -> None:
    """Otherwise it would keep to the capacity of before, and evict for all down to that."""
    key = {"access_key_id": ORIGIN_KEYS[0], "secret_access_key": ORIGIN_KEYS[1]}
    tables = {"origin": {"endpoint_url": "http://127.0.0.1:1", **key}}
    settings = []
    for capacity in ("64MiB", "96MiB"):
        file = tmp_path / f"{capacity}.toml"
        cache = {"directory": str(tmp_path / "cache"), "capacity": capacity, "block_size": "1MiB"}
        file.write_text(to_toml({**tables, "cache": cache}))
        settings.append(load_settings(file, {}).settings)
    live = _Watched(settings[0])

    async def change_early() -> None:
        await live.is_followed.wait()  # by its first parts, and the cache directory is not open yet
        await live.change(settings[1])

    async def scenario() -> int:
        changing = asyncio.create_task(change_early())
        async with background_services(live, instance_id="instance", shared_directory=None) as kept:
            await changing
            return kept.blocks._dependencies.directory.capacity.total_bytes

    (tmp_path / "cache").mkdir()
    assert asyncio.run(scenario()) == 96 * MIB
