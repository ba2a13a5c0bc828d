"""`hypergpu node`: list, show, trust, pause, resume, drain, revoke, readmit."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.journal.text import round_from_one
from hypergpu.units import several
from hypergpu.user.terminal.commands import AsJson, group, on_coordinator
from hypergpu.user.terminal.output import (
    Column,
    mbit_s,
    milliseconds,
    name_or_id,
    optional_numbers,
    percent,
    say,
    say_json,
    say_table,
    short_id,
    size,
    span,
)

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator, NodeView
    from hypergpu.user.client.values import EstimateView, HealthHistoryView, HealthView
    from hypergpu.user.terminal.output import Table

app = group("See the nodes, pause them, let them go, shut them out.")
_Node = Annotated[str, typer.Argument(help="A node's name, or its id or the beginning of it.")]


@app.command()
@on_coordinator
def ls(coordinator: "Coordinator", *, as_json: AsJson = False) -> None:
    """List the nodes with their state and the reason for it."""
    from hypergpu.user.client.values import Nodes

    nodes = coordinator.nodes()
    if as_json:
        say_json(Nodes(nodes))
        return
    empty = "no nodes yet; make a join line: hypergpu token create"
    say_table(*nodes_table(nodes), empty=empty)


def nodes_table(nodes: "Sequence[NodeView]") -> "Table":
    """Columns and rows of `node ls`."""
    columns = tuple(column for column, _ in _COLUMNS)
    return columns, [tuple(cell(node) for _, cell in _COLUMNS) for node in nodes]


def _why(node: "NodeView") -> str:
    """The reason of a node's state, and that its worker may do anything on its machine."""
    is_open = node.sandbox.startswith("unsandboxed")
    reasons = (round_from_one(node.reason), node.sandbox if is_open else "")
    return "; ".join(text for text in reasons if text) or "-"


_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "round trip": ("round_trip_us", milliseconds),
    "loss": ("loss", percent),
    "up Mbit/s": ("up_bits_per_s", mbit_s),
    "down Mbit/s": ("down_bits_per_s", mbit_s),
    "inner step": ("step_us", milliseconds),
}
"""Readings of a node by the title that people see, each with its field and its text."""


def _mean(node: "NodeView", title: str) -> str:
    """Text of a reading's mean; a dash before it was measured."""
    field, text = _FIGURES[title]
    estimate: EstimateView | None = getattr(node.reading, field)
    return "-" if estimate is None else text(estimate.mean)


def _figure(title: str) -> Column:
    """A column of figures that a narrow terminal has no room for."""
    return Column(title, is_number=True, is_optional=True)


_COLUMNS: Sequence[tuple[Column, Callable[["NodeView"], str]]] = (
    (Column("node"), lambda node: name_or_id(node.name, node.id)),
    (Column("id"), lambda node: short_id(node.id)),
    (Column("state"), lambda node: node.state),
    (Column("health"), lambda node: f"{node.health.value:.2f} {node.health.level}"),
    (Column("job", is_optional=True), lambda node: short_id(node.job) if node.job else "-"),
    (_figure("step"), lambda node: _mean(node, "inner step")),
    (_figure("rtt"), lambda node: _mean(node, "round trip")),
    (_figure("loss"), lambda node: _mean(node, "loss")),
    (_figure("up Mbit/s"), lambda node: _mean(node, "up Mbit/s")),
    (_figure("down Mbit/s"), lambda node: _mean(node, "down Mbit/s")),
    (_figure("seen"), lambda node: f"{span(node.last_seen_ms_ago / 1000)} ago"),
    (_figure("accepted"), lambda node: str(node.updates_accepted)),
    (_figure("rejected"), lambda node: str(node.updates_rejected)),
    (
        Column("device", is_optional=True),
        lambda node: f"{node.device} {node.device_name}".strip() or "-",
    ),
    (Column("why", folds=True), _why),
)
"""Columns of `node ls`, each with the text of its cell."""


