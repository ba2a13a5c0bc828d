"""The node's session: every state against every event, what it measures, how long it waits."""

import asyncio
import configparser
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_node.config import NodeSettings
from gpu_node.core.commands import NodeCommand, SetTimer
from gpu_node.core.events import NodeEvent
from gpu_node.core.session import transition
from gpu_node.core.session_state import LinkPhase, NodeSession
from gpu_node.shell.link.calls import (
    ROUND_TRIPS_MAX,
    TRAINS_MAX,
    TRANSFERS_MAX,
    Measurements,
    TransferTimer,
)
from gpu_node.shell.link.coroutines import run_alongside
from gpu_node.shell.link.probing import BlockedJudgment, Prober, count_missing, judge_train
from hypergpu.errors import Reason
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.line_limits import PIECE_BYTES, SLOWEST_BYTES_PER_S, StallTimeout, transfer_timeout_s
from hypergpu.units import Milliseconds
from hypergpu.v1 import measurement_pb2, node_pb2
from hypergpu.wire.datagrams import DATAGRAM_BYTES, TOKEN_BYTES, Numbers, datagram, numbers_of
from tests.unit.node.node_states import all_events, states

TABLE = Path(__file__).parents[1] / "session_pairs.txt"


def place(session: NodeSession) -> str:
    """Where a session is, in a few words."""
    worker = "busy" if session.worker.busy else "resting" if session.worker.retry_at_ms else "free"
    return f"{session.link.phase.value} | {type(session.work).__name__.lower()} | {worker}"


def command_name(command: NodeCommand) -> str:
    name = type(command).__name__
    return f"{name} {command.timer.value}" if isinstance(command, SetTimer) else name


def outcome(session: NodeSession, event: NodeEvent) -> str:
    """One cell: nothing, or the place after the event and the commands it leads to."""
    step = transition(session, event)
    if step == (session, ()):
        return "ignored"
    names = ", ".join(command_name(command) for command in step.commands)
    return f"-> {place(step.session)} [{names}]"


def pair_table() -> str:
    """Every state against every event, one line a pair."""
    lines = [
        f"{state:28} {name:26} {outcome(session, event)}"
        for state, session in states().items()
        for name, event in all_events().items()
    ]
    return "\n".join(lines) + "\n"


def test_the_table_covers_every_connection_and_every_event() -> None:
    covered_phases = {session.link.phase for session in states().values()}
    assert covered_phases == set(LinkPhase) - {LinkPhase.JOIN_WAITING}
    assert {type(event) for event in all_events().values()} == set(NodeEvent.__subclasses__())


def test_every_pair_has_its_committed_outcome() -> None:
    assert pair_table() == TABLE.read_text()


def test_a_node_that_left_ignores_everything() -> None:
    left_session = states()["left"]
    assert all(
        transition(left_session, event) == (left_session, ()) for event in all_events().values()
    )


def test_an_event_of_another_lease_leaves_the_work_alone() -> None:
    training = states()["training"]
    for event in all_events().values():
        held_lease = getattr(event, "lease", None)
        if held_lease is not None:
            other = held_lease.__class__(held_lease.job_id, held_lease.round, 99)
            stray = event.__class__(**{**_fields(event), "lease": other})
            assert transition(training, stray).session.work == training.work


def _fields(event: NodeEvent) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


if __name__ == "__main__":
    sys.exit(TABLE.write_text(pair_table()) == 0)


TOKEN = bytes(range(TOKEN_BYTES))
GONE = measurement_pb2.ProbeTrain(sent=20, lost=20, bursts=1)
FINE = measurement_pb2.ProbeTrain(sent=20, lost=1, bursts=1)


def report_of(measurements: Measurements) -> measurement_pb2.Measured:
    return measurements.take_report(congestion_control="cubic", is_probing_blocked=False)


