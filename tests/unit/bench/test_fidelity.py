import asyncio

import pytest

from benchmarks.ours.fidelity.figures import TRIES, Judged, Repeats
from benchmarks.ours.fidelity.world import LOSSY, WORLDS, Compared, round_time_error
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


def measured_with(repeats: Repeats, *validities: bool) -> Judged[int]:
    """Return the measurement that counts, of some that are valid or not, in this order."""
    left = [Judged(number, is_valid) for number, is_valid in enumerate(validities)]

    async def measure() -> Judged[int]:
        return left.pop(0)

    return asyncio.run(repeats.measured(measure))


def test_the_error_of_round_times_is_that_of_single_rounds_relative_to_the_real_ones() -> None:
    assert round_time_error(report(1100, 1800), report(1000, 2000)) == pytest.approx(0.1)


def test_what_a_backend_calls_invalid_is_measured_again_and_counted() -> None:
    repeats = Repeats()
    assert measured_with(repeats, False, True).found == 1
    assert repeats.notes() == ["The backend was late: measured again 1 times."]


def test_measuring_again_has_an_end_and_the_row_says_that_it_does_not_count() -> None:
    repeats = Repeats()
    assert measured_with(repeats, *[False] * TRIES) == Judged(TRIES - 1, is_valid=False)
    row = repeats.judged(("rate", "1", "2", "+100 %"), is_valid=False)
    assert row[0] == "rate (INVALID)"
    assert repeats.notes()[-1].endswith("rate")


@pytest.mark.parametrize("world", [*WORLDS, LOSSY], ids=lambda world: world.name)
def test_the_worlds_that_are_compared_have_eight_nodes(world: Compared) -> None:
    assert len(parse_world(world.text.replace("ROUNDS", "8"), source=world.name).nodes) == 8
