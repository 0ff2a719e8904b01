"""Leases: parts of a ceiling that never sum up to more than it, whoever asks, dies, or hears nothing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.policy.leases import ASK_SECONDS, LEASE_SECONDS, LeaseBook, Lessee, floors, max_min

DEMANDS = st.lists(st.floats(0, 1e10), min_size=1, max_size=20)


@given(st.floats(1, 1e10), DEMANDS)
def test_parts_are_max_min_fair(capacity: float, demands: list[float]) -> None:
    """They sum up to the capacity; who gets less than it wants has no smaller part than anybody else."""
    parts = max_min(capacity, demands)
    assert abs(sum(parts) - capacity) <= 1e-6 * capacity
    for part, demand in zip(parts, demands, strict=True):
        assert part >= demand * (1 - 1e-9) or part >= max(parts) * (1 - 1e-6)


@given(st.floats(1, 1e10), st.lists(st.floats(0, 1e10), min_size=2, max_size=20))
def test_who_wants_more_gets_no_less(capacity: float, demands: list[float]) -> None:
    """Parts have the order of demands."""
    pairs = sorted(zip(demands, max_min(capacity, demands), strict=True))
    parts = [part for _, part in pairs]
    assert all(one <= other * (1 + 1e-6) for one, other in pairwise(parts))


HOLDERS = ["worker0", "worker1", "worker2"]
CEILINGS = [1000.0, 50.0]
FLOORS = [one * (1 - 1e-9) for one in floors(CEILINGS, len(HOLDERS))]


class Leases(RuleBasedStateMachine):
    """Holders, book and time: asking for this and that, death and return of either side, a book that is stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.book: LeaseBook | None = LeaseBook(CEILINGS, HOLDERS, self.now)
        self.lessees: dict[str, Lessee] = {}
        self.demands = {holder: [0.0, 0.0] for holder in HOLDERS}
        self.due = dict.fromkeys(HOLDERS, self.now)

    @rule(holder=st.sampled_from(HOLDERS))
    def holder_begins(self, holder: str) -> None:
        self.lessees[holder] = Lessee(CEILINGS, len(HOLDERS), self.now)
        self.due[holder] = self.now

    @rule(holder=st.sampled_from(HOLDERS))
    def holder_dies(self, holder: str) -> None:
        self.lessees.pop(holder, None)

    @rule(holder=st.sampled_from(HOLDERS), demands=st.lists(st.sampled_from([0.0, 5.0, 60.0, 2000.0]), min_size=2))
    def holder_wants(self, holder: str, demands: list[float]) -> None:
        self.demands[holder] = demands[:2]

    @rule(seconds=st.floats(0.01, 2.0), late=st.floats(0.0, 0.05))
    def time_passes(self, seconds: float, late: float) -> None:
        """Every living holder asks in time, or almost."""
        end = self.now + seconds
        while self.lessees and (at := min(self.due[holder] for holder in self.lessees)) < end:
            self.now = max(self.now, at)
            self.ask(next(holder for holder in self.lessees if self.due[holder] == at), late)
            self.no_more_than_the_ceilings()
        self.now = end

    def ask(self, holder: str, late: float) -> None:
        self.due[holder] = self.now + ASK_SECONDS + late
        rates = self.book.ask(holder, self.demands[holder], self.now) if self.book else None
        if rates is not None:
            self.lessees[holder].granted(rates, self.now)

    @rule()
    def book_dies(self) -> None:
        self.book = None

    @rule()
    def book_begins_anew(self) -> None:
        self.book = LeaseBook(CEILINGS, HOLDERS, self.now)

    @rule(seconds=st.floats(LEASE_SECONDS, 3.0))
    def book_is_stuck(self, seconds: float) -> None:
        """It answers nobody, and goes on as if nothing had been."""
        book, self.book = self.book, None
        self.time_passes(seconds, 0.0)
        self.book = book

    @invariant()
    def no_more_than_the_ceilings(self) -> None:
        rates = [lessee.rates(self.now) for lessee in self.lessees.values()]
        for i, ceiling in enumerate(CEILINGS):
            assert sum(one[i] for one in rates) <= ceiling * (1 + 1e-9)

    @invariant()
    def nobody_starves(self) -> None:
        for lessee in self.lessees.values():
            assert all(rate >= floor for rate, floor in zip(lessee.rates(self.now), FLOORS, strict=True))


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def settled(demands: dict[str, list[float]], book: LeaseBook, now: float, rounds: int = 30) -> dict[str, list[float]]:
    """What everybody has when all have asked again and again."""
    rates: dict[str, list[float] | None] = {}
    for _ in range(rounds):
        now += ASK_SECONDS
        for holder, wanted in demands.items():
            rates[holder] = book.ask(holder, wanted, now)
    return {holder: rate for holder, rate in rates.items() if rate is not None}


