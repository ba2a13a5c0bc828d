"""Which of the nodes that are there could hold a model, whole or in stages, and how fast."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hypergpu.rings.placement import (
    PlacementProblem,
    StageOffer,
    place_layers,
    relay_hops,
    shortfall,
)
from hypergpu.rings.stage_work import CutSizes, layers_in
from hypergpu.units import Bytes
from hypergpu.user.client.values import NodeView

_LAYER_US = 1_000.0
"""Time of a layer that is taken for every node: none has computed this model."""
_GONE_STATES = frozenset({"lost", "revoked"})


class PlannedStage(msgspec.Struct, frozen=True):
    """A node's part of a plan."""

    node: str
    name: str
    layers: int
    memory_bytes: int
    """Memory that its layers take, with one end of the model."""


class ModelPlan(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/plan/1"):
    """`plan`."""

    model: str
    kind: str
    total_bytes: int
    """Memory of all its parameters."""
    stages: list[PlannedStage]
    """The fewest nodes that can hold it, in the order of the ring; none: they cannot."""
    hops_ms: float
    """Time that a token is under way between them."""
    missing_bytes: int
    """Memory of the layers for which no node has room."""

    @property
    def is_possible(self) -> bool:
        """Whether the nodes can hold it."""
        return bool(self.stages)


class _Candidate(NamedTuple):
    node: NodeView
    layers_most: int
    round_trip_us: float


def plan_model(model: str, sizes: CutSizes, nodes: Sequence[NodeView], kind: str) -> ModelPlan:
    """Place a model on as few nodes as can hold it, the nearest ones first.

    Args:
        model: Its name, for people.
        sizes: What its layers take.
        nodes: All that are known.
        kind: What nodes must offer.
    """
    candidates = [
        _Candidate(node, layers_in(sizes, Bytes(node.memory_bytes)), _round_trip_us(node))
        for node in nodes
        if kind in node.workloads and node.state not in _GONE_STATES
    ]
    problem = PlacementProblem(
        sizes.layers,
        [StageOffer(_LAYER_US, each.layers_most) for each in candidates],
        relay_hops([each.round_trip_us for each in candidates]),
    )
    for count in range(1, len(candidates) + 1):
        placement = place_layers(problem._replace(stages=count))
        if placement is not None:
            hops_us = placement.cost_us - _LAYER_US * sizes.layers
            stages = [
                _stage(candidates[share.offer].node, share.layers, sizes)
                for share in placement.shares
            ]
            return ModelPlan(model, sizes.kind, sizes.total_bytes, stages, hops_us / 1000, 0)
    missing_bytes = shortfall(problem) * sizes.layer_bytes
    return ModelPlan(model, sizes.kind, sizes.total_bytes, [], 0.0, missing_bytes)


def _round_trip_us(node: NodeView) -> float:
    estimate = node.reading.round_trip_us
    return estimate.mean if estimate is not None else 0.0


def _stage(node: NodeView, layers: int, sizes: CutSizes) -> PlannedStage:
    memory_bytes = layers * sizes.layer_bytes + sizes.end_bytes
    return PlannedStage(node.id, node.name, layers, memory_bytes)
