"""A node that says it is faster than it is: it is given no more than a slower one, and timed."""

import random
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.plan.common_work import (
    is_lesser,
    is_timed,
    is_too_slow,
    is_work_equal,
    lesser_work,
)
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.plan.reasons import with_reason
from coordinator.core.training.trust.duplicates import (
    ComparedPair,
    RoundWorker,
    draw_duplicates,
    judge_pairs,
)
from coordinator.core.training.trust.weights import WHOLE
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

NODES = tuple(NodeId(f"{number:02d}") for number in range(20))
BATCH, ROUNDS = 32, 50
SPAN_MS, MOVING, STEPS = 30_000, 0.3, 40
"""A round of the usual node: a third of it moves bytes, the rest takes so many steps."""
FULL = NodePlan(
    320,
    "int4",
    "high",
    forecast_ms=Milliseconds(SPAN_MS),
    spread_ms=Milliseconds(1_000),
    step_us=65,
    batch_size=16,
)
SLOW = NodePlan(
    40, "topk64", "low", forecast_ms=Milliseconds(29_000), step_us=525_000, micro_batch=8
)


def test_work_that_is_compared_is_the_lesser_of_both_in_everything() -> None:
    first, second = lesser_work(FULL, SLOW, BATCH), lesser_work(SLOW, FULL, BATCH)
    assert is_work_equal(first, second, BATCH)
    assert (first.inner_steps, first.batch(BATCH), first.micro_batch) == (40, 16, 8)
    assert first.codec == "topk64"
    assert first.forecast_ms < FULL.forecast_ms == first.full_forecast_ms
    # The same work is left as it is.
    assert lesser_work(first, second, BATCH) == first


def test_nobody_is_timed_by_passes_over_a_batch_that_another_node_needs() -> None:
    first, second = lesser_work(FULL, SLOW, BATCH), lesser_work(SLOW, FULL, BATCH)
    assert first.micro_batch != FULL.micro_batch
    assert is_lesser(first)
    assert not is_timed(first)
    assert not is_too_slow(first, Milliseconds(10 * SPAN_MS))
    assert second.step_us == SLOW.step_us


def as_planned(plan: NodePlan) -> NodePlan:
    return with_reason(plan, up_bits_per_s=3e6, deadline_ms=42_000, why="a reason, forecast 1 s")


def test_no_assignment_tells_that_its_node_is_compared() -> None:
    fast = as_planned(FULL)
    slow = as_planned(replace(SLOW, codec="int4", batch_size=16, micro_batch=0))
    less = lesser_work(fast, slow, BATCH)
    assert less.reason == as_planned(replace(less, reason=FULL.reason)).reason
    assert lesser_work(slow, fast, BATCH).reason == slow.reason


def test_a_plan_of_an_earlier_journal_gives_the_reason_that_it_gave() -> None:
    fast = replace(as_planned(FULL), reason_values=None)
    slow = as_planned(replace(SLOW, codec="int4", batch_size=16, micro_batch=0))
    less = lesser_work(fast, slow, BATCH)
    assert less.reason_values is None
    assert less.reason == lesser_work(as_planned(FULL), slow, BATCH).reason


def test_only_less_work_than_planned_is_timed() -> None:
    plan = NodePlan(320, "int4", "", forecast_ms=Milliseconds(SPAN_MS), step_us=65_625)
    slow = NodePlan(40, "int4", "", forecast_ms=Milliseconds(SPAN_MS), step_us=525_000)
    assert not is_too_slow(plan, Milliseconds(10 * SPAN_MS))
    less = lesser_work(plan, slow, BATCH)
    assert less.forecast_ms == SPAN_MS - 280 * 65_625 // 1000
    assert not is_too_slow(less, Milliseconds(less.forecast_ms + 2_900))
    assert is_too_slow(less, Milliseconds(less.forecast_ms + 3_100))
    assert is_too_slow(less, Milliseconds(SPAN_MS))


class Liar(NamedTuple):
    """A usual node that says it is so many times faster."""

    claim: float
    takes_steps_when_compared: bool
    """Whether it trains as it should where it gets few steps; else it never does."""


