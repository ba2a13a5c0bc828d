"""A node's health: its parts stay in [0, 1], and slowness alone excludes nobody."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.hub.health import (
    HISTORY_MINUTES,
    NEWCOMER,
    POINTS_MOST,
    QUALITY_LIMIT,
    RELIABILITY_LIMIT,
    WORKLOADS_MOST,
    HealthLevel,
    HealthParts,
    HealthRecord,
    after_line,
    after_minute,
    after_rate,
    after_round,
    arrival_sample,
    exclusion,
    fleet_medians,
    health_evidence,
    health_history,
    health_parts,
    health_reason,
    level_of,
    relative_score,
)
from coordinator.core.training.job.state import Job, Participant, Shard
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.work.leases import WorkState
from coordinator.core.work.work_events import NodeLost
from hypergpu.ids import JobId, NodeId, Slot
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Milliseconds

START_S = 1_790_000_000
NEW = HealthRecord()
_rates = st.floats(0.001, 1e9)
_shares = st.floats(0.0, 1.0)
_samples = st.one_of(st.none(), _shares)


def participant(work: WorkState) -> Participant:
    """A participant whose work ended so."""
    plan = NodePlan(inner_steps=4, codec="int4", reason="")
    return Participant(
        slot=Slot(0),
        lease=7,
        shard=Shard(0, ()),
        plan=plan,
        assigned_at_ms=Milliseconds(0),
        work=work,
    )


@given(
    rates=st.lists(_rates, min_size=1, max_size=30),
    rounds=st.lists(st.tuples(_samples, _samples), max_size=40),
    loss=_shares,
    connected=st.lists(st.booleans(), max_size=90),
)
def test_the_parts_and_the_health_stay_between_zero_and_one(
    rates: list[float],
    rounds: list[tuple[float | None, float | None]],
    loss: float,
    connected: list[bool],
) -> None:
    record = NEW
    for rate in rates:
        record = after_line(after_rate(record, "mlp", rate), rate, rate, loss)
    for step, (arrival, quality) in enumerate(rounds):
        record = after_round(record, arrival, quality, START_S + 60 * step)
    for minute, is_connected in enumerate(connected):
        record = after_minute(record, 100 + minute, 0.5, is_connected=is_connected)
    others = [after_rate(NEW, "mlp", rate) for rate in rates]
    parts = health_parts(record, fleet_medians([record, *others]), START_S + 3_600)
    assert all(0.0 <= part <= 1.0 for part in parts)
    assert 0.0 <= parts.value <= 1.0
    assert parts.level is level_of(parts.value)
    assert health_reason(parts, None)


@given(
    slowdown=st.floats(1.0, 64.0),
    others=st.integers(1, 20),
    rounds=st.integers(0, 400),
    is_late_each_time=st.booleans(),
)
def test_a_perfect_node_is_never_excluded_however_slow_it_is(
    slowdown: float, others: int, rounds: int, *, is_late_each_time: bool
) -> None:
    work = WorkState.CUT if is_late_each_time else WorkState.RECEIVED
    arrival = arrival_sample(participant(work), has_progress=True)
    record = after_line(after_rate(NEW, "mlp", 1000.0 / slowdown), 1e6 / slowdown, 1e6, 0.0)
    for round_ in range(rounds):
        now_s = START_S + 60 * round_
        record = after_round(record, arrival, None if is_late_each_time else 1.0, now_s)
        record = after_minute(record, now_s // 60, 0.5, is_connected=True)
        assert exclusion(record, now_s) is None
    fleet = [record, *[after_rate(NEW, "mlp", 1000.0)] * others]
    parts = health_parts(record, fleet_medians(fleet), START_S)
    assert parts.level is not HealthLevel.POOR


@given(slow=_rates, factor=st.floats(1.0, 1000.0), usual=_rates)
def test_a_faster_node_never_scores_less(slow: float, factor: float, usual: float) -> None:
    assert relative_score(slow * factor, usual) >= relative_score(slow, usual)


@given(stated=_rates, others=st.lists(_rates, min_size=4, max_size=20))
def test_a_median_node_gains_a_tenth_of_the_health_at_most_by_a_false_speed(
    stated: float, others: list[float]
) -> None:
    middle = median(others)
    honest = after_line(after_rate(NEW, "mlp", middle), 1e6, 1e6, 0.0)
    liar = after_line(after_rate(NEW, "mlp", stated), 1e6, 1e6, 0.0)
    fleet = [after_line(after_rate(NEW, "mlp", rate), 1e6, 1e6, 0.0) for rate in others]
    values = [
        health_parts(record, fleet_medians([*fleet, record]), START_S).value
        for record in (honest, liar)
    ]
    assert values[1] - values[0] <= 0.1


def test_the_scale_of_the_speed_is_what_the_manual_says() -> None:
    assert relative_score(1 / 64, 1.0) == 0.0
    assert relative_score(1.0, 1.0) == NEWCOMER
    assert relative_score(4.0, 1.0) == 1.0
    assert relative_score(1e9, 1.0) == 1.0


def test_a_newcomer_is_a_normal_node_in_each_part() -> None:
    parts = health_parts(NEW, fleet_medians([NEW]), START_S)
    assert parts == HealthParts(NEWCOMER, NEWCOMER, NEWCOMER, NEWCOMER)
    assert (parts.value, parts.level) == (NEWCOMER, HealthLevel.NORMAL)


def test_levels_begin_at_their_limits() -> None:
    values = (1.0, 0.8, 0.7999, 0.5, 0.4999, 0.3, 0.2999, 0.0)
    levels = ("high", "high", "normal", "normal", "low", "low", "poor", "poor")
    assert tuple(level_of(value) for value in values) == levels


def test_the_weights_are_those_that_the_manual_states() -> None:
    assert HealthParts(1.0, 0.0, 0.0, 0.0).value == 0.4
    assert HealthParts(0.0, 1.0, 0.0, 0.0).value == 0.3
    assert HealthParts(0.0, 0.0, 1.0, 0.0).value == 0.2
    assert HealthParts(0.0, 0.0, 0.0, 1.0).value == 0.1


def test_reliability_excludes_for_longer_each_time_and_lets_the_node_try_again() -> None:
    record, now_s, lengths = NEW, START_S, []
    for _ in range(3):
        while (current_exclusion := exclusion(record, now_s)) is None:
            record = after_round(record, 0.0, None, now_s)
        assert (current_exclusion.part, "reliability" in current_exclusion.reason) == (
            "reliability",
            True,
        )
        lengths.append(current_exclusion.until_s - now_s)
        now_s = current_exclusion.until_s
        assert exclusion(record, now_s) is None
        parts = health_parts(record, fleet_medians([record]), now_s)
        assert parts.reliability == RELIABILITY_LIMIT.restart
    assert lengths == [600, 1200, 2400]


def test_quality_excludes_by_a_limit_and_for_a_time_of_its_own() -> None:
    record, rounds = NEW, 0
    while exclusion(record, START_S) is None:
        record, rounds = after_round(record, 1.0, 0.0, START_S), rounds + 1
    current_exclusion = exclusion(record, START_S)
    assert current_exclusion is not None
    assert (current_exclusion.part, current_exclusion.until_s) == (
        "quality",
        START_S + QUALITY_LIMIT.first_s,
    )
    assert rounds == 21
    assert record.reliability.excluded_until_s == 0


def test_neither_health_nor_uptime_excludes() -> None:
    record = after_rate(NEW, "mlp", 0.001)
    for minute in range(2 * HISTORY_MINUTES):
        record = after_minute(record, 1 + minute, 0.0, is_connected=False)
    fast = after_rate(NEW, "mlp", 1e9)
    parts = health_parts(record, fleet_medians([record, fast]), START_S)
    assert parts.speed == 0.0
    assert parts.uptime < 0.05
    assert exclusion(record, START_S) is None


def test_a_node_that_is_at_work_is_not_held_for_one_that_is_gone() -> None:
    cut = participant(WorkState.CUT)
    assert arrival_sample(cut, has_progress=True) == 0.5
    assert arrival_sample(cut, has_progress=False) == 0.0
    assert arrival_sample(participant(WorkState.LOST), has_progress=True) == 0.0
    assert arrival_sample(participant(WorkState.RECEIVED), has_progress=False) == 1.0
    assert arrival_sample(participant(WorkState.UNREADABLE), has_progress=True) is None
    assert arrival_sample(participant(WorkState.PENDING), has_progress=True) is None


def test_a_node_that_is_lost_with_a_lease_over_several_rounds_loses_reliability() -> None:
    node, lost_ms = NodeId("0x" + "a1" * 20), Milliseconds(9)
    job = Job(job_id=JobId("job-1"), spec=JobSpec(workload="digits-softmax"))
    event = NodeLost(at_ms=lost_ms, node=node, reason="not heard of for 15 s")
    assert health_evidence(job, event, job) == []
    at_work = replace(job, long_leases={node: participant(WorkState.UNDER_WAY)})
    (evidence,) = health_evidence(at_work, event, job)
    assert (evidence.node, evidence.quality) == (node, None)
    assert arrival_sample(evidence.participant, has_progress=True) == 0.0


def test_an_absurd_speed_is_passed_over_and_workloads_are_bounded() -> None:
    for absurd in (0.0, -1.0, float("nan"), float("inf")):
        assert after_rate(NEW, "mlp", absurd) == NEW
    record = NEW
    for number in range(3 * WORKLOADS_MOST):
        record = after_rate(record, f"workload {number}", 10.0)
    assert len(record.rates) == WORKLOADS_MOST
    assert list(record.rates)[-1] == f"workload {3 * WORKLOADS_MOST - 1}"


def test_lost_packets_lower_the_reliability() -> None:
    record = after_line(NEW, 0.0, 0.0, 0.2)
    parts = health_parts(record, fleet_medians([record]), START_S)
    assert parts.reliability == NEWCOMER * 0.8


def test_the_uptime_leaves_out_minutes_in_which_no_coordinator_looked() -> None:
    record = after_minute(NEW, 1_000, 0.8, is_connected=True)
    for minute in range(61, 120):
        record = after_minute(record, 1_000 + minute, 0.8, is_connected=True)
    parts = health_parts(record, fleet_medians([record]), START_S)
    assert parts.uptime == (60 + 0.75 * 60) / 120
    assert health_history(record).points[1:60] == (None,) * 59


@given(st.lists(st.tuples(st.integers(-3, 3_000), _shares, st.booleans()), max_size=60))
def test_a_history_is_bounded_and_in_the_order_of_time(
    steps: list[tuple[int, float, bool]],
) -> None:
    record, minute = NEW, 5_000
    for passed_minutes, value, is_connected in steps:
        minute += passed_minutes
        record = after_minute(record, minute, value, is_connected=is_connected)
    history = health_history(record)
    assert len(record.minutes) <= HISTORY_MINUTES
    assert len(history.points) <= POINTS_MOST
    assert all(point is None or 0.0 <= point <= 1.0 for point in history.points)
    assert len(history.points) == -(-len(record.minutes) // history.step_minutes)


def test_a_minute_is_counted_once_though_the_clock_goes_back() -> None:
    record = after_minute(NEW, 7, 0.5, is_connected=True)
    assert after_minute(record, 7, 0.9, is_connected=False) == record
    assert after_minute(record, 6, 0.9, is_connected=False) == record
