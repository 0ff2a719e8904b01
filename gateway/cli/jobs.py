"""`forebay warm`, `evict`, `pin`, `unpin` and `jobs`: work that the running gateway does in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import size_text
from gateway.api import MANIFEST_TYPE
from gateway.cli.common import JsonOption, asks, fail, print_json, printable
from gateway.cli.tables import (
    NOTHING,
    Column,
    Columns,
    bytes_progress,
    duration_text,
    listing_progress,
    print_table,
    rate_text,
    some_bytes_text,
)

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to

_LOOK_SECONDS = 0.5
_READ_BYTES = 1024 * 1024

PrefixArgument = Annotated[str | None, typer.Argument(metavar="s3://BUCKET/PREFIX", help="All keys with this prefix.")]
PinnedArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="All keys with this prefix.")]
ManifestOption = Annotated[
    Path | None,
    typer.Option("--manifest", help="File with one s3://bucket/key a line; the gateway takes them in this order."),
]
AllowEmptyOption = Annotated[bool, typer.Option("--allow-empty", help="Finding no object is no failure.")]
ClusterOption = Annotated[
    bool,
    typer.Option("--cluster", help="Fetch each block to the node of the cluster that owns it; no copy stays here."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Show the progress until it ends; exit code 1 if not all was done.")
]


@asks
def warm(
    client: AdminClient,
    prefix: PrefixArgument = None,
    manifest: ManifestOption = None,
    wait: WaitOption = False,
    allow_empty: AllowEmptyOption = False,
    cluster: ClusterOption = False,
    json: JsonOption = False,
) -> None:
    """Fetch objects that are not in the cache yet. The running gateway does it as a job."""
    _run("warm", prefix, manifest, wait, client, json, allow_empty, cluster=cluster)


@asks
def evict(
    client: AdminClient,
    prefix: PrefixArgument = None,
    manifest: ManifestOption = None,
    wait: WaitOption = False,
    json: JsonOption = False,
) -> None:
    """Drop objects from the cache, as a job of the running gateway. The bucket keeps them."""
    _run("evict", prefix, manifest, wait, client, json, True)


@asks
def pin(
    client: AdminClient,
    prefix: PinnedArgument,
    wait: WaitOption = False,
    allow_empty: AllowEmptyOption = False,
    cluster: ClusterOption = False,
    json: JsonOption = False,
) -> None:
    """Fetch what lies under a prefix, and never evict it. `forebay status` lists the pins."""
    _run("pin", prefix, None, wait, client, json, allow_empty, cluster=cluster)


@asks
def unpin(
    client: AdminClient,
    prefix: PinnedArgument,
    cluster: Annotated[bool, typer.Option("--cluster", help="What is pinned over the cluster, on all nodes.")] = False,
    json: JsonOption = False,
) -> None:
    """Let the gateway evict what lies under a pinned prefix again, when it needs room."""
    answer = client.unpin(prefix, cluster=cluster)
    if json:
        print_json(answer.document())
    elif not answer.not_told:
        typer.echo(f"{printable(answer.prefix)} is not pinned any more")
    if answer.not_told:
        fail(f"no answer from {', '.join(answer.not_told)}: {printable(answer.prefix)} may be pinned there still")


@asks
def refresh(
    client: AdminClient,
    prefix: PinnedArgument,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the indexes show what is there now; exit code 1 if a crawl fails."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """See now what others have changed in the bucket: list the prefix anew, or forget what is remembered of its bucket.

    The next GET, HEAD and LIST of other nodes of the cluster ask the bucket.
    """
    answer = client.refresh(prefix)
    if wait:
        _wait_for_indexes(client, set(answer.indexes))
    if json:
        print_json(answer.document())
        return
    name, slots = printable(answer.prefix), ", ".join(answer.indexes)
    told = [f"the index of {slots} {'has listed' if wait else 'lists'} it anew"] if answer.indexes else []
    told += ["all that was remembered of its bucket is forgotten"] if answer.voided else []
    typer.echo(f"{name}: {'; '.join(told)}")


def _wait_for_indexes(client: AdminClient, slots: set[str]) -> None:
    while left := [one for one in client.indexes().indexes if one.slot in slots and one.refreshing]:
        for one in left:
            if one.state == "failing":
                fail(f"the index of {one.slot} fails, and is tried again: {printable(one.error or '')}")
        time.sleep(_LOOK_SECONDS)


@asks
def jobs(
    client: AdminClient,
    job_id: Annotated[str | None, typer.Argument(metavar="JOB", help="One job; otherwise all.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="End the job.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the jobs of the running gateway, or one of them; or end one."""
    if cancel and job_id is None:
        raise typer.BadParameter("--cancel needs a job")
    found = client.jobs() if job_id is None else [client.cancel_job(job_id) if cancel else client.job(job_id)]
    if json:
        documents = [job.document() for job in found]
        print_json({"jobs": documents} if job_id is None else documents[0])
    elif found:
        _show(found)
    else:
        typer.echo("there are no jobs", err=True)


