"""A node that states an absurd speed, another one each round, or none: its forecast is bounded, the
plan gives a reason, and nothing of the others' work is lost.
"""

from dataclasses import dataclass, field
from math import inf, nan

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.network.reading import Observation, StepTime
from coordinator.core.training.plan.node_speed import UNPROVEN_TIMES
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.unit.plan.fleet import Played, PlayedFleet, Truth, names, spec

HONEST, LIAR = names(4), NodeId("liar")
ROUNDS = 8
MONTH_MS = 30 * 86_400_000
FORECAST_MS_MOST = 200_000_000
"""Two days: no time that a plan reckons with overflows anything."""
ABSURD = (0.0, -1.0, inf, nan, 1e30, 1e-30, 100.0, 0.01, 1.0)


@dataclass
class LyingFleet(PlayedFleet):
    """A fleet of which one node multiplies the times that it states, another way each round."""

    factors: list[float | None] = field(default_factory=list)
    """One a round; None: it states nothing."""

    def _observe(self, node: NodeId, observation: Observation) -> None:
        if node == LIAR and isinstance(observation, StepTime):
            factor = self.factors[self.number % len(self.factors)]
            if factor is None:
                return
            # As what comes off the wire is: a whole number, of at least one and at most a month.
            stated_ms = observation.took_ms * factor
            took_ms = int(max(1, stated_ms)) if stated_ms < MONTH_MS else MONTH_MS
            observation = replace(observation, took_ms=Milliseconds(took_ms))
        super()._observe(node, observation)


def play(factors: list[float | None], rounds: int = ROUNDS) -> list[Played]:
    truths = dict.fromkeys((*HONEST, LIAR), Truth())
    fleet = LyingFleet(spec(nodes=len(truths)), truths, factors=factors)
    return [fleet.play() for _ in range(rounds)]


@given(st.lists(st.none() | st.sampled_from(ABSURD) | st.floats(), min_size=1, max_size=ROUNDS))
@settings(max_examples=40, deadline=None)
def test_whatever_a_node_states_the_plan_is_one_that_can_be_carried_out(
    factors: list[float | None],
) -> None:
    for each_round in play(factors):
        plan = each_round.plan
        assert plan.nodes.keys() | plan.resting.keys() == {*HONEST, LIAR}
        if LIAR in plan.resting:
            assert plan.resting[LIAR]
            continue
        part = plan.nodes[LIAR]
        assert 1 <= part.inner_steps <= UNPROVEN_TIMES * max(1, plan.memory.inner_steps)
        assert part.batch(32) >= 4
        assert 0 <= part.forecast_ms <= FORECAST_MS_MOST
        assert part.reason


@given(st.lists(st.none() | st.sampled_from(ABSURD), min_size=1, max_size=ROUNDS))
@settings(max_examples=25, deadline=None)
def test_whatever_a_node_states_no_honest_update_is_lost_and_rounds_go_on(
    factors: list[float | None],
) -> None:
    honest = play([1.0])
    rounds = play(factors)
    lost_nodes = [node for each_round in rounds for node in each_round.cut if node != LIAR]
    assert not lost_nodes
    done_steps = sum(
        part.inner_steps
        for each_round in rounds
        for node, part in each_round.plan.nodes.items()
        if node != LIAR
    )
    usual = sum(
        part.inner_steps
        for each_round in honest
        for node, part in each_round.plan.nodes.items()
        if node != LIAR
    )
    assert done_steps / sum(each.took_ms for each in rounds) >= 0.7 * usual / sum(
        each.took_ms for each in honest
    )
