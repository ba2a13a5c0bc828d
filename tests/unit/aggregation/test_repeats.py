"""Updates that repeat an earlier one."""

from collections.abc import Mapping

import numpy as np

from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.shell.aggregation.evidence import SketchedUpdate, weigh_sketched
from coordinator.shell.aggregation.repeats import find_repeats, remember
from coordinator.shell.aggregation.sketch import WIDTH, Sketch, UpdateSketch
from hypergpu.ids import NodeId

NODES = tuple(NodeId(f"{number:02d}") for number in range(8))
LIAR = NODES[3]


class HonestRounds:
    """Honest updates: a common direction that turns from round to round, and each node's own."""

    def __init__(self, seed: int, *, turn: float) -> None:
        self._draws = np.random.default_rng(seed)
        self._turn = turn
        self._direction = self._draws.normal(size=WIDTH)

    def play_round(self) -> dict[NodeId, Sketch]:
        """Each node's update."""
        self._direction += self._turn * self._draws.normal(size=WIDTH)
        return {node: self._direction + self._draws.normal(size=WIDTH) for node in NODES}


def found_over(rounds: int, training: HonestRounds, noise: float) -> list[frozenset[NodeId]]:
    """Repeats of each round, where the liar sends what it sent first with some noise."""
    fingerprints: Mapping[NodeId, tuple[str, ...]] = {}
    draws, repeats_by_round = np.random.default_rng(9), []
    first = training.play_round()
    fingerprints = remember(fingerprints, first, frozenset())
    for _ in range(rounds):
        sent_updates = training.play_round()
        again = first[LIAR]
        sent_updates[LIAR] = again + noise * np.abs(again).mean() * draws.normal(size=WIDTH)
        repeats = find_repeats(fingerprints, sent_updates)
        fingerprints = remember(fingerprints, sent_updates, repeats)
        repeats_by_round.append(repeats)
    return repeats_by_round


def test_an_update_sent_again_is_known_through_noise_and_for_good() -> None:
    for noise in (0.0, 0.1):
        assert found_over(12, HonestRounds(1, turn=0.5), noise) == [frozenset({LIAR})] * 12


def test_updates_that_hardly_change_are_no_repeats() -> None:
    training = HonestRounds(2, turn=0.02)
    fingerprints: Mapping[NodeId, tuple[str, ...]] = {}
    for _ in range(50):
        sent_updates = training.play_round()
        assert find_repeats(fingerprints, sent_updates) == frozenset()
        fingerprints = remember(fingerprints, sent_updates, frozenset())


def test_where_no_update_changes_none_is_a_repeat() -> None:
    sent_updates = HonestRounds(5, turn=0.5).play_round()
    assert find_repeats(remember({}, sent_updates, frozenset()), sent_updates) == frozenset()


def test_where_updates_keep_most_signs_none_is_a_repeat() -> None:
    draws, first = np.random.default_rng(6), HonestRounds(6, turn=0.5).play_round()
    alike = {node: each + 0.05 * draws.normal(size=WIDTH) for node, each in first.items()}
    alike[LIAR] = first[LIAR]
    assert find_repeats(remember({}, first, frozenset()), alike) == frozenset()


def test_another_nodes_update_of_before_is_a_repeat() -> None:
    training = HonestRounds(3, turn=0.5)
    first, second = training.play_round(), training.play_round()
    second[LIAR] = first[NODES[0]]
    assert find_repeats(remember({}, first, frozenset()), second) == {LIAR}


def measure(sent: Mapping[NodeId, Sketch]) -> list[SketchedUpdate]:
    """The updates as they are measured."""
    return [
        SketchedUpdate(node, 20, UpdateSketch(sketch, 1.0, 0.0)) for node, sketch in sent.items()
    ]


def test_a_repeated_update_has_no_vote_and_stays_known() -> None:
    training, memory = HonestRounds(4, turn=0.5), TrustMemory()
    first = training.play_round()
    weighing = weigh_sketched(memory, "robust", measure(first), None)
    for _ in range(4):
        sent_updates = {**training.play_round(), LIAR: first[LIAR]}
        weighing = weigh_sketched(weighing.memory, "robust", measure(sent_updates), None)
    assert weighing.votes == {LIAR: 0}
    assert weighing.reasons == {LIAR: "it repeats an earlier update"}
    assert weighing.useless == (LIAR,)
