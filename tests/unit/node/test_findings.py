"""What a node has found out and not yet told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_node.shell.probe.findings import (
    ROUND_TRIPS_MAX,
    TRAINS_MAX,
    TRANSFERS_MAX,
    Direction,
    Findings,
    TrainCount,
    Transfer,
)
from gpu_node.shell.probe.pace import Pace
from gpu_node.shell.probe.prober import Prober
from gpu_node.shell.probe.stopwatch import Stopwatch
from gpu_node.shell.probe.train import Verdict, count_missing, judge_train
from hypergpu.units import Bytes, Microseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import SMALLEST_BYTES
from hypergpu.wire.probing import DATAGRAM_BYTES, TOKEN_BYTES, Numbers, datagram, numbers_of

TOKEN = bytes(range(TOKEN_BYTES))
GONE = TrainCount(20, 20, 1)
FINE = TrainCount(20, 1, 1)


def taken(findings: Findings) -> node_pb2.Measured:
    return findings.take(congestion_control="cubic", is_probing_blocked=False)


def transfer(size: int) -> Transfer:
    return Transfer(Direction.DOWN, Bytes(size), Microseconds(1_000), 1)


def test_a_report_has_the_newest_and_is_bounded() -> None:
    findings = Findings()
    for number in range(1, 1_000):
        findings.round_trip(number)
        findings.train(TrainCount(20, 0, 0))
        findings.transferred(transfer(number))
    report = taken(findings)
    assert report.round_trips_us[-1] == 999
    assert report.transfers[-1].size_bytes == 999
    lengths = (len(report.round_trips_us), len(report.trains), len(report.transfers))
    assert lengths == (ROUND_TRIPS_MAX, TRAINS_MAX, TRANSFERS_MAX)


def test_nothing_is_reported_twice() -> None:
    findings = Findings()
    findings.round_trip(5)
    findings.transferred(transfer(1 << 20))
    assert taken(findings).transfers[0].direction == node_pb2.DIRECTION_DOWN
    assert taken(findings) == node_pb2.Measured(congestion_control="cubic")


def test_each_transfer_is_told_at_once() -> None:
    told: list[int] = []
    findings = Findings(lambda: told.append(1))
    findings.round_trip(5)
    findings.transferred(transfer(1 << 20))
    assert told == [1]
    assert findings.has_transfers


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_losses_and_their_runs_are_counted(arrived: list[bool]) -> None:
    count = count_missing(len(arrived), {at for at, is_there in enumerate(arrived) if is_there})
    text = "".join("." if is_there else "x" for is_there in arrived)
    runs = [run for run in text.split(".") if run]
    assert count == TrainCount(len(arrived), text.count("x"), len(runs))


def test_three_trains_that_are_gone_mean_that_datagrams_are_blocked() -> None:
    verdict = Verdict()
    believed: list[TrainCount] = []
    for _ in range(5):
        verdict, counts = judge_train(verdict, GONE)
        believed += counts
    assert verdict.is_blocked
    assert believed == []


def test_an_outage_counts_once_something_comes_through_again() -> None:
    verdict, none = judge_train(Verdict(), GONE)
    verdict, counts = judge_train(verdict, FINE)
    assert none == ()
    assert counts == (GONE, FINE)
    assert verdict == Verdict()


def test_a_blocked_port_that_opens_is_believed_at_once() -> None:
    verdict, counts = judge_train(Verdict(is_blocked=True), FINE)
    assert not verdict.is_blocked
    assert counts == (FINE,)


def test_a_small_transfer_says_nothing_of_a_rate() -> None:
    findings = Findings()
    stopwatch = Stopwatch(findings, Direction.UP)
    stopwatch.moved(SMALLEST_BYTES - 1)
    stopwatch.stop()
    assert not findings.has_transfers


def test_a_transfer_that_took_no_longer_than_a_round_trip_says_nothing_of_a_rate() -> None:
    findings = Findings()
    findings.round_trip(10**9)
    stopwatch = Stopwatch(findings, Direction.DOWN)
    stopwatch.moved(100_000)
    stopwatch.stop()
    assert not findings.has_transfers


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_a_datagram_is_told_apart_by_its_numbers(train: int, packet: int) -> None:
    sent = datagram(TOKEN, Numbers(train, packet))
    assert len(sent) == DATAGRAM_BYTES
    assert numbers_of(sent, TOKEN) == Numbers(train, packet)


@given(st.binary(max_size=300))
def test_what_is_no_echo_is_passed_over(received: bytes) -> None:
    assert numbers_of(received, TOKEN) is None


@pytest.mark.parametrize("is_busy", [True, False])
def test_an_idle_line_is_probed_less(is_busy: bool) -> None:  # noqa: FBT001  a case of the table
    pace = Pace()
    busy = pace.train(is_busy=is_busy, is_blocked=False)
    assert busy == (pace.train_s if is_busy else pace.idle_train_s)
    assert pace.train(is_busy=is_busy, is_blocked=True) == pace.blocked_train_s
    assert pace.report(is_busy=is_busy, has_transfers=True) == pace.news_s
    assert pace.round_trip(is_busy=is_busy, age_s=0.0) == pace.round_trip_s
    assert (pace.round_trip(is_busy=is_busy, age_s=1e6) == pace.round_trip_s) is is_busy


def test_a_node_that_is_given_no_port_for_probes_is_as_good_as_blocked() -> None:
    prober = Prober()
    prober.welcomed(node_pb2.Welcome(), ("127.0.0.1", 7700))
    assert prober.is_blocked
    prober.welcomed(node_pb2.Welcome(probe_port=7700, probe_token=TOKEN), ("127.0.0.1", 7700))
    assert not prober.is_blocked
