"""Jobs of many nodes, of which some are looked at in a round, of evidence that is made up."""

import random
from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory, Weighing
from coordinator.core.training.trust.own_draw import KNOWN_MOST, NODES_MOST, drawn_nodes
from coordinator.core.training.trust.own_samples import weigh_by_own_samples
from coordinator.core.training.trust.weights import BAN_AFTER, WHOLE, UpdateEvidence
from hypergpu.ids import NodeId
from tests.unit.test_pay_share import evidence, honest_work

HONEST = tuple(NodeId(f"honest-{number:03}") for number in range(3 * NODES_MOST))
LIARS = tuple(NodeId(f"liar-{number:03}") for number in range(2 * NODES_MOST))
EVERYBODY = (*HONEST, *LIARS)
ROUNDS_FOR_ALL = -(-len(EVERYBODY) // (NODES_MOST - KNOWN_MOST))
BEFORE = TrustMemory(by_own_samples=True, pay=PayMemory())
NOW = replace(BEFORE, unseen={})


def crowd_rounds(memory: TrustMemory, rounds: int) -> tuple[list[Weighing], list[set[NodeId]]]:
    """Weighings, and who was looked at, where liars turn the sign of all that they send."""
    dice, weighings, looks = random.Random(1), [], []
    for number in range(rounds):
        looked_at = set(drawn_nodes(str(number), memory, EVERYBODY))
        round_: list[UpdateEvidence] = []
        for node in EVERYBODY:
            own = honest_work(dice)
            if node in LIARS:
                turned_layers = tuple(-each for each in own.layers)
                own = replace(own, cosine=-own.cosine, layers=turned_layers, loss_after=1.5)
            round_.append(evidence(node, own if node in looked_at else None))
        weighings.append(weigh_by_own_samples(memory, round_, 0.03))
        looks.append(looked_at)
        memory = weighings[-1].memory
    return weighings, looks


def sum_of(shares: Sequence[dict[NodeId, int]], nodes: Sequence[NodeId]) -> float:
    return sum(each.get(node, WHOLE) for each in shares for node in nodes) / WHOLE


def test_everybody_is_looked_at_within_as_few_rounds_as_newcomers_take() -> None:
    _, looks = crowd_rounds(NOW, ROUNDS_FOR_ALL)
    assert set().union(*looks) == set(EVERYBODY)


def test_a_look_takes_the_vote_of_a_liar_until_it_is_looked_at_again() -> None:
    weighings, _ = crowd_rounds(NOW, 3 * ROUNDS_FOR_ALL)
    late = [each.votes for each in weighings[ROUNDS_FOR_ALL:]]
    assert sum_of(late, LIARS) < 0.02 * len(late) * len(LIARS)
    assert sum_of(late, HONEST) > 0.7 * len(late) * len(HONEST)


def test_liars_earn_less_than_where_a_look_counts_for_its_own_round() -> None:
    rounds = 3 * ROUNDS_FOR_ALL
    now, before = (
        sum_of([each.pay_shares for each in crowd_rounds(memory, rounds)[0]], LIARS)
        for memory in (NOW, BEFORE)
    )
    assert now < 0.7 * before


def test_rounds_that_the_memory_alone_decides_count_for_no_ban() -> None:
    weighings, looks = crowd_rounds(NOW, ROUNDS_FOR_ALL + BAN_AFTER)
    for weighing, looked_at in zip(weighings, looks, strict=True):
        assert set(weighing.useless) <= looked_at
