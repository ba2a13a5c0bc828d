import pytest

from hypergpu.jobfile.spec import SPARSE_SCHEMES, Aware
from tests.unit.plan.fleet import Fleet, Truth, names, spec

FAST = Truth(50, 1000, 1000, 10)
SLOW = Truth(50, 2, 5, 150, 0.01)


def _fleet(truth: Truth, aware: Aware | None = None) -> Fleet:
    return Fleet(spec(nodes=5, aware=aware), dict.fromkeys(names(5), truth))


def test_a_jobs_first_round_is_sparse_both_ways_and_steps_without_momentum() -> None:
    plan = _fleet(FAST).play().plan
    assert {mine.codec for mine in plan.nodes.values()} == {"topk256"}
    assert (plan.down, plan.is_sparse) == ("topk256", True)


def test_a_job_without_sparse_codecs_begins_with_the_finest() -> None:
    plan = _fleet(FAST, Aware(sparsest="int4")).play().plan
    assert {mine.codec for mine in plan.nodes.values()} == {"int4"}
    assert (plan.down, plan.is_sparse) == ("int4", False)


@pytest.mark.parametrize(("truth", "is_sparse"), [(FAST, False), (SLOW, True)])
def test_the_first_round_does_not_hold_the_second_to_its_family(
    truth: Truth, *, is_sparse: bool
) -> None:
    fleet = _fleet(truth)
    fleet.play()
    plan = fleet.play().plan
    assert plan.is_sparse == is_sparse
    assert all((mine.codec in SPARSE_SCHEMES) == is_sparse for mine in plan.nodes.values())
