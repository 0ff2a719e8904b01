"""What a manifest names is read from its bytes alone; what cannot be understood is said to be so, whatever it is."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.model import ObjectKey
from gateway.writeback.checkpoints import manifests
from gateway.writeback.checkpoints.manifests import NamedFiles, NotUnderstood, may_be_understood, named_files

RECORDED = Path(__file__).parent / "recorded"
"""Written by torch 2.13: `torch.distributed.checkpoint.save` by one process, and by two that share tensors."""


def named(name: str, content: bytes) -> NamedFiles | NotUnderstood:
    return named_files(ObjectKey("bucket", f"run/step-1/{name}"), content)


def keys(name: str, content: bytes) -> list[str]:
    found = named(name, content)
    assert isinstance(found, NamedFiles), found
    return [one.removeprefix("run/step-1/") for one in (*found.keys, *found.directories)]


def index_of(*names: Any) -> bytes:
    return json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}}).encode()


@dataclass
class _StorageInfo:
    """As PyTorch's, by which its `.metadata` is recognised."""

    relative_path: Any
    offset: int = 0


def dcp(*paths: Any, protocol: int = 4, more: Any = None) -> bytes:
    return pickle.dumps({"storage_data": [_StorageInfo(one) for one in paths], "more": more}, protocol)


@pytest.mark.parametrize(
    ("name", "expected"), [("one_rank", ["__0_0.distcp"]), ("two_ranks", ["__0_0.distcp", "__1_0.distcp"])]
)
def test_what_torch_writes_is_understood(name: str, expected: list[str]) -> None:
    """Each file once, in the order in which it is named first."""
    assert keys(".metadata", (RECORDED / f"{name}.metadata").read_bytes()) == expected


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_understood(protocol: int) -> None:
    """Strings that come again are numbers in the memo."""
    tensors = ["relative", "path", "x" * 300, 7, 2.5, None, (), {"__9_9.distcp": b"__8_8.distcp"}, 2**80]
    paths = ["__0_0.distcp", "__0_1.distcp", "__0_0.distcp", "sub/__1_0.distcp", "y" * 300, "relative"]
    assert keys(".metadata", dcp(*paths, protocol=protocol, more=tensors)) == list(dict.fromkeys(paths))


def test_an_index_names_the_files_of_its_weights() -> None:
    assert keys("model.safetensors.index.json", index_of("a.safetensors", "b.safetensors", "a.safetensors")) == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert keys("pytorch_model.bin.index.json", index_of("pytorch_model-00001-of-00002.bin")) == [
        "pytorch_model-00001-of-00002.bin"
    ]


@pytest.mark.parametrize(
    ("name", "content", "directory"),
    [
        ("latest", "global_step100", "global_step100"),
        ("latest", " step-7\n", "step-7"),
        ("latest", "checkpoint", "checkpoint"),
        ("latest_universal", "global_step100_universal", None),
        ("latest", "the last one", None),
        ("latest", "../global_step100", None),
        ("latest_checkpointed_iteration.txt", "100\n", "iter_0000100"),
        ("latest_checkpointed_iteration.txt", "12345678", "iter_12345678"),
        ("latest_checkpointed_iteration.txt", "release", "release"),
        ("latest_checkpointed_iteration.txt", "-1", None),
        ("latest_checkpointed_iteration.txt", "9" * 1000, None),
        ("latest_checkpointed_iteration.txt", "\u0661", None),
        ("latest.json", "global_step100", None),
        ("_SUCCESS", "", None),
        ("checkpoint", 'model_checkpoint_path: "ckpt-1"', None),
    ],
)
def test_pointers_name_a_directory(name: str, content: str, directory: str | None) -> None:
    found = named(name, content.encode())
    if directory is None:
        assert isinstance(found, NotUnderstood)
    else:
        assert found == NamedFiles(directories=(f"run/step-1/{directory}",))


STRANGE = ["", "/etc/passwd", "..", "../x", "a/../b", "./a", "a//b", "a/", "s3://other/key", "a\\b", "a\0b", "x" * 1100]
STRANGE += ["\ud800", "a\nb"]


