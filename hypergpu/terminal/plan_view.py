"""A round's plan as a watcher sees it, and what it changed."""

from collections.abc import Iterator, Mapping

import msgspec

from hypergpu.terminal.output import round_from_one, short


class NodeShare(msgspec.Struct, frozen=True):
    """A node's part of a round; without inner steps it rests."""

    inner_steps: int = 0
    codec: str = ""
    reason: str = ""
    batch_size: int = 0
    """The node's own batch; 0: as the job states."""
    micro_batch: int = 0
    checkpoints_activations: bool = False

    @property
    def work(self) -> tuple[int, int, int, bool, str]:
        """What the node is asked for."""
        memory = (self.micro_batch, self.checkpoints_activations)
        return self.inner_steps, self.batch_size, *memory, self.codec


class PlanView(msgspec.Struct, frozen=True):
    """A round's plan as its event tells it. ``round`` counts from 0."""

    round: int = 0
    reason: str = ""
    nodes: dict[str, NodeShare] = {}
    resting: dict[str, str] = {}
    """Why a node rests, by node."""

    @property
    def shares(self) -> dict[str, NodeShare]:
        """Every node's part, also of those that rest."""
        return self.nodes | {node: NodeShare(reason=why) for node, why in self.resting.items()}


def plan_news(plan: PlanView, before: PlanView | None, names: Mapping[str, str]) -> Iterator[str]:
    """A line for each node whose steps, batch, codec or part changed; a first plan's reason."""
    number = plan.round + 1
    if before is None:
        yield f"round {number}: {round_from_one(plan.reason)}"
        return
    earlier = before.shares
    for node, share in plan.shares.items():
        if node not in earlier or earlier[node].work != share.work:
            rests = "" if share.inner_steps else "rests: "
            reason = f"{rests}{round_from_one(share.reason)}"
            yield f"round {number}, {names.get(node) or short(node)}: {reason}"
