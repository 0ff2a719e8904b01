"""Which checkpoint a key belongs to, and which rank wrote it, on listings as the frameworks leave them.

In listings/ each line is a key, behind a tab the rank that wrote it. Above the keys of a checkpoint stands its prefix,
step and layout in brackets, above those of none `[none]`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.checkpoint_patterns import parse_pattern
from gateway.core.model import ObjectKey
from gateway.writeback.checkpoints.layouts import (
    KNOWN,
    CheckpointName,
    Rules,
    checkpoint_of,
    is_pointer,
    member_of,
    rank_of,
    rules_of,
    shard_of,
    world_size_of,
)

LISTINGS = sorted((Path(__file__).parent / "listings").glob("*.txt"))
LAYOUTS = {"dcp", "huggingface", "safetensors", "deepspeed", "megatron", "lightning", "nemo", "ranks", "step"}


class Line(NamedTuple):
    key: ObjectKey
    checkpoint: CheckpointName | None
    rank: int | None


def read(path: Path) -> Iterator[Line]:
    checkpoint = None
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("["):
            checkpoint = None
            if line != "[none]":
                prefix, step, layout = line.strip("[]").rsplit(" ", 2)
                checkpoint = CheckpointName("bucket", prefix, None if step == "-" else int(step), layout)
            continue
        key, _, rank = line.partition("\t")
        yield Line(ObjectKey("bucket", key), checkpoint, int(rank) if rank else None)


def found(key: str, rules: Rules = KNOWN) -> tuple[str, int | None, int | None] | None:
    """Prefix, step and rank."""
    member = member_of(ObjectKey("bucket", key), rules)
    return None if member is None else (member.checkpoint.prefix, member.checkpoint.step, member.rank)


@pytest.mark.parametrize("path", LISTINGS, ids=lambda path: path.stem)
def test_a_listing_is_taken_apart_into_its_checkpoints(path: Path) -> None:
    """Prefix and step of every key; what is of the run alone belongs to none."""
    lines = list(read(path))
    assert lines
    for line in lines:
        checkpoint = checkpoint_of(line.key)
        assert (checkpoint and checkpoint[:3]) == (line.checkpoint and line.checkpoint[:3]), line.key
        if line.checkpoint is not None:
            assert rank_of(line.key) == line.rank, line.key


@pytest.mark.parametrize("path", LISTINGS, ids=lambda path: path.stem)
def test_a_layout_is_told_by_at_least_one_key(path: Path) -> None:
    """A number alone tells `step`; another key of the same checkpoint may tell more."""
    told: dict[CheckpointName, set[str]] = {}
    for line in read(path):
        name = checkpoint_of(line.key)
        if line.checkpoint is not None and name is not None:
            told.setdefault(line.checkpoint, set()).add(name.layout)
    for checkpoint, layouts in told.items():
        assert layouts - {"step"} <= {checkpoint.layout}
        assert checkpoint.layout in layouts


def test_every_layout_has_a_listing() -> None:
    """None is without."""
    assert {line.checkpoint.layout for path in LISTINGS for line in read(path) if line.checkpoint} == LAYOUTS


@pytest.mark.parametrize(
    "key",
    [
        "run/latest",
        "run/latest_checkpointed_iteration.txt",
        "run/latest_train_state.pt",
        "run/last.ckpt",
        "run/last-v3.ckpt",
    ],
)
def test_a_pointer_is_of_the_run(key: str) -> None:
    """It belongs to no checkpoint; within a checkpoint's directory it is an object like others."""
    assert is_pointer(ObjectKey("bucket", key))
    assert checkpoint_of(ObjectKey("bucket", key)) is None
    within = ObjectKey("bucket", f"run/checkpoint-5/{key}")
    assert not is_pointer(within)
    assert found(within.key) == ("run/checkpoint-5/", 5, None)


def test_checkpoints_of_a_run_lie_side_by_side() -> None:
    """Those of a directory, as directories or as objects."""
    for key in ("run/step-5/.metadata", "run/ckpt-5.pt", "run/epoch=1-step=5.ckpt"):
        name = checkpoint_of(ObjectKey("bucket", key))
        assert name is not None
        assert name.run == "run/"
    top = checkpoint_of(ObjectKey("bucket", "step-5/x"))
    assert top is not None
    assert (top.run, str(top), top.is_directory) == ("", "s3://bucket/step-5/", True)


def test_what_lies_in_the_bucket_itself_is_no_checkpoint() -> None:
    """The whole bucket would be one."""
    assert [found(key) for key in (".metadata", "__0_0.distcp", "rank_0.pt", "")] == [None] * 4


