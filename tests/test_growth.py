"""What reads the bytes of clients costs no more than in proportion to them (docs/security.md)."""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import pkgutil
import re
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from xml.etree.ElementTree import ParseError, fromstring

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gateway
from gateway.core.checkpoint_patterns import too_many
from gateway.core.model import ObjectKey
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.xml_writer import encode_list_key, escape
from gateway.writeback.checkpoints.layouts import Rules, member_of, rules_of
from tests.support.client_parsers import PARSERS, ClientParser
from tests.support.growth import backtracking, grows_in_pieces, grows_too_fast, python_steps
from tests.support.piecewise_parsers import PIECEWISE
from tests.support.rest_is_slow import rest_is_slow

EXAMPLES = int(os.environ.get("FOREBAY_GROWTH_EXAMPLES", "2"))
SOURCES = Path(gateway.__file__).parent
OLD_ETAG = re.compile(r"""\s*(?:W/)?("[^"]*"|[^",\s]+(?:\s+[^",\s]+)*)?\s*(?:,|$)""")


@pytest.mark.parametrize("name", rest_is_slow(PARSERS, *(set(list(PARSERS)[::3]) - {"presigned"})))
def test_a_word_again_and_again_costs_in_proportion(name: str) -> None:
    """Every word of the grammar, from 256 bytes to 64 KiB of it."""
    parser = PARSERS[name]
    for word in parser.words:
        growth = grows_too_fast(parser.parse, parser.begin, word, b"z" + parser.end)
        assert growth is None, f"{word!r} again and again: {growth}"


@pytest.mark.parametrize("name", PARSERS)
def test_generated_repetitions_cost_in_proportion(name: str) -> None:
    """A beginning, something again and again, and an end, each put together from words of the grammar."""
    parser = PARSERS[name]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(_texts(parser, 0, 3), _texts(parser, 1, 4), _texts(parser, 0, 3))
    def play(begin: bytes, unit: bytes, end: bytes) -> None:
        growth = grows_too_fast(parser.parse, parser.begin + begin, unit, end + parser.end)
        assert growth is None, str(growth)

    play()


def _texts(parser: ClientParser, least: int, most: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(parser.words), min_size=least, max_size=most).map(b"".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECEWISE)
async def test_a_byte_costs_the_same_whatever_came_before_it(name: str) -> None:
    """Whatever is read as it arrives, in the smallest pieces."""
    reader = PIECEWISE[name]
    for word in reader.words:
        growth = grows_in_pieces(reader.make, reader.begin, word)
        assert growth is None, f"{word!r} again and again: {growth}"
        await asyncio.sleep(0)  # requests that have come whole begin, and are cancelled at the end


SECONDS_OF_A_KEY_MAX = 0.02


