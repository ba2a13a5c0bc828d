"""What the coordinator makes of what nodes say and of what it sees; who opens the echo."""

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.__main__ import main
from coordinator.config import Settings
from coordinator.core.network.progress import LeaseProgress
from coordinator.core.network.reading import (
    NodeReading,
    PacketTrain,
    SocketReport,
    TransferDirection,
    TransferTime,
)
from coordinator.core.training.plan.decision import PlanRequest
from coordinator.shell.kinds.training.planning import with_line
from coordinator.shell.nodes.readings import (
    ABSENT_MAX,
    REPORTS,
    FinishedUpdate,
    Readings,
)
from coordinator.shell.nodes.upload_meter import UploadMeter
from coordinator.shell.probe_tokens import LIFE_MS, RENEWAL_MS, ProbeTokens
from coordinator.shell.service.node_session import lease_progress
from coordinator.shell.store.bulk.messages import BytesReceived
from coordinator.shell.translate import (
    ROUND_TRIPS_MAX,
    TRAINS_MAX,
    TRANSFERS_MAX,
    observations,
    reading_message,
)
from hypergpu.clock import monotonic_ms
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples
from hypergpu.v1 import job_pb2, measurement_pb2
from hypergpu.wire.datagrams import PACKETS_MAX, TOKEN_BYTES
from tests.unit.job_states import AWARE
from tests.unit.shell.whole_shell import begin_job, driving, services_in

NODE = NodeId("0x" + "a1" * 20)
OTHER = NodeId("0x" + "b2" * 20)
NOW = Milliseconds(1_000)
JOB = JobId("job-000000000001")
UINT = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)
REPORT = st.builds(
    measurement_pb2.Measured,
    round_trips_us=st.lists(UINT, max_size=100),
    trains=st.lists(
        st.builds(measurement_pb2.ProbeTrain, sent=UINT, lost=UINT, bursts=UINT), max_size=40
    ),
    transfers=st.lists(
        st.builds(
            measurement_pb2.MeasuredTransfer,
            direction=st.integers(0, 3),
            size_bytes=LONG,
            took_us=LONG,
            connections=UINT,
        ),
        max_size=40,
    ),
    congestion_control=st.text(max_size=40),
    is_probing_blocked=st.booleans(),
)


def upload_report(took_us: int) -> measurement_pb2.Measured:
    transfer = measurement_pb2.MeasuredTransfer(
        direction=measurement_pb2.DIRECTION_UP, size_bytes=1 << 20, took_us=took_us, connections=1
    )
    return measurement_pb2.Measured(transfers=[transfer])


def finished_update(lease: int = 1, compute_ms: int = 2_000) -> FinishedUpdate:
    took_ms = Milliseconds(5_000)
    return FinishedUpdate(JOB, lease, 10, Milliseconds(compute_ms), Milliseconds(4_000), took_ms)


@given(REPORT)
def test_whatever_a_node_says_is_bounded(message: measurement_pb2.Measured) -> None:
    observation_list = list(observations(message, NOW, own="bbr"))
    assert len(observation_list) <= ROUND_TRIPS_MAX + TRAINS_MAX + TRANSFERS_MAX + 1
    for each in observation_list:
        match each:
            case PacketTrain(sent=sent_count, lost=lost_count, bursts=bursts):
                assert 0 < sent_count <= PACKETS_MAX
                assert 0 <= lost_count <= sent_count
                assert (bursts == 0) == (lost_count == 0)
                assert bursts <= lost_count
            case TransferTime(size_bytes=size, took_us=took_us, connections=connections):
                assert size >= SMALLEST_BYTES
                assert 0 < size * 8 / took_us <= 100_000
                assert 1 <= connections <= 64
            case SocketReport(congestion_control=name):
                assert name.isascii()
                assert len(name) <= 16
            case _:
                assert 0 < getattr(each, "took_us", 0) <= 60_000_000


@given(REPORT)
def test_whatever_a_node_says_makes_a_reading_that_can_be_shown(
    message: measurement_pb2.Measured,
) -> None:
    readings = Readings()
    readings.record_report(NODE, message)
    shown_message = reading_message(readings.reading(NODE), monotonic_ms())
    assert job_pb2.Reading.FromString(shown_message.SerializeToString()) == shown_message


def test_a_node_that_reports_too_often_is_not_listened_to() -> None:
    readings = Readings()
    for _ in range(1_000):
        readings.record_report(NODE, measurement_pb2.Measured(round_trips_us=[5_000]))
    assert readings.reading(NODE).round_trip_us.count <= REPORTS.burst + 1
    assert readings.dropped >= 900