def test_names_tell_of_shards_and_of_all_ranks() -> None:
    """How many belong together."""
    shard = shard_of("m/model-00002-of-00004.safetensors")
    assert shard == ("m/model-.safetensors", 2, 4)
    assert shard_of("m/model.safetensors") is None
    assert shard_of("m/x-1-of-0.pt") is None
    assert world_size_of("m/model_world_size_8_rank_0.pt") == 8
    assert world_size_of("world_size_8/m.pt") is None


def test_ranks_that_two_numbers_tell_are_not_guessed() -> None:
    """Which rank it is depends on the job."""
    assert rank_of(ObjectKey("b", "iter_0000100/mp_rank_03_001/model_optim_rng.pt")) is None
    assert rank_of(ObjectKey("b", "x/tp_rank_01_pp_rank_002/model_weights.ckpt")) is None
    assert rank_of(ObjectKey("b", "x/rank-07/model.pt")) == 7


# A slot's own patterns


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("runs/*/save-{step}/", "runs/a/save-12/x/y.pt", ("runs/a/save-12/", 12, None)),
        ("runs/*/save-{step}/", "runs/a/b/save-12/x", None),
        ("runs/*/save-{step}/", "runs/a/save-12", None),
        ("runs/*/save-{step}/", "runs/a/save-/x", None),
        ("runs/*/save-{step}/", "runs/a/save-1234567890123456789/x", None),
        ("runs/**/s{step}/", "runs/s7/x", ("runs/s7/", 7, None)),
        ("runs/**/s{step}/", "runs/a/b/s7/x", ("runs/a/b/s7/", 7, None)),
        ("runs/**/s{step}/", "runs/s7/s8/x", ("runs/s7/", 7, None)),
        ("m/s{step}/**/r{rank}.pt", "m/s7/a/b/r3.pt", ("m/s7/", 7, 3)),
        ("m/s{step}/**/r{rank}.pt", "m/s7/other.json", ("m/s7/", 7, None)),
        ("m/s{step}/r{rank}.pt", "m/s7/rank_5.pt", ("m/s7/", 7, 5)),
        ("m/*/e-{step}.pt", "m/a/e-3.pt", ("m/a/e-3.pt", 3, None)),
        ("m/*/e-{step}.pt", "m/a/e-3.pt/x", None),
        ("a/r{rank}/x", "a/r3/x", ("a/", None, 3)),
        ("best/*/", "best/x/y", ("best/x/", None, None)),
        ("it-{step}-*/", "it-5-a.b/x", ("it-5-a.b/", 5, None)),
        ("a.b/{step}/", "aXb/5/x", None),
        ("a*-{step}.d/", "a-1-2.d/x", ("a-1-2.d/", 2, None)),
        ("a*-{step}.d/", "a-2.d/x", ("a-2.d/", 2, None)),
        ("ab*bc/", "abc/x", None),
        ("*-{step}.d/", "-7.d/x", ("-7.d/", 7, None)),
        ("*/{step}/", "é/5/x", ("é/5/", 5, None)),
    ],
)
def test_patterns_find_prefix_step_and_rank(
    pattern: str, key: str, expected: tuple[str, int | None, int | None] | None
) -> None:
    """A directory ends with a slash and has all that lies under it, anything else is one object."""
    assert found(key, rules_of((pattern,))) == expected


