"""Votes and clips of rounds whose evidence is made up: who keeps a vote, and who loses it when."""

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.weights import (
    FIRST_ROUNDS,
    NEWCOMER,
    RETURN,
    ROLLBACKS_MOST,
    WEIGHT_MOST,
    WHOLE,
    UpdateEvidence,
    blame,
    clip_factors,
    is_exploded,
    is_hopeless,
    known_votes,
    weigh_updates,
    whole_weighing,
)
from hypergpu.ids import NodeId

HONEST = tuple(NodeId(f"honest-{number}") for number in range(5))
LIAR = NodeId("liar")
USUAL = 0.3
"""Influence of honest updates."""


def evidence(node: NodeId, influence: float | None, *, steepness: float = 1.0) -> UpdateEvidence:
    """An update of length 1, where the gradient's length is ``steepness``."""
    return UpdateEvidence(
        node=node,
        inner_steps=10,
        norm=1.0,
        statistics_norm=0.0,
        influence=influence,
        gain=(influence or 0.0) * steepness,
    )


def honest_round(dice: random.Random, *, steepness: float = 1.0) -> list[UpdateEvidence]:
    return [evidence(node, USUAL * dice.uniform(0.7, 1.3), steepness=steepness) for node in HONEST]


def weighed_rounds(rounds: Sequence[Sequence[UpdateEvidence]]) -> list[Weighing]:
    memory, weighings = TrustMemory(), []
    for round_ in rounds:
        weighings.append(weigh_updates(memory, round_))
        memory = weighings[-1].memory
    return weighings


def rounds_with(liar: Sequence[UpdateEvidence], seed: int = 0) -> list[Weighing]:
    """Rounds of honest nodes with one liar."""
    dice = random.Random(seed)
    return weighed_rounds([[*honest_round(dice), own] for own in liar])


def assert_honest_votes_are_full(found: Sequence[Weighing]) -> None:
    for weighing in found:
        assert not weighing.votes.keys() & set(HONEST)
        assert not weighing.reasons.keys() & set(HONEST)


def test_a_flipped_update_never_counts() -> None:
    weighings = rounds_with([evidence(LIAR, -USUAL)] * 6)
    assert [weighing.votes[LIAR] for weighing in weighings] == [0] * 6
    assert weighings[-1].memory.weights[LIAR] == 0
    assert "-0.30" in weighings[0].reasons[LIAR]
    assert_honest_votes_are_full(weighings)


def test_noise_loses_its_vote_for_good_within_a_few_rounds() -> None:
    dice = random.Random(1)
    weighings = rounds_with([evidence(LIAR, dice.uniform(-0.03, 0.03)) for _ in range(20)])
    assert [weighing.votes[LIAR] for weighing in weighings[3:]] == [0] * 17
    assert [weighing.memory.weights[LIAR] / WHOLE < 0.1 for weighing in weighings[3:]] == [
        True
    ] * 17
    assert_honest_votes_are_full(weighings)


def test_work_of_little_help_loses_a_part_of_its_vote_over_many_rounds() -> None:
    """It is above the gate: its weight alone decides."""
    weighings = rounds_with([evidence(LIAR, 0.26 * USUAL)] * 40)
    votes = [weighing.votes.get(LIAR, WHOLE) for weighing in weighings]
    assert votes[0] == WHOLE
    assert max(votes[20], votes[39]) < votes[5] < WHOLE
    assert votes[39] < WHOLE // 2
    assert "helped less than others'" in weighings[-1].reasons[LIAR]
    assert_honest_votes_are_full(weighings)


def test_an_empty_update_counts_nothing_and_says_so() -> None:
    empty = replace(evidence(LIAR, 0.0), norm=0.0)
    weighings = rounds_with([empty] * 3)
    assert [(each.votes[LIAR], each.reasons[LIAR]) for each in weighings] == [
        (0, "it is empty")
    ] * 3
    assert_honest_votes_are_full(weighings)


def test_where_all_updates_are_empty_none_is_worse_than_the_others() -> None:
    empty = [replace(evidence(node, 0.0), norm=0.0) for node in HONEST]
    assert weigh_updates(TrustMemory(), empty).votes == {}


