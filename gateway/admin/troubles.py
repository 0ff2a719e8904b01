"""Names the troubles of a running gateway, causes and cures: for the dashboard's banner and `forebay doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.admin.formatting import DISK_STATES, size_text, wrong_with
from gateway.api import documents as to

_DO_ABOUT_ORIGIN = {
    "unreachable": "see why the origin or the way to it is down; the gateway asks again by itself: do not restart it",
    "no credentials": "give it a key: origin.access_key_id, AWS_ACCESS_KEY_ID, a profile or a role",
    "refused": "check the key, its policy, origin.region and origin.endpoint_url; forebay reload reads new ones",
    "wrong clock": "set this machine's clock: chronyc tracking, timedatectl",
    "well": "see why the key is not renewed",
}
_LIST = "forebay writeback list --problems"
_WHICH_RIGHT = f"{_LIST}; forebay doctor --write-test s3://BUCKET/PREFIX/ says which right is missing"
_KILLED_SOON = "it is killed and started again after 30 seconds; see what it waits for: dmesg"
_NEARLY = 0.98


def _trouble(level: str, what: str, why: str, advice: str, page: str = "incidents") -> to.TroubleDocument:
    return to.TroubleDocument(level=level, what=what, why=why, advice=advice, page=page)


def troubles(status: to.Status) -> Iterator[to.TroubleDocument]:
    gateway, cache = status.gateway, status.cache
    if gateway is None:
        yield _trouble("warning", "the gateway is starting", "", "ask again in a moment")
        return
    if not gateway.ready:
        down = ", ".join(one.name for one in gateway.processes if not one.ready) or "draining"
        yield _trouble("error", "not ready", down, "see its log")
    for one in gateway.processes:
        if one.hangs:
            yield _trouble("error", f"{one.name} (process {one.process_id}) does not answer", "", _KILLED_SOON)
    if why := gateway.closed:
        yield _trouble("error", "it works without a cache", why, "repair the disk, and restart it")
    for origin in (status.origin, *status.origin.differing):
        if why := origin.problem:
            level, what = "warning" if origin.state == "well" else "error", "the origin"
            if isinstance(origin, to.DifferingOrigin) and origin.replica is not None:
                level, what = "warning", f"a replica of {origin.prefix}"
            yield _trouble(level, what, why, _DO_ABOUT_ORIGIN[origin.state])
    if (state := cache.disk.state) != "well":
        means, do = DISK_STATES[state]
        do += " (df), but remove nothing under writeback/" if state == "full" else ""
        yield _trouble("error", f"the disk of the cache ({cache.directory})", means, do)
    if cache.disk.journal_failing_processes:
        what = "the write-back journal takes no writes: nothing is acknowledged here, nothing is flushed"
        yield _trouble("error", what, "", "make room; see its log")
    if why := gateway.settings_problem:
        what, do = "changed settings are not in force", "correct them, then forebay reload"
        yield _trouble("warning", what, why, do, "configuration")
    for frozen in status.frozen:
        if why := frozen.problem:
            yield _trouble("error", f"slot {frozen.slot}", why, "forebay snapshot list", "snapshots")
    for index in status.indexes:
        if why := index.error:
            what, do = f"the index of slot {index.slot} fails", "check the right to list there"
            yield _trouble("warning", what, why, do, "listings-and-indexes")
    for source in status.event_sources:
        if why := source.problem:
            what, do = "changes of others are not told of", "until they are, they are seen as metadata_ttl says"
            yield _trouble("warning", what, why, do, "listings-and-indexes")
    if (pending := status.writeback) is None:
        return
    for slot in pending.slots:
        if wrong := wrong_with(slot):
            why = f" ({slot.reason})" if slot.reason else ""
            what, do = f"slot {slot.slot}: not at the origin: {', '.join(wrong)}{why}", _LIST
            yield _trouble("error", what, "", _WHICH_RIGHT if "AccessDenied" in why else do)
        if slot.buffer_bytes and slot.staged_bytes >= _NEARLY * slot.buffer_bytes:
            why = f"{size_text(slot.staged_bytes)} of {size_text(slot.buffer_bytes)} wait for the bucket"
            do = "see why they are not flushed; or raise its buffer, or its write_bandwidth"
            yield _trouble("warning", f"slot {slot.slot}: its buffer is full", why, do, "write-back")
    if why := pending.journal_problem:
        yield _trouble("error", "nothing is flushed", why, "make room on the disk of the cache")
