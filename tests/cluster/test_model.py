"""A small version of the model of a large cluster: `python -m tools.cluster_model` computes the whole."""

from __future__ import annotations

import pytest

from tools.cluster_model import Storm, grown, placed, restarted, table


@pytest.mark.slow
def test_a_small_cluster_keeps_to_the_bounds_of_a_large_one() -> None:
    """All but the time that choosing takes: it depends on the machine."""
    found = [*placed(20, 20_000, 2), *grown(4_000), *restarted(20, 4_000)]
    assert [one.what for one in found if not one.holds and not one.what.startswith("choosing")] == []
    assert "busiest node / mean" in table(found)


def test_a_block_that_all_want_at_once_spreads_in_rounds() -> None:
    """Nobody waits for ever, and the owner sends it a few times."""
    storm = Storm(200)
    seconds = storm.run()
    assert len(storm.sources) == 200
    assert storm.rounds <= 5
    assert storm.sent_by_owner <= 8
    assert seconds < 0.1
