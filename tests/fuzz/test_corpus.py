"""What fuzzing begins with and what it has found, sent again each time (tests/fuzz/run.py looks for more)."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from tests.fuzz.connections import Recorder, Seen, as_h11_reads, check_framing
from tests.fuzz.targets import NAMES, directory_name, seeds, target

MUTANTS = 150
GROWTH_BYTES_MAX = 2**20


def mutants(inputs: list[bytes], rng: random.Random, count: int) -> list[bytes]:
    """Pieces of the inputs cut out, repeated, put together and changed."""
    made = []
    for _ in range(count):
        data = bytearray(rng.choice(inputs))
        for _ in range(rng.randint(1, 4)):
            position, length = rng.randint(0, len(data)), rng.randint(0, 8)
            change = rng.randrange(4)
            if change == 0:
                del data[position : position + length]
            elif change == 1:
                data[position:position] = rng.choice(inputs)[:64]
            elif change == 2:
                data[position:position] = data[position : position + length] * rng.randint(1, 5)
            elif position < len(data):
                data[position] = rng.choice(b'\0\t\n\r "%&,/:;<=>?\\\x7f\x80\xff')
        made.append(bytes(data[:8192]))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_what_was_found_do_no_harm(name: str) -> None:
    """An answer or a refusal to each, in bounded memory; to connections an answer or a close, and never a 500."""
    inputs = seeds(name)
    with target(name) as check:
        for data in inputs + mutants(inputs, random.Random(name), MUTANTS):
            check(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "authorization", "presigned", "conditions", "DeleteObjects"])
def test_nothing_is_kept_of_what_strangers_send(name: str) -> None:
    """However many different inputs come: what is kept for the next request is bounded."""
    inputs = seeds(name)
    with target(name) as check:

        def send(seed: int) -> None:
            for data in mutants(inputs, random.Random(seed), 1000):
                check(data + b"%d" % random.Random(seed).getrandbits(64))

        send(1)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for seed in range(2, 5):
                send(seed)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - before < GROWTH_BYTES_MAX
        finally:
            tracemalloc.stop()


def test_every_file_of_the_corpus_belongs_to_a_target() -> None:
    """What is in no target's folder would be sent to nobody."""
    from tests.fuzz.targets import CORPUS

    known = {directory_name(name) for name in NAMES}
    assert {path.name for path in CORPUS.iterdir()} <= known


def test_a_parser_that_disagrees_is_found_out() -> None:
    """Where another request begins than the second parser says."""
    data = b"PUT /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nabGET /b HTTP/1.1\r\nHost: h\r\n\r\n"
    right = [Seen(b"PUT", b"/a", b"ab"), Seen(b"GET", b"/b", b"")]
    assert as_h11_reads(data)[0] == right
    check_framing(data, right)
    for wrong in ([Seen(b"PUT", b"/a", b"")], [right[0], Seen(b"GET", b"/c", b"")]):
        with pytest.raises(AssertionError):
            check_framing(data, wrong)
    assert Recorder().seen == []
