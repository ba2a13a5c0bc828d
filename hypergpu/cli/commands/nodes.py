"""`hypergpu node ...`."""

from typing import Annotated

import typer

from hypergpu.terminal.commands import group
from hypergpu.terminal.options import Address, AsJson, TokenFile

app = group("See the nodes, let them go, shut them out.")
_Node = Annotated[str, typer.Argument(help="A node's id or its beginning.")]


@app.command()
def ls(*, as_json: AsJson = False, address: Address = None, token_file: TokenFile = None) -> None:
    """List the nodes with their state and why."""
    from hypergpu.cli.show.nodes import NODE_COLUMNS, node_row
    from hypergpu.client.calls import connect
    from hypergpu.client.values import Nodes, node_view
    from hypergpu.terminal.output import say_json, say_table

    with connect(address, token_file) as coordinator:
        nodes = [node_view(node) for node in coordinator.nodes()]
    if as_json:
        say_json(Nodes(nodes))
    else:
        empty = "no nodes yet; make a join line: hypergpu token create"
        say_table(NODE_COLUMNS, [node_row(node) for node in nodes], empty=empty)


@app.command()
def show(
    node: _Node,
    *,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Show one node: its health with the reason, and everything measured of it."""
    from hypergpu.cli.show.nodes import FIGURE_COLUMNS, figure_rows, node_lines
    from hypergpu.client.calls import connect
    from hypergpu.client.selection import node_named
    from hypergpu.client.values import NodeDetail, node_view
    from hypergpu.terminal.output import say, say_json, say_table

    with connect(address, token_file) as coordinator:
        nodes = coordinator.nodes()
    node_id = node_named(nodes, node)
    found = next(node_view(each) for each in nodes if each.node_id == node_id)
    if as_json:
        say_json(NodeDetail(found))
        return
    for line in node_lines(found):
        say(line)
    say()
    say_table(FIGURE_COLUMNS, figure_rows(found), empty="")


@app.command()
def drain(node: _Node, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Let a node finish what it holds and leave."""
    from hypergpu.client.calls import connect
    from hypergpu.client.selection import node_named
    from hypergpu.terminal.output import say

    with connect(address, token_file) as coordinator:
        node_id = node_named(coordinator.nodes(), node)
        coordinator.drain(node_id)
    say(f"{node_id} drains; see it go: hypergpu node ls")


@app.command()
def revoke(node: _Node, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Shut a node out at once, whatever certificate or token it holds."""
    from hypergpu.client.calls import connect
    from hypergpu.client.selection import node_named
    from hypergpu.terminal.output import say

    with connect(address, token_file) as coordinator:
        node_id = node_named(coordinator.nodes(), node)
        coordinator.revoke_node(node_id)
    say(f"{node_id} revoked; take it back: hypergpu node readmit {node_id}")


@app.command()
def readmit(node: _Node, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Let a revoked node in again; it dials in once it is started."""
    from hypergpu.client.calls import connect
    from hypergpu.client.selection import node_named
    from hypergpu.terminal.output import say

    with connect(address, token_file) as coordinator:
        node_id = node_named(coordinator.nodes(), node)
        coordinator.readmit_node(node_id)
    say(f"{node_id} may come back; start it again on its machine: hypergpu-node run")
