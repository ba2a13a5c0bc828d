"""Which experts of a mixture each node holds."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.training.experts import expert_windows, experts_text, give_experts
from coordinator.core.work.node_fit import experts_reason
from hypergpu.experts import Mixture
from hypergpu.ids import NodeId


def names(count: int) -> list[NodeId]:
    return [NodeId(f"node-{number}") for number in range(count)]


MIXTURES = st.integers(2, 24).flatmap(
    lambda experts: st.builds(Mixture, st.just(experts), st.integers(1, experts - 1), st.just(1))
)


@given(MIXTURES)
def test_every_expert_is_in_two_windows_where_a_node_holds_more_than_one(
    mixture: Mixture,
) -> None:
    windows = expert_windows(mixture)
    holders = Counter(expert for window in windows for expert in window)
    assert len(holders) == mixture.experts
    assert min(holders.values()) >= min(2, mixture.held)
    assert all(len(set(window)) == mixture.held for window in windows)
    assert len(windows) <= mixture.experts


@given(MIXTURES, st.integers(1, 30))
def test_no_expert_is_without_a_holder_where_there_is_a_node_for_each_window(
    mixture: Mixture, spare: int
) -> None:
    nodes = names(len(expert_windows(mixture)) + spare)
    given_experts = give_experts(mixture, {}, nodes)
    assert {expert for window in given_experts.values() for expert in window} == set(
        range(mixture.experts)
    )


def test_four_nodes_with_three_of_eight_experts_each_hold_all_of_them() -> None:
    given_experts = give_experts(Mixture(8, 3, 2), {}, names(4))
    assert {expert for window in given_experts.values() for expert in window} == set(range(8))


@given(MIXTURES, st.integers(1, 12))
def test_whoever_holds_experts_keeps_them_while_nobody_is_missing(
    mixture: Mixture, count: int
) -> None:
    before = give_experts(mixture, {}, names(count))
    assert give_experts(mixture, before, names(count)) == before
    after = give_experts(mixture, before, names(count + 1))
    missing_before = mixture.experts - len({each for it in before.values() for each in it})
    if not missing_before:
        assert {node: after[node] for node in before} == before


def test_somebody_moves_where_an_expert_has_lost_its_last_holder() -> None:
    mixture = Mixture(8, 4, 2)
    windows = expert_windows(mixture)
    same_window = dict.fromkeys(names(4), windows[0])
    given_experts = give_experts(mixture, same_window, names(4))
    assert {expert for window in given_experts.values() for expert in window} == set(range(8))


def test_nodes_hold_everything_of_a_mixture_that_states_no_number() -> None:
    assert expert_windows(Mixture(8, 0, 2)) == ()
    assert expert_windows(Mixture(8, 8, 2)) == ()


def test_a_node_is_told_its_experts() -> None:
    assert experts_text(Mixture(8, 3, 2), (0, 1, 3)) == "experts 0, 1, 3 of 8"
    assert experts_text(Mixture(8, 0, 2), ()) == ""


def test_a_node_of_a_version_before_gets_no_part_of_a_mixture_and_is_told_the_fix() -> None:
    assert "pip install --upgrade" in experts_reason(is_partial=True, holds_experts=False)
    assert experts_reason(is_partial=True, holds_experts=True) == ""
    assert experts_reason(is_partial=False, holds_experts=False) == ""
