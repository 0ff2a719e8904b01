"""The judge of the races is judged: it lets through what may be, and nothing else."""

from __future__ import annotations

import random

import pytest

from tests.scenarios.races.caller import Answer, Broken
from tests.scenarios.races.contents import Value, described
from tests.scenarios.races.history import STRICT, Bounds, History
from tests.scenarios.races.world import World, WrongAnswer

TTL = Bounds(presence_seconds=10.0, absence_seconds=2.0, remembered=True)


def history(bounds: Bounds, *writes: tuple[str | None, bool, float, float | None]) -> History:
    """Writes as (state, own, sent, over), the last None where there was no answer."""
    made = History("key", bounds)
    for state, own, sent, over in writes:
        write = made.begin(state, sent, own=own)
        if over is not None:
            made.end(write, over)
    return made


def allowed(made: History, sent: float, answered: float) -> set[str | None]:
    found: set[str | None] = set()
    for state in ("a", "b", None):

        def is_it(candidate: str | None, state: str | None = state) -> bool:
            return candidate == state

        if made.explains(is_it, sent, answered):
            found.add(state)
    return found


def test_reads_see_the_last_answered_write_or_one_under_way() -> None:
    """Before, during and after: never what was replaced for certain, never what was not sent yet."""
    made = history(Bounds(remembered=True), ("a", True, 1, 2), ("b", True, 5, 8))
    assert allowed(made, 3, 4) == {"a"}
    assert allowed(made, 3, 6) == {"a", "b"}
    assert allowed(made, 7, 9) == {"a", "b"}
    assert allowed(made, 9, 10) == {"b"}
    assert allowed(made, 0, 0.5) == {None}


def test_a_write_without_an_answer_may_take_effect_at_any_time() -> None:
    """Nobody said that it failed, or that it did not."""
    made = history(Bounds(remembered=True), ("a", True, 1, 2), ("b", True, 5, None))
    assert allowed(made, 100, 101) == {"a", "b"}


def test_what_a_reader_saw_nobody_unsees_where_the_origin_is_asked_each_time() -> None:
    """A write under way that one read has shown is over for reads sent after that; not so where answers are kept."""
    for bounds, expected in ((STRICT, {"b"}), (Bounds(remembered=True), {"a", "b"})):
        made = history(bounds, ("a", True, 1, 2), ("b", True, 5, None))
        assert made.explains(lambda state: state == "b", 6, 7)
        assert allowed(made, 8, 9) == expected


def test_writes_of_others_are_seen_within_the_bound() -> None:
    """Presence as long as metadata_ttl, absence as long as negative_ttl; own writes end both at once."""
    made = history(TTL, ("a", False, 1, 1), ("b", False, 20, 20))
    assert allowed(made, 29, 29) == {"a", "b"}
    assert allowed(made, 31, 31) == {"b"}
    assert allowed(history(TTL, ("a", False, 5, 5)), 6, 6) == {"a", None}
    assert allowed(history(TTL, ("a", False, 5, 5)), 8, 8) == {"a"}
    assert allowed(history(TTL, ("a", False, 1, 1), ("b", True, 20, 20)), 20.1, 20.2) == {"b"}
    assert allowed(history(STRICT, ("a", False, 1, 1), ("b", False, 20, 20)), 20.1, 20.2) == {"b"}


def test_what_is_forgotten_changes_no_verdict() -> None:
    """Hundreds of writes later the history is short, and says the same of the present."""
    made = history(STRICT, *((f"v{number}", True, number, number + 0.5) for number in range(500)))
    assert len(made.writes) < 100
    assert made.explains(lambda state: state == "v499", 500, 501)
    assert not made.explains(lambda state: state == "v498", 500, 501)


@pytest.fixture
def world() -> World:
    """One key, with a value that was stored, a second one that replaced it, and a clock that stands still."""
    now = iter(range(1_000_000))
    made = World("bucket", {"key": STRICT}, ["key"], now=lambda: float(next(now)))
    for size_bytes in (1000, 2000):
        value = Value(size_bytes, size_bytes)
        made.values[value.etag] = value
        made.end("key", made.begin("key", value.etag))
    return made


def answer(value: Value, body: bytes, status: int = 200, **headers: str) -> Answer:
    return Answer(status, {"etag": value.etag, "content-length": str(len(body)), **headers}, body)


NEW, OLD = Value(2000, 2000), Value(1000, 1000)


def test_right_answers_pass(world: World) -> None:
    """The whole object, a range, a head."""
    world.saw_object("key", world.now(), answer(NEW, NEW.content))
    part = answer(NEW, NEW.content[16:100], 206, **{"content-range": "bytes 16-99/2000"})
    world.saw_object("key", world.now(), part, (16, 99))
    world.saw_head("key", world.now(), answer(NEW, NEW.content))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (answer(OLD, OLD.content), "can not see this"),
        (answer(NEW, b""), "0 bytes at 0"),
        (answer(NEW, OLD.content), "value 1000 records 0-61"),
        (answer(NEW, NEW.content[:1008] + OLD.content[1008:] + NEW.content[1000:]), "came as"),
        (answer(NEW, NEW.content[16:] + NEW.content[:16]), "value 2000 records 1-124, value 2000 records 0-0"),
        (answer(Value(7, 50), Value(7, 50).content), "nobody ever stored"),
        (Answer(404, {}, b""), "can not see this"),
        (Answer(503, {}, b"<Error/>"), "was answered 503"),
        (answer(NEW, NEW.content[16:100], 206, **{"content-range": "bytes 0-99/2000"}), "came as"),
    ],
)
def test_wrong_answers_are_found(world: World, wrong: Answer, why: str) -> None:
    """Old, short, mixed, moved, never stored, absent, refused; and the report says what came."""
    with pytest.raises(WrongAnswer, match=why):
        world.saw_object("key", world.now(), wrong, (16, 99) if wrong.status == 206 else None)


def test_broken_answers_are_right_as_far_as_they_go(world: World) -> None:
    """The bytes that came must be right, and nothing breaks without a reason."""
    with pytest.raises(WrongAnswer, match="value 1000 records 0-61"):
        world.broke("key", world.now(), Broken("", answer(NEW, OLD.content)))
    with pytest.raises(WrongAnswer, match="nothing changed"):
        world.broke("key", world.now(), Broken("", answer(NEW, NEW.content[:100])))
    sent = world.now()
    world.begin("key", None)
    world.broke("key", sent, Broken("", answer(NEW, NEW.content[:100])))


def test_every_byte_says_where_it_belongs() -> None:
    """A value's content is as long as it should be, and is recognised from wherever it is cut."""
    rng = random.Random(1)
    value = Value(3, 777)
    assert len(value.content) == 777
    first = rng.randrange(300)
    begin, end = -(-first // 16), 700 // 16 - 1
    assert f"value 3 records {begin}-{end}" in described(value.content[first:700], first)
