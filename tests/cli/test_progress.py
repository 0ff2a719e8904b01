"""The bar of long work: no time left before it is known, and the gateway's own word where it has one."""

from __future__ import annotations

from rich.progress import Progress

from gateway.cli.tables import LeftColumn, RateColumn


def test_a_bar_says_how_long_the_rest_takes_once_that_is_known() -> None:
    """By what has moved within the last minute: parts of a flush come all at once, and late."""
    now, column = 0.0, LeftColumn()
    with Progress(column, get_time=lambda: now, disable=True) as bar:
        number = bar.add_task("flush", total=1000)
        [task] = bar.tasks

        def shown(at: float, completed: int) -> str:
            nonlocal now
            now = at
            bar.update(number, completed=completed)
            return column.render(task).plain

        assert shown(0.0, 0) == "-:--:--"
        assert shown(1.0, 300) == "-:--:--", "as fast as that it does not go on"
        assert shown(8.0, 300) == "-:--:--"
        assert shown(10.0, 500) == "0:00:10"
        assert shown(20.0, 1000) == ""


def test_a_job_tells_itself_how_long_it_takes() -> None:
    """And how fast it goes: it knows what is on its way, and is not shown as done."""
    column, of_rate = LeftColumn(), RateColumn()
    with Progress(column, disable=True) as bar:
        number = bar.add_task("warm", total=1000, seconds_left=None)
        [task] = bar.tasks
        assert column.render(task).plain == "-:--:--"
        assert of_rate.render(task).plain == ""
        bar.update(number, completed=10, seconds_left=99.6, bytes_per_second=2.0 * 2**20)
        assert column.render(task).plain == "0:01:40"
        assert of_rate.render(task).plain == "2.0 MiB/s"
