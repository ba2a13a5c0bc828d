import pytest

from gpu_node.shell.worker.batches import Schedule, learning_rate
from hypergpu.units import Samples


def test_constant_is_the_peak() -> None:
    assert learning_rate(Schedule(0.5), Samples(10**9)) == 0.5


@pytest.mark.parametrize(("processed", "rate"), [(25, 0.25), (100, 1.0), (400, 1.0)])
def test_warm_up_rises_with_the_samples_of_the_whole_job(processed: int, rate: float) -> None:
    schedule = Schedule(1.0, warmup_samples=Samples(100))
    assert learning_rate(schedule, Samples(processed)) == rate


@pytest.mark.parametrize(("processed", "rate"), [(0, 1.0), (500, 0.5), (1000, 0.0), (2000, 0.0)])
def test_cosine_falls_to_zero_at_the_end_of_the_job(processed: int, rate: float) -> None:
    schedule = Schedule(1.0, "cosine", total_samples=Samples(1000))
    assert learning_rate(schedule, Samples(processed)) == pytest.approx(rate)
