"""How many inner steps the median node may take, and how far single nodes may stray from it."""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from coordinator.core.training.plan.decision import PlanRequest
from coordinator.core.training.plan.node_speed import NodeSpeed
from hypergpu.ids import NodeId


class StepBounds(NamedTuple):
    """The fewest and the most inner steps of one node."""

    least: int
    most: int


def step_bounds(middle_steps: int, inner_steps_max: int, *, is_common: bool) -> StepBounds:
    """How far single nodes may stray from the median node's H.

    Where any node may train on any sample updates are weighted by their samples, so that few
    steps do no harm and many are what a fast node is there for: from one step to eight times the
    middle node's.
    Where nodes hold samples that others do not, unequal work biases the model: half to twice.
    """
    least, most = _reach(is_common)
    upper = max(1, min(inner_steps_max, int(middle_steps * most)))
    return StepBounds(min(upper, max(1, ceil(middle_steps * least))), upper)


def _work_share(step_us: float, middle_step_us: float, *, is_common: bool) -> float:
    """A node's work in a round over the middle one's: as its speed is, as far as `step_bounds` lets
    it stray. A node's own statement of its speed moves nothing by more than that.
    """
    least, most = _reach(is_common)
    return min(most, max(least, middle_step_us / step_us))


def _reach(is_common: bool) -> tuple[float, float]:  # noqa: FBT001 - the only argument
    """The least and the most of the median node's H."""
    return (0, 8) if is_common else (0.5, 2)


def most_inner_steps(
    request: PlanRequest, speeds: Mapping[NodeId, NodeSpeed], step_us: float
) -> int:
    """The largest H of the median node: within the user's limit, and in at least so many rounds.

    A job that states fewer rounds than that has those. A node counts by the steps that it would be
    given: a node that claims to be a thousand times faster has no thousand times as many.

    Args:
        request: What is planned.
        speeds: Speeds of the candidates.
        step_us: Step of the middle one.
    """
    aware, is_common = request.spec.aware, request.spec.data.is_common
    rounds = max(1, min(aware.rounds_min, request.spec.training.rounds))
    shares = [_work_share(mine.step_us, step_us, is_common=is_common) for mine in speeds.values()]
    per_round = request.samples_total / rounds / request.spec.training.batch_size

    def together(steps: int) -> float:
        limits = step_bounds(steps, aware.inner_steps_max, is_common=is_common)
        return sum(min(limits.most, max(limits.least, steps * share)) for share in shares)

    least, most = 1, aware.inner_steps_max
    while least < most:
        steps = (least + most + 1) // 2
        least, most = (steps, most) if together(steps) <= per_round else (least, steps - 1)
    return least
