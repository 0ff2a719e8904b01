"""Which objects a manifest names, by its bytes. Pure.

    .metadata                           PyTorch DCP: a pickle, whose opcodes are read, and never carried out
    *.index.json                        safetensors and PyTorch shards: the values of `weight_map`
    latest, latest_universal            DeepSpeed: the name of a directory beside it, such as global_step100
    latest_checkpointed_iteration.txt   Megatron: the number of one

Anything else is not understood, and neither is what is longer than it should be, or says something that its writers
never write. What a manifest names lies in its own bucket, under its own directory: nothing can lead out of it. Time and
memory are bounded by the length of the bytes, whatever they are.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.core.model import ObjectKey

CONTENT_BYTES_MAX = 64 * 1024**2
"""The longest manifest that is read: one of a million tensor shards."""

NAMES_MAX = 100_000
"""Objects that a manifest may name."""

OPCODES_MAX = 32_000_000
"""The most opcodes of a pickle: some ten seconds of a thread's time."""

TOKENS_MAX = 16_000_000
"""The most tokens of JSON, for the same time. An index has two for each tensor."""

BYTES_OF_A_STRING = 8
"""A pickle may remember one string in this many bytes: PyTorch writes one in some forty. Each takes seven times as many
bytes of memory."""

_FEW_STRINGS = 1000
"""Strings that any pickle may remember."""

_KEY_BYTES_MAX = 1024
"""S3's limit."""

_POINTER_BYTES_MAX = 1024
_DIGITS_MAX = 18
"""The longest number of an iteration of Megatron's."""

_INDEX = ".index.json"
_WEIGHTS = "weight_map"
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")
_TOO_MANY = f"it names more than {NAMES_MAX} files"
_DCP = ".metadata"
_DEEPSPEED = frozenset({"latest", "latest_universal"})
_MEGATRON = "latest_checkpointed_iteration.txt"

_TAG = re.compile(r"(?:global_step|checkpoint|step|iter|epoch)[-_=]?[0-9]{1,18}|checkpoint", re.ASCII)
"""Directories as DeepSpeed, Lightning and people name them. Any other text of a `latest` may be the name of nothing,
and a manifest that waited for it would wait for ever."""

_STORAGE = "_StorageInfo"
"""The class that DCP writes for each piece of a tensor; its `relative_path` is the file's."""

_PATH = "relative_path"


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """The files that must exist before the manifest: each of `keys`, and for each of `directories` an object.

    It is under the directory (without final slash), of its name, or of its name and an ending.
    """

    keys: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.keys) + len(self.directories)


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """`reason` is for people."""

    reason: str


class _Strange(Exception):
    """The reason why a manifest is not understood."""


def may_be_understood(key: ObjectKey) -> bool:
    """Return whether an object of this name may be a manifest; others are not worth reading."""
    name = _name(key)
    return name in (_DCP, _MEGATRON) or name in _DEEPSPEED or name.endswith(_INDEX)


def named_files(key: ObjectKey, content: bytes) -> NamedFiles | NotUnderstood:
    """Return the files that a manifest names. Takes a second per 10 MiB: keep it off the event loop."""
    try:
        return _named(key.key, content)
    except _Strange as strange:
        return NotUnderstood(str(strange))


def _name(key: ObjectKey) -> str:
    return key.key.rpartition("/")[2]


def _named(key: str, content: bytes) -> NamedFiles:
    if len(content) > CONTENT_BYTES_MAX:
        raise _Strange(f"it is longer than {CONTENT_BYTES_MAX} bytes")
    above, slash, name = key.rpartition("/")
    directory = above + slash
    if name == _DCP:
        return NamedFiles(_keys(directory, key, _paths_of_pickle(content)))
    if name.endswith(_INDEX):
        return NamedFiles(_keys(directory, key, _paths_of_index(content)))
    if name in _DEEPSPEED:
        line = _line(content)
        if _TAG.fullmatch(line) is None:
            raise _Strange("it is no name that directories of checkpoints have")
        return NamedFiles(directories=_keys(directory, key, [line]))
    if name == _MEGATRON:
        return NamedFiles(directories=_keys(directory, key, [_iteration(_line(content))]))
    raise _Strange("it is of no known kind")


def _keys(directory: str, own: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of paths relative to a directory, each once, in order, without the manifest's own."""
    found: dict[str, None] = {}
    for path in paths:
        if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or not path.isprintable():
            raise _Strange("it names a path that leads elsewhere")
        name = f"{directory}{path}"
        if len(name.encode()) > _KEY_BYTES_MAX:
            raise _Strange("it names a path that is too long")
        found[name] = None
        if len(found) > NAMES_MAX:
            raise _Strange(_TOO_MANY)
    found.pop(own, None)
    if not found:
        raise _Strange("it names no files")
    return tuple(found)


# PyTorch DCP

_KEEP = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "FRAME", "PROTO"})
"""Opcodes that leave the stack as it is."""