@pytest.mark.parametrize("path", [*STRANGE, None, 7, b"bytes", ["a"]])
def test_what_leads_elsewhere_is_not_understood(path: Any) -> None:
    """One such path is enough: nothing of it is believed."""
    assert isinstance(named(".metadata", dcp("__0_0.distcp", path)), NotUnderstood)
    if isinstance(path, str):
        assert isinstance(named("m.index.json", json.dumps({"weight_map": {"a": path}}).encode()), NotUnderstood)


def test_a_manifest_does_not_name_itself() -> None:
    """It would wait for itself."""
    assert keys("m.index.json", index_of("m.index.json", "a")) == ["a"]
    assert isinstance(named("m.index.json", index_of("m.index.json")), NotUnderstood)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"weight_map":' * 10_000,
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "' + b"9" * 10 + b"\xff" + b'"}}',
        b"9" * 100_000,
    ],
)
def test_what_is_no_index_is_not_understood(content: bytes) -> None:
    assert isinstance(named("m.index.json", content), NotUnderstood)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no pickle": lambda: b"not a pickle",
    "cut off": lambda: (RECORDED / "two_ranks.metadata").read_bytes()[:-1],
    "another pickle": lambda: pickle.dumps(["__0_0.distcp"]),
    "no paths": lambda: pickle.dumps([_StorageInfo]),
    "many opcodes": lambda: b"N" * 3_000_000 + b".",
    "deep": lambda: b"(" * 1_000_000 + b"N" + b"l" * 1_000_000 + b".",
    "a long number in digits": lambda: b"L" + b"9" * 3_000_000 + b"L\n.",
    "a long number": lambda: b"\x8b\x00\x00\x20\x00" + b"\xff" * 0x200000 + b".",
    "a length without bytes": lambda: b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a negative length": lambda: b"\x8b\xff\xff\xff\xff.",
    "a memo that is far away": lambda: b"Ng99999999999999999999\n.",
    "escapes": lambda: b"S'" + b"\\q" * 100_000 + b"'\n.",
    "a call": lambda: b"cos\nsystem\n(S'false'\ntR.",
    "a line without an end": lambda: b"V" + b"x" * 3_000_000,
    "twice the name of the attribute": lambda: dcp("relative_path", "relative_path", protocol=2)[:-1],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickles_are_not_understood(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time, and nothing of them is carried out."""
    monkeypatch.setattr(manifests, "OPCODES_MAX", 100_000)
    content = HOSTILE[kind]()
    began = time.process_time()
    assert isinstance(named(".metadata", content), NotUnderstood)
    assert time.process_time() - began < 2.0


def test_many_short_strings_are_understood() -> None:
    """As the names of layers, part by part, of which PyTorch writes several for each tensor."""
    layers = [tuple(f"layer{number}.attention.wq.w".split(".")) for number in range(20_000)]
    assert keys(".metadata", dcp("__0_0.distcp", more=layers)) == ["__0_0.distcp"]


SHORT_STRINGS = b"".join(b"\x8c\x04%04d\x94" % number for number in range(10_000))

MEMORY_HUNGRY = {
    "remembered": (".metadata", b"\x80\x04\x8c\x01a" + b"\x94" * 300_000 + b"."),
    "short-strings": (
        ".metadata",
        b"\x80\x04" + SHORT_STRINGS * 6 + b".",
    ),
    "empty-lists": ("m.index.json", b'{"a": [' + b"[]," * 100_000 + b'[]], "weight_map": {"a": "b"}}'),
    "nested": ("m.index.json", b'{"a": ' + b"[" * 150_000 + b"]" * 150_000 + b"}"),
    "tensors": ("m.index.json", b'{"weight_map": {' + b'"a": "b",' * 30_000 + b'"c": "b"}}'),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEMORY_HUNGRY)
def test_memory_is_bounded_by_the_length(kind: str) -> None:
    """Whatever the bytes are: a few times their length."""
    name, content = MEMORY_HUNGRY[kind]
    tracemalloc.start()
    try:
        named(name, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"weight_map": {"a": "b"}',
        b'{"weight_map": {"a": "b"}} {}',
        b'{"weight_map": {"a": ["b"]}}',
        b'{"weight_map": {"a": "b"}, "weight_map": []}',
        b'{"weight_map": {"a": "\\ud800"}}',
        b'{"weight_map": {"a": "b}}',
        b'{"x": {"weight_map": {"a": "b"}}}',
        b'{"x": ]}',
    ],
)
def test_an_index_that_is_none_is_not_understood(content: bytes) -> None:
    """Cut off, continued, of other values, or with the names somewhere else."""
    assert isinstance(named("m.index.json", content), NotUnderstood)


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
        lambda of: st.lists(of) | st.dictionaries(st.text(), of),
    ),
    st.booleans(),
)
def test_what_else_an_index_says_does_not_matter(other: Any, is_before: bool) -> None:
    """Before or behind the names, whatever it is, in any writing of JSON."""
    weights = {"w": 'a"b\u00e9', "v": "c"}
    document = {"metadata": other, "weight_map": weights} if is_before else {"weight_map": weights, "metadata": other}
    for content in (json.dumps(document), json.dumps(document, ensure_ascii=False, indent=1)):
        assert keys("m.index.json", content.encode()) == ['a"b\u00e9', "c"]


def test_too_much_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, and names."""
    monkeypatch.setattr(manifests, "CONTENT_BYTES_MAX", 10_000)
    monkeypatch.setattr(manifests, "NAMES_MAX", 10)
    assert len(keys("m.index.json", index_of(*map(str, range(10))))) == 10
    assert isinstance(named("m.index.json", index_of(*map(str, range(11)))), NotUnderstood)
    assert isinstance(named("m.index.json", index_of("x") + b" " * 10_000), NotUnderstood)
    assert isinstance(named(".metadata", dcp(*map(str, range(11)))), NotUnderstood)


@given(
    st.sampled_from([".metadata", "m.index.json", "latest", "latest_checkpointed_iteration.txt", "x"]),
    st.binary(max_size=400),
)
def test_any_bytes_are_answered(name: str, content: bytes) -> None:
    """No exception, and no name outside of the directory."""
    _is_within(named(name, content))


@given(st.data())
def test_harmed_manifests_are_answered(data: st.DataObject) -> None:
    """Bytes of a real one, changed here and there."""
    content = bytearray((RECORDED / "two_ranks.metadata").read_bytes())
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)):
        content[at] = byte
    _is_within(named(".metadata", bytes(content)))


