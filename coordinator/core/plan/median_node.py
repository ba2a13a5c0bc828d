"""How many inner steps the median node takes (H): enough that moving bytes is a small share of a
round, no more than the job can divide its work by, and slow to change.

Also the sentences in which plans explain themselves.
"""

from collections.abc import Mapping
from math import ceil

import msgspec

from coordinator.core.plan.agreement import update_cosine
from coordinator.core.plan.decision import NodePlan, PlanMemory, PlanRequest
from coordinator.core.plan.node_work import prefetch_limit, step_bounds, work_share
from coordinator.core.plan.speeds import NodeSpeed
from hypergpu.ids import NodeId
from hypergpu.optimizer import schedule_share
from hypergpu.units import several

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
    """What the agreement of updates makes of H."""

    factor: float = 1.0
    crowded_rounds: int = 0


class MedianNode(msgspec.Struct, frozen=True):
    """The median node's part of a round."""

    inner_steps: int
    changed_at_round: int
    computing_us: float
    moving_us: float
    dense_at_change_us: float
    """What a dense update and delta took the median node to move when H was last changed."""
    drift: Drift
    why: str
    hidden_us: float = 0.0
    """Part of the moving during which steps of the next round are taken."""

    @property
    def span_us(self) -> float:
        """What the round takes the median node."""
        return self.computing_us + self.moving_us - self.hidden_us


def most_inner_steps(
    request: PlanRequest, known: Mapping[NodeId, NodeSpeed], step_us: float
) -> int:
    """The largest H of the median node: within the user's limit, and in at least so many rounds.

    Whoever states fewer rounds than that finds those enough. A node counts by the steps that it
    would be given: one that says it is a thousand times faster has no thousand times as many.

    Args:
        request: What is planned.
        known: Speeds of the candidates.
        step_us: Step of the middle one.
    """
    aware, is_common = request.spec.aware, request.spec.data.is_common
    rounds = max(1, min(aware.rounds_min, request.spec.training.rounds))
    shares = [work_share(mine.step_us, step_us, is_common=is_common) for mine in known.values()]
    per_round = request.samples_total / rounds / request.spec.training.batch_size

    def together(steps: int) -> float:
        limits = step_bounds(steps, aware.inner_steps_max, is_common=is_common)
        return sum(min(limits.most, max(limits.least, steps * share)) for share in shares)

    least, most = 1, aware.inner_steps_max
    while least < most:
        steps = (least + most + 1) // 2
        least, most = (steps, most) if together(steps) <= per_round else (least, steps - 1)
    return least


def computing_for(moving_us: float, uploading_us: float, utilisation: float) -> float:
    """How long a node has to compute for its moving to be a small enough share of the round, and
    for its upload to stay within its byte budget.
    """
    idle = max(1e-3, 1 - utilisation)
    aimed = max(1e-3, idle * (1 - _WAITING))
    return max((1 - aimed) / aimed * moving_us, uploading_us / idle)


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


def drift(request: PlanRequest, moving_share: float) -> Drift:
    """Half of H when updates were nearly orthogonal for three rounds; a quarter more when they
    agree and a fifth of the round moves bytes. What was halved grows back by quarters as soon as
    they are orthogonal no more, whatever bytes take.

    Sparse updates hardly overlap and two or fewer say little: neither counts.
    """
    previous = request.previous
    if previous is None:
        return Drift()
    before = Drift(previous.drift, previous.crowded_rounds)
    agreed = update_cosine(request)
    if agreed is None:
        return before
    if agreed < _CROWD:
        crowded = before.crowded_rounds + 1
        if crowded < _CROWDED_ROUNDS:
            return Drift(before.factor, crowded)
        return Drift(max(_DRIFT_LEAST, before.factor / 2))
    most = 1.0 if agreed > _UNCROWDED else 0.0
    if agreed > _AGREED and moving_share > 0.2:
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
    decayed = decay_steps(request)
    wanted, why = max(
        (network, "the network"), (decayed, "the decayed learning rate"), (least, "the least")
    )
    if drift_.factor != 1:
        # Less than what the job can be divided by, or it would be no less.
        wanted = min(wanted, most) if drift_.factor < 1 else wanted
        wanted, why = round(wanted * drift_.factor), f"{why} and the agreement of updates"
    if wanted > most:
        wanted, why = most, f"the most, where {why} asks for {wanted}"
    return max(1, wanted), why


