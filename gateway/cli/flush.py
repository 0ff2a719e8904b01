"""`forebay flush`: what this node has acknowledged gets to the origin now."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.admin.formatting import age_text, are, counted, journal_problem_text, no_objects_yet_text, size_text
from gateway.cli.common import JsonOption, asks, check_url, print_json, printable
from gateway.cli.tables import NOTHING, Column, Columns, bytes_progress, print_table
from gateway.config.units import parse_duration_seconds

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to

_LOOK_SECONDS = 0.5
_PAUSE_PER_ANSWER = 5.0
"""With much pending an answer takes a while: the gateway has other things to do than to give them."""

_AGAIN_SECONDS = 3.0
"""Seconds between two retries of failed objects while a command waits."""

_GONE_SECONDS = 60.0
"""A background process that was killed is back by then, and goes on."""

_REFUSED_SECONDS = 30.0
"""Seconds without progress, with failures alone, after which the bucket seems to refuse the rest."""

_STALLED_SECONDS = 300.0
"""Seconds without progress after which the command gives up, for any reason: the origin does not answer, say."""

_BODY_SECONDS, _LONG_BODY_SECONDS = 10.0, 60.0
"""Seconds after which an attempt is probably a large body on its way, whatever its earlier failures: the command waits
for it in spite of the one limit and the other."""

PrefixArgument = Annotated[
    str,
    typer.Argument(metavar="s3://BUCKET/PREFIX", help="All keys with this prefix; s3:// (the default) is everything."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until the bucket has everything; exit code 1 if it does not get there.")
]
TimeoutOption = Annotated[
    str | None,
    typer.Option("--timeout", metavar="DURATION", help="Wait at most this long, such as 10m; then exit code 1."),
]


ClusterOption = Annotated[bool, typer.Option("--cluster", help="What all nodes of the cluster have pending.")]


class Outcome(StrEnum):
    FLUSHED = "flushed"
    STUCK = "stuck"
    """The rest is in conflict or damaged, or waits behind such an object."""
    FAILING = "failing"
    """The rest has made no progress for a while."""
    TIMEOUT = "timeout"
    UNANSWERED = "unanswered"
    """Nodes of the cluster could not be asked; the others have flushed everything."""


_WHY = {
    Outcome.STUCK: "an operator must decide",
    Outcome.FAILING: "nothing gets there; the gateway goes on trying",
    Outcome.TIMEOUT: "the time is over; the gateway goes on",
    Outcome.UNANSWERED: "not all nodes could be asked",
}


@asks
def flush(
    client: AdminClient,
    prefix: PrefixArgument = "s3://",
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    cluster: ClusterOption = False,
    json: JsonOption = False,
) -> None:
    """Send to the bucket now all writes under a prefix that the gateway has acknowledged so far.

    It tries failed writes again at once. With --wait it ends with exit code 0 when the origin has all of them. It ends
    with exit code 1, and a table of what the origin lacks, when the rest is in conflict, damaged or failing, when the
    time is over, or when the slot never sends something under the prefix. It names open uploads, and does not wait for
    them. With --cluster, exit code 0 says so of all nodes; nodes that cannot be asked are named.
    """
    check_url(prefix)
    seconds = _timeout_seconds(timeout, wait=wait)
    asked = _OfAllNodes(client, prefix) if cluster else _OfThisNode(client, prefix)
    begun = asked.begin(min(_GONE_SECONDS, seconds or math.inf) if wait else 0.0)
    try:
        outcome, left = _wait(asked, begun, seconds, quiet=json) if wait else (None, begun)
    except KeyboardInterrupt:
        typer.echo("not waited for any longer; the gateway goes on", err=True)
        raise
    if json:
        print_json(asked.document(left) | ({"outcome": outcome} if outcome is not None else {}))
    else:
        _tell(begun, left, outcome)
    for one in asked.unanswered:
        typer.echo(printable(f"{one.node} ({one.address}) could not be asked: {one.problem}"), err=True)
    failed = left.stuck > 0 if outcome is None else outcome is not Outcome.FLUSHED
    failed = failed or bool(asked.unanswered)
    is_named = begun.prefix.removeprefix("s3://").partition("/")[2] != ""
    raise typer.Exit(1 if failed or (is_named and left.local_objects) else 0)


def _timeout_seconds(timeout: str | None, *, wait: bool) -> float | None:
    if timeout is None:
        return None
    if not wait:
        raise typer.BadParameter("--timeout needs --wait")
    try:
        return parse_duration_seconds(timeout)
    except ValueError as error:
        raise typer.BadParameter(f"--timeout {printable(timeout)}: {error}") from None


class _OfThisNode:
    """The pending writes of one node."""

    unanswered: Sequence[to.NodeFlush] = ()
    """The nodes that could not be asked the last time."""

    unanswered_seconds = 0.0

    def __init__(self, client: AdminClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._begun: to.FlushProgress | None = None

    def begin(self, patience_seconds: float) -> to.FlushProgress:
        self._begun = self._client.flush(self._prefix, patience_seconds=patience_seconds)
        return self._begun

    def try_again(self, patience_seconds: float) -> None:
        """Have failed writes tried now."""
        self._client.flush(self._begun.prefix if self._begun else self._prefix, patience_seconds=patience_seconds)

    def look(self, patience_seconds: float) -> to.FlushProgress:
        """Return what is left."""
        begun = self._begun or self.begin(patience_seconds)
        return self._client.flush_progress(
            begun.prefix, begun.through, is_name=begun.is_name, patience_seconds=patience_seconds
        )

    def document(self, left: to.FlushProgress) -> dict[str, Any]:
        return left.document()


class _OfAllNodes(_OfThisNode):
    """The pending writes of all nodes of the cluster. A node that answers late is asked to begin then."""

    _nodes: to.ClusterFlush | None = None
    _unanswered_since: float | None = None

    def begin(self, patience_seconds: float) -> to.FlushProgress:
        return self._sum(self._client.cluster_flush(self._prefix, patience_seconds=patience_seconds))

    def try_again(self, patience_seconds: float) -> None:
        self._client.cluster_flush(self._prefix, patience_seconds=patience_seconds)

    def look(self, patience_seconds: float) -> to.FlushProgress:
        return self._sum(self._client.cluster_flush(self._prefix, self._nodes, patience_seconds=patience_seconds))

    def document(self, left: to.FlushProgress) -> dict[str, Any]:
        return left.document() | (self._nodes.document() if self._nodes is not None else {})

    def _sum(self, nodes: to.ClusterFlush) -> to.FlushProgress:
        before = {one.address: one.progress for one in self._nodes.nodes} if self._nodes is not None else {}
        told = [one for node in nodes.nodes if (one := node.progress) is not None]
        self.unanswered = [one for one in nodes.nodes if one.progress is None]
        kept = [one.model_copy(update={"progress": one.progress or before.get(one.address)}) for one in nodes.nodes]
        self._nodes = nodes.model_copy(update={"nodes": kept})
        since = self._unanswered_since or time.monotonic()
        self._unanswered_since = since if self.unanswered else None
        self.unanswered_seconds = time.monotonic() - since
        sums = {name: sum(getattr(one, name) for one in told) for name in _SUMMED}
        attempts = [one.longest_attempt_seconds for one in told if one.longest_attempt_seconds is not None]
        oldest = [one.oldest_acknowledged_at for one in told if one.oldest_acknowledged_at is not None]
        return told[0].model_copy(
            update={
                **sums,
                "oldest_acknowledged_at": min(oldest, default=None),
                "longest_attempt_seconds": max(attempts, default=None),
                "origin_away": any(one.origin_away for one in told),
                "journal_problem": next((one.journal_problem for one in told if one.journal_problem), None),
                "problems": [problem for one in told for problem in one.problems],
            }
        )


_SUMMED = (
    *(
        "objects",
        "bytes",
        "bytes_sent",
        "local_objects",
        "open_uploads",
        "open_upload_bytes",
        "conflicts",
        "damaged",
        "failing",
    ),
    *("waiting_for_bucket", "stuck", "held_up", "awaiting_files", "files_missing"),
)


def _wait(
    asked: _OfThisNode, begun: to.FlushProgress, seconds: float | None, *, quiet: bool
) -> tuple[Outcome, to.FlushProgress]:
    """Wait; return the outcome, and the rest."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    left, stall = begun, _Stall(begun, has_deadline=seconds is not None)
    again_at, pause = time.monotonic() + _AGAIN_SECONDS, _LOOK_SECONDS
    with bytes_progress(quiet=quiet or not begun.objects) as progress:
        task = progress.add_task("flush", total=begun.bytes or None)
        while True:
            done_bytes = begun.bytes - left.bytes + left.bytes_sent
            progress.update(task, description=_description(left), completed=max(0, done_bytes))
            is_late = time.monotonic() >= deadline
            outcome = _outcome(left, stall, is_late=is_late)
            if outcome is Outcome.FLUSHED and asked.unanswered:
                outcome = Outcome.UNANSWERED if is_late or asked.unanswered_seconds >= _GONE_SECONDS else None
            if outcome is not None:
                return outcome, left
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            patience_seconds = max(0.0, min(_GONE_SECONDS, deadline - time.monotonic()))
            if (left.failing or left.waiting_for_bucket or left.awaiting_files) and time.monotonic() >= again_at:
                again_at = time.monotonic() + _AGAIN_SECONDS
                asked.try_again(patience_seconds)
            asked_at = time.monotonic()
            left = asked.look(patience_seconds)
            pause = max(_LOOK_SECONDS, _PAUSE_PER_ANSWER * (time.monotonic() - asked_at))


