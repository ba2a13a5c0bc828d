"""How many passes are under way in a ring, and how many sessions share one."""

import pytest

from benchmarks.ours.stages.virtual_ring import VirtualRing
from coordinator.core.rings.drafts import DraftCosts
from coordinator.core.rings.pass_plan import PassPlan, pass_plan
from coordinator.core.rings.ring_state import RingLimits, StagePace

STAGES = 3


def costs(pass_us: float, token_us: float, way_us: float) -> DraftCosts:
    return DraftCosts(STAGES * pass_us, STAGES * token_us, 2 * STAGES * way_us, pass_us, token_us)


@pytest.mark.parametrize(
    ("way_ms", "live", "plan"),
    [
        (0, 1, PassPlan(1, 1)),
        (0, 2, PassPlan(2, 1)),
        (0, 3, PassPlan(3, 1)),
        # Four passes would wait for stages: 160 ms for a token in place of 120.
        (0, 4, PassPlan(2, 2)),
        (1, 4, PassPlan(2, 2)),
        (1, 16, PassPlan(3, 6)),
        # The way takes as long as a seventh pass and more.
        (30, 7, PassPlan(7, 1)),
        (30, 16, PassPlan(6, 3)),
    ],
)
def test_as_many_passes_are_under_way_as_wait_for_no_stage(
    way_ms: int, live: int, plan: PassPlan
) -> None:
    assert pass_plan(costs(40_000, 10, 1_000 * way_ms), live, 256) == plan


def test_where_tokens_alone_cost_time_the_fewest_passes_that_fill_all_stages_are_as_good() -> None:
    assert pass_plan(costs(0, 40_000, 0), 6, 256) == PassPlan(3, 2)


def test_a_pass_has_no_more_sessions_than_room() -> None:
    assert pass_plan(costs(40_000, 10, 0), 16, 3) == PassPlan(6, 3)
    assert pass_plan(costs(40_000, 10, 0), 4, 1) == PassPlan(4, 1)


def test_a_ring_without_sessions_may_begin_one() -> None:
    assert pass_plan(costs(40_000, 10, 0), 0, 256) == PassPlan(1, 1)


@pytest.mark.parametrize("sessions", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("way_ms", [0.0, 0.6, 30.0, 80.0])
def test_sessions_up_to_16_get_each_what_one_gets_alone_where_tokens_cost_little(
    sessions: int, way_ms: float
) -> None:
    paces = [StagePace(40_000.0, 10.0, 1_000 * way_ms)] * STAGES
    ring = VirtualRing(paces, RingLimits(has_drafts=False))
    for session in range(sessions):
        ring.open(session, prompt=4, answer=60)
    alone_us = STAGES * (40_000 + 2_000 * way_ms)
    for answer in ring.run().values():
        later_us = answer.times_us[10:]
        token_us = (later_us[-1] - later_us[0]) / (len(later_us) - 1)
        assert token_us == pytest.approx(alone_us, rel=0.02)
