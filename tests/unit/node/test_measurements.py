"""Measurements that wait to be reported, and probes."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_node.shell.probing.measurements import (
    ROUND_TRIPS_MAX,
    TRAINS_MAX,
    TRANSFERS_MAX,
    Measurements,
    TransferTimer,
)
from gpu_node.shell.probing.prober import Prober
from gpu_node.shell.probing.trains import BlockedJudgment, count_missing, judge_train
from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import SMALLEST_BYTES
from hypergpu.wire.probing import DATAGRAM_BYTES, TOKEN_BYTES, Numbers, datagram, numbers_of

TOKEN = bytes(range(TOKEN_BYTES))
GONE = node_pb2.ProbeTrain(sent=20, lost=20, bursts=1)
FINE = node_pb2.ProbeTrain(sent=20, lost=1, bursts=1)


def report_of(measurements: Measurements) -> node_pb2.Measured:
    return measurements.take_report(congestion_control="cubic", is_probing_blocked=False)


def transfer(size: int) -> node_pb2.MeasuredTransfer:
    return node_pb2.MeasuredTransfer(
        direction=node_pb2.DIRECTION_DOWN, size_bytes=size, took_us=1_000, connections=1
    )


def test_a_report_has_the_newest_and_is_bounded() -> None:
    measurements = Measurements()
    for number in range(1, 1_000):
        measurements.add_round_trip(number)
        measurements.add_train(FINE)
        measurements.add_transfer(transfer(number))
    report = report_of(measurements)
    assert report.round_trips_us[-1] == 999
    assert report.transfers[-1].size_bytes == 999
    lengths = (len(report.round_trips_us), len(report.trains), len(report.transfers))
    assert lengths == (ROUND_TRIPS_MAX, TRAINS_MAX, TRANSFERS_MAX)


def test_nothing_is_reported_twice() -> None:
    measurements = Measurements()
    measurements.add_round_trip(5)
    measurements.add_transfer(transfer(1 << 20))
    assert report_of(measurements).transfers[0].direction == node_pb2.DIRECTION_DOWN
    assert report_of(measurements) == node_pb2.Measured(congestion_control="cubic")


def test_each_transfer_is_told_at_once() -> None:
    told: list[int] = []
    measurements = Measurements(lambda: told.append(1))
    measurements.add_round_trip(5)
    measurements.add_transfer(transfer(1 << 20))
    assert told == [1]
    assert measurements.has_transfers


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_losses_and_their_runs_are_counted(arrived: list[bool]) -> None:
    count = count_missing(len(arrived), {at for at, is_there in enumerate(arrived) if is_there})
    text = "".join("." if is_there else "x" for is_there in arrived)
    runs = [run for run in text.split(".") if run]
    assert (count.sent, count.lost, count.bursts) == (len(arrived), text.count("x"), len(runs))


def test_three_trains_that_are_gone_mean_that_datagrams_are_blocked() -> None:
    judgment = BlockedJudgment()
    believed: list[node_pb2.ProbeTrain] = []
    for _ in range(5):
        judgment, counts = judge_train(judgment, GONE)
        believed += counts
    assert judgment.is_blocked
    assert believed == []


def test_an_outage_counts_once_something_comes_through_again() -> None:
    judgment, none = judge_train(BlockedJudgment(), GONE)
    judgment, counts = judge_train(judgment, FINE)
    assert none == ()
    assert counts == (GONE, FINE)
    assert judgment == BlockedJudgment()


def test_a_blocked_port_that_opens_is_believed_at_once() -> None:
    judgment, counts = judge_train(BlockedJudgment(is_blocked=True), FINE)
    assert not judgment.is_blocked
    assert counts == (FINE,)


def test_a_small_transfer_says_nothing_of_a_rate() -> None:
    measurements = Measurements()
    timer = TransferTimer(measurements, node_pb2.DIRECTION_UP)
    timer.add_bytes(SMALLEST_BYTES - 1)
    timer.stop()
    assert not measurements.has_transfers


def test_a_transfer_that_took_no_longer_than_a_round_trip_says_nothing_of_a_rate() -> None:
    measurements = Measurements()
    measurements.add_round_trip(10**9)
    timer = TransferTimer(measurements, node_pb2.DIRECTION_DOWN)
    timer.add_bytes(100_000)
    timer.stop()
    assert not measurements.has_transfers


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_a_datagram_is_told_apart_by_its_numbers(train: int, packet: int) -> None:
    sent = datagram(TOKEN, Numbers(train, packet))
    assert len(sent) == DATAGRAM_BYTES
    assert numbers_of(sent, TOKEN) == Numbers(train, packet)


@given(st.binary(max_size=300))
def test_what_is_no_echo_is_passed_over(received: bytes) -> None:
    assert numbers_of(received, TOKEN) is None


def test_a_node_that_is_given_no_port_for_probes_is_as_good_as_blocked() -> None:
    prober = Prober()
    prober.set_target(node_pb2.Welcome(), ("127.0.0.1", 7700))
    assert prober.is_blocked
    prober.set_target(node_pb2.Welcome(probe_port=7700, probe_token=TOKEN), ("127.0.0.1", 7700))
    assert not prober.is_blocked
