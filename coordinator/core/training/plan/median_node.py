"""How many inner steps the median node takes (H): enough that moving bytes is a small share of a
round, no more than the job can divide its work by, and slow to change.
"""

from math import ceil

import msgspec

from coordinator.core.training.plan.decision import PlanMemory, PlanRequest
from coordinator.core.training.plan.node_speed import NodeSpeed
from coordinator.core.training.plan.prefetch import prefetch_limit
from coordinator.core.training.plan.speeds import RoundSpeeds
from hypergpu.jobfile.spec import JobSpec
from hypergpu.optimizer import schedule_share
from hypergpu.units import Bytes

_SHORT_US = 250_000
"""Opening and closing a round takes as long, however little there is to do."""
_LEAST = 10
"""Fewer steps gain nothing on the fastest line: a round has costs that no line explains."""
_PATIENCE = 5
"""Rounds between two changes, unless the network itself has changed."""
_CHANGE = 0.25
"""Smaller changes are not worth one: with noise of 5 % on speed and line H wanders by 22 %."""
_NETWORK_CHANGE = 2.0
_CROWD, _UNCROWDED, _AGREED = 0.04, 0.08, 0.25
"""Cosine between two nodes' updates: below the first more steps only drive nodes apart, above the
second they no longer do, above the third they go the same way. For eight nodes these are 1.3, 1.6
and 2.8 of the ratio that `PlanRequest.agreement` is; a cosine says the same of three and of thirty.
"""
_CROWDED_ROUNDS = 3
_RISE = 1.25
_DRIFT_LEAST, _DRIFT_MOST = 1 / 8, 2.0
_QSR_BASE = 30
_WAITING = 0.15
"""Share of the idle time in which nodes wait for the last one, however well planned."""


class Drift(msgspec.Struct, frozen=True):
    """Effect of the agreement of updates on H."""

    factor: float = 1.0
    crowded_rounds: int = 0


class MedianNode(msgspec.Struct, frozen=True):
    """The median node's part of a round."""

    inner_steps: int
    changed_at_round: int
    computing_us: float
    moving_us: float
    dense_at_change_us: float
    """Time for which it moved a dense update and delta when H was last changed."""
    drift: Drift
    why: str
    hidden_us: float = 0.0
    """Part of the moving during which steps of the next round are taken."""

    @property
    def span_us(self) -> float:
        """Time of the round for the median node."""
        return self.computing_us + self.moving_us - self.hidden_us


def node_computing_us(spec: JobSpec, speed: NodeSpeed, moving_us: float, up_bytes: Bytes) -> float:
    """How long a node has to compute, for one update of so many bytes.

    Args:
        spec: The job's.
        speed: Of the node.
        moving_us: Time for which it moves bytes in a round.
        up_bytes: Of its update.
    """
    if spec.round.overlap == "eager":
        return computing_beside(moving_us, spec.aware.utilisation)
    # The line may be as bad as in one case of four.
    uploading_us = up_bytes * 8e6 / speed.cautious_up_bits_per_s
    return computing_for(moving_us, uploading_us, spec.aware.utilisation)


def computing_for(moving_us: float, uploading_us: float, utilisation: float) -> float:
    """How long a node has to compute for its moving to be a small enough share of the round, and
    for its upload to stay within its byte budget.
    """
    idle = max(1e-3, 1 - utilisation)
    moving_share = max(1e-3, idle * (1 - _WAITING))
    return max((1 - moving_share) / moving_share * moving_us, uploading_us / idle)


def computing_beside(moving_us: float, utilisation: float) -> float:
    """How long a node has to compute where it begins the next round while bytes move: half of that
    hides the moving. What is left of one that takes twice its forecast is a small enough share.
    """
    return 4 * utilisation / (2 - utilisation) * moving_us


def decay_steps(request: PlanRequest) -> int:
    """The H of the quadratic synchronisation rule: ``base * (eta_0 / eta)^2`` (arXiv:2310.14423).

    Only where the learning rate decays: with a constant one H stays what the network asks for.
    """
    spec = request.spec
    if spec.inner.schedule == "constant" or request.samples_total <= 0:
        return 0
    progress = request.samples_done / request.samples_total
    share = max(0.05, schedule_share(spec.inner.schedule, progress))
    base = min(_QSR_BASE, spec.training.inner_steps)
    return int(base / share**2)


