"""What a change of settings comes to before any process is told of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Settings, SlotSettings
from gateway.config.fields import Section
from gateway.config.live import Numbers
from gateway.config.loading import load_settings
from gateway.config.overlay import SlotTable, load_with_overlay, read_overlay, write_overlay
from gateway.config.problems import SettingsError, table_of
from gateway.disk import atomic_write
from gateway.serve import reloading
from gateway.serve.child_config import ChildConfig
from gateway.serve.reloading import ChangeRefused, FileThreads, Reloader, SlotChange
from gateway.writeback import DIRECTORY
from gateway.writeback.journal.schema import prepare
from tests.support.cache_directory import begun
from tests.support.gateway_process import to_toml
from tests.support.settings import problems
from tests.support.waiting import until


class Node:
    """A gateway as far as its settings go: the file, the cache directory, and what is in force."""

    def __init__(self, base: Path, **tables: Any) -> None:
        self.directory = base / "cache"
        begun(self.directory)
        self.file = base / "forebay.toml"
        self.write(**tables)
        self.running = load_with_overlay(self.file, {}).settings
        self.numbers = Numbers.begin(self.running)

    def write(self, **tables: Any) -> None:
        cache = {"directory": str(self.directory), "capacity": "1GiB", "persistent": True}
        self.file.write_text(to_toml({"cache": cache, **tables}))

    def change(self, name: str, slot: Any) -> None:
        """As the supervisor does it. ChangeRefused."""
        self._follow(SlotChange("asked", name, slot))

    def reload(self) -> None:
        self._follow(None)

    def _follow(self, change: SlotChange | None) -> None:
        if change is not None:
            change = SlotChange.from_line(change.to_line())
        loaded = Reloader(self.file, {}).load(self.running, self.numbers, change)
        line = ChildConfig(loaded.settings, "instance", self.directory, Path("/memory"), loaded.numbers).to_line()
        told = ChildConfig.from_line(line)
        assert (told.settings.slots, told.numbers) == (loaded.settings.slots, loaded.numbers)
        loaded.keep()
        self.running, self.numbers = loaded.settings, loaded.numbers
        assert load_with_overlay(self.file, {}).settings.slots == self.running.slots, "another gateway after a restart"

    @property
    def in_force(self) -> dict[str, str]:
        return {slot.name: str(slot.prefix) for slot in self.running.slots}

    @property
    def overlay(self) -> set[str]:
        return {slot["name"] for slot in read_overlay(self.directory)}


def slot(at: str, /, **more: Any) -> dict[str, Any]:
    return {"prefix": f"s3://b/{at}/", **more}


KEYS = sorted(field.alias or name for name, field in SlotSettings.model_fields.items())
VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["99999PiB", "99999PiB/s", "8EiB", "1e300", "9999999999999999999d", "through", "back", "strict"]),
    st.text(max_size=20),
    st.booleans(),
    st.none(),
)
NESTED = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(KEYS), NESTED, max_size=4))
@settings(max_examples=100, deadline=None)
def test_whatever_is_set_can_be_told_and_read_again(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    """Or is refused, and nothing is written. A gateway starts with what was accepted."""
    node = Node(tmp_path_factory.mktemp("node"))
    try:
        document = orjson.loads(json.dumps({"prefix": "s3://b/k/", **document}))
    except orjson.JSONDecodeError:
        return  # the admin port takes no such document
    document.pop("name", None)
    before = node.running
    try:
        node.change("k", document)
    except ChangeRefused:
        assert node.running is before
        assert not node.overlay


def numbers_of(model: type[Section], path: str = "") -> list[tuple[str, str]]:
    """Every setting that is a number: its table, and its name there."""
    found = []
    for name, field in model.model_fields.items():
        table = table_of(field.annotation)
        if table is not None and issubclass(table, Section):
            found += numbers_of(table, field.alias or name)
        elif re.search(r"\b(int|float)\b", str(field.annotation)):
            found.append((path, field.alias or name))
    return found


@pytest.mark.parametrize("value", [1e300, 2**63, 2**64, float("inf"), float("nan"), "99999PiB", "99999PiB/s"])
def test_a_number_beyond_what_can_be_held_is_refused(tmp_path: Path, value: Any) -> None:
    """Of every setting, with its key, value and what is allowed."""
    lists = {"slots": slot("a", name="a"), "credentials": {}, "caller_classes": {"name": "c"}}
    lists |= {
        "origin_credentials": {"name": "o"},
        "buckets": {"name": "b"},
        "event_sources": {"queue_url": "http://127.0.0.1/1/q"},
    }
    text = to_toml({"x": {"y": value}}).split(" = ")[1]
    for table, name in numbers_of(Settings):
        head = f"[[{table}]]" if table in lists else f"[{table}]"
        given = to_toml({"x": lists.get(table, {})}).replace("[x]", head)
        found = problems(tmp_path, f"{given}{name} = {text}\n")
        key = f"{table}[0].{name}" if table in lists else f"{table}.{name}"
        assert found[key].startswith(f"{key} = {value!r}: "), found


PLACES = ["name", "prefix", "together"]


@pytest.mark.parametrize("conflict", PLACES)
def test_one_slot_that_the_configuration_contradicts_keeps_no_other_from_changing(
    tmp_path: Path, conflict: str
) -> None:
    """Others are set and removed beside it, and so is it itself; it is in force again when nothing contradicts it."""
    node = Node(tmp_path)
    node.change("a", slot("a", capacity="600MiB"))
    contradicts = {
        "name": {"name": "a", "prefix": "s3://b/other/"},
        "prefix": {"name": "other", "prefix": "s3://b/a/"},
        "together": {"name": "other", "prefix": "s3://b/other/", "capacity": "600MiB"},
    }
    node.write(slots=[contradicts[conflict]])
    node.reload()
    node.change("b", slot("b"))
    assert node.in_force["b"] == "s3://b/b/"
    node.change("b", slot("b", weight=3))
    node.change("c", slot("c"))
    node.change("b", None)
    assert set(node.in_force) == {contradicts[conflict]["name"], "c"}
    assert node.overlay == {"a", "c"}
    node.write()
    node.reload()
    assert node.in_force == {"a": "s3://b/a/", "c": "s3://b/c/"}
    node.write(slots=[contradicts[conflict]])
    node.reload()
    node.change("a", None)
    assert node.overlay == {"c"}
    node.write()
    node.reload()
    assert node.in_force == {"c": "s3://b/c/"}


@pytest.mark.parametrize("seed", range(20))
def test_no_change_puts_another_slot_out_of_force(tmp_path: Path, seed: int) -> None:
    """Whatever was set before, and whatever the file said meanwhile."""
    dice = random.Random(seed)
    node, names = Node(tmp_path), "abcdef"
    for _ in range(15):
        if dice.random() < 0.3:
            drawn = dice.sample(names, dice.randrange(3))
            node.write(slots=[slot(name, name=name, capacity=f"{dice.randrange(1, 6)}00MiB") for name in drawn])
            with suppress(ChangeRefused):
                node.reload()
            continue
        name, before = dice.choice(names), node.in_force
        wanted = slot(name, capacity=f"{dice.randrange(1, 9)}00MiB") if dice.random() < 0.7 else None
        try:
            node.change(name, wanted)
        except ChangeRefused:
            assert node.in_force == before
        else:
            assert {one for one in before if one != name} <= set(node.in_force)
            assert (name in node.in_force) or wanted is None


def journal_of(node: Node) -> sqlite3.Connection:
    directory = node.directory / DIRECTORY
    directory.mkdir()
    connection = sqlite3.connect(directory / "journal", isolation_level=None)
    prepare(connection)
    return connection


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("change", [None, slot("elsewhere")])
def test_a_slot_stays_while_the_origin_lacks_something_of_it(tmp_path: Path, write: str, change: Any) -> None:
    """However it writes now."""
    node = Node(tmp_path)
    connection = journal_of(node)
    write_overlay(node.directory, [slot("a", name="a", write="back")])
    node.reload()
    connection.execute("INSERT INTO usage VALUES ('a', 1000, 2) ON CONFLICT (slot) DO UPDATE SET objects = 2")
    node.change("a", slot("a", write=write))
    with pytest.raises(ChangeRefused, match="2 objects and 1000 bytes"):
        node.change("a", change)
    assert node.in_force == {"a": "s3://b/a/"}
    connection.execute("UPDATE usage SET objects = 0, staged_bytes = 0")
    node.change("a", change)
    connection.close()


def test_a_journal_that_cannot_be_read_keeps_the_slot(tmp_path: Path) -> None:
    """Nobody can tell what the origin lacks of it; other slots change all the same."""
    node = Node(tmp_path)
    (node.directory / DIRECTORY).mkdir()
    (node.directory / DIRECTORY / "journal").write_bytes(b"this is no database" * 1000)
    node.change("a", slot("a"))
    node.change("b", slot("b"))
    with pytest.raises(ChangeRefused, match=r"'a' stays: .*journal cannot be read"):
        node.change("a", None)
    node.change("b", slot("b", weight=2))
    assert load_settings(node.file, {}).settings.slots == []


def test_files_that_hang_are_waited_for_for_a_while() -> None:
    """A mount that hangs, or a pipe: the change is refused, and so is the next one, at once, until it answers."""

    async def scenario() -> None:
        files, answers = FileThreads(1, seconds_max=0.05), threading.Event()
        assert await files.run(lambda: 1) == 1
        with pytest.raises(ChangeRefused, match=r"within 0\.05 s"):
            await files.run(answers.wait)
        with pytest.raises(ChangeRefused, match="an earlier change still waits"):
            await files.run(lambda: 2)
        with pytest.raises(ChangeRefused, match="an earlier change still waits"):
            await files.run(lambda: 3)
        answers.set()
        for thread in threading.enumerate():
            if thread.name == "files of settings":
                thread.join()
        assert await files.run(lambda: 4) == 4
        with pytest.raises(ZeroDivisionError):
            await files.run(lambda: 1 / 0)

    asyncio.run(scenario())


def test_a_change_that_was_refused_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk takes it when nobody waits any more: what the next change, or the next start, finds is what was
    there before."""
    node = Node(tmp_path)
    node.change("old", slot("old"))
    refused = Reloader(node.file, {}).load(node.running, node.numbers, SlotChange("asked", "new", slot("new")))
    answers, written = threading.Event(), write_overlay

    def late(directory: Path, slots: Sequence[SlotTable]) -> None:
        answers.wait()
        written(directory, slots)

    async def scenario() -> None:
        files = FileThreads(1, seconds_max=0.05)
        with pytest.raises(ChangeRefused, match="have not answered"):
            await files.run(refused.keep, refused.undo)
        assert files.hang
        answers.set()
        await until(lambda: not files.hang)

    monkeypatch.setattr(reloading, "write_overlay", late)
    asyncio.run(scenario())
    assert node.overlay == {"old"}
    node.reload()
    assert node.in_force == {"old": "s3://b/old/"}


