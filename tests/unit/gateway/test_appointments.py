"""When nodes may dial that all want to at once."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.hub.admission import LATE_MS, Appointments
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def node(number: int) -> NodeId:
    return NodeId(f"0x{number:040x}")


def at(ms: int) -> Milliseconds:
    return Milliseconds(ms)


def test_a_burst_comes_in_at_once_and_the_others_get_appointments_one_interval_apart() -> None:
    appointments = Appointments(per_s=2, burst=3)
    waits = [appointments.wait_ms(node(number), at(0)) for number in range(6)]
    assert waits == [0, 0, 0, 500, 1_000, 1_500]


def test_whoever_keeps_its_appointment_is_let_in_and_whoever_is_early_is_told_again() -> None:
    appointments = Appointments(per_s=1, burst=1)
    assert [appointments.wait_ms(node(number), at(0)) for number in range(3)] == [0, 1_000, 2_000]
    assert appointments.wait_ms(node(2), at(500)) == 1_500
    assert appointments.wait_ms(node(1), at(1_000)) == 0
    assert appointments.wait_ms(node(2), at(2_300)) == 0


def test_an_appointment_made_for_a_node_that_is_sent_away_is_kept_for_it() -> None:
    appointments = Appointments(per_s=1, burst=1)
    assert appointments.appointment_ms(node(0), at(0)) == 0
    assert appointments.appointment_ms(node(1), at(0)) == 1_000
    assert appointments.wait_ms(node(0), at(10)) == 0
    assert appointments.wait_ms(node(1), at(1_000)) == 0
    assert appointments.wait_ms(node(2), at(1_000)) == 1_000


def test_a_missed_appointment_is_forgotten() -> None:
    appointments = Appointments(per_s=1, burst=1)
    assert [appointments.wait_ms(node(number), at(0)) for number in range(2)] == [0, 1_000]
    later = at(LATE_MS + 2_000)
    assert appointments.wait_ms(node(2), later) == 0
    assert appointments.wait_ms(node(1), later) == 1_000


@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 300))
def test_all_who_come_when_they_are_told_are_in_by_the_rate(
    per_s: int, burst: int, nodes: int
) -> None:
    appointments = Appointments(per_s=per_s, burst=burst)
    waits = [appointments.wait_ms(node(number), at(0)) for number in range(nodes)]
    again = sorted((wait, number) for number, wait in enumerate(waits) if wait)
    assert all(appointments.wait_ms(node(number), at(wait)) == 0 for wait, number in again)
    assert max(waits) <= max(0, nodes - burst) * 1_000 / per_s + 1
