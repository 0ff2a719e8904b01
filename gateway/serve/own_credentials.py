"""Which key the gateway signs with towards the origin, and where it comes from: told at the start, and no secret."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
import structlog

from gateway.config import Settings

LOOKUP_SECONDS_MAX = 15.0
_LOOK_UP = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gateway.serve.own_credentials import print_own_key
print_own_key(sys.argv[2] or None)
"""

_log = structlog.get_logger("forebay.serve")


@dataclass(frozen=True, slots=True)
class OwnKey:
    """`source` in words."""

    access_key_id: str
    source: str


def find_own_key(settings: Settings, environment: Mapping[str, str]) -> OwnKey | None:
    """Return the key by which the workers will sign; None where there is none now.

    Files, roles and metadata services are asked in a process of their own: what that needs stays out of this one.
    """
    origin = settings.origin
    if origin.access_key_id is not None:
        return OwnKey(origin.access_key_id, "the configuration")
    if origin.profile is None and environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return OwnKey(environment["AWS_ACCESS_KEY_ID"], "the environment (AWS_ACCESS_KEY_ID)")
    path = orjson.dumps([os.path.abspath(entry) for entry in sys.path]).decode()
    # It says where S3 is, and may name this gateway; botocore would ask for roles there.
    without = {name: value for name, value in os.environ.items() if name != "AWS_ENDPOINT_URL"}
    command = [sys.executable, "-P", "-c", _LOOK_UP, path, origin.profile or ""]
    try:
        done = subprocess.run(  # noqa: S603 - our own module; a profile's name is an argument of it
            command,
            capture_output=True,
            timeout=LOOKUP_SECONDS_MAX,
            check=True,
            stdin=subprocess.DEVNULL,
            env=without,
        )
    except (subprocess.SubprocessError, OSError) as error:
        _log.warning("the origin's credentials could not be looked up", error=type(error).__name__)
        return None
    found = orjson.loads(done.stdout or b"null")
    return None if found is None else OwnKey(found["access_key_id"], f"the usual AWS chain ({found['method']})")


async def _look_up(profile: str | None) -> dict[str, str] | None:
    from aiobotocore.session import AioSession

    credentials = await AioSession(profile=profile).get_credentials()
    if credentials is None:
        return None
    frozen = await credentials.get_frozen_credentials()
    return {"access_key_id": frozen.access_key, "method": str(credentials.method)}


def print_own_key(profile: str | None) -> None:
    """In the process of its own: what was found, as JSON."""
    sys.stdout.buffer.write(orjson.dumps(asyncio.run(_look_up(profile))))
