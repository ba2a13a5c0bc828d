"""`hypergpu up`, `join`, `status`, `demo`, `doctor`, `env` and `config show`.

What they do is imported when they run: help needs none of it.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.user.terminal.commands import AsJson, JoinLineNodes, group

if TYPE_CHECKING:
    from hypergpu.user.cli.doctor import Diagnosis

config = group("See the settings.")


class DemoNet(StrEnum):
    """Links of the demo's nodes: a backend of netsim, or none."""

    PROXY = "proxy"
    TUNNEL = "tunnel"
    TC = "tc"
    NONE = "none"


class DemoBlobs(StrEnum):
    """What carries the demo's bulk bytes: the coordinator itself, or an object store."""

    EMBEDDED = "embedded"
    S3 = "s3"


class Metering(StrEnum):
    """Ways of receipts onto the chain, by the names of the coordinator's `--metering`."""

    BATCHED = "batched"
    EACH = "each"


StateDir = Annotated[Path | None, typer.Option("--state-dir", help="The node's key and state.")]
BlobsAddress = Annotated[
    str,
    typer.Option(
        "--blobs",
        metavar="s3://BUCKET/PREFIX",
        help="Object store for bulk bytes, in place of the bulk port: docs/storage.md.",
    ),
]
ViaDestination = Annotated[
    str,
    typer.Option(
        "--via",
        metavar="USER@HOST[:PORT]",
        help="A machine with a public address whose ports ssh leads here: docs/home.md.",
    ),
]
EventsAddress = Annotated[
    str,
    typer.Option(
        "--events",
        metavar="redis://HOST",
        help="Redis stream that gets receipts and rounds; with a password better by"
        " HYPERGPU_COORDINATOR_EVENTS: docs/events.md.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Who folds large models and evaluates: local, ray or ray://HOST:10001; else the"
        " coordinator: docs/engine.md.",
    ),
]
AdvertisedHosts = Annotated[
    list[str] | None,
    typer.Option("--advertise", metavar="HOST", help="A name nodes reach it by; repeatable."),
]
RetriesPayments = Annotated[
    bool, typer.Option("--retry-payments", help="Try halted payments again, this once.")
]
PagePort = Annotated[
    int | None, typer.Option("--page-port", min=0, max=65535, help="Else 7780; 0: any free.")
]


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
    bulk_port: Annotated[
        int | None, typer.Option("--bulk-port", min=0, max=65535, help="Else 7702; 0: any free.")
    ] = None,
    blobs: BlobsAddress = "",
    advertise: AdvertisedHosts = None,
    via: ViaDestination = "",
    events: EventsAddress = "",
    engine: EngineName = "",
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS; only on loopback.")
    ] = False,
    retry_payments: RetriesPayments = False,
    page_port: PagePort = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page in the browser.")] = False,
    nodes: JoinLineNodes = None,
) -> None:
    """Start a coordinator here and print a join line."""
    from hypergpu.user.cli.reach import listen_behind, rented_host
    from hypergpu.user.cli.up import PageWish, run_coordinator, settled_by
    from hypergpu.user.client.settings import resolve_settings
    from hypergpu.user.cluster.cluster import Listen, SettlingBy

    flags = {"data_dir": str(data_dir) if data_dir else None, "via": via or None}
    settings = resolve_settings(flags)
    at = Listen(
        data_dir=Path(settings["data_dir"].value).expanduser().resolve(),
        listen=listen or ("127.0.0.1" if plaintext else ""),
        port=port,
        node_port=node_port,
        bulk_port=bulk_port,
        blobs=blobs,
        advertise=tuple(advertise or ()),
        is_plaintext=plaintext,
    )
    environment = settled_by(settings) | SettlingBy(retries_halted=retry_payments).environment()
    more = {"EVENTS": events, "ENGINE": engine}
    environment |= {f"HYPERGPU_COORDINATOR_{name}": each for name, each in more.items() if each}
    forwarding_host = rented_host(settings["via"].value)
    at = listen_behind(at, forwarding_host)
    raise typer.Exit(
        run_coordinator(at, environment, PageWish(not no_page, page_port), nodes, forwarding_host)
    )


