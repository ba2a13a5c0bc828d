"""`hypergpu gateway`: this machine holds nodes' streams for a coordinator."""

import os
from typing import Annotated

import typer

from hypergpu.user.terminal.commands import TokenFile


def gateway(  # noqa: PLR0913 - each is an option
    *,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT",
            help="For whom; repeatable: they are tried in turn. Else the token's own.",
        ),
    ] = None,
    token_file: TokenFile = None,
    listen: Annotated[str, typer.Option("--listen", help="Address to bind; else all.")] = "",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Else 7700; 0: any free.")
    ] = None,
    node_port: Annotated[
        int | None, typer.Option("--node-port", min=0, max=65535, help="Else 7701; 0: any free.")
    ] = None,
    bulk_port: Annotated[
        int | None, typer.Option("--bulk-port", min=0, max=65535, help="Else 7702; 0: any free.")
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option("--advertise", metavar="HOST", help="A name nodes reach it by; repeatable."),
    ] = None,
    streams_per_s: Annotated[
        int | None,
        typer.Option("--streams-per-s", min=1, help="Nodes let in each second; else 200."),
    ] = None,
) -> None:
    """Hold nodes' streams here for a coordinator. Needs an operator's token; keeps nothing."""
    from hypergpu.command_line import program
    from hypergpu.user.cli.join import put_on_stdin
    from hypergpu.user.client.connection import stated_token
    from hypergpu.user.client.settings import resolve_settings
    from hypergpu.user.terminal.output import note
    from hypergpu.wire.credentials import parse_token

    text = stated_token(resolve_settings({"token_file": token_file}))
    token = parse_token(text)
    single = {
        "listen": listen or None,
        "port": port,
        "node-port": node_port,
        "bulk-port": bulk_port,
        "streams-per-s": streams_per_s,
    }
    words = [f"--{name}={value}" for name, value in single.items() if value is not None]
    words += [f"--coordinator={address}" for address in coordinator or ()]
    words += [f"--advertise={host}" for host in advertise or ()]
    note(f"a gateway of {', '.join(coordinator or token.addresses)}")
    note("Ctrl-C ends it; its nodes then dial again, and another gateway takes them in")
    put_on_stdin(text.strip())
    command = program("coordinator.shell.gateway", *words)
    os.execv(command[0], command)  # noqa: S606 - no shell is what is wanted
