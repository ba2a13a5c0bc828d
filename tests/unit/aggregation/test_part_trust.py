"""Updates of some experts, held against samples of their own shards: one liar in four."""

from collections.abc import Callable

import numpy as np

from coordinator.core.training.experts import give_experts
from coordinator.core.training.job.trust_memory import DuplicateMemory, TrustMemory
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.trust.duplicates import RoundWorker, draw_duplicates
from coordinator.core.training.trust.own_samples import USE_LEAST
from coordinator.core.training.trust.weights import WHOLE
from coordinator.shell.aggregation.evidence import SketchedUpdate, own_evidence, weigh_sketched
from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.measurements import HeldOutGradient, OwnGradient
from coordinator.shell.aggregation.sketch import SketchKey, UpdateSketch, sketch_layers
from hypergpu.experts import Mixture
from hypergpu.ids import Digest, NodeId
from hypergpu.tensors.layout import Float32s, unpack
from hypergpu.tensors.partial import expert_of
from tests.unit.tensors.test_partial import mixture_layout, random_model

MIXTURE = Mixture(8, 3, 1)
LAYOUT, KEY = mixture_layout(8), SketchKey(b"k" * 32)
GROUPS = layer_groups(LAYOUT)
NODES = [NodeId(f"node-{number}") for number in range(4)]
HELD = give_experts(MIXTURE, {}, NODES)
LIAR = NODES[3]
SLOPE = random_model(LAYOUT, 99).parameters
"""Gradient of the held-out loss."""


def own_slope(seed: int) -> Float32s:
    """The gradient of one node's samples."""
    slope: Float32s = SLOPE + random_model(LAYOUT, seed).parameters
    return slope


def covered_part(vector: Float32s, experts: tuple[int, ...]) -> Float32s:
    """What an update of these experts says of a vector."""
    flat = random_model(LAYOUT, 0)._replace(parameters=vector.copy())
    tensors = unpack(LAYOUT, flat)
    for tensor in LAYOUT.tensors:
        if expert_of(tensor) not in {None, *experts}:
            tensors[tensor.name][...] = 0
    return flat.parameters


def sketch_of(node: NodeId, update: Float32s, slope: Float32s) -> SketchedUpdate:
    layers = sketch_layers(KEY, LAYOUT, update, GROUPS)
    norm = float(np.linalg.norm(update))
    return SketchedUpdate(
        node,
        10,
        UpdateSketch(layers.sum(axis=0), norm, 0.0, layers),
        own=OwnGradient(sketch_layers(KEY, LAYOUT, slope, GROUPS), 1.0),
        held=GROUPS.held_by(HELD[node]),
    )


def round_of(seed: int, lie: Callable[[Float32s], Float32s]) -> list[SketchedUpdate]:
    """A round in which each node goes down the slope of its own samples, but for the liar."""
    updates = []
    for number, node in enumerate(NODES):
        slope = own_slope(100 * seed + number)
        noise = random_model(LAYOUT, 100 * seed + 50 + number).parameters
        update = covered_part(slope + noise, HELD[node])
        updates.append(sketch_of(node, lie(update) if node == LIAR else update, slope))
    return updates


def votes_after(rounds: int, lie: Callable[[Float32s], Float32s]) -> dict[NodeId, float]:
    """Votes of the last of so many rounds; 1 is a full one."""
    memory = TrustMemory(by_own_samples=True, use_least=USE_LEAST)
    gradient = HeldOutGradient(
        Digest(""), 1.0, sketch_layers(KEY, LAYOUT, SLOPE, GROUPS).sum(axis=0)
    )
    votes: dict[NodeId, int] = {}
    for seed in range(1, rounds + 1):
        weighing = weigh_sketched(memory, "robust", round_of(seed, lie), gradient)
        memory, votes = weighing.memory, weighing.votes
    return {node: votes.get(node, WHOLE) / WHOLE for node in NODES}


def test_an_update_of_some_experts_is_held_against_what_it_covers_alone() -> None:
    slope = own_slope(1)
    node = NODES[0]
    update = sketch_of(node, covered_part(slope, HELD[node]), slope)
    evidence = own_evidence(update.measured, update.own, None, update.held)
    assert evidence is not None
    assert evidence.cosine > 0.99
    assert len(evidence.layers) == GROUPS.shared_count + 1
    assert min(evidence.layers) > 0.99


def test_one_liar_in_four_loses_its_vote_and_three_holders_of_other_experts_keep_theirs() -> None:
    votes = votes_after(4, lambda update: -update)
    assert votes.pop(LIAR) == 0
    assert min(votes.values()) > 0.5


def turn_experts(update: Float32s) -> Float32s:
    """The update with its experts turned round, and what all share honest."""
    turned_update: Float32s = 2 * covered_part(update, ()) - update
    return turned_update


def test_a_liar_that_turns_its_experts_and_nothing_else_loses_its_vote() -> None:
    votes = votes_after(4, turn_experts)
    assert votes.pop(LIAR) < 0.1
    assert min(votes.values()) > 0.5


def test_honest_holders_of_different_experts_all_keep_their_votes() -> None:
    assert min(votes_after(4, lambda update: update).values()) > 0.5


def test_only_nodes_with_the_same_experts_get_the_same_shard() -> None:
    plan = NodePlan(inner_steps=10, codec="int4", reason="")
    memory = DuplicateMemory(due=frozenset(NODES))
    alike = [RoundWorker(node, plan, has_begun=False, experts=(0, 1)) for node in NODES]
    unlike = [RoundWorker(node, plan, has_begun=False, experts=HELD[node]) for node in NODES]
    assert draw_duplicates("draw", memory, alike, 32)
    assert not draw_duplicates("draw", memory, unlike, 32)