def join(  # noqa: PLR0913 - each is an option
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="TOKEN",
            help="From the join line; - reads it from stdin, which no other user of the machine"
            " sees; HYPERGPU_JOIN_TOKEN works too. Needed the first time only.",
        ),
    ] = None,
    *,
    state_dir: StateDir = None,
    worker: Annotated[
        str, typer.Option("--worker", help="torch or numpy; else what is installed.")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", help="What node ls calls it; else the machine's name.")
    ] = "",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="KEY=VALUE",
            help="What it may take of this machine, such as disk=50GB; repeatable: docs/node.md.",
        ),
    ] = None,
    kinds: Annotated[
        str,
        typer.Option("--kinds", help="Work that it does: training,embed; else node.toml's."),
    ] = "",
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME=VALUE",
            help="A label that jobs may require, such as region=eu; repeatable.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="A device that gets a node: a GPU's index or UUID, or cpu; else all CUDA devices.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Log to stderr in place of the live view.")
    ] = False,
) -> None:
    """Train on this machine for a coordinator. The first Ctrl-C drains, the second stops."""
    from hypergpu.user.cli.join import NodeWish, become_node
    from hypergpu.user.client.settings import resolve_settings
    from hypergpu.user.terminal.output import is_rich

    settings = resolve_settings({"state_dir": str(state_dir) if state_dir else None})
    folder = Path(settings["state_dir"].value).expanduser()
    is_live = not plain and is_rich() and is_rich(sys.stderr)
    owner_words = {"labels": ",".join(label or ()), "kinds": kinds}
    limits = (*(limit or ()), *(f"{key}={words}" for key, words in owner_words.items() if words))
    become_node(token, NodeWish(folder, worker, name, limits, tuple(device or ()), is_live))


def status(
    *,
    state_dir: StateDir = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the node of this machine does, did and earned."""
    from hypergpu.user.cli.status import show_once, watch
    from hypergpu.user.terminal.output import is_rich

    folder = (state_dir or _settled_state_dir()).expanduser().resolve()
    if once or as_json or not is_rich():
        show_once(folder, as_json=as_json)
    else:
        watch(folder)


def _settled_state_dir() -> Path:
    """The node's folder by the settings, whose module loads gRPC along with its package."""
    from hypergpu.user.client.settings import resolve_settings

    return Path(resolve_settings()["state_dir"].value)


FixedOption = Annotated[
    bool,
    typer.Option(
        "--fixed",
        help="Nothing depends on time and nobody is killed: ends with the same model every"
        " time, whose digest is printed last.",
    ),
]
NetOption = Annotated[
    DemoNet,
    typer.Option(
        "--net",
        help="Links of the nodes; tunnel and tc carry real packets and need root.",
    ),
]
MeteringOption = Annotated[
    Metering,
    typer.Option(
        "--metering",
        envvar="HYPERGPU_COORDINATOR_METERING",
        help="How work gets onto the chain: batched, or each: a transaction for each"
        " contribution, 100 and more in an epoch.",
    ),
]


def demo(  # noqa: PLR0913 - each is an option
    *,
    short: Annotated[bool, typer.Option("--short", help="Fewer rounds.")] = False,
    fixed: FixedOption = False,
    attack: Annotated[
        bool,
        typer.Option(
            "--attack", help="Train thrice: honest, and with a node that tells each of two lies."
        ),
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Summary, logs, model.")] = Path("demo-out"),
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=32, help="Number of nodes.")] = 5,
    worker: Annotated[
        str, typer.Option("--worker", help="torch or numpy; else what is installed.")
    ] = "",
    net: NetOption = DemoNet.PROXY,
    blobs: Annotated[
        DemoBlobs,
        typer.Option("--blobs", help="s3: bulk bytes go through an S3 server, rclone's."),
    ] = DemoBlobs.EMBEDDED,
    metering: MeteringOption = Metering.BATCHED,
) -> None:
    """Train digits on five nodes of this machine; one is killed."""
    from hypergpu.sites import told_sites
    from hypergpu.user.cli.demo.job import plan
    from hypergpu.user.cli.demo.run import demonstrate, run_over_lines

    sites = told_sites()
    if sites is not None:
        nodes = len(sites.nodes)
    elif net is not DemoNet.NONE:
        arguments = ["--out", str(out), "--nodes", str(nodes), "--worker", worker]
        arguments += ["--metering", metering, "--blobs", blobs]
        arguments += [*["--short"] * short, *["--fixed"] * fixed, *["--attack"] * attack]
        run_over_lines(net, nodes, arguments)
    ends = {"is_fixed": fixed, "is_attacked": attack}
    demo_plan = plan(nodes, is_short=short, worker=worker, metering=metering, **ends)
    demonstrate(out, demo_plan._replace(blobs=blobs))


