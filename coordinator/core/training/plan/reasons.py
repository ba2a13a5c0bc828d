"""The sentences in which plans explain themselves."""

from msgspec.structs import replace

from coordinator.core.training.plan.decision import NodePlan, ReasonValues
from coordinator.core.training.plan.median_node import MedianNode
from hypergpu.units import Milliseconds, several


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


def with_reason(
    plan: NodePlan, *, up_bits_per_s: float, deadline_ms: int, why: str = ""
) -> NodePlan:
    """The plan with its reason. What it says already goes before the rest of why."""
    why = "; ".join(filter(None, (plan.reason, why)))
    values = ReasonValues(up_bits_per_s, Milliseconds(deadline_ms), why)
    return replace(plan, reason=node_reason(plan, values), reason_values=values)


def node_reason(plan: NodePlan, values: ReasonValues) -> str:
    """``H=80, int4, uplink 6 Mbit/s, forecast 31 s, deadline 42 s (WHY)``."""
    up_bits_per_s, deadline_ms, why = values.up_bits_per_s, values.deadline_ms, values.why
    parts = [f"H={plan.inner_steps}", plan.codec]
    if up_bits_per_s:
        parts.append(f"uplink {rate(up_bits_per_s)}")
    parts.append(
        f"forecast {seconds(plan.forecast_ms)}" if plan.forecast_ms else "not yet measured"
    )
    if plan.rounds > 1:
        parts.append(f"within {several(plan.rounds, 'round')}")
    elif deadline_ms:
        parts.append(f"deadline {seconds(deadline_ms)}")
    if plan.connections > 1:
        parts.append(f"{plan.connections} connections")
    if plan.prefetch_steps:
        parts.append(f"{plan.prefetch_steps} of the next ahead")
    if plan.upload_after_ms:
        parts.append(f"uploads {seconds(plan.upload_after_ms)} later")
    return ", ".join(parts) + (f" ({why})" if why else "")


def _work(plan: NodePlan) -> str:
    return f"H={plan.inner_steps}, {plan.codec}"


def _finish(plan: NodePlan) -> str:
    return f"forecast {seconds(plan.forecast_ms)}" if plan.forecast_ms else "not yet measured"


def reason_of_lesser(plan: NodePlan, lesser: NodePlan) -> str:
    """The reason of ``plan``, as if ``lesser`` had been planned. The node reads it, and must not
    learn that it is compared.
    """
    if plan.reason_values is None:
        return _lesser_of_text(plan, lesser)
    return node_reason(lesser, plan.reason_values)


def _lesser_of_text(plan: NodePlan, lesser: NodePlan) -> str:
    """The same of a plan in a journal of an earlier version, which kept no values: all parts but
    work and forecast are taken over as they are.
    """
    work = _work(plan)
    if not plan.forecast_ms or not plan.reason.startswith(work):
        return plan.reason
    line, _, others = plan.reason.removeprefix(work).partition(_finish(plan))
    return f"{_work(lesser)}{line}{_finish(lesser)}{others}"


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
    """Reason of a round's plan: the values that hold for all of its nodes."""
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
