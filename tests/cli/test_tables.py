"""Tables of commands: whole in a pipe, within the terminal on one, a line an entry."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from gateway.cli.tables import LINES_MAX, Column, Columns, Row, folded, shortened, table_lines

COLUMNS: Columns[object] = (
    Column("name"),
    Column("prefix", shortened=True),
    Column("bytes", right=True),
    Column("more", rank=1),
    Column("most", rank=2),
)
LONG = "s3://bucket/" + "directory/" * 12 + "part-00001.tar"
ROWS = [Row(("a", LONG, "1.0 GiB", "m" * 30, "n" * 30)), Row(("bb", "s3://b/", "11 B", "-", ""))]


def lines(width: int | None) -> list[str]:
    return [text for text, _ in table_lines(COLUMNS, ROWS, width)]


def test_a_pipe_has_everything_on_one_line() -> None:
    """However long it is; programs cut it up by themselves."""
    head, first, second = lines(None)
    assert head.split() == ["name", "prefix", "bytes", "more", "most"]
    assert first.split() == ["a", LONG, "1.0", "GiB", "m" * 30, "n" * 30]
    assert second.split() == ["bb", "s3://b/", "11", "B", "-"]


@pytest.mark.parametrize("width", [20, 40, 80, 120, 300])
def test_a_terminal_is_never_too_narrow(width: int) -> None:
    """Lines are within it, an entry has five at most, and a key keeps both of its ends where there is room."""
    found = lines(width)
    assert all(cell_len(line) <= width for line in found)
    assert len(found) <= 1 + LINES_MAX * len(ROWS)
    if width >= 40:
        assert found[1].split()[1].startswith("s3://")
        assert ".tar" in found[1]


def test_columns_leave_by_rank_and_follow_below() -> None:
    """What is needed most stays on the line."""
    found = lines(100)
    assert found[0].split() == ["name", "prefix", "bytes", "more"]
    assert found[2] == f"  most: {'n' * 30}"
    assert found[3].split()[:2] == ["bb", "s3://b/"], "nothing follows where there is nothing to say"


def test_neighbours_are_told_apart() -> None:
    """What all of them begin with is left out first."""
    keys = [f"s3://bucket/a-run-with-a-long-name/step-{i}/model-00001-of-00002.safetensors" for i in range(3)]
    columns: Columns[object] = (Column("object", shortened=True),)
    found = [text for text, _ in table_lines(columns, [Row([key]) for key in keys], 60)]
    assert found[2] == "s3://bucket/a-run-w…/step-1/model-00001-of-00002.safetensors"
    assert len({*found}) == 4


def test_wide_characters_count_as_two() -> None:
    """As a terminal shows them."""
    assert cell_len(shortened("数据" * 20, 21)) <= 21
    assert shortened("abcdefgh", 6) == "ab…fgh"
    assert shortened("abc", 3) == "abc"


def test_what_follows_is_bounded() -> None:
    """And says that there is more."""
    found = folded([f"reason-{i} {'x' * 30}" for i in range(20)], 40)
    assert len(found) == LINES_MAX - 1
    assert found[-1].endswith(" …")
    assert all(cell_len(line) <= 40 for line in found)


def test_nothing_is_no_table() -> None:
    """Not even a head."""
    assert list(table_lines(COLUMNS, [], 80)) == []