def test_what_was_measured_here_of_an_upload_goes_before_what_the_node_says() -> None:
    readings = Readings()
    own = TransferTime(
        monotonic_ms(), TransferDirection.UP, Bytes(4 << 20), Microseconds(4_000_000), connections=1
    )
    readings.record_upload(NODE, own)
    before = readings.reading(NODE)
    readings.record_report(NODE, upload_report(1_000))
    assert readings.reading(NODE).up_bits_per_s.mean == before.up_bits_per_s.mean
    readings.record_report(OTHER, upload_report(1_000_000))
    assert readings.reading(OTHER).up_bits_per_s.count == 1


def bytes_message(request: int, size_bytes: int, at_us: int) -> BytesReceived:
    """Bytes that a bulk process tells of."""
    return BytesReceived(NODE, request, Bytes(size_bytes), Microseconds(at_us), is_last=False)


def measure_upload(requests: int, at_us: Sequence[int]) -> list[TransferTime]:
    """Transfers that the meter reports where every request brings a piece at these times."""
    transfers: list[TransferTime] = []
    meter = UploadMeter(transfers.append)
    for now_us in at_us:
        for request in range(requests):
            meter.add(bytes_message(request, 64 << 10, now_us))
    for request in range(requests):
        meter.add(replace(bytes_message(request, 0, at_us[-1]), is_last=True))
    return transfers


def test_an_upload_is_timed_over_all_its_requests() -> None:
    """Four requests over a line of 8 Mbit/s: what they brought first had begun before the clock."""
    (transfer,) = measure_upload(4, range(0, 5 * 262_144, 262_144))
    assert (transfer.size_bytes, transfer.connections) == (1 << 20, 4)
    assert transfer.size_bytes * 8e6 / transfer.took_us == 8e6


@pytest.mark.parametrize(
    ("requests", "at_us"),
    [
        (1, [0]),
        (8, [0]),
        (8, [0, 40_000]),  # found at once by a coordinator that was busy meanwhile
        (4, [0, 0, 0]),
        (1, [0, 500_000, 900_000]),
    ],
)
def test_an_upload_that_was_small_or_there_all_at_once_says_nothing_of_a_rate(
    requests: int, at_us: list[int]
) -> None:
    assert measure_upload(requests, at_us) == []


def test_a_stall_of_the_line_is_part_of_its_upload() -> None:
    (transfer,) = measure_upload(4, [0, 100_000, 5_000_000, 5_100_000])
    assert transfer.took_us == 5_100_000


def test_an_update_says_how_long_its_steps_took_and_is_counted_once() -> None:
    readings = Readings()
    for _ in range(3):
        readings.record_accepted(NODE, finished_update())
    reading = readings.reading(NODE)
    assert (reading.step_us.mean, reading.step_us.count) == (200_000, 1)
    assert reading.forecast_error.count == 1
    readings.record_accepted(NODE, finished_update(2, 4_000))
    assert readings.reading(NODE).step_us.count == 2


def test_a_node_that_states_no_computing_time_is_measured_all_the_same() -> None:
    readings = Readings()
    readings.record_accepted(NODE, finished_update(1, 0))
    assert readings.reading(NODE).step_us.mean == 100


def test_a_node_is_timed_by_its_progress_whether_an_update_comes_or_not() -> None:
    readings = Readings()
    for second in range(5):
        at_ms = Milliseconds(2_000 * second)
        readings.record_progress(NODE, LeaseProgress(JOB, 7, 1.0 + 4 * second, at_ms))
    step_us = readings.reading(NODE).step_us
    assert (step_us.mean, step_us.count) == (500_000, 4)


