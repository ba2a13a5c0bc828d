"""`hypergpu node`: list, show, drain, revoke, readmit; and the wallet of this machine's node."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.terminal.commands import group
from hypergpu.terminal.options import Address, AsJson, TokenFile

if TYPE_CHECKING:
    from hypergpu.client import NodeView
    from hypergpu.client.values import EstimateView
    from hypergpu.terminal.output import Table

app = group("See the nodes, let them go, shut them out.")
_Node = Annotated[str, typer.Argument(help="A node's name, or its id or the beginning of it.")]


@app.command()
def ls(*, as_json: AsJson = False, address: Address = None, token_file: TokenFile = None) -> None:
    """List the nodes with their state and the reason for it."""
    from hypergpu.cli.schemas import Nodes
    from hypergpu.client import connect
    from hypergpu.terminal.output import say_json, say_table

    with connect(address, token_file=token_file) as coordinator:
        nodes = coordinator.nodes()
    if as_json:
        say_json(Nodes(nodes))
        return
    empty = "no nodes yet; make a join line: hypergpu token create"
    say_table(*nodes_table(nodes), empty=empty)


def nodes_table(nodes: "Sequence[NodeView]") -> "Table":
    """Columns and rows of `node ls`."""
    from hypergpu.terminal.output import Column

    columns = (
        Column("node", is_required=True),
        Column("id", is_required=True),
        Column("state", is_required=True),
        Column("health", is_number=True),
        Column("job"),
        Column("step", is_number=True),
        Column("rtt", is_number=True),
        Column("loss", is_number=True),
        Column("up Mbit/s", is_number=True),
        Column("down Mbit/s", is_number=True),
        Column("seen", is_number=True),
        Column("accepted", is_number=True),
        Column("refused", is_number=True),
        Column("device"),
        Column("why", folds=True, is_required=True),
    )
    return columns, [_node_row(node) for node in nodes]


def _node_row(node: "NodeView") -> tuple[str, ...]:
    from hypergpu.terminal.figures import mbit_s, milliseconds, name_or_id, percent, short_id, span

    seen = node.reading
    return (
        name_or_id(node.name, node.id),
        short_id(node.id),
        node.state,
        "-" if node.health is None else f"{node.health:.2f}",
        short_id(node.job) if node.job else "-",
        _mean(seen.step_us, milliseconds),
        _mean(seen.round_trip_us, milliseconds),
        _mean(seen.loss, percent),
        _mean(seen.up_bits_per_s, mbit_s),
        _mean(seen.down_bits_per_s, mbit_s),
        f"{span(node.last_seen_ms_ago / 1000)} ago",
        str(node.updates_accepted),
        str(node.updates_refused),
        f"{node.device} {node.device_name}".strip() or "-",
        node.reason or "-",
    )


def _mean(estimate: "EstimateView | None", text: Callable[[float], str]) -> str:
    return "-" if estimate is None else text(estimate.mean)


@app.command()
def show(
    node: _Node,
    *,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Show one node: its health with the reason, and everything measured of it."""
    from hypergpu.cli.schemas import NodeDetail
    from hypergpu.client import connect
    from hypergpu.terminal.output import Column, say, say_json, say_table

    with connect(address, token_file=token_file) as coordinator:
        found = coordinator.find_node(node)
    if as_json:
        say_json(NodeDetail(found))
        return
    for line in _node_lines(found):
        say(line)
    say()
    columns = (
        Column("measured", is_required=True),
        Column("mean", is_number=True, is_required=True),
        Column("spread", is_number=True),
        Column("samples", is_number=True),
        Column("age", is_number=True),
    )
    say_table(columns, _figure_rows(found), empty="")


def _node_lines(node: "NodeView") -> list[str]:
    from hypergpu.terminal.figures import milliseconds, size, span

    least_us = node.reading.least_round_trip_us
    return [
        f"{node.name}  {node.id}".lstrip(),
        f"  state       {node.state}: {node.reason or '-'}",
        f"  health      {'nothing measured yet' if node.health is None else node.health_reason}",
        f"  device      {node.device} {node.device_name}".rstrip() + f", {size(node.memory_bytes)}",
        f"  worker      {node.worker or '-'}, {node.software or '-'}",
        f"  job         {node.job or '-'}",
        f"  updates     {node.updates_accepted} accepted, {node.updates_refused} refused",
        f"  seen        {span(node.last_seen_ms_ago / 1000)} ago",
        f"  congestion  {node.reading.congestion_control or '-'}",
        f"  least RTT   {milliseconds(least_us) if least_us else '-'}",
    ]


def _figure_rows(node: "NodeView") -> list[tuple[str, ...]]:
    from hypergpu.terminal.figures import mbit_s, milliseconds, percent, span

    seen = node.reading
    figures = (
        ("round trip", seen.round_trip_us, milliseconds),
        ("loss", seen.loss, percent),
        ("up Mbit/s", seen.up_bits_per_s, mbit_s),
        ("down Mbit/s", seen.down_bits_per_s, mbit_s),
        ("inner step", seen.step_us, milliseconds),
    )
    return [
        (name, "-", "-", "0", "-")
        if estimate is None
        else (
            name,
            text(estimate.mean),
            text(estimate.spread),
            str(estimate.samples) if estimate.samples else "inferred",
            f"{span(estimate.age_ms / 1000)} ago",
        )
        for name, estimate, text in figures
    ]


@app.command()
def drain(node: _Node, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Let a node finish what it holds and leave."""
    from hypergpu.client import connect
    from hypergpu.terminal.output import say

    with connect(address, token_file=token_file) as coordinator:
        node_id = coordinator.find_node(node).id
        coordinator.drain(node_id)
    say(f"{node_id} drains; see it go: hypergpu node ls")


@app.command()
def revoke(node: _Node, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Shut a node out at once, whatever certificate or token it holds."""
    from hypergpu.client import connect
    from hypergpu.terminal.output import say

    with connect(address, token_file=token_file) as coordinator:
        node_id = coordinator.find_node(node).id
        coordinator.revoke_node(node_id)
    say(f"{node_id} revoked; take it back: hypergpu node readmit {node_id}")


@app.command()
def readmit(node: _Node, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Let a revoked node in again; it dials in once it is started."""
    from hypergpu.client import connect
    from hypergpu.terminal.output import say

    with connect(address, token_file=token_file) as coordinator:
        node_id = coordinator.find_node(node).id
        coordinator.readmit_node(node_id)
    say(f"{node_id} may come back; start it again on its machine: hypergpu-node run")


@app.command()
def wallet(
    *,
    decimals: Annotated[
        int | None,
        typer.Option("--decimals", min=0, max=36, help="The token's, to show amounts with."),
    ] = None,
    as_json: AsJson = False,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="The node's key and state.")
    ] = None,
) -> None:
    """Show this machine's node: whose key it holds, and what it can prove that it earned."""
    from hypergpu.cli.ledger.wallet import COLUMNS, wallet_lines, wallet_rows, wallet_view
    from hypergpu.client.settings import resolve_settings
    from hypergpu.terminal.output import say, say_json, say_table

    settings = resolve_settings({"state_dir": str(state_dir) if state_dir else None})
    view = wallet_view(Path(settings["state_dir"].value).expanduser())
    if as_json:
        say_json(view)
        return
    for line in wallet_lines(view):
        say(line)
    say()
    say_table(COLUMNS, wallet_rows(view, decimals), empty="no receipts yet")