def test_an_update_that_cannot_be_summed_has_no_vote_and_shrinks_nobody() -> None:
    huge = replace(evidence(LIAR, None), norm=math.inf, is_sound=False)
    weighings = rounds_with([huge] * 2)
    assert weighings[0].votes == {LIAR: 0}
    assert weighings[0].reasons == {LIAR: "its values are too large"}
    assert weighings[0].clips == {LIAR: 0}


def test_a_round_whose_influences_are_noise_moves_weights_hardly() -> None:
    dice = random.Random(2)
    (steep,) = weighed_rounds([[*honest_round(dice), evidence(LIAR, -USUAL)]])
    memory = steep.memory
    for _ in range(20):
        flat = [
            evidence(node, dice.uniform(-0.05, 0.05), steepness=0.01) for node in (*HONEST, LIAR)
        ]
        weighing = weigh_updates(memory, flat)
        for node, weight in weighing.memory.weights.items():
            drift = RETURN * abs(WHOLE - memory.weights[node])
            assert abs(weight - memory.weights[node]) < drift + WHOLE // 100
        assert weighing.votes.keys() <= {LIAR}  # Nor is anybody left out for noise.
        memory = weighing.memory


def test_without_a_gradient_votes_follow_from_what_is_known() -> None:
    memory = TrustMemory(weights=dict.fromkeys((*HONEST, LIAR), WHOLE) | {LIAR: 0}, rounds=9)
    weighing = weigh_updates(memory, [evidence(node, None) for node in (*HONEST, LIAR)])
    assert weighing.votes == {LIAR: 0}
    assert weighing.memory.weights == memory.weights


def test_of_two_nodes_neither_is_held_against_the_other() -> None:
    two = [evidence(HONEST[0], 0.4), evidence(HONEST[1], -0.4)]
    assert weigh_updates(TrustMemory(), two).votes == {}


