"""Nodes that send noise."""

import numpy as np

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.shell.aggregation.evidence import SketchedUpdate, weigh_sketched
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import WIDTH, UpdateSketch
from hypergpu.ids import Digest, NodeId

NODES = tuple(NodeId(f"{number:02d}") for number in range(20))
NOISE = NODES[:8]
RARE = NODES[8]
ROUNDS = 12


def train(seed: int, common_part: float = 0.5) -> Weighing:
    """The last round's weighing where eight of twenty nodes send noise, and one is alone with data
    that the model lacks.
    """
    draws, memory = np.random.default_rng(seed), TrustMemory()
    weighing = Weighing(clips={}, votes={}, reasons={}, memory=memory)
    for number in range(ROUNDS):
        common, rare = draws.normal(size=(2, WIDTH))
        sent_vectors = {node: draws.normal(size=WIDTH) for node in NODES}
        for node in NODES[len(NOISE) + 1 :]:
            sent_vectors[node] += common_part * common
        sent_vectors[RARE] += 0.5 * rare
        sketched_updates = [
            SketchedUpdate(node, 20, UpdateSketch(sketch, float(np.linalg.norm(sketch)), 0.0))
            for node, sketch in sent_vectors.items()
        ]
        gradient = HeldOutGradient(Digest(f"{number:064d}"), 1.0, common + rare)
        weighing = weigh_sketched(weighing.memory, "robust", sketched_updates, gradient)
    return weighing


def test_noise_loses_its_votes_and_an_honest_node_of_rare_data_does_not() -> None:
    for seed in range(5):
        weighing = train(seed)
        noise = {node for node, why in weighing.reasons.items() if "are noise" in why}
        assert noise == set(NOISE)
        assert all(weighing.votes[node] == 0 for node in NOISE)
        assert weighing.votes.get(RARE, 1) > 0


def test_where_honest_updates_have_next_to_nothing_in_common_nothing_is_noise() -> None:
    for seed in range(5):
        assert not [why for why in train(seed, 0.1).reasons.values() if "are noise" in why]
