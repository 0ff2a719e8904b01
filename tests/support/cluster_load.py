"""Clients of a cluster: each writes through one node, reads through others at once, and judges every answer.

A program of its own, so that its clients take no turns from the origin of the tests: it gets a `Task` as JSON, goes on
until its standard input ends or it has judged enough, and prints a `Report`.

A client is the only one that writes its keys, so it knows what each may be: what was answered with success last, or
what was not answered with success since.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import IO, Any, NamedTuple
from urllib.parse import quote, urlsplit

BUCKET = "bucket"
PATIENCE_SECONDS = 60.0
KEYS_EACH = 3
"""Keys that a client has in each slot."""

WRONG_MAX = 20
HISTORY = 6
"""The last so many writes of a key are told with a wrong answer."""

_SIZES = ((0, 3000),) * 30 + ((100_000, 300_000),) * 2 + ((1_500_000, 2_500_000),)
_ENTRY = re.compile(r"<Contents>.*?<Key>(.*?)</Key>.*?<ETag>(.*?)</ETag>.*?</Contents>", re.DOTALL)
_ETAG = re.compile(r"<ETag>(.*?)</ETag>")


class Version(NamedTuple):
    """What a key may be: the digest of its content, None: it is absent; and its ETag, None: unknown."""

    digest: str | None
    etag: str | None


ABSENT = Version(None, None)


@dataclass(frozen=True)
class Task:
    """`prefixes` are written; of `data`, key → digest, everything is there and stays. `pairs`: enough of them."""

    urls: Sequence[str]
    seed: str
    prefixes: Sequence[str]
    clients: int = 4
    pairs: int = 1 << 60
    data: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    pairs: dict[str, int] = field(default_factory=Counter)
    """Answers that were right, by slot, write and read, each of a write that was answered with success before."""

    outcomes: dict[str, int] = field(default_factory=Counter)
    """What writes were told, by slot: `absorbed`, or why not."""

    written: list[tuple[float, int, str]] = field(default_factory=list)
    """When, on the monotonic clock, a node answered a write of a slot with success."""

    refused: list[tuple[float, int, str, str]] = field(default_factory=list)
    """When a node refused what, and how."""

    wrong: list[str] = field(default_factory=list)
    data_reads: int = 0
    data_seconds: list[float] = field(default_factory=list)
    """How long the slowest reads of `data` took."""

    truth: dict[str, list[Version]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Report:
        document = json.loads(text)
        document["truth"] = {key: [Version(*one) for one in may_be] for key, may_be in document["truth"].items()}
        return cls(**document)


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class _Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300


class _Asking:
    """A connection to each node."""

    def __init__(self, urls: Sequence[str], report: Report) -> None:
        self.report = report
        self._connections = [http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_SECONDS) for url in urls]

    def ask(
        self, node: int, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> _Answer:
        connection = self._connections[node]
        try:
            connection.request(method, f"/{BUCKET}{target}", body or None, headers or {})
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            found = _Answer(answer.status, told, answer.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            found = _Answer(0, {}, repr(error).encode())
        if found.status == 0 or found.status >= 500:
            code = re.search(rb"<Message>(.*?)</Message>", found.body)
            reason = f"{found.status} {(code[1] if code else found.body[:100]).decode()}"
            self.report.refused.append((time.monotonic(), node, f"{method} {target}", reason))
        return found

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Client(_Asking):
    """Writes and reads keys that are its own."""

    def __init__(self, task: Task, name: str, report: Report) -> None:
        super().__init__(task.urls, report)
        self._nodes = range(len(task.urls))
        self._dice = random.Random(f"{task.seed}-{name}")
        self._keys = {
            prefix: [f"{prefix}/{task.seed}-{name}/k{number}" for number in range(KEYS_EACH)]
            for prefix in task.prefixes
        }
        self._where = f"seed {task.seed}, client {name}"
        self.truth = {key: [ABSENT] for keys in self._keys.values() for key in keys}
        self._history: dict[str, deque[str]] = {key: deque(maxlen=HISTORY) for key in self.truth}
        self.pairs = 0

    def turn(self) -> None:
        """Write through a node, then read through all others."""
        node, prefix = self._dice.choice(self._nodes), self._dice.choice(list(self._keys))
        key = self._dice.choice(self._keys[prefix])
        write: Callable[[int, str], list[str]] = self._dice.choices(
            (self._put, self._upload, self._delete, self._copy, self._delete_many), (10, 2, 3, 3, 2)
        )[0]
        written = write(node, key)
        readers = [one for one in self._nodes if one != node]
        self._dice.shuffle(readers)
        for reader, about in product(readers, written or [key]):
            how = self._dice.choices(("GET", "HEAD", "LIST"), (4, 3, 1))[0]
            is_right = self._list(reader, about) if how == "LIST" else self._read(reader, how, about)
            if is_right and written:
                self.pairs += 1
                self.report.pairs[f"{_slot(about)} {write.__name__.strip('_')} {how}"] += 1

    # Writes: each returns the keys of which it was answered with success

    def _content(self) -> bytes:
        low, high = self._dice.choice(_SIZES)
        return self._dice.randbytes(self._dice.randint(low, high))

    def _put(self, node: int, key: str) -> list[str]:
        content = self._content()
        answer = self.ask(node, "PUT", f"/{quote(key)}", content)
        return self._wrote(node, key, answer, _version(content))

    def _upload(self, node: int, key: str) -> list[str]:
        content, target = self._content(), f"/{quote(key)}"
        begun = self.ask(self._dice.choice(self._nodes), "POST", f"{target}?uploads")
        found = re.search(rb"<UploadId>(.*?)</UploadId>", begun.body)
        if found is None:
            return []
        upload = quote(found[1].decode(), safe="")
        part = self.ask(self._dice.choice(self._nodes), "PUT", f"{target}?partNumber=1&uploadId={upload}", content)
        if not part.is_done:
            return []
        told = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
        document = f"<CompleteMultipartUpload>{told}</CompleteMultipartUpload>".encode()
        done = self.ask(node, "POST", f"{target}?uploadId={upload}", document)
        etag = hashlib.md5(hashlib.md5(content).digest()).hexdigest() + "-1"
        return self._wrote(node, key, done, Version(digest_of(content), etag))

    def _delete(self, node: int, key: str) -> list[str]:
        return self._wrote(node, key, self.ask(node, "DELETE", f"/{quote(key)}"), ABSENT)

    def _copy(self, node: int, key: str) -> list[str]:
        """From any other key that is surely there; if there is none, put."""
        there = [one for one, may_be in self.truth.items() if one != key and len(may_be) == 1 and may_be[0].digest]
        if not there:
            return self._put(node, key)
        source = self._dice.choice(there)
        answer = self.ask(node, "PUT", f"/{quote(key)}", headers={"x-amz-copy-source": f"/{BUCKET}/{quote(source)}"})
        if answer.status == 404 or (answer.is_done and b"<Error>" in answer.body):
            self._is_wrong(f"copy of {source} through node {node}: {answer}")
        etag = _ETAG.search(answer.body.decode())
        version = self.truth[source][0]._replace(etag=_bare(etag[1]) if etag and answer.is_done else None)
        return self._wrote(node, key, answer, version)

    def _delete_many(self, node: int, key: str) -> list[str]:
        keys = list(dict.fromkeys([key, *self._dice.sample(list(self.truth), self._dice.randrange(4))]))
        document = f"<Delete>{''.join(f'<Object><Key>{one}</Key></Object>' for one in keys)}</Delete>".encode()
        check = {"content-md5": b64encode(hashlib.md5(document).digest()).decode()}
        answer = self.ask(node, "POST", "?delete", document, check)
        failed = set(re.findall(r"<Error><Key>(.*?)</Key>", answer.body.decode()))
        if failed:
            self.report.refused.append((time.monotonic(), node, "delete", answer.body.decode()[:500]))
        of_failed = answer._replace(status=503)
        return [done for one in keys for done in self._wrote(node, one, of_failed if one in failed else answer, ABSENT)]

    def _wrote(self, node: int, key: str, answer: _Answer, version: Version) -> list[str]:
        how = answer.headers.get("x-forebay-not-absorbed", answer.headers.get("x-forebay-cache", ""))
        told = f"{time.monotonic():.3f} node {node} answered {answer.status} {how}: {version}"
        self._history[key].append(told)
        if not answer.is_done:
            if answer.status != 0 and answer.status < 500:
                self._is_wrong(f"write of {key} through node {node}: {answer}")
            self.truth[key].append(version)
            return []
        self.truth[key] = [version]
        self.report.outcomes[f"{_slot(key)} {how.partition(';')[0]}"] += 1
        self.report.written.append((time.monotonic(), node, _slot(key)))
        return [key]

    # Reads: each returns whether the answer was right

    def _read(self, node: int, method: str, key: str) -> bool:
        began = time.monotonic()
        answer = self.ask(node, method, f"/{quote(key)}")
        if answer.status == 0 or answer.status >= 500:
            return False
        method = f"{method} (from {began:.3f}, {answer.headers.get('x-forebay-cache')})"
        if answer.status == 404:
            return self._judge(node, method, key, ABSENT)
        if answer.status != 200:
            return self._is_wrong(f"{method} of {key} through node {node}: {answer}")
        digest = "?" if method.startswith("HEAD") else digest_of(answer.body)
        return self._judge(node, method, key, Version(digest, _etag(answer)))

    def _list(self, node: int, key: str) -> bool:
        """Judge all of this client's keys in the slot."""
        folder = key.rpartition("/")[0]
        answer = self.ask(node, "GET", f"?list-type=2&prefix={quote(folder)}/")
        if not answer.is_done:
            return False if answer.status == 0 or answer.status >= 500 else self._is_wrong(f"LIST: {answer}")
        listed = {name: _bare(etag) for name, etag in _ENTRY.findall(answer.body.decode())}
        keys = self._keys[_slot(key)]
        if not listed.keys() <= set(keys):
            return self._is_wrong(f"LIST of {folder} through node {node}: {listed}")
        seen = {one: Version("?", listed[one]) if one in listed else ABSENT for one in keys}
        return not [one for one, version in seen.items() if not self._judge(node, "LIST", one, version)]

    def _judge(self, node: int, how: str, key: str, seen: Version) -> bool:
        if any(_is_same(seen, one) for one in self.truth[key]):
            return True
        history = "\n    ".join(self._history[key])
        return self._is_wrong(f"{how} of {key} through node {node}: {seen}, not {self.truth[key]}\n    {history}")

    def _is_wrong(self, what: str) -> bool:
        self.report.wrong.append(f"{time.monotonic():.3f} {self._where}: {what}")
        return False