@app.command()
@on_coordinator
def show(coordinator: "Coordinator", node: _Node, *, as_json: AsJson = False) -> None:
    """Show one node: its health with parts, the plan's reason, and everything measured of it."""
    from hypergpu.user.client.values import NodeDetail

    view = coordinator.find_node(node)
    if as_json:
        say_json(NodeDetail(view))
        return
    for line in _node_lines(view):
        say(line)
    say()
    columns = (
        Column("measured"),
        Column("mean", is_number=True),
        *optional_numbers("spread", "samples", "age"),
    )
    say_table(columns, _figure_rows(view), empty="")


def _node_lines(node: "NodeView") -> list[str]:

    least_us = node.reading.least_round_trip_us
    return [
        f"{node.name}  {node.id}".lstrip(),
        f"  state       {node.state}: {round_from_one(node.reason) or '-'}",
        f"  health      {node.health.value:.2f} {node.health.level}: {node.health.reason}",
        f"  parts       {_parts_text(node.health)}",
        f"  last day    {health_line(node.health_history) or 'its first minute is not over'}",
        f"  plan        {round_from_one(node.plan_reason) or 'in no planned round yet'}",
        f"  device      {node.device} {node.device_name}".rstrip() + f", {size(node.memory_bytes)}",
        f"  worker      {node.worker or '-'}, {node.software or '-'}",
        f"  machine     {machine_text(node)}",
        f"  trusted     {', '.join(node.trust_labels) or 'no labels of an operator'}",
        f"  labels      {', '.join(map('='.join, node.labels.items())) or 'none'}",
        f"  limits      {limits_text(node.caps) or 'none'}",
        f"  sandbox     {node.sandbox or '-'}",
        f"  own data    {', '.join(node.data_names) or '-'}",
        f"  job         {node.job or '-'}",
        f"  updates     {node.updates_accepted} accepted, {node.updates_rejected} rejected",
        f"  seen        {span(node.last_seen_ms_ago / 1000)} ago",
        f"  congestion  {node.reading.congestion_control or '-'}",
        f"  least RTT   {milliseconds(least_us) if least_us else '-'}",
    ]


def _parts_text(health: "HealthView") -> str:
    parts = ("speed", "reliability", "quality", "uptime")
    return ", ".join(f"{name} {getattr(health, name):.2f}" for name in parts)


_BARS = "▁▂▃▄▅▆▇█"
_LINE_POINTS = 48