class ClaimedRounds:
    """Nodes of 1/4 to 4 times the usual speed, with the noise of homes; the first ones lie."""

    def __init__(self, seed: int, liar: Liar | None, liars: int = 1) -> None:
        self.liar, self.seed = liar, seed
        self.liars = frozenset(NODES[:liars] if liar is not None else ())
        self.dice = random.Random(seed)
        self.speeds = {node: self.dice.choice((0.25, 0.5, 1, 1, 1, 2, 4)) for node in NODES}
        self.speeds |= dict.fromkeys(NODES[:liars], 1.0)
        self.memory = TrustMemory()
        self.paid_steps = 0.0
        self.undone = self.planned = 0
        self.slow_honest = 0

    def play_round(self, number: int) -> None:
        planned_work = {node: self._plan(node) for node in NODES}
        workers = [RoundWorker(node, planned_work[node], has_begun=False) for node in NODES]
        draw = f"{self.seed}/{number}"
        pairs = draw_duplicates(draw, self.memory.duplicates, workers, BATCH)
        both = pairs | {other: own for own, other in pairs.items()}
        plans = {
            node: lesser_work(plan, planned_work[both[node]], BATCH) if node in both else plan
            for node, plan in planned_work.items()
        }
        late = {node for node in both if is_too_slow(plans[node], self._elapsed_ms(plans, node))}
        slow = {node for node in late if both[node] not in late}
        compared_pairs = [ComparedPair(pair, self._likeness(pair, plans)) for pair in pairs.items()]
        whole = Weighing(clips={}, votes={}, reasons={}, memory=self.memory)
        timed_nodes = {node for node in both if is_timed(plans[node])}
        weighing = judge_pairs(whole, compared_pairs, slow, timed_nodes)
        self.memory = weighing.memory
        self.paid_steps += plans[NODES[0]].inner_steps * weighing.votes.get(NODES[0], WHOLE) / WHOLE
        self.slow_honest += len(slow - self.liars)
        self.planned += sum(plan.inner_steps for plan in planned_work.values())
        self.undone += sum(planned_work[it].inner_steps - plans[it].inner_steps for it in NODES)
        self.undone += sum(plans[node].inner_steps for node in pairs)

    def _plan(self, node: NodeId) -> NodePlan:
        claim = self.liar.claim if self.liar is not None and node in self.liars else 1.0
        steps = int(STEPS * self.speeds[node] * claim)
        return NodePlan(
            steps,
            "int4",
            "",
            forecast_ms=Milliseconds(SPAN_MS),
            spread_ms=Milliseconds(SPAN_MS // 12),
            step_us=int((1 - MOVING) * SPAN_MS * 1000 / steps),
        )

    def _cheats(self, node: NodeId, plan: NodePlan) -> bool:
        if self.liar is None or node not in self.liars:
            return False
        return not (plan.full_forecast_ms and self.liar.takes_steps_when_compared)

    def _elapsed_ms(self, plans: dict[NodeId, NodePlan], node: NodeId) -> Milliseconds:
        plan, dice = plans[node], self.dice
        hiccup = 1.6 if dice.random() < 0.03 else 1.0
        usual_ms = (1 - MOVING) * SPAN_MS / STEPS / self.speeds[node]
        computing_ms = plan.inner_steps * usual_ms * hiccup * dice.lognormvariate(0, 0.12)
        if self._cheats(node, plan):
            computing_ms = plan.inner_steps * plan.step_us / 1000
        return Milliseconds(int(MOVING * SPAN_MS * dice.lognormvariate(0, 0.25) + computing_ms))

    def _likeness(self, pair: tuple[NodeId, NodeId], plans: dict[NodeId, NodePlan]) -> float:
        is_cheated = any(self._cheats(node, plans[node]) for node in pair)
        return self.dice.gauss(0.05 if is_cheated else 0.75, 0.05)


def play(seed: int, liar: Liar | None, liars: int = 1) -> ClaimedRounds:
    rounds = ClaimedRounds(seed, liar, liars)
    for number in range(ROUNDS):
        rounds.play_round(number)
    return rounds


@pytest.mark.parametrize(
    "liar",
    [
        Liar(claim, takes_steps_when_compared=takes)
        for claim in (2.0, 8.0)
        for takes in (True, False)
    ],
)
def test_who_overstates_its_speed_is_paid_little_more_than_its_share_and_ever_less(
    liar: Liar,
) -> None:
    plays = [play(seed, liar) for seed in range(8)]
    shares = [one.paid_steps / (ROUNDS * STEPS) for one in plays]
    # Unchecked it would be the claim.
    assert sum(shares) / len(shares) < min(2.0, liar.claim / 2)
    doubts = [one.memory.duplicates.doubts.get(NODES[0], 0) for one in plays]
    assert sum(doubts) / len(doubts) > 16


def test_two_liars_in_five_do_not_hide_behind_each_other() -> None:
    liar = Liar(8.0, takes_steps_when_compared=False)
    plays = [play(seed, liar, liars=8) for seed in range(4)]
    shares = [one.paid_steps / (ROUNDS * STEPS) for one in plays]
    assert sum(shares) / len(shares) < 3


def test_honest_unequal_nodes_lose_little_work_and_hardly_ever_a_part_of_their_votes() -> None:
    plays = [play(seed, None) for seed in range(8)]
    assert sum(one.undone for one in plays) / sum(one.planned for one in plays) < 0.1
    assert sum(one.slow_honest for one in plays) / len(plays) < 1.5
    assert sum(len(one.memory.duplicates.doubts) for one in plays) / len(plays) < 1