class Reader(_Asking):
    """Reads what nobody writes."""

    def __init__(self, task: Task, name: str, report: Report) -> None:
        super().__init__(task.urls, report)
        self._dice = random.Random(f"{task.seed}-{name}")
        self._data, self._keys, self._nodes = task.data, list(task.data), range(len(task.urls))
        self.pairs = 0

    def turn(self) -> None:
        key, node, began = self._dice.choice(self._keys), self._dice.choice(self._nodes), time.monotonic()
        answer = self.ask(node, "GET", f"/{quote(key)}")
        if answer.status != 200 or digest_of(answer.body) != self._data[key]:
            what = f"{answer.status} {answer.body[:200]!r}" if answer.status != 200 else "other bytes"
            self.report.wrong.append(f"{began:.3f}: GET of {key} through node {node}: {what}")
        self.report.data_reads += 1
        self.report.data_seconds = sorted([*self.report.data_seconds, time.monotonic() - began])[-20:]


def _version(content: bytes) -> Version:
    return Version(digest_of(content), hashlib.md5(content).hexdigest())


def _is_same(seen: Version, may_be: Version) -> bool:
    if seen.digest is None or may_be.digest is None:
        return seen.digest is may_be.digest
    return seen.digest in ("?", may_be.digest) and (may_be.etag is None or seen.etag == may_be.etag)


