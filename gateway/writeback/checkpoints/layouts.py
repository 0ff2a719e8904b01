"""Finds the checkpoint that a key belongs to, and the rank that wrote the object. Pure.

A checkpoint is what one save of a training job leaves: a directory, or one object. The layouts that are known:

    dcp            PyTorch distributed checkpoints: `__0_0.distcp`, `.metadata`, also in a directory of any name
    huggingface    `checkpoint-500/` of the Trainer, with all that lies under it, DeepSpeed's directories too
    safetensors    `model-00001-of-00004.safetensors` and its index, in a directory of any name
    deepspeed      `global_step500/`, and its files in a directory of any name
    megatron       `iter_0000500/`, `release/`, with `mp_rank_00/` or of distributed checkpoints
    lightning      `epoch=1-step=500.ckpt`, an object or a directory
    nemo           `name--val_loss=2.1-step=500-consumed_samples=64000.0-last/`, an object or a directory
    ranks          `rank_0.pt` in a directory of any name
    step           `step-500/`, `ckpt_500/`, `epoch_3/`, `ckpt-500.pt`: a number alone tells
    pattern        a slot's own patterns

The innermost directory that fits is the checkpoint, except DeepSpeed's and Megatron's within another of the same step,
or within the Trainer's. Pointers to a run's newest checkpoint belong to none: `latest`, `last.ckpt`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gateway.core.checkpoint_patterns import BUILT_IN, CheckpointPattern, parse_pattern
from gateway.core.model import ObjectKey

_N = r"[0-9]{1,18}"
"""Numbers that SQLite can hold."""


class CheckpointName(NamedTuple):
    """Which checkpoint. Bucket and prefix tell one from another; the prefix of one object is its key."""

    bucket: str
    prefix: str
    step: int | None
    layout: str

    @property
    def is_directory(self) -> bool:
        return self.prefix.endswith("/")

    @property
    def run(self) -> str:
        """The directory in which the checkpoints of the same run lie; empty for the bucket itself."""
        above, slash, _ = self.prefix.removesuffix("/").rpartition("/")
        return above + slash

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


class Member(NamedTuple):
    """An object of a checkpoint. `rank` wrote it, where its name says so."""

    checkpoint: CheckpointName
    rank: int | None


@dataclass(frozen=True, slots=True)
class Rules:
    """By which objects are grouped: patterns first, then the known layouts."""

    patterns: Sequence[CheckpointPattern] = ()
    built_in: bool = True


KNOWN = Rules()


@lru_cache(256)
def rules_of(patterns: tuple[str, ...] | None) -> Rules:
    """Return the rules of a slot's setting; None: the known layouts. ValueError for a bad pattern."""
    if patterns is None:
        return KNOWN
    return Rules(tuple(parse_pattern(one) for one in patterns if one != BUILT_IN), BUILT_IN in patterns)


def member_of(key: ObjectKey, rules: Rules = KNOWN) -> Member | None:
    """None: the object belongs to no checkpoint."""
    for pattern in rules.patterns:
        if (found := pattern.find(key.key)) is not None:
            name = CheckpointName(key.bucket, found.prefix, found.step, "pattern")
            return Member(name, rank_of(key) if found.rank is None else found.rank)
    known = _known(key) if rules.built_in else None
    return None if known is None else Member(known, rank_of(key))


def checkpoint_of(key: ObjectKey, rules: Rules = KNOWN) -> CheckpointName | None:
    member = member_of(key, rules)
    return None if member is None else member.checkpoint


# Directories, by their own name

_TEMPORARY = r"(?:[._-]tmp|\.partial|\.incomplete)?"

_DIRECTORIES = {
    "huggingface": re.compile(rf"(?:tmp-)?checkpoint-({_N}){_TEMPORARY}"),
    "deepspeed": re.compile(rf"global_step({_N}){_TEMPORARY}"),
    "megatron": re.compile(rf"iter_({_N}){_TEMPORARY}"),
    "step": re.compile(
        rf"(?:model_|global_)?(?:step|ckpt|checkpoint|chkpt|iter|iteration|epoch)[-_=]?({_N}){_TEMPORARY}"
    ),
}
"""The first that fits counts."""

_OF_LIGHTNING = re.compile(rf"(?:^|[-_.])(?:global_)?step=({_N})(?![0-9])")
_EPOCH_OF_LIGHTNING = re.compile(rf"(?:^|[-_.])epoch=({_N})(?![0-9])")
_OF_NEMO = ("consumed_samples=", "--")


class _Directory(NamedTuple):
    parts_count: int
    step: int | None
    layout: str


def _known(key: ObjectKey) -> CheckpointName | None:
    parts = key.key.split("/")
    said = next((layout for layout, pattern in _FILES.items() if pattern.fullmatch(parts[-1])), None)
    found = _directory(parts)
    if found is not None:
        layout = said if said is not None and found.layout == "step" else found.layout
        return CheckpointName(key.bucket, "/".join(parts[: found.parts_count]) + "/", found.step, layout)
    if said is not None:
        return CheckpointName(key.bucket, "/".join(parts[:-1]) + "/", None, said) if len(parts) > 1 else None
    if len(parts) > 2 and _MEGATRON_RANK.fullmatch(parts[-2]):
        return CheckpointName(key.bucket, "/".join(parts[:-2]) + "/", None, "megatron")
    alone = _object(parts[-1])
    return None if alone is None else CheckpointName(key.bucket, key.key, *alone)


def _directory(parts: Sequence[str]) -> _Directory | None:
    for count in range(len(parts) - 1, 0, -1):
        found = _named(parts[count - 1])
        if found is None:
            continue
        while count > 1 and found[1] in ("deepspeed", "megatron"):
            above = _named(parts[count - 2])
            if above is None or not (above[0] == found[0] or above[1] == "huggingface"):
                break
            count, found = count - 1, above
        return _Directory(count, *found)
    return None


