"""Rounds judged by samples of their own shards, of evidence that is made up."""

import random
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.honesty import judge_honesty
from coordinator.core.training.trust.own_evidence import OwnEvidence
from coordinator.core.training.trust.own_samples import (
    LENGTH_MOST,
    USE_LEAST,
    VOTES_LEAST,
    WORK_FULL,
    weigh_by_own_samples,
)
from coordinator.core.training.trust.weights import BAN_AFTER, WHOLE, UpdateEvidence
from hypergpu.ids import NodeId

HONEST = tuple(NodeId(f"honest-{number}") for number in range(6))
LIARS = tuple(NodeId(f"liar-{number}") for number in range(4))
ERROR = 0.03
LAYERS = 3
USUAL, SPREAD = 0.4, 0.05


def evidence(
    node: NodeId,
    cosine: float,
    *,
    layers: Sequence[float] | None = None,
    norm: float = 1.0,
    influence: float = 0.3,
    steepness: float = 1.0,
) -> UpdateEvidence:
    own = OwnEvidence(
        cosine=cosine,
        layers=tuple(layers if layers is not None else [cosine] * LAYERS),
        steepness=steepness,
    )
    return UpdateEvidence(
        node=node,
        inner_steps=10,
        norm=norm,
        statistics_norm=0.0,
        influence=influence,
        gain=influence,
        own=own,
    )


def honest_round(dice: random.Random, *, usual: float = USUAL) -> list[UpdateEvidence]:
    return [evidence(node, dice.gauss(usual, SPREAD)) for node in HONEST]


def weighed_rounds(
    rounds: Sequence[Sequence[UpdateEvidence]], memory: TrustMemory | None = None
) -> list[Weighing]:
    memory, weighings = memory or TrustMemory(by_own_samples=True), []
    for round_ in rounds:
        weighings.append(weigh_by_own_samples(memory, round_, ERROR))
        memory = weighings[-1].memory
    return weighings


def pay(weighing: Weighing, nodes: Sequence[NodeId] = HONEST) -> float:
    return sum(weighing.pay_shares.get(node, WHOLE) for node in nodes) / WHOLE / len(nodes)


def test_updates_against_their_own_samples_count_nothing_from_the_first_round_on() -> None:
    dice = random.Random(1)
    lies = [evidence(node, -0.3) for node in LIARS]
    weighings = weighed_rounds([[*honest_round(dice), *lies] for _ in range(10)])
    for weighing in weighings:
        assert [weighing.votes[node] for node in LIARS] == [0] * len(LIARS)
        assert pay(weighing, LIARS) == 0
        assert pay(weighing) > 0.95
        assert "of the usual" in weighing.pay_reasons[LIARS[0]]


def test_an_update_whose_one_layer_is_turned_is_left_out() -> None:
    dice = random.Random(2)
    lie = evidence(LIARS[0], 0.35, layers=[0.4, -0.4, 0.4])
    weighing = weighed_rounds([[*honest_round(dice), lie]])[0]
    assert weighing.votes[LIARS[0]] == 0
    assert "in its worst layers" in weighing.reasons[LIARS[0]]


def test_a_node_of_rare_data_is_paid_in_full_while_it_counts_less() -> None:
    dice = random.Random(3)
    rare = HONEST[0]
    rounds = [
        [
            replace(each, influence=-0.1) if each.node == rare else each
            for each in honest_round(dice)
        ]
        for _ in range(12)
    ]
    last = weighed_rounds(rounds)[-1]
    assert last.pay_shares.get(rare, WHOLE) == WHOLE
    assert last.votes[rare] < WHOLE // 2
    assert last.pay_reasons[rare].startswith("paid in full, but it counts")


def test_honest_nodes_keep_their_pay_where_cosines_are_noise() -> None:
    dice = random.Random(4)
    late = [[evidence(node, dice.gauss(0.05, 0.1)) for node in HONEST] for _ in range(40)]
    weighings = weighed_rounds([honest_round(dice) for _ in range(5)] + late)
    assert sum(pay(each) for each in weighings) / len(weighings) > 0.95
    assert all(not each.useless for each in weighings)


def test_who_is_left_out_sets_no_length_for_the_others() -> None:
    dice = random.Random(5)
    honest = honest_round(dice)
    lies = [evidence(node, -0.3, norm=0.2) for node in LIARS]
    assert weighed_rounds([[*honest, *lies]])[0].clips == weighed_rounds([honest])[0].clips


def test_an_update_of_a_hundredth_of_the_length_is_paid_by_that_and_clips_nobody() -> None:
    dice = random.Random(6)
    rounds = [
        [*honest_round(dice), *(evidence(node, USUAL, norm=0.01) for node in LIARS)]
        for _ in range(3)
    ]
    for weighing in weighed_rounds(rounds):
        assert pay(weighing, LIARS) == pytest.approx(0.01 / WORK_FULL, rel=0.1)
        assert not weighing.clips
        assert "of the usual length" in weighing.pay_reasons[LIARS[0]]