def _slot(key: str) -> str:
    return key.partition("/")[0]


def _bare(etag: str) -> str:
    return etag.replace("&quot;", "").replace("&#34;", "").strip('"')


def _etag(answer: _Answer) -> str:
    return _bare(answer.headers.get("etag", ""))


def run(task: Task, ended: threading.Event) -> Report:
    """Let the clients go on until there is enough, something is wrong, or it has ended."""
    reports = [Report() for _ in range(task.clients + bool(task.data))]
    clients: list[Client | Reader] = [Client(task, f"c{number}", reports[number]) for number in range(task.clients)]
    clients += [Reader(task, "reader", reports[-1])] if task.data else []

    def go_on(client: Client | Reader) -> None:
        try:
            while not ended.is_set() and len(client.report.wrong) < WRONG_MAX:
                client.turn()
                if sum(one.pairs for one in clients) >= task.pairs:
                    ended.set()
        except Exception as error:
            client.report.wrong.append(repr(error))
        if client.report.wrong:
            ended.set()
        client.close()

    threads = [threading.Thread(target=go_on, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = Report(pairs=Counter(), outcomes=Counter())
    for client, report in zip(clients, reports, strict=True):
        whole.pairs = dict(Counter(whole.pairs) + Counter(report.pairs))
        whole.outcomes = dict(Counter(whole.outcomes) + Counter(report.outcomes))
        whole.truth |= client.truth if isinstance(client, Client) else {}
        for name in ("written", "refused", "wrong", "data_seconds"):
            getattr(whole, name).extend(getattr(report, name))
        whole.data_reads += report.data_reads
    return whole


class Load:
    """The program, as tests start it."""

    def __init__(self, task: Task) -> None:
        command = [sys.executable, "-m", "tests.support.cluster_load", json.dumps(asdict(task))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._said.append(self._process.stdout.read())

    @property
    def goes_on(self) -> bool:
        return self._process.poll() is None

    def end(self) -> Report:
        """End it, and return what it has found."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(2 * PATIENCE_SECONDS) == 0
        self._reading.join()
        return Report.read(self._said[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def load(*tasks: Task) -> Iterator[list[Load]]:
    loads = [Load(task) for task in tasks]
    try:
        yield loads
    finally:
        for one in loads:
            one.close()


def main(arguments: Sequence[str], stdin: IO[str]) -> None:
    document: dict[str, Any] = json.loads(arguments[0])
    ended = threading.Event()

    def wait_for_end() -> None:
        stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    print(json.dumps(asdict(run(Task(**document), ended))))


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin)
