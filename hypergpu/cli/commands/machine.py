"""`hypergpu up`, `join` and `demo`: what starts programs on this machine."""

from pathlib import Path
from typing import Annotated

import typer


def up(  # noqa: PLR0913 - each is an option
    *,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Journal, models, keys.")
    ] = None,
    listen: Annotated[str, typer.Option("--listen", help="Address to bind; else all.")] = "",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Else 7700; 0: any free.")
    ] = None,
    node_port: Annotated[
        int | None, typer.Option("--node-port", min=0, max=65535, help="Else 7701; 0: any free.")
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option("--advertise", metavar="HOST", help="A name nodes reach it by; repeatable."),
    ] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS; only on loopback.")
    ] = False,
    retry_payments: Annotated[
        bool,
        typer.Option("--retry-payments", help="Try halted payments again, this once."),
    ] = False,
) -> None:
    """Start a coordinator here and print the line that nodes join with."""
    from hypergpu.cli.machine.up import settled_by
    from hypergpu.cli.machine.up import up as run
    from hypergpu.client.settings import resolved
    from hypergpu.cluster.coordinator import Listen, SettlingBy

    settings = resolved({"data_dir": str(data_dir) if data_dir else None})
    at = Listen(
        data_dir=Path(settings["data_dir"].value).expanduser().resolve(),
        listen=listen or ("127.0.0.1" if plaintext else ""),
        port=port,
        node_port=node_port,
        advertise=tuple(advertise or ()),
        is_plaintext=plaintext,
    )
    retry = SettlingBy(retries_halted=retry_payments)
    raise typer.Exit(run(at, {**settled_by(settings), **retry.environment()}))


def join(
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="TOKEN",
            help="From the join line; - reads it from stdin, which no other user of the machine"
            " sees; HYPERGPU_JOIN_TOKEN works too. Needed the first time only.",
        ),
    ] = None,
    *,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="The node's key and state.")
    ] = None,
    worker: Annotated[
        str, typer.Option("--worker", help="torch or numpy; else what is installed.")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", help="What node ls calls it; else the machine's name.")
    ] = "",
) -> None:
    """Train on this machine for a coordinator. The first Ctrl-C drains, the second stops."""
    from hypergpu.cli.machine.join import become_node
    from hypergpu.client.settings import resolved

    settings = resolved({"state_dir": str(state_dir) if state_dir else None})
    folder = Path(settings["state_dir"].value).expanduser()
    become_node(token, state_dir=folder, worker=worker, name=name)


def demo(
    *,
    short: Annotated[bool, typer.Option("--short", help="Fewer rounds.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Summary, logs, model.")] = Path("demo-out"),
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=32, help="How many.")] = 5,
    worker: Annotated[
        str, typer.Option("--worker", help="torch or numpy; else what is installed.")
    ] = "",
    net: Annotated[
        str,
        typer.Option(
            "--net",
            help="Between nodes and coordinator: proxy, tunnel (real packets; root), tc, or none.",
        ),
    ] = "proxy",
    metering: Annotated[
        str,
        typer.Option(
            "--metering",
            envvar="HYPERGPU_COORDINATOR_METERING",
            help="How work gets onto the chain: batched, or each: a transaction for each"
            " contribution, 100 and more in an epoch.",
        ),
    ] = "batched",
) -> None:
    """Train handwritten digits on five nodes here over five home lines, killing one half-way."""
    from hypergpu.cli.demo.lines import NONE, run_over_lines
    from hypergpu.cli.demo.run import demonstrate
    from hypergpu.sites import told_sites

    if net != NONE and told_sites() is None:
        given = ["--out", str(out), "--nodes", str(nodes), "--worker", worker]
        given += ["--metering", metering]
        run_over_lines(net, nodes, [*given, *(["--short"] if short else [])])
    demonstrate(out, nodes=nodes, is_short=short, worker=worker, metering=metering)


def netsim() -> None:
    """The bad internet: profiles, check, shape, run, plot. See `hypergpu netsim --help`."""
    import os
    import sys

    # Everything behind the name is for that program, also what looks like an option of ours.
    arguments = sys.argv[sys.argv.index("netsim") + 1 :]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "netsim", *arguments])  # noqa: S606
