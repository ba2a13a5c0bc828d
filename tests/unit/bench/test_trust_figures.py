"""What the figures of trust say of the outcomes of its jobs."""

from benchmarks.ours.table import PartFigures
from benchmarks.ours.trust.attacks import ABSENT, NONE
from benchmarks.ours.trust.cells import EVERY, PEERS, TrustGrid
from benchmarks.ours.trust.outcome import Outcome
from benchmarks.trust import figures_of

UNDER = "under"


def outcome(accuracy: float, paid: float = 0.0) -> Outcome:
    return Outcome(
        accuracy=accuracy, honest_weight=0.9, attackers_pay=paid, rounds_to_ban=(1, 2, 3)
    )


def figures(changed: dict[tuple[str, str], float]) -> PartFigures:
    """Figures of jobs that all reach 90 %, but for those of these rules and attacks.

    With a seed the accuracy of all jobs rises, so that what is not paired is seen.
    """
    grid = TrustGrid()
    outcomes = {
        each: outcome(changed.get((each.rule, each.attack), 90.0) + each.seed)
        for each in grid.settings()
    }
    return figures_of(grid, outcomes)


def test_points_are_lost_against_the_job_whose_attackers_are_absent() -> None:
    metrics = figures({("robust", NONE): 95.0, ("robust", ABSENT): 92.0}).metrics
    assert metrics["points_lost_20"] == metrics["points_lost_30"] == metrics["points_lost_40"] == 2
    assert metrics["points_lost_to_honest_40"] == 5


def test_the_worst_attack_decides() -> None:
    assert figures({("robust", UNDER): 81.0}).metrics["points_lost_40"] == 9


def test_only_attacks_a_point_below_another_rule_count_as_worse() -> None:
    assert figures({}).metrics["skewed_worse_than_best"] == 0
    below = {("robust", UNDER): 88.5, (PEERS[0], "label flip"): 90.9}
    assert figures(below).metrics["skewed_worse_than_best"] == 1


def test_rules_with_fewer_seeds_are_compared_over_theirs() -> None:
    assert figures({}).metrics["skewed_points_below_best"] == 0


def test_all_jobs_of_the_gravest_attacks_are_among_those_of_all() -> None:
    assert set(TrustGrid().settings()) < set(EVERY.settings())
