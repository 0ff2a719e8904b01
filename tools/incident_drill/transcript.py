"""docs/incident-drill.md, from the incidents; and the transcript of a drill, from what gateways said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tools.incident_drill.alerting import SCALE
from tools.incident_drill.incidents import Clue, Incident
from tools.incident_drill.observing import ALERTS, CLIENT, COMMAND, DOCTOR, LOG, METRICS, OVERVIEW, READY, STATUS
from tools.incident_drill.scene import Account, texts_of

_LINES_MAX: Mapping[str, int] = {CLIENT: 5, LOG: 5, OVERVIEW: 6, METRICS: 8}
_LINES_MAX_ELSE = 14
_CHARACTERS_MAX = 260

_HEADS = {
    CLIENT: "the job is told",
    ALERTS: "alerts that fire",
    LOG: "the log",
    STATUS: "`forebay status`",
    DOCTOR: "`forebay doctor`",
    READY: "`/readyz`",
    OVERVIEW: "`/api/v1/overview` (the dashboard)",
    METRICS: "metrics that moved",
    COMMAND: "commands",
}

_PAGE_INTRODUCTION = """\
# Incident drill

`make drill` brings twelve incidents upon real gateways, with a real Prometheus where there is one. It checks that each
sentence below is said, that the incident ends, and that the bucket has every object that the job was told to be saved.
It takes three minutes, and writes what was said word by word to `build/incident-drill.md`. `make test-slow` runs the
same drill, and fails when a sentence or a byte is missing.
"""

_INTRODUCTION = f"""\
# Transcript of an incident drill

`make drill` wrote this page. It brings twelve incidents upon real gateways, asks each of them by every way there is,
and ends the incident again. The bucket is the tests' own strict S3 server; the job is boto3. Each incident below says
what happened, which sentences lead from the first sign to the cause, and what was said word by word.

- Shown is **what differs from before the incident**: a line of `forebay status` that was there already is left out, and
  so are log lines below a warning. Ports, directories and process ids are replaced.
- Alerts come from a real Prometheus with deploy/prometheus/rules.yaml, in which **a
  minute is a second**: durations in the rules, and ages in seconds that they compare with, are a {SCALE}th. Multiply
  "after 5 s" by {SCALE} for how long it takes in operation, at most; the gateway's own delays are not shortened.
- Prometheus looks at each gateway once a second. `/metrics` may take three seconds while a bucket is silent: keep
  `scrape_timeout` above that, as its default of ten seconds is.
- At the end of each incident the drill compares the bucket's objects with what the job was told to be saved: the last
  write of each key.
"""


def page(incidents: Sequence[Incident]) -> str:
    """Return docs/incident-drill.md: what happens in each incident, and which sentences lead to its cause."""
    return "\n".join([_PAGE_INTRODUCTION, *(line for one in incidents for line in _way_to_the_cause(one))])


def transcript(incidents: Sequence[Incident], accounts: Sequence[Account], notes: Sequence[str]) -> str:
    """The page. `notes` say what could not be done on this machine."""
    return "\n".join(_lines(incidents, accounts, notes))


def missing_clues(incident: Incident, account: Account, *, with_alerts: bool) -> list[Clue]:
    """Those that nobody could have followed."""
    return [
        clue
        for clue in incident.clues
        if clue.says not in account.said(clue.where) and (with_alerts or clue.where != ALERTS)
    ]


def _lines(incidents: Sequence[Incident], accounts: Sequence[Account], notes: Sequence[str]) -> Iterator[str]:
    yield _INTRODUCTION
    if notes:
        yield from (f"- {note}" for note in notes)
        yield ""
    yield "| incident | first sign | acknowledged, compared | lost |"
    yield "|---|---|---|---|"
    for incident, account in zip(incidents, accounts, strict=True):
        link = f"[{incident.title}](#{incident.title.lower().replace(' ', '-').replace(chr(39), '')})"
        saved = f"{account.acknowledged_objects} objects, {account.acknowledged_bytes:,} bytes"
        yield f"| {link} | {_HEADS[incident.clues[0].where]} | {saved} | {len(account.lost) or 'nothing'} |"
    for incident, account in zip(incidents, accounts, strict=True):
        yield from _section(incident, account)


def _way_to_the_cause(incident: Incident) -> Iterator[str]:
    yield f"## {incident.title}\n"
    yield f"{incident.happens}\n"
    yield "| where | what it says | what you know then |"
    yield "|---|---|---|"
    for clue in incident.clues:
        yield f"| {_HEADS[clue.where]} | {clue.says} | {clue.tells} |"
    yield f"\nWhat to do: [{_title(incident.advice)}]({incident.advice}).\n"


def _section(incident: Incident, account: Account) -> Iterator[str]:
    yield ""
    yield from _way_to_the_cause(incident)
    for title, texts in texts_of(account.moments):
        yield f"**{title}**\n"
        if not texts:
            continue
        yield "```"
        for number, (channel, lines) in enumerate(texts.items()):
            if number:
                yield ""
            yield f"# {_HEADS[channel].replace('`', '')}"
            yield from (_shortened(line) for line in _chosen(lines, incident.clues, channel))
        yield "```\n"
    if account.failed is not None:
        yield f"The drill stopped here: {account.failed}\n"
    if account.lost:
        yield "**Lost**: " + "; ".join(account.lost) + "\n"
    else:
        yield (
            f"All {account.acknowledged_objects} objects that the job was told to be saved "
            f"({account.acknowledged_bytes:,} bytes) were found, byte for byte.\n"
        )


def _title(advice: str) -> str:
    page, _, section = advice.partition("#")
    return f"{page.removesuffix('.md')}: {section.replace('-', ' ')}"


def _chosen(lines: Sequence[str], clues: Sequence[Clue], channel: str) -> Iterator[str]:
    """At most so many: those with a clue stay."""
    wanted = [clue.says for clue in clues if clue.where == channel]
    spare = _LINES_MAX.get(channel, _LINES_MAX_ELSE) - sum(any(says in line for says in wanted) for line in lines)
    left_out = 0
    for line in lines:
        if any(says in line for says in wanted):
            yield line
        elif spare > 0:
            spare -= 1
            yield line
        else:
            left_out += 1
    if left_out:
        yield f"… and {left_out} more"


def _shortened(line: str) -> str:
    return line if len(line) <= _CHARACTERS_MAX else f"{line[:_CHARACTERS_MAX]}…"