def plan_median_node(
    request: PlanRequest,
    *,
    step_us: float,
    moving: float,
    dense: float,
    computing_us: float,
    most: int,
) -> MedianNode:
    """The median node's H: at most every five rounds another one, and not for a small change.

    Args:
        request: What is planned.
        step_us: A step of the middle node.
        moving: Time for which it moves bytes, in microseconds like all of these.
        dense: What that would be if nothing were sparse: it changes with the network alone.
        computing_us: What it has to compute for.
        most: The largest H of the median node.
    """
    previous = request.previous

    def hidden_us(steps: int) -> float:
        return min(moving, prefetch_limit(request.spec, steps) * step_us)

    held_us, shown_us = computing_us, moving - hidden_us(int(computing_us / step_us))
    if previous is not None and previous.span_ms:
        held_us = previous.inner_steps * step_us
        shown_us = moving - hidden_us(previous.inner_steps)
    drift_ = drift(request, shown_us / max(1.0, shown_us + held_us))
    network = ceil(computing_us / step_us)
    short = int(_SHORT_US / step_us)
    steps, why = wanted_steps(request, network, most, drift_, short)
    changed_at, at_change_us = request.round, dense
    if previous is not None and not _changes(request, previous, steps, dense, drift_, most):
        steps, why = previous.inner_steps, "as before"
        changed_at = previous.changed_at_round
        at_change_us = previous.dense_ms * 1000
    return MedianNode(
        steps, changed_at, steps * step_us, moving, at_change_us, drift_, why, hidden_us(steps)
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
    held = previous.inner_steps
    if not (steps >= held * (1 + _CHANGE) or steps * (1 + _CHANGE) <= held):
        return False
    at_change_us = max(1.0, previous.dense_ms * 1000)
    ratio = max(dense_us, 1.0) / at_change_us
    return (
        request.round - previous.changed_at_round >= _PATIENCE
        or not 1 / _NETWORK_CHANGE < ratio < _NETWORK_CHANGE
        or drift_.factor < previous.drift
        or held > most * (1 + _CHANGE)
    )


def seconds(time_ms: float) -> str:
    """A time: ``0.42 s``, ``7.5 s``, ``42 s``."""
    time_s = time_ms / 1000
    if time_s < 0.995:
        return f"{time_s:.2f} s"
    return f"{time_s:.1f} s" if time_s < 9.95 else f"{time_s:.0f} s"


def rate(bits_per_s: float) -> str:
    """A rate: ``850 kbit/s``, ``6 Mbit/s``, ``1.2 Gbit/s``."""
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= 0.9995 * scale or unit == "kbit/s":
            return f"{bits_per_s / scale:.3g} {unit}"
    raise AssertionError("every rate has a unit")


def node_reason(plan: NodePlan, *, up_bits_per_s: float, deadline_ms: int, why: str = "") -> str:
    """``H=80, int4, uplink 6 Mbit/s, forecast 31 s, deadline 42 s (WHY)``. What the plan's
    reason says already goes before the rest of why.
    """
    why = "; ".join(filter(None, (plan.reason, why)))
    said = [f"H={plan.inner_steps}", plan.codec]
    if up_bits_per_s:
        said.append(f"uplink {rate(up_bits_per_s)}")
    said.append(f"forecast {seconds(plan.forecast_ms)}" if plan.forecast_ms else "not yet measured")
    if plan.rounds > 1:
        said.append(f"within {several(plan.rounds, 'round')}")
    elif deadline_ms:
        said.append(f"deadline {seconds(deadline_ms)}")
    if plan.connections > 1:
        said.append(f"{plan.connections} connections")
    if plan.prefetch_steps:
        said.append(f"{plan.prefetch_steps} of the next ahead")
    if plan.upload_after_ms:
        said.append(f"uploads {seconds(plan.upload_after_ms)} later")
    return ", ".join(said) + (f" ({why})" if why else "")


def unmeasured_reason(inner_steps: int, codec: str, deadline_ms: int) -> str:
    """Reason of a plan that is made before any node was measured."""
    closes = _closing_reason(deadline_ms)
    return f"H={inner_steps} and {codec} until nodes are measured; {closes}"


def _closing_reason(deadline_ms: int) -> str:
    after = seconds(deadline_ms) if deadline_ms else "twice what its quorum takes"
    return f"closes after {after}"


def round_reason(
    middle: MedianNode, *, codecs: list[str], down: str, deadline_ms: int, resting: int
) -> str:
    """What holds for all nodes of a round."""
    computes = f"computes {seconds(middle.computing_us / 1000)}"
    moves = f"moves bytes {seconds(middle.moving_us / 1000)}"
    if middle.hidden_us:
        moves += f", {seconds(middle.hidden_us / 1000)} of it while it begins the next"
    until = _closing_reason(deadline_ms)
    rests = f"; {resting} {'node rests' if resting == 1 else 'nodes rest'}" if resting else ""
    up = "/".join(codecs)
    return (
        f"H={middle.inner_steps} ({middle.why}); the median node {computes} and {moves}; "
        f"{up} up, {down} down; {until}{rests}"
    )