def transfer(size: int) -> measurement_pb2.MeasuredTransfer:
    return measurement_pb2.MeasuredTransfer(
        direction=measurement_pb2.DIRECTION_DOWN, size_bytes=size, took_us=1_000, connections=1
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
    assert report_of(measurements).transfers[0].direction == measurement_pb2.DIRECTION_DOWN
    assert report_of(measurements) == measurement_pb2.Measured(congestion_control="cubic")


def test_each_transfer_is_told_at_once() -> None:
    calls: list[int] = []
    measurements = Measurements(lambda: calls.append(1))
    measurements.add_round_trip(5)
    measurements.add_transfer(transfer(1 << 20))
    assert calls == [1]
    assert measurements.has_transfers


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_losses_and_their_runs_are_counted(arrived: list[bool]) -> None:
    count = count_missing(len(arrived), {at for at, is_there in enumerate(arrived) if is_there})
    text = "".join("." if is_there else "x" for is_there in arrived)
    runs = [run for run in text.split(".") if run]
    assert (count.sent, count.lost, count.bursts) == (len(arrived), text.count("x"), len(runs))


def test_three_trains_that_are_gone_mean_that_datagrams_are_blocked() -> None:
    judgment = BlockedJudgment()
    believed_trains: list[measurement_pb2.ProbeTrain] = []
    for _ in range(5):
        judgment, counts = judge_train(judgment, GONE)
        believed_trains += counts
    assert judgment.is_blocked
    assert believed_trains == []


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
    timer = TransferTimer(measurements, measurement_pb2.DIRECTION_UP)
    timer.add_bytes(SMALLEST_BYTES - 1)
    timer.stop()
    assert not measurements.has_transfers


def test_a_transfer_that_took_no_longer_than_a_round_trip_says_nothing_of_a_rate() -> None:
    measurements = Measurements()
    measurements.add_round_trip(10**9)
    timer = TransferTimer(measurements, measurement_pb2.DIRECTION_DOWN)
    timer.add_bytes(100_000)
    timer.stop()
    assert not measurements.has_transfers


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_a_datagram_is_told_apart_by_its_numbers(train: int, packet: int) -> None:
    sent_datagram = datagram(TOKEN, Numbers(train, packet))
    assert len(sent_datagram) == DATAGRAM_BYTES
    assert numbers_of(sent_datagram, TOKEN) == Numbers(train, packet)


@given(st.binary(max_size=300))
def test_what_is_no_echo_is_passed_over(received: bytes) -> None:
    assert numbers_of(received, TOKEN) is None


def test_a_node_that_is_given_no_port_for_probes_is_as_good_as_blocked() -> None:
    prober = Prober()
    prober.set_target(node_pb2.Welcome(), ("127.0.0.1", 7700))
    assert prober.is_blocked
    prober.set_target(node_pb2.Welcome(probe_port=7700, probe_token=TOKEN), ("127.0.0.1", 7700))
    assert not prober.is_blocked


TIMEOUT_MS = Milliseconds(10_000)
CHUNK_BYTES = 512 << 10
SLOW_BYTES_PER_S = 100_000 / 8
"""A line of 100 kbit/s."""


def test_a_piece_may_take_as_long_as_a_line_of_100_kbit_s_needs_for_it() -> None:
    assert SLOW_BYTES_PER_S > SLOWEST_BYTES_PER_S
    assert StallTimeout(CHUNK_BYTES, TIMEOUT_MS).limit_s() > CHUNK_BYTES / SLOW_BYTES_PER_S
    for connections in (1, 4, 16):
        shared_timeout = StallTimeout(PIECE_BYTES, TIMEOUT_MS, connections=connections)
        assert shared_timeout.limit_s() > PIECE_BYTES * connections / SLOW_BYTES_PER_S


def test_who_brought_pieces_quickly_is_missed_soon() -> None:
    stall = StallTimeout(CHUNK_BYTES, TIMEOUT_MS)
    stall.note_piece(0.05)
    stall.note_piece(0.01)
    assert stall.limit_s() == 10.2


def test_a_small_rest_is_waited_for_no_longer_than_it_can_take() -> None:
    stall = StallTimeout(CHUNK_BYTES, TIMEOUT_MS)
    assert stall.limit_s(0) == 10
    assert stall.limit_s(SLOWEST_BYTES_PER_S) == 11
    assert stall.limit_s(1 << 30) == stall.limit_s()


@given(st.lists(st.floats(0, 1e6)), st.integers(1, 1 << 20), st.integers(1, 16))
def test_no_piece_is_waited_for_less_than_a_call_or_longer_than_over_the_slowest_line(
    took_s: list[float], piece_bytes: int, connections: int
) -> None:
    stall = StallTimeout(piece_bytes, TIMEOUT_MS, connections=connections)
    for each in took_s:
        stall.note_piece(each)
    most_s = transfer_timeout_s(piece_bytes, TIMEOUT_MS, connections=connections)
    assert 10 <= stall.limit_s() <= most_s


class BrokenError(Exception):
    """What one of them ends by."""


async def fail() -> None:
    raise BrokenError


async def for_ever(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def test_what_breaks_one_breaks_the_body_and_ends_the_others() -> None:
    end_event = asyncio.Event()
    with pytest.raises(BrokenError):
        async with run_alongside(for_ever(end_event), fail()):
            await asyncio.Event().wait()
    assert end_event.is_set()


async def test_what_breaks_the_body_ends_the_others() -> None:
    end_event = asyncio.Event()

    async def block() -> None:
        async with run_alongside(for_ever(end_event)):
            await asyncio.sleep(0)
            raise BrokenError

    with pytest.raises(BrokenError):
        await block()
    assert end_event.is_set()


async def test_the_end_of_the_body_ends_the_others() -> None:
    end_event = asyncio.Event()
    async with run_alongside(for_ever(end_event)):
        await asyncio.sleep(0)
    assert end_event.is_set()


async def test_one_that_is_over_leaves_the_body_be() -> None:
    async with run_alongside(asyncio.sleep(0)):
        await asyncio.sleep(0)
        await asyncio.sleep(0)


ROOT = Path(__file__).parents[3]
MANUAL = (ROOT / "docs/node.md").read_text("utf-8")
UNIT = ROOT / "examples/hypergpu-node.service"


def test_the_manual_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `HYPERGPU_NODE_(\w+)` \| `?([^`|]+?)`? \|", MANUAL, re.MULTILINE))
    settings = {name.upper(): field.default for name, field in NodeSettings.model_fields.items()}
    settings["STATE_DIR"] = "~" + str(settings["STATE_DIR"]).removeprefix(str(Path.home()))
    settings["NAME"] = "the machine's"
    assert rows == {name: str(default) for name, default in settings.items()}


def test_the_service_gives_up_on_what_trying_again_cannot_mend() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    lasting_statuses = {
        str(reason.exit_code) for reason in (Reason.TOKEN_INVALID, Reason.NODE_NOT_JOINED)
    }
    assert set(unit["Service"]["RestartPreventExitStatus"].split()) == lasting_statuses


def test_the_service_waits_longer_than_a_drain_may_take() -> None:
    limit_s = NodeSettings.model_fields["drain_limit_ms"].default / 1000
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert int(timeout_s) > limit_s + 10