def drift(request: PlanRequest, update_cosine: float | None, moving_share: float) -> Drift:
    """The factor of H: half when updates were nearly orthogonal for three rounds; a quarter more
    when they agree and a fifth of the round moves bytes. A factor below 1 grows back by quarters as
    soon as updates are orthogonal no more, whatever bytes take.

    Args:
        request: What is planned.
        update_cosine: Cosine between two updates of the round before; None: it says nothing.
        moving_share: Part of the round for which the median node moves bytes.
    """
    previous = request.previous
    if previous is None:
        return Drift()
    before = Drift(previous.drift, previous.crowded_rounds)
    if update_cosine is None:
        return before
    if update_cosine < _CROWD:
        crowded_rounds = before.crowded_rounds + 1
        if crowded_rounds < _CROWDED_ROUNDS:
            return Drift(before.factor, crowded_rounds)
        return Drift(max(_DRIFT_LEAST, before.factor / 2))
    most = 1.0 if update_cosine > _UNCROWDED else 0.0
    if update_cosine > _AGREED and moving_share > 0.2:
        most = _DRIFT_MOST
    can_rise = request.round - previous.changed_at_round >= _PATIENCE
    if can_rise and before.factor < most:
        return Drift(min(most, before.factor * _RISE))
    return Drift(before.factor)


def wanted_steps(
    request: PlanRequest, network: int, most: int, drift_: Drift, short: int = 0
) -> tuple[int, str]:
    """The median node's H if nothing came before, and what decided it.

    Args:
        request: What is planned.
        network: The H that bytes ask for.
        most: The largest H.
        drift_: What the agreement of updates makes of it.
        short: The H of a round so short that opening and closing it takes as long.
    """
    least = min(max(_LEAST, short), request.spec.training.inner_steps)
    decay = decay_steps(request)
    steps, why = max(
        (network, "the network"), (decay, "the decayed learning rate"), (least, "the least")
    )
    if drift_.factor != 1:
        # Less than what the job can be divided by, or it would be no less.
        steps = min(steps, most) if drift_.factor < 1 else steps
        steps, why = round(steps * drift_.factor), f"{why} and the agreement of updates"
    if steps > most:
        steps, why = most, f"the most, where {why} asks for {steps}"
    return max(1, steps), why


def plan_median_node(
    speeds: RoundSpeeds,
    *,
    step_us: float,
    moving_us: float,
    dense_us: float,
    computing_us: float,
    most: int,
) -> MedianNode:
    """The median node's H: at most every five rounds another one, and not for a small change.

    Args:
        speeds: Of the candidates.
        step_us: A step of the middle node.
        moving_us: Time for which it moves bytes.
        dense_us: The same if nothing were sparse: it changes with the network alone.
        computing_us: Time that it has to compute.
        most: The largest H of the median node.
    """
    request, previous = speeds.request, speeds.request.previous

    def hidden_us(steps: int) -> float:
        return min(moving_us, prefetch_limit(request.spec, steps) * step_us)

    before_us, shown_us = computing_us, moving_us - hidden_us(int(computing_us / step_us))
    if previous is not None and previous.span_ms:
        before_us = previous.inner_steps * step_us
        shown_us = moving_us - hidden_us(previous.inner_steps)
    moving_share = shown_us / max(1.0, shown_us + before_us)
    drift_ = drift(request, speeds.agreement.cosine, moving_share)
    network = ceil(computing_us / step_us)
    short = int(_SHORT_US / step_us)
    steps, why = wanted_steps(request, network, most, drift_, short)
    changed_at, at_change_us = request.round, dense_us
    if previous is not None and not _changes(request, previous, steps, dense_us, drift_, most):
        steps, why = previous.inner_steps, "as before"
        changed_at = previous.changed_at_round
        at_change_us = previous.dense_ms * 1000
    return MedianNode(
        steps, changed_at, steps * step_us, moving_us, at_change_us, drift_, why, hidden_us(steps)
    )


def _changes(
    request: PlanRequest,
    previous: PlanMemory,
    steps: int,
    dense_us: float,
    drift_: Drift,
    most: int,
) -> bool:
    """Whether the median node's H becomes ``steps``."""
    if not previous.span_ms:
        return True
    before = previous.inner_steps
    if not (steps >= before * (1 + _CHANGE) or steps * (1 + _CHANGE) <= before):
        return False
    at_change_us = max(1.0, previous.dense_ms * 1000)
    ratio = max(dense_us, 1.0) / at_change_us
    return (
        request.round - previous.changed_at_round >= _PATIENCE
        or not 1 / _NETWORK_CHANGE < ratio < _NETWORK_CHANGE
        or drift_.factor < previous.drift
        or before > most * (1 + _CHANGE)
    )
