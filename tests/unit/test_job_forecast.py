"""Forecasts of jobs: by measurements alone, and alike for equal arguments."""

from msgspec.structs import replace

from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    Finish,
    NodeReading,
    Observation,
    Presence,
    RoundTrip,
    StepTime,
    TransferDirection,
    TransferTime,
)
from coordinator.core.training.job_forecast.basis import (
    CoordinatorTimes,
    ForecastBasis,
    JobForecast,
)
from coordinator.core.training.job_forecast.forecast import forecast_job
from coordinator.core.training.job_forecast.node_course import absence_rates, expected_nodes
from coordinator.core.training.plan.decision import ModelSizes
from hypergpu.ids import NodeId
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.units import Bytes, Microseconds, Milliseconds

NOW_MS = Milliseconds(600_000)
SIZES = ModelSizes(
    {
        "fp32": Bytes(400_000),
        "bf16": Bytes(200_000),
        "int8": Bytes(100_000),
        "int4": Bytes(51_000),
        "topk256": Bytes(13_000),
        "topk64": Bytes(3_000),
        "topk16": Bytes(800),
    },
    Bytes(400_000),
)


def job_of(rounds: int, *, nodes: int = 2, strategy: str = "aware") -> JobSpec:
    training = TrainingSettings(rounds=rounds, inner_steps=20, batch_size=16, nodes=nodes)
    return with_strategy(JobSpec(workload="digits-softmax", training=training), strategy)


def read(*observations: Observation) -> NodeReading:
    reading = NodeReading()
    for each in observations:
        reading = add_observation(reading, each)
    return reading


def reading_of(step_ms: int = 100) -> NodeReading:
    """A node next door that trained before."""
    mbit = TransferTime(NOW_MS, TransferDirection.UP, Bytes(1_000_000), Microseconds(80_000), 1)
    observations: list[Observation] = []
    for _ in range(5):
        observations += [
            RoundTrip(NOW_MS, Microseconds(1_000)),
            StepTime(NOW_MS, steps=10, took_ms=Milliseconds(10 * step_ms)),
            mbit,
            replace(mbit, direction=TransferDirection.DOWN),
            Finish(NOW_MS, Milliseconds(1_000), Milliseconds(1_000)),
        ]
    return read(Presence(Milliseconds(0), is_present=True), *observations)


def basis_of(spec: JobSpec, **readings: NodeReading) -> ForecastBasis:
    readings_by_node = {NodeId(name): each for name, each in readings.items()}
    times = CoordinatorTimes(prepare_ms=Milliseconds(200), evaluate_ms=Milliseconds(200))
    return ForecastBasis(
        spec=spec, readings=readings_by_node, sizes=SIZES, times=times, now_ms=NOW_MS
    )


def forecast(spec: JobSpec, **readings: NodeReading) -> JobForecast:
    job_forecast = forecast_job(basis_of(spec, **readings))
    assert isinstance(job_forecast, JobForecast), job_forecast
    return job_forecast


def test_time_is_that_of_the_computing_and_what_is_around_it() -> None:
    job_forecast = forecast(job_of(10), a=reading_of(), b=reading_of())
    computing_ms = 10 * 20 * 100
    assert computing_ms <= job_forecast.left_ms.middle <= 1.3 * computing_ms
    assert job_forecast.left_ms.low < job_forecast.left_ms.middle < job_forecast.left_ms.high
    assert job_forecast.samples >= job_of(10).stated_samples


def test_equal_arguments_give_equal_forecasts() -> None:
    spec, readings = job_of(10), {"a": reading_of(), "b": reading_of(300)}
    assert forecast(spec, **readings) == forecast(spec, **readings)


def test_longer_job_is_extrapolated_from_the_rounds_that_were_rolled() -> None:
    short, long = (forecast(job_of(n), a=reading_of(), b=reading_of()) for n in (40, 400))
    assert 8 <= long.left_ms.middle / short.left_ms.middle <= 12
    assert 8 <= long.bytes_up.middle / short.bytes_up.middle <= 12


