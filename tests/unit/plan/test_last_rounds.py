"""Plans of a job's last rounds in fleets with one slow node."""

import pytest

from hypergpu.ids import NodeId
from tests.unit.plan.fleet import Played, PlayedFleet, Truth, names, spec, total_samples

SLOW = NodeId("slow")


def _play_to_the_end(times_slower: int, seed: int) -> list[Played]:
    truths = dict.fromkeys(names(3), Truth()) | {SLOW: Truth(step_ms=50 * times_slower)}
    fleet = PlayedFleet(spec(nodes=4, rounds=20), truths, seed=seed)
    rounds = []
    while fleet.samples_done < total_samples(fleet.job):
        rounds.append(fleet.play())
    return rounds


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("times_slower", [8, 20, 64])
def test_a_slow_node_works_until_the_job_ends(times_slower: int, seed: int) -> None:
    assert all(
        SLOW in each_round.plan.nodes for each_round in _play_to_the_end(times_slower, seed)[-6:]
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_two_rounds_share_what_is_left_equally(seed: int) -> None:
    samples = [each_round.samples for each_round in _play_to_the_end(8, seed)]
    assert samples[-1] > 0.7 * samples[-2]
    assert samples[-1] > 0.4 * max(samples)
