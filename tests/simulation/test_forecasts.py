"""Forecasts beside what jobs in virtual time then took: see `make bench ONLY=adaptive`."""

import itertools
from statistics import median

from benchmarks.ours.adaptive.forecasts import drawn_simulation, trial_in
from coordinator.core.training.job_forecast.basis import JobForecast
from coordinator.core.training.job_forecast.forecast import forecast_job
from hypergpu.units import Milliseconds
from netsim.network.world import SlowDeviceFault

SEEDS = (0, 1, 2, 8, 10, 13)


def test_jobs_take_about_as_long_as_was_said() -> None:
    trials = [trial_in(seed) for seed in SEEDS]
    assert median(each.error for each in trials) <= 0.15
    assert max(each.error for each in trials) <= 0.4


def test_forecast_knows_what_was_measured_and_not_the_world() -> None:
    """Two worlds with one past and unlike futures: what is said of a job is the same."""
    forecasts = []
    for factor in (1, 10):
        slower = SlowDeviceFault(nodes="node-0", at_ms=Milliseconds(10**7), factor=factor)
        trial = drawn_simulation(4, faults=(slower,))
        trial.simulation.run()
        forecasts.append(forecast_job(trial.simulation.forecast_basis(trial.spec)))
    assert isinstance(forecasts[0], JobForecast)
    assert forecasts[0] == forecasts[1]


def test_what_is_left_shrinks_to_nothing_while_a_job_runs() -> None:
    """Each tenth of a job from its own state, with the readings of that moment."""
    trial = drawn_simulation(8)
    simulation = trial.simulation
    simulation.run()
    job_id, began_ms = simulation.submit(trial.spec), simulation.now_ms
    points: list[tuple[int, int]] = []
    while simulation.pass_time(Milliseconds(5_000)):
        basis = simulation.forecast_basis(trial.spec)
        job_forecast = forecast_job(basis, simulation.job_states[job_id])
        if isinstance(job_forecast, JobForecast):
            points.append((simulation.now_ms - began_ms, job_forecast.left_ms.middle))
    took_ms = simulation.now_ms - began_ms
    assert len(points) >= 8
    lefts = [left_ms for _, left_ms in points]
    assert lefts[-1] <= 0.2 * lefts[0]
    assert all(after <= 1.25 * before for before, after in itertools.pairwise(lefts))
    errors = [abs(at_ms + left_ms - took_ms) / took_ms for at_ms, left_ms in points]
    assert max(errors) <= 0.25
    assert errors[-1] <= 0.1
