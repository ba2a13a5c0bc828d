from msgspec.structs import replace

from coordinator.core.measure.reading import Conditions, NodeReading
from coordinator.core.plan.transfers import PlannedUpload, connection_count, upload_delays
from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Microseconds
from tests.unit.plan.fleet import Truth, reading_of

A, B, C = (NodeId(name) for name in "abc")
LARGE = Bytes(2_000_000)


def _count(truth: Truth, size: int = LARGE, held: int = 0) -> int:
    return connection_count(reading_of(truth), NodeReading(), Bytes(size), held)


def test_senders_that_know_their_rate_have_one_connection() -> None:
    assert _count(Truth(loss=0.05, rtt_ms=300, congestion_control="bbr")) == 1


def test_senders_that_heed_losses_have_sixteen_where_packets_are_lost() -> None:
    reading = _over_one_connection(Truth(loss=0.01, rtt_ms=150, up_mbit_s=0.8, down_mbit_s=0.8))
    assert connection_count(reading, NodeReading(), LARGE, 0) == 16


def _over_one_connection(truth: Truth) -> NodeReading:
    then = Conditions(Microseconds(int(truth.rtt_ms * 1000)), 1)
    return replace(reading_of(truth), up_conditions=then, down_conditions=then)


def test_four_do_where_nothing_is_lost() -> None:
    assert _count(Truth(rtt_ms=150)) == 4


def test_four_do_where_losses_do_not_limit_the_line() -> None:
    assert _count(Truth(loss=0.001, rtt_ms=10, up_mbit_s=2, down_mbit_s=2)) == 4


def test_a_small_payload_has_one() -> None:
    assert _count(Truth(loss=0.05, rtt_ms=300), size=60_000) == 1


def test_connections_that_are_there_are_kept_when_probes_lose_nothing_for_once() -> None:
    truth = Truth(loss=0.01, rtt_ms=150, up_mbit_s=1, down_mbit_s=1)
    lucky = replace(reading_of(truth), packets_lost=0.0, bursts_lost=0.0)
    assert connection_count(lucky, NodeReading(), LARGE, 16) == 16


def test_losses_that_are_only_inferred_count_as_they_are() -> None:
    truth = Truth(rtt_ms=150, up_mbit_s=3, down_mbit_s=3)
    blocked = replace(
        _over_one_connection(truth),
        is_probing_blocked=True,
        packets_sent=0.0,
        packets_lost=0.0,
        bursts_lost=0.0,
        loss_bound=0.01,
    )
    assert connection_count(blocked, NodeReading(), LARGE, 0) > 4


def _upload(ready_ms: int, mbit_s: float, size: int = 1_000_000) -> PlannedUpload:
    return PlannedUpload(ready_ms * 1000, Bytes(size), mbit_s * 1e6)


def test_nobody_waits_while_the_line_has_room_or_is_not_known() -> None:
    uploads = {A: _upload(0, 40), B: _upload(0, 40)}
    assert upload_delays(uploads, 100_000_000) == {A: 0, B: 0}
    assert upload_delays(uploads, 0) == {A: 0, B: 0}


def test_uploads_that_would_collide_go_one_after_the_other() -> None:
    uploads = {A: _upload(0, 100), B: _upload(10, 100), C: _upload(20, 100)}
    # 8 Mbit at 100 Mbit/s take 80 ms.
    assert upload_delays(uploads, 100_000_000) == {A: 0, B: 70, C: 140}


def test_nobody_waits_when_waiting_would_end_the_round_later() -> None:
    # One slow upload and a fast one that would wait for all of it.
    uploads = {A: _upload(0, 60, 6_000_000), B: _upload(1, 100, 1_000_000)}
    assert upload_delays(uploads, 100_000_000) == {A: 0, B: 0}