def _outcome(left: to.FlushProgress, stall: _Stall, *, is_late: bool) -> Outcome | None:
    """None: there is something to wait for."""
    if not left.objects:
        return Outcome.FLUSHED
    if left.objects == left.stuck:
        return Outcome.STUCK
    if stall.is_over(left):
        return Outcome.FAILING
    return Outcome.TIMEOUT if is_late else None


class _Stall:
    """Since when nothing has got to the origin of what is waited for."""

    def __init__(self, begun: to.FlushProgress, *, has_deadline: bool) -> None:
        self._has_deadline = has_deadline
        self._reached = self._progress(begun)
        self._since = time.monotonic()

    def is_over(self, left: to.FlushProgress) -> bool:
        """Return True if waiting for the rest is useless."""
        now, reached = time.monotonic(), self._progress(left)
        if reached != self._reached:
            self._reached, self._since = reached, now
        if self._has_deadline and (left.origin_away or left.awaiting_files):
            return False
        stalled_seconds, attempt_seconds = now - self._since, left.longest_attempt_seconds or 0.0
        all_fails = left.held_up == left.objects and not left.origin_away
        all_fails = all_fails or left.journal_problem is not None  # then failures are not written down, either
        if all_fails and stalled_seconds >= _REFUSED_SECONDS and attempt_seconds < _BODY_SECONDS:
            return True
        return stalled_seconds >= _STALLED_SECONDS and attempt_seconds < _LONG_BODY_SECONDS

    def _progress(self, left: to.FlushProgress) -> tuple[int, int, int]:
        return left.objects, left.bytes_sent, left.files_missing