def test_each_strategy_has_a_forecast() -> None:
    readings = {"a": reading_of(), "b": reading_of()}
    for strategy in ("diloco", "fedavg", "sync"):
        spec = job_of(10, strategy=strategy)
        job_forecast = forecast(spec, **readings)
        assert job_forecast.rounds == 10
        assert job_forecast.left_ms.middle >= 10 * spec.training.inner_steps * 100


def test_node_that_was_never_seen_is_taken_for_one_of_its_fleet_with_more_spread() -> None:
    unseen_reading = read(
        Presence(Milliseconds(0), is_present=True), RoundTrip(NOW_MS, Microseconds(1_000))
    )
    known_forecast = forecast(job_of(10), a=reading_of(), b=reading_of())
    job_forecast = forecast(job_of(10), a=reading_of(), b=unseen_reading)
    assert (job_forecast.nodes, job_forecast.measured_nodes) == (2, 1)
    assert job_forecast.reason == "1 of 2 nodes is measured, 1 by the median"
    assert 0.5 < job_forecast.left_ms.middle / known_forecast.left_ms.middle < 2
    spreads = [each.left_ms.high / each.left_ms.low for each in (job_forecast, known_forecast)]
    assert spreads[0] > spreads[1]


def test_fleet_of_which_nothing_is_known_is_said_to_be_assumed() -> None:
    job_forecast = forecast(job_of(10), a=NodeReading(), b=NodeReading())
    assert job_forecast.measured_nodes == 0
    assert "assumed" in job_forecast.reason
    assert job_forecast.left_ms.high > 1.5 * job_forecast.left_ms.low


def test_nodes_that_keep_leaving_cost_time() -> None:
    leaving_readings = [reading_of(), reading_of()]
    for number in range(12):
        at_ms = Milliseconds(NOW_MS + 30_000 * number)
        back_ms = Milliseconds(at_ms + 20_000)
        leaving_readings = [
            add_observation(add_observation(each, Presence(at_ms, False)), Presence(back_ms, True))
            for each in leaving_readings
        ]
    calm = forecast(job_of(20), a=reading_of(), b=reading_of())
    job_forecast = forecast(job_of(20), a=leaving_readings[0], b=leaving_readings[1])
    assert job_forecast.left_ms.middle > 1.3 * calm.left_ms.middle


def test_absences_are_counted_with_their_times_and_forgotten() -> None:
    reading = read(Presence(Milliseconds(0), is_present=True))
    for number in range(1, 101):
        reading = add_observation(reading, Presence(Milliseconds(number * 10_000 - 1_000), False))
        reading = add_observation(reading, Presence(Milliseconds(number * 10_000), True))
    rates = absence_rates({NodeId("a"): reading}, Milliseconds(1_000_000))
    assert reading.absences <= 17
    assert 900 <= rates.away_ms <= 2_000
    assert 9_000 <= rates.each_ms[NodeId("a")] <= 60_000


def test_node_that_is_away_for_long_is_not_expected_back() -> None:
    reading = read(Presence(Milliseconds(0), True), Presence(Milliseconds(100_000), False))
    node = NodeId("a")
    assert node in expected_nodes({node: reading}, Milliseconds(105_000))
    assert node not in expected_nodes({node: reading}, Milliseconds(100_000_000))


def test_job_without_enough_nodes_has_a_reason_in_place_of_a_forecast() -> None:
    assert forecast_job(basis_of(job_of(10))) == "no node is there for it"
    reason = forecast_job(basis_of(job_of(10), a=reading_of()))
    assert reason == "1 of 2 nodes is there for it"


def test_large_fleet_is_rolled_for_fewer_rounds() -> None:
    readings = {f"n{number}": reading_of() for number in range(200)}
    job_forecast = forecast(job_of(10, nodes=200), **readings)
    assert job_forecast.nodes == 200
    assert job_forecast.left_ms.middle >= 10 * 20 * 100