def _named(part: str) -> tuple[int, str] | None:
    """Step and layout, as the name of a directory says them."""
    for layout, pattern in _DIRECTORIES.items():
        if (match := pattern.fullmatch(part)) is not None:
            return int(match[1]), layout
    return _lightning(part)


def _lightning(part: str) -> tuple[int, str] | None:
    match = _OF_LIGHTNING.search(part) or _EPOCH_OF_LIGHTNING.search(part)
    if match is None:
        return None
    is_nemo = any(one in part for one in _OF_NEMO) or part.removesuffix(".ckpt").endswith("-last")
    return int(match[1]), "nemo" if is_nemo else "lightning"


# Objects, by their own name

_KINDS = r"(?:pt|pth|ckpt|bin|safetensors|tar|pkl|npz|msgpack|nemo)"
_MEGATRON_RANK = re.compile(r"(?:mp|tp)_rank_[0-9]{2,6}(?:_(?:pp_rank_)?[0-9]{3,6}){0,2}")

_FILES = {
    "dcp": re.compile(r"_{0,4}[0-9]{1,18}_[0-9]{1,18}\.distcp|\.metadata(?:\.tmp)?"),
    "deepspeed": re.compile(
        r"[a-z0-9_]{0,64}mp_rank_[0-9]{2,6}_(?:model|optim)_states\.pt"
        r"|layer_[0-9]{2,6}-model_[0-9]{2,6}-model_states\.pt"
    ),
    "safetensors": re.compile(r".{0,255}-[0-9]{5}-of-[0-9]{5}\.safetensors|.{0,255}\.safetensors\.index\.json"),
    "huggingface": re.compile(r"pytorch_model-[0-9]{5}-of-[0-9]{5}\.bin|pytorch_model\.bin\.index\.json"),
    "ranks": re.compile(rf"(?:[A-Za-z0-9_.-]{{0,200}}[-_.])?rank[-_]?[0-9]{{1,9}}(?:-of-[0-9]{{1,9}})?\.{_KINDS}"),
}
"""The first that fits counts."""

_OBJECT = re.compile(
    rf"(?:^|[-_.])(?:ckpt|checkpoint|chkpt|step|iter|iteration|epoch)[-_=]?(?:{_N}_)?({_N})\.{_KINDS}$"
)

LAYOUTS = ("dcp", "huggingface", "safetensors", "deepspeed", "megatron", "lightning", "nemo", "ranks", "step")
"""The layouts that are known without patterns."""


def _object(name: str) -> tuple[int, str] | None:
    """Step and layout of an object that is a checkpoint by itself."""
    if name.endswith((".ckpt", ".nemo")) and (found := _lightning(name)) is not None:
        return found
    match = _OBJECT.search(name)
    return None if match is None else (int(match[1]), "step")


_POINTER = re.compile(r"latest(?:[-_.].{0,255})?|last(?:-v[0-9]{1,9})?\.ckpt", re.DOTALL)


def is_pointer(key: ObjectKey) -> bool:
    """Return whether an object's name makes it a pointer to a run's newest checkpoint, or a second name of that."""
    return checkpoint_of(key) is None and _POINTER.fullmatch(key.key.rpartition("/")[2]) is not None


# Ranks and shards in names

_RANKS_IN_FILE = (
    re.compile(rf"_{{0,4}}({_N})_{_N}\.distcp"),
    re.compile(rf"[a-z0-9_]{{0,64}}zero_pp_rank_({_N})_mp_rank_.{{1,64}}"),
    re.compile(rf"rng_state_({_N})\.pth"),
)
_RANK = re.compile(rf"(?<![tpmec]p_)(?:^|(?<=[-_.=]))rank[-_=]?({_N})(?![0-9])")
_RANK_OF_MODEL = re.compile(r"mp_rank_([0-9]{2,6})")


def rank_of(key: ObjectKey) -> int | None:
    """Return the rank that wrote an object, if its name or its directory's says so.

    For DeepSpeed's optimizer states this is the data-parallel rank, for Megatron's `mp_rank_03/` the tensor-parallel
    one. The job decides the meaning of two numbers (`mp_rank_03_001/`): they give None.
    """
    *_, directory, name = ("", *key.key.split("/"))
    for pattern in _RANKS_IN_FILE:
        if (match := pattern.fullmatch(name)) is not None:
            return int(match[1])
    found = _RANK.search(name) or _RANK.search(directory) or _RANK_OF_MODEL.fullmatch(directory)
    return None if found is None else int(found[1])


class Shard(NamedTuple):
    """One of several objects that belong together, and say how many they are. `family` is what their names share."""

    family: str
    number: int
    shards: int


_SHARD = re.compile(rf"(?<=[-_])({_N})-of-({_N})(?![0-9])")
_WORLD = re.compile(rf"world_size_({_N})(?![0-9])")


def shard_of(key: str) -> Shard | None:
    """`model-00002-of-00004.safetensors` is the second of four."""
    directory, slash, name = key.rpartition("/")
    match = _SHARD.search(name) if "-of-" in name else None
    if match is None or not int(match[2]):
        return None
    family = f"{directory}{slash}{name[: match.start(1)]}{name[match.end(2) :]}"
    return Shard(family, int(match[1]), int(match[2]))


def world_size_of(key: str) -> int | None:
    """Return the number of ranks in a name such as `model_world_size_8_rank_0.pt`."""
    match = _WORLD.search(key.rpartition("/")[2]) if "world_size_" in key else None
    return None if match is None else int(match[1])