def test_a_change_whose_last_step_the_disk_refuses_does_not_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its new content, and its name might not outlive a power cut: it is as before."""
    node = Node(tmp_path)

    def failing(_path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as faulty:
        faulty.setattr(atomic_write, "sync_directory", failing)
        with pytest.raises(ChangeRefused, match="cannot be written"):
            node.change("new", slot("new"))
    assert node.overlay == set()
    node.reload()
    assert node.in_force == {}


def test_while_the_disk_hangs_the_settings_of_before_go_on(tmp_path: Path) -> None:
    """What it will have of a change that was refused, nobody knows: that is not read. Callers can still be changed."""
    node = Node(tmp_path)
    node.change("new", slot("new"))
    loaded = Reloader(node.file, {}).load(node.running, node.numbers, None, known=[])
    assert [one.name for one in loaded.settings.slots] == []


@pytest.mark.parametrize("key", ["config", "secret_access_key_file"])
def test_a_file_without_end_is_refused(tmp_path: Path, key: str) -> None:
    """A device, or a log, named by mistake: no memory is filled with it."""
    file = Path("/dev/zero")
    if key != "config":
        file = tmp_path / "forebay.toml"
        file.write_text(to_toml({"origin": {"access_key_id": "a-key-id", key: "/dev/zero"}}))
    with pytest.raises(SettingsError, match=r"/dev/zero"):
        load_settings(file, {})


def test_a_pipe_in_place_of_the_configuration_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever opens it waits for a writer, for ever."""

    async def scenario() -> None:
        files = FileThreads(1, seconds_max=0.2)
        with pytest.raises(ChangeRefused, match="have not answered"):
            await files.run(lambda: load_settings(pipe, {}))

    pipe = tmp_path / "forebay.toml"
    os.mkfifo(pipe)
    asyncio.run(scenario())
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # its reader is there, and ends


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "[server]\nport = " + "9" * 5000, "a = \xff\xfe", "a ="])
def test_no_file_is_a_fault_of_the_gateway(tmp_path: Path, text: str) -> None:
    """Whatever it holds: the file is named."""
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError, match=re.escape(str(file))):
        load_settings(file, {})
