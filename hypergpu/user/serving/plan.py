"""Which of the nodes that are there could hold a model, whole or in stages, and how fast."""

import math
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
from hypergpu.rings.stage_work import MEMORY_SHARE, CutSizes, layers_in, memory_for_models
from hypergpu.units import Bytes
from hypergpu.user.client.values import NodeView

_LAYER_US = 1_000.0
"""Time of a layer that is taken for every node: none has computed this model."""


class PlannedStage(msgspec.Struct, frozen=True):
    """A node's part of a plan."""

    node: str
    name: str
    layers: int
    memory_bytes: int
    """Memory that its layers take, with one end of the model."""


class NodeFit(msgspec.Struct, frozen=True):
    """What one node could hold of a model."""

    node: str
    name: str
    layers: int
    """Layers that it has room for, with one end of the model."""
    missing_bytes: int
    """Memory that it lacks to hold the model whole."""
    reason: str = ""
    """Why it holds nothing; empty: it could."""


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
    nodes: list[NodeFit] = []
    """All nodes that are known, those that could hold most first."""

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
        _Candidate(node, layers_in(sizes, _memory(node)), _round_trip_us(node))
        for node in nodes
        if not _absence(node, kind)
    ]
    fits = sorted((_fit(node, sizes, kind) for node in nodes), key=lambda fit: -fit.layers)
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
            hops_ms = hops_us / 1000
            return ModelPlan(model, sizes.kind, sizes.total_bytes, stages, hops_ms, 0, fits)
    lacking_bytes = shortfall(problem) * sizes.layer_bytes
    return ModelPlan(model, sizes.kind, sizes.total_bytes, [], 0.0, lacking_bytes, fits)


def _absence(node: NodeView, kind: str) -> str:
    """Why a node holds nothing of any model; empty: it may."""
    if node.is_gone:
        return f"it is {node.state}"
    return "" if kind in node.workloads else f"it offers no {kind}: see kinds in its node.toml"


def _fit(node: NodeView, sizes: CutSizes, kind: str) -> NodeFit:
    memory_bytes = _memory(node)
    reason = _absence(node, kind)
    layers = 0 if reason else layers_in(sizes, memory_bytes)
    if not layers and not reason:
        reason = "it has no room for one layer"
    return NodeFit(node.id, node.name, layers, missing_bytes(sizes, memory_bytes), reason)


def missing_bytes(sizes: CutSizes, memory_bytes: Bytes) -> int:
    """Memory that a device lacks to hold a model whole, beside what keys and passes take.

    Args:
        sizes: The model's.
        memory_bytes: What models may have of the device's; 0: not known, taken to be enough.
    """
    if not memory_bytes or layers_in(sizes, memory_bytes) == sizes.layers:
        return 0
    needed_bytes = sizes.layers * sizes.layer_bytes + sizes.end_bytes
    return max(0, math.ceil(needed_bytes / MEMORY_SHARE) - memory_bytes)


def _memory(node: NodeView) -> Bytes:
    return memory_for_models(node.device, node.memory_bytes)


def _round_trip_us(node: NodeView) -> float:
    estimate = node.reading.round_trip_us
    return estimate.mean if estimate is not None else 0.0


def _stage(node: NodeView, layers: int, sizes: CutSizes) -> PlannedStage:
    memory_bytes = layers * sizes.layer_bytes + sizes.end_bytes
    return PlannedStage(node.id, node.name, layers, memory_bytes)