def test_a_node_that_is_not_drawn_is_judged_by_its_memory() -> None:
    honesty = {LIARS[0]: WHOLE // 10, HONEST[0]: WHOLE}
    memory = TrustMemory(by_own_samples=True, rounds=9, honesty=honesty)
    round_ = [replace(evidence(node, USUAL), own=None) for node in (HONEST[0], LIARS[0])]
    round_ += [evidence(node, USUAL) for node in HONEST[1:]]
    judgement = judge_honesty(memory, round_)
    assert judgement.honesty[HONEST[0]] == 1
    assert judgement.honesty[LIARS[0]] == pytest.approx(0.1 / 0.7, rel=0.01)
    assert "by earlier rounds alone" in judgement.reasons[LIARS[0]]
    assert judgement.memory.honesty[LIARS[0]] == WHOLE // 10


def test_a_liar_is_banned_in_the_end_and_no_honest_node_is() -> None:
    dice = random.Random(7)
    lies = [evidence(node, -0.3) for node in LIARS]
    weighings = weighed_rounds([[*honest_round(dice), *lies] for _ in range(BAN_AFTER + 3)])
    for weighing in weighings[-BAN_AFTER:]:
        assert weighing.useless == LIARS


def test_copies_are_paid_as_less_than_one_update() -> None:
    dice = random.Random(8)
    round_ = [
        replace(each, group=1) if each.node in HONEST[:2] else each for each in honest_round(dice)
    ]
    weighing = weighed_rounds([round_])[0]
    shares: Mapping[NodeId, int] = weighing.pay_shares
    assert shares[HONEST[0]] + shares[HONEST[1]] <= WHOLE // 2
    assert "copies" in weighing.pay_reasons[HONEST[0]]


def test_where_fewer_than_three_are_measured_the_memory_decides() -> None:
    memory = TrustMemory(by_own_samples=True)
    round_ = [evidence(HONEST[0], USUAL), evidence(LIARS[0], -USUAL)]
    judgement = judge_honesty(memory, round_)
    assert judgement.honesty == {HONEST[0]: 1.0, LIARS[0]: 1.0}
    assert judgement.memory == memory


@pytest.mark.parametrize("norm", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("others", [0, 1, 6])
def test_an_update_that_cannot_be_held_against_others_ends_no_round(
    norm: float, others: int
) -> None:
    odd = replace(evidence(LIARS[0], 0.0, norm=norm), is_sound=norm == 0, own=None)
    honest = honest_round(random.Random(9))[:others]
    weighing = weighed_rounds([[odd, *honest]] * 3)[-1]
    assert pay(weighing, HONEST[:others] or HONEST) > 0.95
    if others or not odd.is_sound:
        assert weighing.pay_shares[LIARS[0]] == 0


def test_an_honest_update_of_little_use_keeps_a_part_and_a_lie_keeps_nothing() -> None:
    def votes_after(use_least: int) -> Mapping[NodeId, int]:
        dice = random.Random(3)
        rounds = [
            [
                *honest_round(dice),
                evidence(LIARS[0], dice.gauss(USUAL, SPREAD), influence=-0.6),
                evidence(LIARS[1], -USUAL, influence=0.3),
            ]
            for _ in range(20)
        ]
        memory = TrustMemory(by_own_samples=True, use_least=use_least)
        return weighed_rounds(rounds, memory)[-1].votes

    before, now = votes_after(0), votes_after(USE_LEAST)
    assert before[LIARS[0]] == before[LIARS[1]] == 0
    assert (now[LIARS[0]], now[LIARS[1]]) == (USE_LEAST, 0)


def test_a_round_in_which_next_to_nobody_has_a_vote_makes_a_short_step() -> None:
    round_ = [evidence(node, USUAL) for node in (*HONEST, *LIARS)]
    doubts = dict.fromkeys(HONEST, 0) | dict.fromkeys(LIARS, WHOLE // 100)
    memory = TrustMemory(
        by_own_samples=True, use_least=USE_LEAST, honesty=doubts, steepest=1e9, rounds=9
    )
    weighing = weigh_by_own_samples(memory, round_, ERROR)
    total = sum(weighing.votes.get(each.node, WHOLE) for each in round_)
    part = total / (VOTES_LEAST * WHOLE * len(round_))
    assert 0 < part < 1
    assert {weighing.clips[node] for node in LIARS if weighing.votes[node]} == {int(part * WHOLE)}
    believed_nodes = dict.fromkeys(doubts, WHOLE)
    whole_step = weigh_by_own_samples(replace(memory, honesty=believed_nodes), round_, ERROR)
    assert not whole_step.clips


def test_a_round_whose_votes_are_all_liars_is_no_longer_than_earlier_rounds_by_far() -> None:
    memory = TrustMemory(by_own_samples=True, use_least=USE_LEAST)
    usual = [evidence(node, USUAL, norm=1.0) for node in (*HONEST, *LIARS)]
    memory = weigh_by_own_samples(memory, usual, ERROR).memory
    assert memory.step_length_most == pytest.approx(1.0 / usual[0].inner_steps)
    long_updates = [evidence(node, USUAL, norm=50.0) for node in (*HONEST, *LIARS)]
    weighing = weigh_by_own_samples(memory, long_updates, ERROR)
    lengths = [50.0 * each / WHOLE for each in weighing.clips.values()]
    assert lengths == pytest.approx([LENGTH_MOST] * len(long_updates), rel=1e-2)
    assert "longest usual update" in weighing.reasons[HONEST[0]]