def doctor(
    *,
    blobs: Annotated[
        str,
        typer.Option(
            "--blobs",
            metavar="s3://BUCKET/PREFIX",
            envvar="HYPERGPU_COORDINATOR_BLOBS",
            help="Try the coordinator's object store too: one PUT and one GET.",
        ),
    ] = "",
    events: Annotated[
        str,
        typer.Option(
            "--events",
            metavar="redis://HOST",
            envvar="HYPERGPU_COORDINATOR_EVENTS",
            help="Try the stream that gets the coordinator's events, too.",
        ),
    ] = "",
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Apply the fixes that need no root, and say the others."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="FOLDER",
            help="Tell how much of a model this machine holds, and how fast.",
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="What that model's parameters are held as: float32, bfloat16 ...")
    ] = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Check what training needs on this machine, with fixes."""
    from hypergpu.user.cli.doctor import diagnosis
    from hypergpu.user.cli.model_checks import model_checks

    report = diagnosis(blobs, events)
    if fix:
        _mend(report)
        report = diagnosis(blobs, events)
    if model:
        report = report.with_checks(model_checks(model, dtype))
    _say_report(report, as_json=as_json)


def _mend(report: "Diagnosis") -> None:
    import os

    from hypergpu.user.cli.doctor import mend
    from hypergpu.user.terminal.output import note

    for line in mend(report.checks, is_root=os.geteuid() == 0):
        note(line)


def _say_report(report: "Diagnosis", *, as_json: bool) -> None:
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.user.cli.doctor import verdict_line
    from hypergpu.user.cli.verdicts import FAIL
    from hypergpu.user.terminal.output import say, say_json

    if as_json:
        say_json(report)
    else:
        for check in report.checks:
            say(verdict_line(check))
    failed_checks = [check.name for check in report.checks if check.verdict == FAIL]
    if failed_checks:
        raise HyperGPUError(Reason.MACHINE_UNFIT, f"failed: {', '.join(failed_checks)}")


def env(*, as_json: AsJson = False) -> None:
    """Print versions, machine and settings to paste into an issue."""
    from hypergpu.user.cli.environment import environment, environment_lines
    from hypergpu.user.terminal.output import say, say_json

    machine_environment = environment()
    if as_json:
        say_json(machine_environment)
        return
    for line in environment_lines(machine_environment):
        say(line)


@config.callback()
def _config() -> None:
    """Keeps `show` a command of its own while it is the only one."""


@config.command()
def show(
    *,
    origin: bool = typer.Option(False, "--origin", help="Say what decided each."),
    as_json: AsJson = False,
) -> None:
    """Print the effective settings: flag > environment > file > what `up` left > default."""
    from hypergpu.user.cli.environment import effective_settings
    from hypergpu.user.client.settings import config_file, known_settings
    from hypergpu.user.terminal.output import Column, say, say_json, say_table

    settings = effective_settings()
    if as_json:
        say_json(settings)
        return
    definitions = known_settings()
    columns = [Column("setting"), Column("value"), Column("variable")]
    rows = [
        [each.name, each.value or "-", definitions[each.name].environment]
        for each in settings.settings
    ]
    if origin:
        columns.append(Column("origin"))
        for row, each in zip(rows, settings.settings, strict=True):
            row.append(each.origin)
    say_table(columns, rows, empty="no settings")
    say(f"file: {config_file()}")
