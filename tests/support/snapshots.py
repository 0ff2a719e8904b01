"""Snapshots for tests: entries, and snapshots made of what an origin in memory holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gateway.core.model import Homes
from gateway.jobs.job import Job, JobDependencies, JobKind
from gateway.jobs.snapshot_job import SnapshotJob
from gateway.metadata.snapshots.staging import Origins, SnapshotStaging
from gateway.metadata.snapshots.store import Manifest, SnapshotStore
from gateway.s3.list_result import EntryTemplate, ListedEntry
from tests.support.gateway_app import GatewayApp

TEMPLATE = EntryTemplate("", "", "<StorageClass>STANDARD</StorageClass>")
DATE = "2026-01-02T03:04:05.000Z"


def entry(key: str, content: bytes = b"", template: EntryTemplate = TEMPLATE) -> ListedEntry:
    """What a listing says of an object of that content."""
    return ListedEntry(key.encode(), DATE, f'"{hashlib.md5(content).hexdigest()}"', len(content), template)


def make(store: SnapshotStore, name: str, objects: Mapping[str, bytes], prefix: str = "s3://bucket/") -> Manifest:
    """A snapshot of these objects."""
    staging = SnapshotStaging.begin(store, f"test-{name}", Origins(name, prefix, "memory", 1.0))
    staging.append([entry(key, content) for key, content in sorted(objects.items(), key=lambda one: one[0].encode())])
    return staging.publish(2.0)


def keys_of(store: SnapshotStore, name: str) -> list[str]:
    """All keys of a snapshot, in order."""
    with store.opened(name) as snapshot:
        return [one.key.decode() for one in snapshot.data.part(b"", b"\xff", 10**6)]


async def freeze(gateway: GatewayApp, name: str, prefix: str = "s3://bucket/") -> None:
    """Make a snapshot of what a gateway's origin holds now."""
    services = gateway.app.services
    homes = Homes("memory")
    tools = JobDependencies(
        gateway.origin, gateway.catalog, gateway.blocks, services.slots, services.clock, gateway.snapshots, homes
    )
    await SnapshotJob(tools, Job(f"job-{name}", JobKind.SNAPSHOT, prefix, name=name, allow_empty=True)).run()


def files_of(root: Path) -> list[str]:
    """What lies in a directory of snapshots, but for the shared number."""
    return sorted(path.name for path in root.iterdir() if path.name != "changes")