@given(st.lists(st.text(max_size=12), min_size=1, max_size=8), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_an_index_and_a_pickle_say_the_same(paths: list[str], protocol: int) -> None:
    """Whatever the names are: all of them, or none."""
    try:
        pickled = dcp(*paths, protocol=protocol)
    except UnicodeEncodeError:
        return
    index, metadata = named("m.index.json", index_of(*paths)), named(".metadata", pickled)
    assert isinstance(index, NamedFiles) == isinstance(metadata, NamedFiles)
    if isinstance(index, NamedFiles):
        assert index == metadata
        assert set(index.keys) <= {f"run/step-1/{path}" for path in paths}


def _is_within(found: NamedFiles | NotUnderstood) -> None:
    if isinstance(found, NamedFiles):
        for one in (*found.keys, *found.directories):
            assert one.startswith("run/step-1/")
            assert ".." not in one.split("/")


def test_only_some_names_are_read_at_all() -> None:
    """Others are flushed without a look at their bytes."""
    names = [".metadata", "x.index.json", "latest", "latest_checkpointed_iteration.txt"]
    assert all(may_be_understood(ObjectKey("b", f"a/{name}")) for name in names)
    assert not any(may_be_understood(ObjectKey("b", name)) for name in ("_SUCCESS", "manifest.json", "a.metadata"))
