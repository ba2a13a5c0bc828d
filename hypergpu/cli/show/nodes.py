"""Nodes as people see them: the table of `node ls` and the page of `node show`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hypergpu.terminal.figures import size, span
from hypergpu.terminal.output import Column

if TYPE_CHECKING:
    from hypergpu.client.readings import EstimateView
    from hypergpu.client.values import NodeView

REASON_LENGTH = 60
NODE_COLUMNS = (
    Column("node"),
    Column("name"),
    Column("state"),
    Column("health", is_number=True),
    Column("rtt", is_number=True),
    Column("loss", is_number=True),
    Column("up Mbit/s", is_number=True),
    Column("down Mbit/s", is_number=True),
    Column("step", is_number=True),
    Column("device"),
    Column("job"),
    Column("seen", is_number=True),
    Column("accepted", is_number=True),
    Column("refused", is_number=True),
    Column("why"),
)
FIGURE_COLUMNS = (
    Column("measured"),
    Column("mean", is_number=True),
    Column("spread", is_number=True),
    Column("samples", is_number=True),
    Column("age", is_number=True),
)


def milliseconds(value_us: float) -> str:
    """A short time, to three digits."""
    return f"{value_us / 1000:.3g} ms" if value_us < 1e6 else span(value_us / 1e6)


def mbit_s(bits_per_s: float) -> str:
    """A rate in Mbit/s, without its unit."""
    value = bits_per_s / 1e6
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share, small ones to two digits."""
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share:.0%}"


def node_row(node: "NodeView") -> tuple[str, ...]:
    """`node ls`, one node."""
    device = f"{node.device} {node.device_name}".strip() or "-"
    seen = node.reading
    return (
        node.id,
        node.name or "-",
        node.state,
        "-" if node.health is None else f"{node.health:.2f}",
        _mean(seen.round_trip_us, milliseconds),
        _mean(seen.loss, percent),
        _mean(seen.up_bits_per_s, mbit_s),
        _mean(seen.down_bits_per_s, mbit_s),
        _mean(seen.step_us, milliseconds),
        device if len(device) <= 36 else f"{device[:33]}...",
        node.job or "-",
        f"{span(node.last_seen_ms_ago / 1000)} ago",
        str(node.updates_accepted),
        str(node.updates_refused),
        _cut(node.reason) or "-",
    )


def node_lines(node: "NodeView") -> list[str]:
    """The head of `node show`."""
    health = "nothing measured yet" if node.health is None else node.health_reason
    congestion = node.reading.congestion_control or "-"
    least_us = node.reading.least_round_trip_us
    return [
        f"{node.id}  {node.name}".rstrip(),
        f"  state       {node.state}: {node.reason or '-'}",
        f"  health      {health}",
        f"  device      {node.device} {node.device_name}".rstrip() + f", {size(node.memory_bytes)}",
        f"  worker      {node.worker or '-'}, {node.software or '-'}",
        f"  job         {node.job or '-'}",
        f"  updates     {node.updates_accepted} accepted, {node.updates_refused} refused",
        f"  seen        {span(node.last_seen_ms_ago / 1000)} ago",
        f"  congestion  {congestion}",
        f"  least RTT   {milliseconds(least_us) if least_us else '-'}",
    ]


def figure_rows(node: "NodeView") -> list[tuple[str, ...]]:
    """The figures of `node show`."""
    seen = node.reading
    return [
        _figure("round trip", seen.round_trip_us, milliseconds),
        _figure("loss", seen.loss, percent),
        _figure("up Mbit/s", seen.up_bits_per_s, mbit_s),
        _figure("down Mbit/s", seen.down_bits_per_s, mbit_s),
        _figure("inner step", seen.step_us, milliseconds),
    ]


def _mean(estimate: "EstimateView | None", shown: Callable[[float], str]) -> str:
    return "-" if estimate is None else shown(estimate.mean)


def _figure(
    name: str, estimate: "EstimateView | None", shown: Callable[[float], str]
) -> tuple[str, ...]:
    if estimate is None:
        return (name, "-", "-", "0", "-")
    samples = str(estimate.samples) if estimate.samples else "inferred"
    age = f"{span(estimate.age_ms / 1000)} ago"
    return (name, shown(estimate.mean), shown(estimate.spread), samples, age)


def _cut(reason: str) -> str:
    """A reason in a list; `show` has all of it."""
    return reason if len(reason) <= REASON_LENGTH else f"{reason[: REASON_LENGTH - 3]}..."
