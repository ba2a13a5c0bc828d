import asyncio

import pytest

from benchmarks.ours.fidelity.figures import TRIES, BackendFigures, Measurement
from benchmarks.ours.fidelity.world import LOSSY, WORLDS, ComparedWorld, round_time_error
from hypergpu.client.history import RoundPoint
from hypergpu.units import Milliseconds
from netsim.measure.lateness import ALWAYS_VALID
from netsim.network.world_file import parse_world
from netsim.run.report import RunReport


def report(*durations_ms: int) -> RunReport:
    return RunReport(
        world="homes",
        seed=1,
        backend="world",
        phase="finished",
        reason="",
        rounds=tuple(
            RoundPoint(number=number, duration_ms=Milliseconds(duration_ms))
            for number, duration_ms in enumerate(durations_ms, 1)
        ),
        metric=None,
        verdict=ALWAYS_VALID,
    )


def measure_with(figures: BackendFigures, *validities: bool) -> Measurement[int]:
    """Return the measurement that counts, of some that are valid or not, in this order."""
    left = [Measurement(number, is_valid) for number, is_valid in enumerate(validities)]

    async def measure() -> Measurement[int]:
        return left.pop(0)

    return asyncio.run(figures.measure(measure))


def test_the_error_of_round_times_is_that_of_single_rounds_relative_to_the_real_ones() -> None:
    assert round_time_error(report(1100, 1800), report(1000, 2000)) == pytest.approx(0.1)


def test_what_a_backend_calls_invalid_is_measured_again_and_counted() -> None:
    figures = BackendFigures("proxy")
    assert measure_with(figures, False, True).found == 1
    assert figures.notes() == ["The proxy was late: measured again 1 times."]


def test_measuring_again_has_an_end_and_the_row_says_that_it_does_not_count() -> None:
    figures = BackendFigures("proxy")
    assert measure_with(figures, *[False] * TRIES) == Measurement(TRIES - 1, is_valid=False)
    figures.add("rate", 1, 2, "+100 %", valid=False)
    assert figures.rows[0][0] == "proxy: rate (INVALID)"
    assert figures.notes()[-1].endswith("rate")


@pytest.mark.parametrize("world", [*WORLDS, LOSSY], ids=lambda world: world.name)
def test_the_worlds_that_are_compared_have_eight_nodes(world: ComparedWorld) -> None:
    assert len(parse_world(world.text.replace("ROUNDS", "8"), source=world.name).nodes) == 8