def health_line(history: "HealthHistoryView") -> str:
    """A history as bars, the newest last, of at most 48 spans; a gap where nobody looked."""
    points = history.points
    span = max(1, -(-len(points) // _LINE_POINTS))
    spans = [points[max(0, end - span) : end] for end in range(len(points), 0, -span)]
    return "".join(map(_bar, reversed(spans)))


def _bar(points: "Sequence[float | None]") -> str:
    known_points = [point for point in points if point is not None]
    if not known_points:
        return " "
    return _BARS[min(len(_BARS) - 1, int(len(_BARS) * sum(known_points) / len(known_points)))]


def machine_text(node: "NodeView") -> str:
    """Processors and memory of a node's machine, in words."""
    if not node.processors:
        return "-"
    return f"{several(node.processors, 'core')}, {size(node.machine_memory_bytes)} of memory"


def limits_text(caps: Mapping[str, int]) -> str:
    """Limits that a node's owner set, in words."""
    words = {
        "worker_threads": several(caps.get("worker_threads", 0), "thread"),
        "worker_memory_bytes": f"{size(caps.get('worker_memory_bytes', 0))} of memory",
        "cache_bytes": f"{size(caps.get('cache_bytes', 0))} of downloads",
        "disk_bytes": f"{size(caps.get('disk_bytes', 0))} of disk in all",
        "upload_bits_per_s": f"{mbit_s(caps.get('upload_bits_per_s', 0))} Mbit/s up",
        "download_bits_per_s": f"{mbit_s(caps.get('download_bits_per_s', 0))} Mbit/s down",
        "step_floor_ms": f"{caps.get('step_floor_ms', 0)} ms or more a step",
    }
    return ", ".join(text for name, text in words.items() if name in caps)


def _figure_rows(node: "NodeView") -> list[tuple[str, ...]]:
    return [_figure_row(node, title) for title in _FIGURES]


def _figure_row(node: "NodeView", title: str) -> tuple[str, ...]:
    field, text = _FIGURES[title]
    estimate: EstimateView | None = getattr(node.reading, field)
    if estimate is None:
        return title, "-", "-", "0", "-"
    return (
        title,
        text(estimate.mean),
        text(estimate.spread),
        str(estimate.samples) if estimate.samples else "inferred",
        f"{span(estimate.age_ms / 1000)} ago",
    )


@app.command()
@on_coordinator
def trust(
    coordinator: "Coordinator",
    node: _Node,
    *,
    job: Annotated[str, typer.Option("--job", help="A job's name or id; else the newest.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what a job's rounds found of a node's updates, and why."""
    from hypergpu.user.client.history import trust_history

    node_id = coordinator.find_node(node).id
    job_id = coordinator.find_job(job or None)
    history = trust_history(coordinator.read_events(job_id).until_newest(), node_id)
    if as_json:
        say_json(history)
        return
    columns = (
        Column("round", is_number=True),
        *optional_numbers("weight", "honesty", "vote", "quality"),
        Column("why", folds=True),
    )
    rows = [
        (
            str(each.round + 1),
            "-" if each.weight is None else percent(each.weight / 65_536),
            "-" if each.honesty is None else percent(each.honesty / 65_536),
            percent(each.vote / 65_536),
            percent(each.quality_bps / 10_000),
            each.reason or "-",
        )
        for each in history.rounds
    ]
    say_table(columns, rows, empty=f"no update of {node_id} was measured in {job_id} yet")


@app.command()
@on_coordinator
def pause(coordinator: "Coordinator", node: _Node) -> None:
    """Take a node's work back at once and give it no more until it is resumed."""
    node_id = coordinator.find_node(node).id
    coordinator.pause_node(node_id)
    say(f"{node_id} paused; let it work again: hypergpu node resume {node_id}")


@app.command()
@on_coordinator
def label(
    coordinator: "Coordinator",
    node: _Node,
    labels: Annotated[
        list[str] | None, typer.Argument(metavar="[LABEL]...", help="None: it has none any more.")
    ] = None,
) -> None:
    """Give a node labels that it does not state itself, in place of those before."""
    node_id = coordinator.find_node(node).id
    coordinator.label_node(node_id, labels or [])
    text = ", ".join(labels or []) or "no labels"
    say(f"{node_id} has {text}; models on such nodes alone: hypergpu serve MODEL --trusted LABEL")


@app.command()
@on_coordinator
def resume(coordinator: "Coordinator", node: _Node) -> None:
    """Let a paused node take work again."""
    node_id = coordinator.find_node(node).id
    coordinator.resume_node(node_id)
    say(f"{node_id} takes work again; see it: hypergpu node ls")


@app.command()
@on_coordinator
def drain(coordinator: "Coordinator", node: _Node) -> None:
    """Let a node finish what it holds and leave."""
    node_id = coordinator.find_node(node).id
    coordinator.drain(node_id)
    say(f"{node_id} drains; see it go: hypergpu node ls")


@app.command()
@on_coordinator
def revoke(coordinator: "Coordinator", node: _Node) -> None:
    """Shut a node out at once, whatever certificate or token it holds."""
    node_id = coordinator.find_node(node).id
    coordinator.revoke_node(node_id)
    say(f"{node_id} revoked; take it back: hypergpu node readmit {node_id}")


@app.command()
@on_coordinator
def readmit(coordinator: "Coordinator", node: _Node) -> None:
    """Let a revoked node in again, and back into jobs that banned it."""
    node_id = coordinator.find_node(node).id
    coordinator.readmit_node(node_id)
    say(f"{node_id} may work again; if it was shut out, start it on its machine: hypergpu-node run")
