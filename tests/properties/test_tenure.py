"""Tenures: whatever sleeps, dies and comes back, one coordinator drives and numbers only grow."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.hub.tenure import (
    NOBODY,
    Claimant,
    Tenure,
    given_up_ms,
    next_tenure,
    renewed_until_ms,
    takeover_text,
)
from hypergpu.units import Milliseconds

LENGTH_MS = Milliseconds(6_000)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["claim", "renew", "write"]),
        st.integers(0, 4_000),
        st.integers(0, 1_500),
    ),
    max_size=60,
)


class SimulatedDatabase:
    """The row, and a clock that nobody else has."""

    def __init__(self, clock_ms: int) -> None:
        self.clock_ms = clock_ms
        self.row = NOBODY
        self.writers: list[int] = []

    def write(self, number: int) -> bool:
        """A transaction with its fence."""
        if number == self.row.number:
            self.writers.append(number)
        return number == self.row.number


class SimulatedCoordinator:
    """One that may sleep at any time: its clock goes on."""

    def __init__(self, name: str, clock_ms: int) -> None:
        self.claimant = Claimant(name, f"{name}:7700", LENGTH_MS)
        self.clock_ms = clock_ms
        self.held: Tenure | None = None
        self.until_ms = Milliseconds(0)

    def is_driving(self, true_ms: int) -> bool:
        return self.held is not None and self.clock_ms + true_ms < self.until_ms

    def act(self, what: str, database: SimulatedDatabase, asked_ms: int, answered_ms: int) -> None:
        """Ask at one moment; the database acts at a later one."""
        database_ms = Milliseconds(database.clock_ms + answered_ms)
        boot_ms = Milliseconds(self.clock_ms + asked_ms)
        if what == "claim":
            taken_tenure = next_tenure(database.row, self.claimant, database_ms)
            if taken_tenure is not None:
                assert taken_tenure.number == database.row.number + 1
                database.row = self.held = taken_tenure
                self.until_ms = given_up_ms(boot_ms, LENGTH_MS)
        elif what == "renew" and self.held is not None and self.is_driving(asked_ms):
            until_ms = renewed_until_ms(database.row, self.held.number, database_ms)
            if until_ms is not None:
                database.row = Tenure(self.held.number, self.claimant.name, "", until_ms, LENGTH_MS)
                self.until_ms = given_up_ms(boot_ms, LENGTH_MS)
        elif self.held is not None:
            is_newest = self.held.number == database.row.number
            assert database.write(self.held.number) == is_newest


@given(STEPS, st.lists(st.integers(-600_000, 600_000), min_size=4, max_size=4))
def test_at_every_moment_at_most_one_drives(
    steps: list[tuple[int, str, int, int]], clocks: list[int]
) -> None:
    database = SimulatedDatabase(clocks[3])
    coordinators = [SimulatedCoordinator(name, clocks[at]) for at, name in enumerate("abc")]
    true_ms = 0
    for who, what, later_ms, takes_ms in steps:
        asked_ms = true_ms + later_ms
        true_ms = asked_ms + takes_ms
        coordinators[who].act(what, database, asked_ms, true_ms)
        drivers = [one for one in coordinators if one.is_driving(true_ms)]
        assert len(drivers) <= 1
    assert database.writers == sorted(database.writers)


def test_its_holder_takes_it_again_and_others_wait() -> None:
    held_tenure = Tenure(4, "a", "a:7700", Milliseconds(10_000), LENGTH_MS)
    again = next_tenure(held_tenure, Claimant("a", "a:7700", LENGTH_MS), Milliseconds(9_000))
    assert again == Tenure(5, "a", "a:7700", Milliseconds(15_000), LENGTH_MS)
    other = Claimant("b", "b:7700", LENGTH_MS)
    assert next_tenure(held_tenure, other, Milliseconds(9_999)) is None
    taken_tenure = next_tenure(held_tenure, other, Milliseconds(10_000))
    assert taken_tenure is not None
    assert taken_tenure.number == 5


def test_one_that_ran_out_is_renewed_where_nobody_took_it() -> None:
    held_tenure = Tenure(4, "a", "a:7700", Milliseconds(10_000), LENGTH_MS)
    assert renewed_until_ms(held_tenure, 4, Milliseconds(50_000)) == 56_000
    assert renewed_until_ms(held_tenure, 3, Milliseconds(1)) is None


def test_a_takeover_is_told_with_what_was_waited_for() -> None:
    held_tenure = Tenure(4, "a", "a:7700", Milliseconds(10_000), LENGTH_MS)
    now_ms = Milliseconds(35_000)
    other = Claimant("b", "b:7700", LENGTH_MS)
    text = "the coordinator at b:7700 has taken over: nothing was heard of the one at a:7700"
    text += " for 31.0 s"
    assert takeover_text(held_tenure, other, now_ms) == text
    late = replace(other, waited_ms=Milliseconds(28_400))
    away = ", of which the database did not answer for 28 s"
    assert takeover_text(held_tenure, late, now_ms) == text + away
    # It was away long ago: the one that drove was heard of since.
    assert takeover_text(
        replace(held_tenure, until_ms=Milliseconds(34_000)), late, now_ms
    ).endswith("7.0 s")


def test_a_coordinator_that_follows_on_itself_tells_of_a_gap_only() -> None:
    held_tenure = Tenure(4, "a", "a:7700", Milliseconds(10_000), LENGTH_MS)
    same = Claimant("a", "a:7700", LENGTH_MS)
    assert takeover_text(held_tenure, same, Milliseconds(9_000)) == ""
    text = "the coordinator at a:7700 goes on: nothing was heard of it for 31.0 s"
    assert takeover_text(held_tenure, same, Milliseconds(35_000)) == text
    assert takeover_text(held_tenure, replace(same, is_alone=True), Milliseconds(35_000)) == ""
    given_back = replace(held_tenure, until_ms=Milliseconds(0))
    assert takeover_text(given_back, same, Milliseconds(35_000)) == ""
    waiting_claimant = replace(same, waited_ms=Milliseconds(3_000))
    assert "did not answer for 3 s" in takeover_text(
        held_tenure, waiting_claimant, Milliseconds(9_000)
    )
    text = "nothing was heard of it while the database did not answer for 3 s"
    assert takeover_text(given_back, waiting_claimant, Milliseconds(35_000)).endswith(text)