def test_one_busy_worker_gets_nearly_everything() -> None:
    """All but the floors of the idle ones."""
    book = LeaseBook([1000.0], HOLDERS, 0.0)
    rates = settled({"worker0": [1000.0], "worker1": [0.0], "worker2": [0.0]}, book, 0.0)
    assert rates["worker0"][0] > 950
    assert rates["worker1"][0] == rates["worker2"][0] > 10


def test_busy_workers_share_evenly_what_the_modest_leave() -> None:
    """Max-min: the modest have what they want, the busy the same each."""
    book = LeaseBook([1000.0], HOLDERS, 0.0)
    rates = settled({"worker0": [1000.0], "worker1": [1000.0], "worker2": [100.0]}, book, 0.0)
    assert rates["worker2"][0] == 100
    assert abs(rates["worker0"][0] - 450) < 1
    assert abs(rates["worker1"][0] - 450) < 1


def test_a_worker_that_becomes_busy_has_its_part_after_two_askings() -> None:
    """The others give up theirs at their next asking, and then it is there."""
    book = LeaseBook([1000.0], HOLDERS, 0.0)
    settled({"worker0": [1000.0], "worker1": [0.0], "worker2": [0.0]}, book, 0.0)
    rates = settled({"worker1": [1000.0], "worker0": [1000.0], "worker2": [0.0]}, book, 30 * ASK_SECONDS, rounds=2)
    assert rates["worker1"][0] > 450


def test_a_dead_workers_part_is_dealt_out_when_its_lease_has_run_out() -> None:
    """Not sooner: it may only be slow. Its floor stays for its successor."""
    book = LeaseBook([1000.0], ["worker0", "worker1"], 0.0)
    settled({"worker0": [1000.0], "worker1": [1000.0]}, book, 0.0)
    now = 30 * ASK_SECONDS
    shortly = book.ask("worker0", [1000.0], now + LEASE_SECONDS / 2)
    later = book.ask("worker0", [1000.0], now + LEASE_SECONDS * 1.01)
    assert shortly is not None
    assert later is not None
    assert shortly[0] < 501
    assert 970 < later[0] < 980


def test_a_book_begun_anew_waits_for_the_leases_of_its_predecessor_to_end() -> None:
    """It does not know whom they were given to."""
    book = LeaseBook([1000.0], ["worker0", "worker1"], 10.0)
    assert book.ask("worker1", [1000.0], 10.0) is None
    assert book.ask("worker1", [1000.0], 10.0 + LEASE_SECONDS * 0.99) is None
    assert book.ask("worker1", [1000.0], 10.0 + LEASE_SECONDS) is not None


def test_a_single_worker_has_the_whole_ceiling_always() -> None:
    """With a book, without one, and in between."""
    lessee, book = Lessee([1000.0], 1, 0.0), LeaseBook([1000.0], ["worker0"], 0.0)
    for tick in range(20):
        now = tick * ASK_SECONDS
        rates = book.ask("worker0", [0.0], now)
        if rates is not None:
            lessee.granted(rates, now)
        assert list(lessee.rates(now)) == [1000.0]
    assert list(lessee.rates(100.0)) == [1000.0]


def test_without_answers_a_lease_ends_in_static_shares() -> None:
    """First in what is surely free, then in the static share: by then the leases of all others have ended too."""
    small, large = Lessee([1000.0], 4, -1.0), Lessee([1000.0], 4, -1.0)
    small.granted([10.0], 0.0)
    large.granted([900.0], 0.0)
    assert (list(small.rates(0.1)), list(large.rates(0.1))) == ([10.0], [900.0])
    behind = LEASE_SECONDS
    assert (list(small.rates(behind)), list(large.rates(behind))) == ([10.0], [250.0])
    assert (list(small.rates(2 * behind)), list(large.rates(2 * behind))) == ([250.0], [250.0])


def test_a_worker_that_begins_is_content_with_its_floor_for_a_moment() -> None:
    """All else may be leased to others; when that must have run out, its static share is free."""
    lessee = Lessee([1000.0], 4, 0.0)
    assert list(lessee.rates(0.0)) == floors([1000.0], 4) == [12.5]
    assert list(lessee.rates(2 * LEASE_SECONDS)) == [250.0]


def test_an_answer_that_comes_late_does_not_undo_a_later_one() -> None:
    """Answers are known by the time of what they answer."""
    lessee = Lessee([1000.0], 4, 0.0)
    lessee.granted([300.0], 1.0)
    lessee.granted([900.0], 0.9)
    assert list(lessee.rates(1.1)) == [300.0]
