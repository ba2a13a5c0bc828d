"""What a round's plan says of each node, and what of it is news. Pure."""

from collections.abc import Iterator, Mapping

import msgspec

from hypergpu.terminal.figures import short


class NodeShare(msgspec.Struct, frozen=True):
    """A node's part of a round; without inner steps it rests."""

    inner_steps: int
    codec: str
    reason: str
    batch_size: int = 0
    """Of its own; 0: as the job states."""


class PlanView(msgspec.Struct, frozen=True):
    """A plan as its event tells it. ``round`` counts from 1, as people do."""

    round: int
    reason: str
    nodes: dict[str, NodeShare]


def plan_view(fields: Mapping[str, object]) -> PlanView:
    """The plan in a `RoundPlanned` event."""
    plan = _table(fields, "plan")
    nodes = {
        node: NodeShare(
            inner_steps=_count(share, "inner_steps"),
            codec=_text(share, "codec"),
            reason=_text(share, "reason"),
            batch_size=_count(share, "batch_size"),
        )
        for node in _table(plan, "nodes")
        if (share := _table(_table(plan, "nodes"), node))
    }
    resting = _table(plan, "resting")
    nodes |= {node: NodeShare(0, "", str(reason)) for node, reason in resting.items()}
    return PlanView(_count(plan, "round") + 1, _text(plan, "reason"), nodes)


def plan_news(plan: PlanView, before: PlanView | None, names: Mapping[str, str]) -> Iterator[str]:
    """A line for each node whose steps, batch, scheme or part changed; a first plan's reason."""
    if before is None:
        yield f"round {plan.round}: {plan.reason}"
        return
    for node, share in plan.nodes.items():
        last = before.nodes.get(node)
        if last is None or _work(last) != _work(share):
            rests = "" if share.inner_steps else "rests: "
            yield f"round {plan.round}, {names.get(node) or short(node)}: {rests}{share.reason}"


def _work(share: NodeShare) -> tuple[int, int, str]:
    return share.inner_steps, share.batch_size, share.codec


def _table(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _text(fields: Mapping[str, object], name: str) -> str:
    return str(fields.get(name) or "")


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0
