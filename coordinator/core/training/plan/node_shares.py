"""The third stage of a plan, the shares: each candidate's codec, batch and inner steps, who takes
part, and for whom the round waits.
"""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.training.plan.codecs import node_codecs
from coordinator.core.training.plan.inner_steps import (
    filling_steps,
    round_pace,
    rounds_left,
    steps_in_job,
    stretched_span_us,
)
from coordinator.core.training.plan.long_work import with_long_work
from coordinator.core.training.plan.node_work import NodeWork, node_work
from coordinator.core.training.plan.participation import (
    Participation,
    part_of_middle,
    participations,
)
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.speeds import RoundSpeeds
from hypergpu.ids import NodeId

_JOB_ENDS = "the job ends before its work would"


class NodeShares(NamedTuple):
    """Work of each candidate in the round."""

    works: Mapping[NodeId, NodeWork]
    working: Mapping[NodeId, NodeWork]
    """Work of those who take part."""
    parts: Mapping[NodeId, Participation]
    full_steps: Mapping[NodeId, int]
    """Inner steps of participants that fill the round."""
    steps: Mapping[NodeId, int]
    """Inner steps that participants are given: fewer where the job ends."""
    span_us: float
    """The round's span, longer where a node that it waits for needs more."""


def node_shares(speeds: RoundSpeeds, shape: RoundShape) -> NodeShares:
    """Each candidate's work, and whether it takes part."""
    codecs = node_codecs(
        shape.codecs.family, speeds, shape.weights, computing_us=shape.middle.computing_us
    )
    works = {node: node_work(speeds, shape, node, codecs[node]) for node in speeds.nodes}
    parts = participations(
        speeds.request,
        speeds.memories,
        {node: part_of_middle(speeds, shape, work) for node, work in works.items()},
        speeds.readings,
    )
    pace = round_pace(speeds, shape, works, parts)
    works = {
        node: work
        if parts[node].is_awaited
        else with_long_work(speeds, shape, node, work, parts[node].memory, pace)
        for node, work in works.items()
    }
    taking_part = {node: work for node, work in works.items() if parts[node].is_taking_part}
    span_us = stretched_span_us(speeds, shape, taking_part)
    full_steps = filling_steps(taking_part, parts, span_us)
    rounds = rounds_left(speeds, taking_part, full_steps)
    too_long = {n for n, w in taking_part.items() if w.long and w.long.made_for > rounds}
    parts = {
        node: part._replace(is_taking_part=False, reason=_JOB_ENDS) if node in too_long else part
        for node, part in parts.items()
    }
    working_nodes = {node: work for node, work in taking_part.items() if node not in too_long}
    steps = steps_in_job(speeds, working_nodes, full_steps)
    return NodeShares(works, working_nodes, parts, full_steps, steps, span_us)