def test_the_patterns_of_a_slot_cost_little_of_any_key() -> None:
    """As many as a slot may have, and `**` in each: the longest keys, of the most parts, do not keep others waiting."""
    for unit in ("", "*/"):
        patterns = tuple(f"**/{unit}{number:03}x-{{step}}/" for number in range(64 // (1 + unit.count("/"))))
        assert too_many(patterns) is None
        assert too_many((*patterns, "**/a/")) is not None
        rules = rules_of(patterns)
        for word in ("a/", "/", "063x-1234567890123456789/", "063x-/", "7/031x-1234567890123456789/"):
            key = ObjectKey("bucket", (word * 1024)[:1024])
            assert member_of(key, Rules(rules.patterns, built_in=False)) is None
            seconds = min(timeit.repeat(lambda key=key, rules=rules: member_of(key, rules), number=1, repeat=5))  # type: ignore[misc]
            assert seconds < SECONDS_OF_A_KEY_MAX, (unit, word)


FILLERS = ("a", "&", "<", ">", '"', "'", "\r", "\x00", "\x7f", "\xe9", "\ud800", "\uffff", "%")
TEXT_SIZE = 16 * 1024
DOCUMENT_BYTES_MAX = 128 * 1024


def _refusal_of(text: str) -> bytes:
    """Every field that repeats what a client has sent."""
    error = s3_error(
        "SignatureDoesNotMatch", text, AWSAccessKeyId=text, StringToSign=text, SignatureProvided=text,
        CanonicalRequest=text,
    )  # fmt: skip
    return error_document(error, resource=text, request_id="1", host_id="2")


def _writing(write: Callable[[str], object], text: str) -> Callable[[bytes], object]:
    return lambda _: write(text)


def test_no_filler_costs_more_than_another() -> None:
    """What has to be escaped is done by C, and however much of it there is, answers stay small."""
    writers: tuple[Callable[[str], object], ...] = (escape, partial(encode_list_key, url=False), _refusal_of)
    for write in writers:
        steps = {one: python_steps(_writing(write, one * TEXT_SIZE), b"") for one in FILLERS}
        assert max(steps.values()) < 2 * steps["a"] + TEXT_SIZE, steps
    assert max(len(_refusal_of(one * TEXT_SIZE)) for one in FILLERS) < DOCUMENT_BYTES_MAX


# --- patterns ---------------------------------------------------------------------------------------------------------


OF_OPERATORS = ("gateway.__main__", "gateway.config.", "gateway.demo.", "gateway.jobs.indexing.")
"""What they read was written by those who run the gateway, or their bucket."""


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(gateway.__path__, "gateway."):
        if not found.ispkg and not found.name.startswith(OF_OPERATORS):
            yield found.name


def source_of(module: str) -> Path:
    return SOURCES / (module.removeprefix("gateway.").replace(".", "/") + ".py")


def named_patterns(name: str) -> dict[str, re.Pattern[str] | re.Pattern[bytes]]:
    """Those of a module, in tuples and mappings too."""
    found: dict[str, re.Pattern[str] | re.Pattern[bytes]] = {}
    for variable, value in vars(importlib.import_module(name)).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        for number, one in enumerate(values):
            if isinstance(one, re.Pattern):
                found[f"{variable}[{number}]"] = one
    return found


@pytest.mark.slow
def test_no_pattern_looks_at_a_text_again_and_again() -> None:
    """Neither from within a match, nor from one place after the other."""
    looked_at = 0
    for name in modules():
        searched = names_searched(source_of(name))
        for variable, pattern in named_patterns(name).items():
            looked_at += 1
            reason = backtracking(pattern, searches=variable.partition("[")[0] in searched)
            assert reason is None, f"{name}.{variable} = {pattern.pattern!r}: {reason}"
    assert looked_at > 40


_SEARCHING = frozenset({"search", "sub", "subn", "split", "findall", "finditer"})


def names_searched(path: Path) -> set[str]:
    """The patterns that a module looks for anywhere in a text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in _SEARCHING:
            owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            if isinstance(owner, ast.Name):
                found.add(owner.id)
    return found


_BOUNDED = {("gateway.core.checkpoint_patterns", "_sought"), ("gateway.writeback.order", "_by_depth")}
"""Make expressions of settings, for keys of 1,024 bytes: what that costs at most is tested beside them."""


@pytest.mark.slow
def test_every_pattern_has_a_name_by_which_it_is_looked_at() -> None:
    """None is made within a function, where the test above does not see it."""
    for name in modules():
        for function in ast.walk(ast.parse(source_of(name).read_text(encoding="utf-8"))):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert not _uses_of_re(function) or (name, function.name) in _BOUNDED, f"{name}, {function.name}"


def _uses_of_re(function: ast.AST) -> set[str]:
    used = {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"
    }
    return used & (_SEARCHING | {"match", "fullmatch", "compile"})


# --- the tests find what they are for ---------------------------------------------------------------------------------


def every_pair(data: bytes) -> None:
    for index in range(len(data) // 64):
        for other in range(index):
            if index == -other:
                raise AssertionError


def joined_again_and_again(data: bytes) -> None:
    value = ""
    for part in data.split(b","):
        value = f"{value},{part.decode('latin-1')}"


def looked_up_in_a_list(data: bytes) -> None:
    names = [b"%d%b" % (number, part) for number, part in enumerate(data.split(b","))]
    assert sum(name in names for name in reversed(names)) == len(names)


def put_together_from_one_value(data: bytes) -> None:
    value = data.decode("latin-1")
    lines = [f"a:{value}" for _ in range(data.count(b","))]
    text = "\n".join(lines)
    assert text is not None


def old_etags(data: bytes) -> None:
    OLD_ETAG.match(data.decode("latin-1"))


def namespaces_in_place(data: bytes) -> None:
    try:
        fromstring(data)
    except ParseError:
        return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parse", "begin", "unit", "end"),
    [
        (every_pair, b"", b"a", b""),
        (joined_again_and_again, b"", b"a,", b""),
        (looked_up_in_a_list, b"", b"a,", b""),
        (put_together_from_one_value, b"", b",a", b""),
        (old_etags, b"", b" ", b'"y"z'),
        (namespaces_in_place, b"<D xmlns:a='" + b"u" * 100, b"' a:b%d='", b"'/>"),
    ],
)
def test_what_costs_more_is_found_out(parse: Callable[[bytes], None], begin: bytes, unit: bytes, end: bytes) -> None:
    """Loops in Python, copies in C, a pattern that backtracks, and what a library does."""
    if parse is namespaces_in_place:
        half = b"<D xmlns:a='" + b"u" * 8_000
        assert grows_too_fast(lambda data: parse(half + b"u" * len(data) + data), b"' a:a='", b"' a:b%d='", end)
    else:
        assert grows_too_fast(parse, begin, unit, end)


def searched_from_the_beginning() -> Callable[[bytes], None]:
    gathered = bytearray()

    def take(data: bytes) -> None:
        gathered.extend(data)
        gathered.find(b"\r\n")

    return take


def put_together_again() -> Callable[[bytes], None]:
    gathered = [b""]

    def take(data: bytes) -> None:
        text = gathered[0] + data
        gathered[0] = text

    return take


def counted() -> Callable[[bytes], None]:
    sizes = []
    return lambda data: sizes.append(len(data))


def test_who_looks_at_everything_again_is_found_out() -> None:
    """In C, and by copying; and who does not is not."""
    assert grows_in_pieces(searched_from_the_beginning, b"", b"a")
    assert grows_in_pieces(put_together_again, b"", b"a")
    assert not grows_in_pieces(counted, b"", b"a")


def test_a_pattern_that_backtracks_is_found_out() -> None:
    """The one by which 32 KiB of a header would have held a worker for a day, and its like."""
    assert backtracking(OLD_ETAG, searches=False)
    assert backtracking(re.compile(r"(a+)+b"), searches=False)
    assert backtracking(re.compile(r"<a>\s*(?:x)?\s*</a>"), searches=True)
    assert backtracking(re.compile(r"\s*x"), searches=True)
    assert not backtracking(re.compile(r"\s*x"), searches=False)
    assert not backtracking(re.compile(r"\s*+(?:x\s*+)?y"), searches=False)