_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TEXT = frozenset({"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})


def _paths_of_pickle(content: bytes) -> Iterator[str]:
    """Yield each string that follows `relative_path` on the stack: pickles write an attribute's name, then its value.

    A string stands in full the first time, later as its number in the memo. Of all else only the opcode counts.
    """
    memo: list[str | None] = []
    strings, strings_max = 0, _FEW_STRINGS + len(content) // BYTES_OF_A_STRING
    top: str | None = None
    has_path = has_storage = False
    for name, argument in _opcodes(content):
        if name in _KEEP:
            if name == "MEMOIZE" or name in _PUT:
                number = len(memo) if name == "MEMOIZE" else int(argument)
                if not 0 <= number <= len(memo):
                    raise _Strange("it counts in no order what it remembers")
                memo[number : number + 1] = [top]
                strings += top is not None
                if strings > strings_max:
                    raise _Strange("it has more strings than PyTorch writes")
            continue
        pushed = None
        if name in _TEXT:
            pushed = str(argument)
        elif name in _GET and 0 <= int(argument) < len(memo):
            pushed = memo[int(argument)]
        if has_path:
            if pushed is None:
                raise _Strange("it has a path that is no string")
            yield pushed
        has_storage = has_storage or pushed == _STORAGE or (name == "GLOBAL" and str(argument).endswith(_STORAGE))
        has_path, top = pushed == _PATH and not has_path, pushed
    if not has_storage:
        raise _Strange("it is no manifest of PyTorch's")


def _opcodes(content: bytes) -> Iterator[tuple[str, Any]]:
    opcodes = pickletools.genops(content)
    for _ in range(OPCODES_MAX):
        try:
            opcode, argument, _position = next(opcodes)
        except StopIteration:
            return
        except Exception as error:
            raise _Strange(f"it is no pickle: {error}"[:200]) from error
        yield opcode.name, argument
    raise _Strange("it is a pickle of too many opcodes")


# Indexes of shards

_TOKEN = re.compile(rb'[\s,:]*+(?:("[^"\\]*+(?:\\.[^"\\]*+)*+")|([{}\[\]])|[^\s,:{}\[\]"]++)', re.DOTALL)
"""A JSON token: a string, a bracket, or anything else. The match looks at each byte once, whatever surrounds it."""


def _paths_of_index(content: bytes) -> Iterator[str]:
    """Yield the values of the outermost object's `weight_map`, each once; of the last one, as parsers do.

    All else is only scanned for brackets and strings: a parser would build objects many times as large, and block all
    other threads meanwhile.
    """
    tokens = _tokens(content)
    if next(tokens, None) != b"{":
        raise _Strange("it is no JSON object")
    weights: Iterable[bytes] | None = None
    for name in _until_closed(tokens):
        value = next(tokens, b"")
        if _text(name) == _WEIGHTS:
            if value != b"{":
                raise _Strange("it has no weight_map of names")
            weights = _values(tokens)
        else:
            _skip(tokens, value)
    if next(tokens, None) is not None:
        raise _Strange("it is no JSON: something follows the object")
    if weights is None:
        raise _Strange("it has no weight_map of names")
    yield from map(_text, weights)


def _tokens(content: bytes) -> Iterator[bytes]:
    at, text = 0, content.rstrip()
    for _ in range(TOKENS_MAX):
        if at >= len(text):
            return
        match = _TOKEN.match(text, at)
        if match is None:
            raise _Strange(f"it is no JSON: at {at}")
        yield match[1] or match[2] or b"-"
        at = match.end()
    raise _Strange("it has too many tokens")


def _until_closed(tokens: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the names in an object; the caller takes each name's value from `tokens`."""
    for token in tokens:
        if token == b"}":
            return
        yield token
    raise _Strange("it is no JSON: it is cut off")


def _values(tokens: Iterator[bytes]) -> Iterable[bytes]:
    found: dict[bytes, None] = {}
    for _ in _until_closed(tokens):
        found[next(tokens, b"")] = None
        if len(found) > NAMES_MAX:
            raise _Strange(_TOO_MANY)
    return found


def _skip(tokens: Iterator[bytes], first: bytes) -> None:
    depth, token = 0, first
    while True:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            raise _Strange("it is no JSON: a bracket closes nothing")
        if depth == 0:
            return
        if (following := next(tokens, None)) is None:
            raise _Strange("it is no JSON: it is cut off")
        token = following


def _text(token: bytes) -> str:
    if not token.startswith(b'"'):
        raise _Strange("it has no weight_map of names")
    try:
        return str(orjson.loads(token))
    except orjson.JSONDecodeError as error:
        raise _Strange(f"it is no JSON: {error}"[:200]) from error


def _line(content: bytes) -> str:
    if len(content) > _POINTER_BYTES_MAX:
        raise _Strange("it is longer than a name")
    try:
        return content.decode().strip()
    except UnicodeDecodeError as error:
        raise _Strange("it is no text") from error


def _iteration(line: str) -> str:
    """Return the directory of an iteration, as Megatron names it."""
    if line == "release":
        return line
    if not (line.isascii() and line.isdecimal() and len(line) <= _DIGITS_MAX):
        raise _Strange("it is no number of an iteration")
    return f"iter_{int(line):07d}"