def test_patterns_come_before_the_known_layouts_where_these_are_wanted() -> None:
    """`built-in` stands for them; without it there are the patterns alone, and in an empty list nothing."""
    both, alone = rules_of(("step-{step}/", "built-in")), rules_of(("own-{step}/",))
    assert member_of(ObjectKey("b", "step-5/x"), both) == (CheckpointName("b", "step-5/", 5, "pattern"), None)
    assert found("run/checkpoint-7/x", both) == ("run/checkpoint-7/", 7, None)
    assert found("run/checkpoint-7/x", alone) is None
    assert found("step-5/x", rules_of(())) is None
    assert rules_of(None) is KNOWN


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "1 to 1024 characters"),
        ("x" * 1025, "1 to 1024 characters"),
        ("s3://b/step-{step}/", "without s3://"),
        ("/step-{step}/", "leading slash"),
        ("a//{step}/", "empty"),
        ("{step}/{step}/", "{step} may stand in it once"),
        ("{rank}/{step}/", "behind the checkpoint's own directory"),
        ("step-{step}-{rank}/", "behind the checkpoint's own directory"),
        ("r{rank}/", "behind the checkpoint's own directory"),
        ("a/**", "a directory ends with /"),
        ("**/{rank}/", "right before"),
        ("**/a/**/{step}/", "** may stand once"),
        ("a*b*/", "* may stand once"),
        ("a**/", "* may stand once"),
        ("a*{step}/", "right before a number"),
        ("a7{step}/", "right before a number"),
        ("a{step}7/", "right behind a number"),
        ("{epoch}/", "braces"),
        ("a}/", "braces"),
    ],
)
def test_what_is_no_pattern_is_refused_with_the_reason(pattern: str, message: str) -> None:
    """And names the pattern."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_pattern(pattern)


# Whatever keys hold

PARTS = st.one_of(
    st.text(max_size=12),
    st.from_regex(r"(step|ckpt|iter|global_step|checkpoint|epoch)[-_=]?[0-9]{0,25}(\.pt|\.tmp)?", fullmatch=True),
    st.sampled_from(["", ".metadata", "__3_0.distcp", "rank_3.pt", "mp_rank_00", "x-step=3-last", "latest", "a.ckpt"]),
)
KEYS = st.lists(PARTS, min_size=1, max_size=6).map("/".join)
PATTERNS = ("runs/**/s{step}/**/r{rank}.pt", "*/{step}/", "built-in")


@given(key=KEYS)
def test_a_checkpoint_is_a_prefix_of_its_keys(key: str) -> None:
    """Never the bucket itself; numbers are such as the journal holds; and the same prefix says the same step."""
    for rules in (KNOWN, rules_of(PATTERNS)):
        member = member_of(ObjectKey("bucket", key), rules)
        if member is None:
            continue
        name = member.checkpoint
        assert name.prefix
        assert key.startswith(name.prefix)
        assert name.is_directory == (name.prefix != key or key.endswith("/"))
        assert name.step is None or 0 <= name.step < 10**18
        assert member.rank is None or 0 <= member.rank < 10**18


DEEP = ("runs/**/s{step}/", "**/*/{step}/", "a/**/b/a*b-{step}/", "**/a*-{step}.d/**/r{rank}.pt", "**/x/*/")
DEEP_KEYS = st.lists(
    st.sampled_from(["runs", "s7", "s8", "a", "b", "ab-5", "abb-55", "a-7.d", "x", "", "3", "1" * 19, "r3.pt"]),
    max_size=9,
).map("/".join)


@given(pattern=st.sampled_from(DEEP), key=DEEP_KEYS)
@settings(max_examples=200)
def test_two_stars_stand_for_as_few_parts_as_can_be(pattern: str, key: str) -> None:
    """As if as many single stars stood there."""
    before, _, behind = pattern.partition("**/")
    like = (parse_pattern(before + "*/" * count + behind).find(key + "/") for count in range(key.count("/") + 2))
    expected = next((one for one in like if one is not None), None)
    found_in = parse_pattern(pattern).find(key + "/")
    assert (found_in and found_in[:2]) == (expected and expected[:2])


@example(key="x-step=3-last/global_step3/global_step3/", other="")
@given(key=KEYS, other=st.text(max_size=10).filter(lambda text: "/" not in text))
def test_what_lies_beside_an_object_in_a_numbered_directory_is_of_the_same_checkpoint(key: str, other: str) -> None:
    """Whatever it is called."""
    name = checkpoint_of(ObjectKey("bucket", key))
    if name is not None and name.is_directory and name.step is not None:
        beside = checkpoint_of(ObjectKey("bucket", f"{name.prefix}{other}"))
        assert beside is not None
        assert beside[:3] == name[:3]


@pytest.mark.parametrize(
    "hostile",
    [
        *("step" * 256, "1" * 1024, "-step=" * 170, "/" * 1024, "a/" * 512, "rank_" * 204, "_1" * 512, "step-1/" * 146),
        *("x-1-of-" * 146, "ckpt-1_" * 146, "mp_rank_00_" * 93, "-" * 1024, "epoch=" * 170),
    ],
)
def test_no_key_takes_long(hostile: str) -> None:
    """Time grows with the key's length, and not with its square: a thousandth of a second is much."""
    rules = rules_of(("**/a*-{step}/", "a/**/b*c/{step}/**/r{rank}", "built-in"))
    key = ObjectKey("bucket", hostile)
    began = time.process_time()
    for _ in range(10):
        member_of(key, rules)
        is_pointer(key)
        shard_of(key.key)
        world_size_of(key.key)
    assert time.process_time() - began < 0.5