def _run(
    kind: str,
    prefix: str | None,
    manifest: Path | None,
    wait: bool,
    client: AdminClient,
    json: bool,
    allow_empty: bool,
    *,
    cluster: bool = False,
) -> None:
    if manifest is not None and prefix is None:
        job = client.start_listed_job(kind, pieces_of(manifest), MANIFEST_TYPE, cluster=cluster)
    elif manifest is None and prefix is not None:
        job = client.start_job(kind, prefix, allow_empty=allow_empty, cluster=cluster)
    else:
        raise typer.BadParameter("give either s3://BUCKET/PREFIX or --manifest FILE")
    if wait:
        job = follow(client, job, quiet=json)
    if json:
        print_json(job.document())
    elif wait:
        _show([job])
    else:
        typer.echo(f"job {job.id} is running: forebay jobs {job.id}")
    name = printable(prefix or str(manifest))
    if wait and job.found_all and not job.objects_found and not allow_empty:
        fail(f"{name} holds no object: check the name, or give --allow-empty")
    if wait and job.full:
        fail(f"the cache has no room for all of {name}: it has {size_text(job.bytes_done)}")
    if wait and job.state != "done":
        raise typer.Exit(1)


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield a file's content, of standard input for `-`; end the command when it cannot be read."""
    try:
        with open(0, "rb", closefd=False) if str(path) == "-" else path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                yield piece
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")


def follow(client: AdminClient, job: to.JobDocument, *, quiet: bool) -> to.JobDocument:
    """Look at a job until it has ended, with a bar on a terminal. Ctrl-C ends the looking, and not the job."""
    bar = listing_progress(quiet=quiet) if job.kind == "snapshot" else bytes_progress(quiet=quiet)
    try:
        with bar as progress:
            task = progress.add_task(job.kind, total=None)
            while True:
                more = "" if job.found_all else "+"
                progress.update(
                    task,
                    description=f"{job.kind} {job.objects_done}/{job.objects_found}{more} objects",
                    completed=job.bytes_done,
                    total=job.bytes_found if job.found_all and job.bytes_found else None,
                    bytes_per_second=job.bytes_per_second,
                    seconds_left=job.seconds_left,
                )
                if job.state != "running":
                    return job
                time.sleep(_LOOK_SECONDS)
                job = client.job(job.id)
    except KeyboardInterrupt:
        typer.echo(f"job {job.id} goes on: forebay jobs {job.id}; --cancel ends it", err=True)
        raise


JOBS: Columns[to.JobDocument] = (
    Column("job", lambda one: one.id),
    Column(
        "what",
        lambda one: printable(
            " ".join(filter(None, (one.kind, "--cluster" * one.cluster, one.name, one.prefix or "manifest")))
        ),
        shortened=True,
    ),
    Column("state", lambda one: one.state + (" (cache is full)" if one.full else "")),
    Column(
        "objects", lambda one: f"{one.objects_done} of {one.objects_found}{'' if one.found_all else '+'}", right=True
    ),
    Column("bytes", lambda one: _bytes(one), right=True, rank=2),
    Column("rate", lambda one: rate_text(one.bytes_per_second), right=True, rank=3),
    Column("left", lambda one: duration_text(one.seconds_left), right=True, rank=1),
    Column("from the origin", lambda one: some_bytes_text(one.bytes_fetched), right=True, rank=5),
    Column("failed", lambda one: str(one.objects_failed or NOTHING), right=True, rank=4),
)


def _show(found: list[to.JobDocument]) -> None:
    print_table(JOBS, found, lambda one: {"failed": "red", "running": "bold"}.get(one.state, ""))
    for job in found:
        for error in job.errors:
            typer.echo(f"{job.id}: {printable(error)}")


def _bytes(job: to.JobDocument) -> str:
    if not job.bytes_found:
        return some_bytes_text(job.bytes_done)
    if job.found_all and job.bytes_done >= job.bytes_found:
        return size_text(job.bytes_done)
    return f"{size_text(job.bytes_done)} of {size_text(job.bytes_found)}{'' if job.found_all else '+'}"