async def test_progress_counts_in_work_that_the_node_was_given_and_no_further(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await begin_job(services)
    job = services.jobs[JOB].job
    participant = job.participant(NODE)
    assert participant is not None
    lease, steps = participant.lease, participant.inner_steps
    progress = lease_progress(job, NODE, lease, steps)
    assert progress is not None
    assert (progress.lease, progress.steps) == (lease, steps)
    assert lease_progress(job, NODE, lease, steps + 1) is None
    assert lease_progress(job, NODE, lease + 1, steps) is None
    assert lease_progress(job, OTHER, lease, steps) is None


def test_an_update_cannot_state_less_computing_than_its_own_progress_took() -> None:
    readings = Readings()
    for at_ms, steps in ((0, 1.0), (10_000, 6.0), (20_000, 10.0)):
        readings.record_progress(NODE, LeaseProgress(JOB, 1, steps, Milliseconds(at_ms)))
    readings.record_accepted(NODE, finished_update(1, compute_ms=1))
    assert readings.reading(NODE).step_us.mean > 1_500_000


def test_a_node_that_went_is_remembered_and_one_that_is_forgotten_is_not() -> None:
    readings = Readings()
    readings.mark_present(NODE)
    readings.record_report(NODE, measurement_pb2.Measured(round_trips_us=[5_000]))
    readings.mark_absent(NODE)
    assert not readings.reading(NODE).is_present
    assert readings.reading(NODE).round_trip_us.count == 1
    readings.mark_present(NODE)
    assert readings.reading(NODE).is_present
    readings.forget(NODE)
    assert readings.reading(NODE) == NodeReading()
    assert not readings.knows(NODE)


def test_nodes_that_are_away_do_not_gather_without_end() -> None:
    readings = Readings()
    nodes = [NodeId(f"0x{number:040x}") for number in range(ABSENT_MAX + 10)]
    for node in nodes:
        readings.mark_present(node)
        readings.mark_absent(node)
    assert not readings.knows(nodes[9])
    assert readings.knows(nodes[10])


def test_readings_are_told_in_the_time_of_the_job_that_asks() -> None:
    readings = Readings()
    readings.record_report(NODE, measurement_pb2.Measured(round_trips_us=[5_000]))
    now_ms = Milliseconds(monotonic_ms() + 12_345)
    by_node = readings.readings([NODE, OTHER], now_ms)
    own = readings.reading(NODE)
    by_ms = by_node[NODE].round_trip_us.at_ms - own.round_trip_us.at_ms
    assert 12_000 < by_ms <= 12_345
    assert by_node[OTHER].round_trip_us.count == 0


def test_where_datagrams_are_blocked_what_the_kernel_sent_again_tells_of_losses() -> None:
    readings = Readings()
    train = measurement_pb2.ProbeTrain(sent=1_000, lost=20, bursts=20)
    readings.record_report(NODE, measurement_pb2.Measured(trains=[train], is_probing_blocked=True))
    shown_message = reading_message(readings.reading(NODE), monotonic_ms())
    assert 0.019 < shown_message.loss.mean < 0.022
    assert shown_message.loss.samples == 1_000
    few = measurement_pb2.ProbeTrain(sent=10, lost=0, bursts=0)
    readings.record_report(OTHER, measurement_pb2.Measured(trains=[few], is_probing_blocked=True))
    assert reading_message(readings.reading(OTHER), monotonic_ms()).loss == job_pb2.Estimate()


def test_the_kernel_names_a_congestion_control_and_no_descriptor_is_left_open() -> None:
    known_controls = (
        Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("ascii").split()
    )
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    assert Readings().congestion_control in known_controls
    assert len(list(descriptors.iterdir())) == before


def test_a_connections_own_congestion_control_goes_before_the_machines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        with socket.create_connection(("127.0.0.1", port)) as caller, server.accept()[0]:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            assert Readings(port).congestion_control == "reno"


REQUEST = PlanRequest(
    round=0,
    at_ms=Milliseconds(0),
    spec=AWARE,
    candidates={},
    samples_done=Samples(0),
    samples_total=Samples(48),
)


def test_a_plan_is_told_what_the_stated_line_carries_besides_its_headers(tmp_path: Path) -> None:
    stated_request = with_line(REQUEST, Settings(data_dir=tmp_path, line_mbit_s=100))
    assert 96_000_000 < stated_request.line_bits_per_s < 97_000_000
    assert with_line(REQUEST, Settings(data_dir=tmp_path)).line_bits_per_s == 0


def test_a_line_of_less_than_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--line-mbit-s", "-1"]) != 0
    assert "line_mbit_s" in capsys.readouterr().err


TOKENS_NOW = Milliseconds(5_000)


def test_a_token_names_its_bearer_until_its_time_is_over() -> None:
    tokens = ProbeTokens()
    token = tokens.token(NODE, TOKENS_NOW)
    assert len(token) == TOKEN_BYTES
    assert tokens.bearer(token, Milliseconds(TOKENS_NOW + LIFE_MS - 1)) == NODE
    assert tokens.bearer(token, Milliseconds(TOKENS_NOW + LIFE_MS)) is None


def test_a_token_is_renewed_well_before_it_ends() -> None:
    assert RENEWAL_MS <= LIFE_MS // 2


def test_a_token_of_another_start_is_worthless() -> None:
    assert ProbeTokens().bearer(ProbeTokens().token(NODE, TOKENS_NOW), TOKENS_NOW) is None


@given(st.integers(0, TOKEN_BYTES - 1), st.integers(1, 255))
def test_a_token_that_was_altered_anywhere_is_worthless(at: int, change: int) -> None:
    tokens = ProbeTokens(b"k" * 32)
    token = bytearray(tokens.token(NODE, TOKENS_NOW))
    token[at] ^= change
    assert tokens.bearer(bytes(token), TOKENS_NOW) is None


@given(st.binary(max_size=2 * TOKEN_BYTES))
def test_noise_is_no_token(noise: bytes) -> None:
    assert ProbeTokens(b"k" * 32).bearer(noise, TOKENS_NOW) is None