def test_copies_have_less_than_one_vote_together() -> None:
    round_ = [
        replace(each, group=1 if number < 3 else 0)
        for number, each in enumerate(honest_round(random.Random(3)))
    ]
    weighing = weigh_updates(TrustMemory(), round_)
    assert weighing.votes == dict.fromkeys(HONEST[:3], WHOLE // 9)
    assert set(weighing.reasons.values()) == {"3 nodes sent copies of one update"}


def test_a_group_of_one_shares_with_nobody() -> None:
    round_ = [
        replace(each, group=1 + number)
        for number, each in enumerate(honest_round(random.Random(3)))
    ]
    assert weigh_updates(TrustMemory(), round_).votes == {}


def lengths(*parts: tuple[int, float]) -> list[UpdateEvidence]:
    """Updates of such numbers of steps and lengths."""
    return [
        replace(evidence(NodeId(f"node-{place}"), None), inner_steps=steps, norm=norm)
        for place, (steps, norm) in enumerate(parts)
    ]


@pytest.mark.parametrize(
    ("own", "clip"),
    [
        ((10, 1.0), WHOLE),
        ((10, 0.1), WHOLE),
        ((10, 4.0), WHOLE // 4),
        # Four times the steps may go four times as far, and not farther.
        ((40, 4.0), WHOLE),
        ((40, 8.0), WHOLE // 2),
        # Half of the steps, more than half as far: steps agree in part.
        ((5, 0.7), WHOLE),
        ((5, 1.0), pytest.approx(WHOLE * math.sqrt(0.5), abs=1)),
        ((0, 1.0), pytest.approx(WHOLE * math.sqrt(0.1), abs=1)),
    ],
)
def test_no_update_is_longer_than_the_median_for_as_many_steps(
    own: tuple[int, float], clip: int
) -> None:
    clips_by_node = clip_factors(lengths((10, 1.0), (10, 1.0), (10, 1.0), (10, 1.0), own))
    assert list(clips_by_node.values()) == [WHOLE] * 4 + [clip]


def test_statistics_far_from_those_of_the_base_clip_an_update_too() -> None:
    round_ = [replace(each, statistics_norm=1.0) for each in honest_round(random.Random(4))]
    round_[2] = replace(round_[2], statistics_norm=10.0)
    assert weigh_updates(TrustMemory(), round_).clips == {HONEST[2]: WHOLE // 10}


@pytest.mark.parametrize(("times", "vote"), [(3.9, WHOLE), (4.1, 0), (1e3, 0), (1e9, 0)])
def test_an_update_far_longer_than_the_others_has_no_vote(times: float, vote: int) -> None:
    long = replace(evidence(LIAR, USUAL), norm=times)
    (weighing,) = rounds_with([long])
    assert weighing.votes.get(LIAR, WHOLE) == vote
    assert ("times as long" in weighing.reasons.get(LIAR, "")) is (vote == 0)
    assert_honest_votes_are_full([weighing])


def test_a_newcomer_has_a_part_of_a_vote_until_its_work_has_helped() -> None:
    known_memory = TrustMemory(
        weights=dict.fromkeys(HONEST, WHOLE), rounds=FIRST_ROUNDS, signal=USUAL
    )
    assert known_votes(known_memory, [*HONEST, LIAR])[LIAR] == round(NEWCOMER / 0.7)
    memory, votes = known_memory, []
    for _ in range(6):
        weighing = weigh_updates(memory, [*honest_round(random.Random(5)), evidence(LIAR, USUAL)])
        votes.append(weighing.votes.get(LIAR, WHOLE))
        memory = weighing.memory
    assert WHOLE // 3 < votes[0] < WHOLE
    assert votes == sorted(votes)
    assert votes[-1] == WHOLE


def test_nodes_of_the_first_rounds_begin_with_a_full_vote() -> None:
    first = TrustMemory(rounds=FIRST_ROUNDS - 1)
    assert known_votes(first, HONEST) == dict.fromkeys(HONEST, WHOLE)


def test_a_node_that_helps_again_gets_its_vote_back() -> None:
    lost_weighing = rounds_with([evidence(LIAR, -USUAL)] * 5)[-1]
    memory, votes = lost_weighing.memory, []
    for seed in range(10):
        round_ = [*honest_round(random.Random(seed)), evidence(LIAR, USUAL)]
        weighing = weigh_updates(memory, round_)
        votes.append(weighing.votes.get(LIAR, WHOLE))
        memory = weighing.memory
    assert votes[0] < WHOLE // 2
    assert votes[-1] == WHOLE


def test_a_node_of_rare_data_is_lifted_as_soon_as_the_model_lacks_them() -> None:
    served_weighing = weighed_rounds(
        [[*honest_round(random.Random(seed)), evidence(LIAR, 0.4 * USUAL)] for seed in range(3)]
    )[-1]
    needed_weighing = weigh_updates(
        served_weighing.memory, [*honest_round(random.Random(9)), evidence(LIAR, 3 * USUAL)]
    )
    assert needed_weighing.memory.weights[LIAR] > served_weighing.memory.weights[LIAR] + WHOLE // 4


def test_the_plain_mean_counts_everything_and_learns_nothing() -> None:
    memory = TrustMemory(weights={LIAR: 0}, rounds=4)
    assert whole_weighing(memory) == Weighing(clips={}, votes={}, reasons={}, memory=memory)


@pytest.mark.parametrize(
    ("known", "loss", "is_so"),
    [
        (None, 1e9, False),
        (None, None, False),
        (1.0, None, True),
        (1.0, 3.0, False),
        (1.0, 3.1, True),
        (0.01, 0.9, False),
        (-1.0, 2.0, False),
        (-1.0, 3.1, True),
    ],
)
def test_a_model_has_exploded_when_its_loss_is_far_beyond_the_last_good_one(
    known: float | None, loss: float | None, *, is_so: bool
) -> None:
    assert is_exploded(TrustMemory(loss=known), loss) is is_so


def test_those_whose_updates_raise_the_loss_of_an_exploded_model_are_blamed() -> None:
    memory = TrustMemory(weights=dict.fromkeys(HONEST, WHOLE), rounds=2)
    makers = [*honest_round(random.Random(6)), evidence(LIAR, -0.01)]
    after, suspects = blame(memory, makers)
    assert suspects == (LIAR,)
    assert after.weights == {**memory.weights, LIAR: 0}
    assert known_votes(after, [HONEST[0], LIAR]) == {HONEST[0]: WHOLE, LIAR: 0}


def test_nobody_is_blamed_where_no_gradient_is_known() -> None:
    after, suspects = blame(TrustMemory(), [evidence(node, None) for node in HONEST])
    assert suspects == ()
    assert after.rollbacks == 1


def test_a_job_is_hopeless_after_some_rollbacks_in_a_row() -> None:
    memory = TrustMemory()
    for count in range(1, ROLLBACKS_MOST + 1):
        memory, _ = blame(memory, [])
        assert is_hopeless(memory) is (count == ROLLBACKS_MOST)


cosines = st.none() | st.floats(-1, 1)
sizes = st.floats(0, 1e30) | st.just(0.0)
NODES = tuple(NodeId(f"node-{number}") for number in range(9))


@st.composite
def any_rounds(draw: st.DrawFn) -> list[UpdateEvidence]:
    nodes = draw(st.lists(st.sampled_from(NODES), unique=True, min_size=1))
    return [
        UpdateEvidence(
            node=node,
            inner_steps=draw(st.integers(0, 500)),
            norm=draw(sizes),
            statistics_norm=draw(sizes),
            influence=draw(cosines),
            gain=draw(st.floats(-1e60, 1e60)),
            group=draw(st.integers(0, 2)),
            is_sound=draw(st.booleans()),
        )
        for node in nodes
    ]


memories = st.builds(
    TrustMemory,
    weights=st.dictionaries(st.sampled_from(NODES), st.integers(0, WEIGHT_MOST)),
    rounds=st.integers(0, 9),
    signal=sizes,
    signal_most=sizes,
)


@given(memory=memories, rounds=st.lists(any_rounds(), min_size=1, max_size=4))
def test_votes_clips_and_weights_keep_to_their_bounds_whatever_comes(
    memory: TrustMemory, rounds: list[list[UpdateEvidence]]
) -> None:
    for round_ in rounds:
        nodes = {each.node for each in round_}
        weighing = weigh_updates(memory, round_)
        assert weighing.votes.keys() | weighing.clips.keys() <= nodes
        assert all(0 <= vote < WHOLE for vote in weighing.votes.values())
        assert all(0 <= clip < WHOLE for clip in weighing.clips.values())
        assert weighing.votes.keys() <= weighing.reasons.keys()
        memory = weighing.memory
        assert all(0 <= weight <= WEIGHT_MOST for weight in memory.weights.values())
        assert memory.weights.keys() >= nodes
        assert 0 <= memory.strength <= 1
        assert math.isfinite(memory.signal)


@given(memory=memories, round_=any_rounds(), turn=st.randoms(use_true_random=False))
def test_the_order_of_updates_does_not_matter(
    memory: TrustMemory, round_: list[UpdateEvidence], turn: random.Random
) -> None:
    shuffled_round = list(round_)
    turn.shuffle(shuffled_round)
    assert weigh_updates(memory, shuffled_round) == weigh_updates(memory, round_)


@given(round_=any_rounds())
def test_a_group_of_copies_never_has_more_than_one_vote(round_: list[UpdateEvidence]) -> None:
    votes: Mapping[NodeId, int] = weigh_updates(TrustMemory(), round_).votes
    for group in (1, 2):
        members = [each.node for each in round_ if each.group == group]
        assert sum(votes.get(node, WHOLE) for node in members) <= WHOLE


lies = st.tuples(st.floats(-1, 1), st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))


@given(
    rounds=st.lists(
        st.tuples(
            st.floats(0.01, 1),
            st.lists(st.floats(0.8, 1.2), min_size=5, max_size=5),
            st.lists(lies, min_size=4, max_size=4),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_majority_of_like_helpers_keeps_its_votes_whatever_the_others_send(
    rounds: list[tuple[float, list[float], list[tuple[float, float, float]]]],
) -> None:
    liars = [NodeId(f"liar-{number}") for number in range(4)]
    memory = TrustMemory()
    for usual, parts, lies in rounds:
        honest = [
            evidence(node, 0.8 * usual * part) for node, part in zip(HONEST, parts, strict=True)
        ]
        others = [
            replace(evidence(node, influence), gain=gain, norm=norm)
            for node, (influence, gain, norm) in zip(liars, lies, strict=True)
        ]
        weighing = weigh_updates(memory, [*others, *honest])
        assert_honest_votes_are_full([weighing])
        memory = weighing.memory