def _description(left: to.FlushProgress) -> str:
    failing = f", {left.failing} failing" if left.failing else ""
    waiting = f", {left.waiting_for_bucket} waiting for the bucket" if left.waiting_for_bucket else ""
    missing = f", {counted(left.files_missing, 'file')} of other nodes" if left.awaiting_files else ""
    return f"flush, {counted(left.objects, 'object')} left{failing}{waiting}{missing}"


def _tell(begun: to.FlushProgress, left: to.FlushProgress, outcome: Outcome | None) -> None:
    if left.problems:
        _show_problems(left)
    if left.local_objects:
        objects = counted(left.local_objects, "object")
        typer.echo(f"{objects} on this node only: not durable, and not to be sent", err=True)
    if left.journal_problem:
        typer.echo(printable(journal_problem_text(left.journal_problem)), err=True)
    if left.open_uploads:
        typer.echo(f"{no_objects_yet_text(left)}: forebay writeback list --uploads", err=True)
    if not begun.objects and not left.objects:
        where = " on the nodes that were asked" if outcome is Outcome.UNANSWERED else ""
        typer.echo(printable(f"nothing is pending under {begun.prefix}{where}"))
    elif outcome is None:
        typer.echo(f"{_amount(left)} on the way to the origin")
    elif outcome is Outcome.FLUSHED:
        typer.echo(f"{_amount(begun)} at the origin")
    else:
        typer.echo(f"{_amount(left)} not at the origin: {_WHY[outcome]}")


_PROBLEMS: Columns[to.PendingObject] = (
    Column("state", lambda one: one.state),
    Column("failures", lambda one: f"{one.failures:,}", right=True, rank=1),
    Column("since", lambda one: age_text(one.failing_since or one.acknowledged_at), right=True, rank=2),
    Column("object", lambda one: printable(one.url), shortened=True),
    Column("reason", lambda one: printable(one.reason or NOTHING), shortened=True, rank=4),
)


def _show_problems(left: to.FlushProgress) -> None:
    """Show what fails, and why: a line each."""
    print_table(_PROBLEMS, left.problems, stderr=True)
    problems = left.conflicts + left.damaged + left.failing
    shown, held_up = len(left.problems), problems + left.waiting_for_bucket
    more, option = f"and {held_up - shown:,} more: " if held_up > shown else "", " --problems" if problems else ""
    typer.echo(f"{more}forebay writeback list{option} {printable(left.prefix)}", err=True)


def _amount(pending: to.FlushProgress) -> str:
    """Say `3 objects, 1.0 MiB, are`."""
    objects = pending.objects
    return f"{counted(objects, 'object')}, {size_text(pending.bytes)}, {are(objects)}"
