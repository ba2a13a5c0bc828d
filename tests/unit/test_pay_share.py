"""Pay by trials of updates on samples of their own shards, of evidence that is made up."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory, Weighing
from coordinator.core.training.trust.own_evidence import OwnEvidence
from coordinator.core.training.trust.own_samples import weigh_by_own_samples
from coordinator.core.training.trust.pay_share import known_pay, pay_shares
from coordinator.core.training.trust.weights import WHOLE, UpdateEvidence, without_trust
from hypergpu.ids import NodeId

HONEST = tuple(NodeId(f"honest-{number}") for number in range(6))
LIARS = tuple(NodeId(f"liar-{number}") for number in range(4))
USUAL, SPREAD = 0.4, 0.04
LOSS, LOSS_AFTER = 1.0, 0.5
NEW = TrustMemory(by_own_samples=True, pay=PayMemory())

Lie = Callable[[int, OwnEvidence], OwnEvidence]


def honest_work(dice: random.Random) -> OwnEvidence:
    layers = tuple(dice.gauss(USUAL, SPREAD) for _ in range(3))
    return OwnEvidence(
        cosine=dice.gauss(USUAL, SPREAD),
        layers=layers,
        steepness=1.0,
        loss=dice.gauss(LOSS, 0.1),
        loss_after=dice.gauss(LOSS_AFTER, 0.05),
    )


def evidence(node: NodeId, own: OwnEvidence | None) -> UpdateEvidence:
    return UpdateEvidence(
        node=node,
        inner_steps=10,
        norm=1.0,
        statistics_norm=0.0,
        influence=0.3,
        gain=0.3,
        own=own,
    )


def weighed_rounds(lie: Lie, rounds: int = 20, memory: TrustMemory = NEW) -> list[Weighing]:
    dice, weighings = random.Random(1), []
    for number in range(rounds):
        honest = [evidence(node, honest_work(dice)) for node in HONEST]
        lies = [evidence(node, lie(number, honest_work(dice))) for node in LIARS]
        weighings.append(weigh_by_own_samples(memory, [*honest, *lies], 0.03))
        memory = weighings[-1].memory
    return weighings


def pay(weighings: Sequence[Weighing], nodes: Sequence[NodeId]) -> float:
    shares = [each.pay_shares.get(node, WHOLE) for each in weighings for node in nodes]
    return sum(shares) / WHOLE / len(shares)


def noise_in_one_layer(_number: int, own: OwnEvidence) -> OwnEvidence:
    return replace(own, layers=(own.layers[0], 0.0, own.layers[2]), cosine=0.8 * own.cosine)


def one_sample(_number: int, own: OwnEvidence) -> OwnEvidence:
    """The mean of the gradients hardly tells it; the other samples become worse."""
    return replace(own, cosine=0.8 * own.cosine, loss_after=1.4)


def each_third_round(number: int, own: OwnEvidence) -> OwnEvidence:
    return replace(own, loss_after=1.6) if number % 3 == 2 else own


def honesty(_number: int, own: OwnEvidence) -> OwnEvidence:
    return own


def test_honest_work_is_paid_in_full() -> None:
    assert pay(weighed_rounds(honesty), (*HONEST, *LIARS)) > 0.99


@pytest.mark.parametrize("lie", [noise_in_one_layer, one_sample])
def test_noise_in_one_layer_and_one_sample_for_all_earn_nothing(lie: Lie) -> None:
    weighings = weighed_rounds(lie)
    assert pay(weighings, LIARS) < 0.05
    assert pay(weighings, HONEST) > 0.99
    reason = weighings[0].pay_reasons[LIARS[0]]
    assert "worst layers" in reason if lie is noise_in_one_layer else "takes the loss" in reason


def test_a_lie_in_each_third_round_takes_the_pay_of_the_rounds_between() -> None:
    weighings = weighed_rounds(each_third_round)
    assert pay(weighings[:2], LIARS) == 1
    assert pay(weighings[2:], LIARS) == 0
    assert "still owes" in weighings[3].pay_reasons[LIARS[0]]


def test_rounds_without_a_fault_pay_a_debt_off() -> None:
    def once(number: int, own: OwnEvidence) -> OwnEvidence:
        return replace(own, loss_after=1.6) if number == 2 else own

    weighings = weighed_rounds(once)
    assert pay(weighings[2:5], LIARS) == 0
    assert pay(weighings[12:], LIARS) > 0.99


def test_without_trials_a_lie_that_the_cosine_hides_is_paid() -> None:
    """What the trial alone tells: the same evidence without it."""

    def without_trial(number: int, own: OwnEvidence) -> OwnEvidence:
        return replace(one_sample(number, own), loss=None, loss_after=None)

    assert pay(weighed_rounds(without_trial), LIARS) > 0.9


def test_an_update_that_is_not_finite_once_applied_earns_nothing() -> None:
    weighings = weighed_rounds(lambda _, own: replace(own, loss_after=math.inf))
    assert pay(weighings, LIARS) == 0


def test_where_hardly_anything_is_left_to_gain_trials_take_no_pay() -> None:
    memory = weighed_rounds(honesty)[-1].memory
    dice, weighings = random.Random(3), []
    for _ in range(20):
        works = [
            replace(honest_work(dice), loss=0.02, loss_after=dice.gauss(0.018, 0.01))
            for _ in HONEST
        ]
        round_ = [evidence(node, own) for node, own in zip(HONEST, works, strict=True)]
        weighings.append(weigh_by_own_samples(memory, round_, 0.03))
        memory = weighings[-1].memory
    assert pay(weighings, HONEST) > 0.95


def test_a_node_that_is_not_drawn_is_paid_by_the_memory() -> None:
    memory = weighed_rounds(noise_in_one_layer)[-1].memory
    dice = random.Random(4)
    round_ = [evidence(node, honest_work(dice)) for node in HONEST]
    round_ += [evidence(node, None) for node in LIARS]
    weighing = weigh_by_own_samples(memory, round_, 0.03)
    assert pay([weighing], LIARS) == 0
    assert "over rounds" in weighing.pay_reasons[LIARS[0]]
    assert set(known_pay(memory, LIARS).values()) == {0}
    assert known_pay(memory, HONEST) == dict.fromkeys(HONEST, WHOLE)


def test_with_fewer_than_three_measured_updates_the_memory_decides() -> None:
    dice = random.Random(5)
    own = {node: replace(honest_work(dice), loss_after=1.6) for node in LIARS[:2]}
    shares_of_pay = pay_shares(PayMemory(), own, dict.fromkeys(LIARS[:2], 1.0), 1.0, {})
    assert shares_of_pay.shares == dict.fromkeys(LIARS[:2], 1.0)
    assert shares_of_pay.memory == PayMemory()


def test_a_node_that_is_readmitted_owes_nothing() -> None:
    memory = weighed_rounds(each_third_round)[-1].memory
    assert memory.pay is not None
    assert memory.pay.debts[LIARS[0]] > 0
    pay_memory = without_trust(memory, LIARS[0]).pay
    assert pay_memory is not None
    assert LIARS[0] not in {**pay_memory.debts, **pay_memory.averages}
    assert pay_memory.debts[LIARS[1]] == memory.pay.debts[LIARS[1]]


def test_a_job_that_began_before_trials_is_paid_as_before() -> None:
    before = weighed_rounds(each_third_round, memory=TrustMemory(by_own_samples=True))
    assert pay(before, LIARS) > 0.6
    assert all(each.memory.pay is None for each in before)
