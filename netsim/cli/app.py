"""`hypergpu netsim`: networks like the internet for programs and jobs.

The commands' modules are imported when a command runs: help needs none of them.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hypergpu.user.terminal.commands import YEAR_S, Commands, seconds_within
from netsim.cli.compare import compare
from netsim.network.options import Backend, Fallback

app = typer.Typer(
    name="netsim",
    cls=Commands,
    help="Networks like the internet: list link profiles, check emulated links, run programs and"
    " jobs over them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class RunBackend(StrEnum):
    """The ways to run a world: over one of the backends, or in virtual time."""

    PROXY = Backend.PROXY
    TUNNEL = Backend.TUNNEL
    TC = Backend.TC
    WORLD = "world"


BackendOption = Annotated[Backend, typer.Option("--backend", help="What carries the packets.")]
FallbackOption = Annotated[
    Fallback,
    typer.Option("--fallback", help="What to do where tc lacks a part that the links need."),
]
StrategyOption = Annotated[
    str, typer.Option("--strategy", help="sync, fedavg, diloco or aware; replaces the job's.")
]
GiveUpOption = Annotated[
    float,
    typer.Option(
        "--give-up-after",
        parser=seconds_within(1, YEAR_S),
        metavar="DURATION",
        help="Ends a job that takes longer: 10m, 2h.",
        show_default="1h",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document.")]
WorldArgument = Annotated[
    Path, typer.Argument(metavar="WORLD.toml", help="See docs/netsim/README.md.")
]


@app.command()
def profiles(*, as_json: JsonOption = False) -> None:
    """List the links that have a name, with the sources of their numbers."""
    from netsim.cli.links import list_profiles

    list_profiles(as_json=as_json)


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORLD.toml|PROFILE...]", help="Links; none: only the machine."),
    ] = None,
    *,
    backend: BackendOption = Backend.PROXY,
    fallback: FallbackOption = Fallback.REFUSE,
    seconds: Annotated[
        float,
        typer.Option(
            "--for",
            parser=seconds_within(0.5, 120),
            metavar="DURATION",
            help="Length of a measurement: 500ms, 10s.",
            show_default="3s",
        ),
    ] = 3.0,
    seed: Annotated[int, typer.Option("--seed", help="Seeds losses.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """List what this machine can do, and compare links' configured and measured behaviour."""
    from netsim.cli.links import check_links

    check_links(
        names or [],
        backend=backend,
        fallback=fallback,
        seconds=seconds,
        seed=seed,
        as_json=as_json,
    )


class _CommandAfterDashes(TyperCommand):
    """Keeps the words after `--` apart: they are another program's and are not parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before `--`."""
        if "--" in args:
            at = args.index("--")
            args, ctx.obj = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


@app.command(cls=_CommandAfterDashes)
def shape(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="WORLD.toml|PROFILE... [-- COMMAND]",
            help="A world file, or a profile for each node; then what to run at the"
            " coordinator's end. Without a command the links stay open until Ctrl-C.",
        ),
    ],
    *,
    backend: BackendOption = Backend.PROXY,
    fallback: FallbackOption = Fallback.REFUSE,
    seed: Annotated[
        int, typer.Option("--seed", help="Seeds losses; a world file has its own seed.")
    ] = 0,
) -> None:
    """Keep links open for a program, which reads from NETSIM_SITES where to run and dial."""
    from netsim.cli.links import backend_for, links_by_name, shape_links

    links = links_by_name(names, seed)
    raise typer.Exit(shape_links(backend_for(backend, links, fallback), links, context.obj or []))


@app.command()
def run(  # noqa: PLR0913 - each is an option
    world: WorldArgument,
    *,
    backend: Annotated[
        RunBackend, typer.Option("--backend", help="world is virtual time, without processes.")
    ] = RunBackend.PROXY,
    fallback: FallbackOption = Fallback.REFUSE,
    job: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="Replaces the world's job.")
    ] = None,
    strategy: StrategyOption = "",
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Replaces the world's and the job's.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Replaces the job's.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option("--target", min=0, help="Ends the job at this metric; 0: never."),
    ] = None,
    lan: Annotated[
        bool, typer.Option("--lan", help="The same nodes on a LAN, without faults.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Gets logs and state.")] = Path("netsim-out"),
    worker: Annotated[
        str, typer.Option("--worker", help="torch, numpy or null; else the one installed.")
    ] = "auto",
    give_up_after: GiveUpOption = 3600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, and print what would run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One report at the end.")] = False,
) -> None:
    """Train a world's job over its links, with the world's faults."""
    from netsim.cli.run import describe_run, run_in_virtual_time, run_over_links
    from netsim.run.choices import Choices, RunOrder

    order = RunOrder(
        choices=Choices(
            world=str(world),
            job="" if job is None else str(job),
            strategy=strategy,
            seed=seed,
            rounds=rounds,
            target=target,
            is_near=lan,
        ),
        folder=str(out),
        worker=worker,
        give_up_after_s=give_up_after,
        is_json=as_json,
    )
    if backend is RunBackend.WORLD:
        raise typer.Exit(run_in_virtual_time(order, fallback))
    start = describe_run if dry_run else run_over_links
    raise typer.Exit(start(order, Backend(backend), fallback))


@app.command()
def sweep(  # noqa: PLR0913 - each is an option
    worlds: Annotated[
        list[Path], typer.Argument(metavar="WORLD.toml...", help="See docs/netsim/README.md.")
    ],
    *,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Each world runs with so many seeds, from 0 on.")
    ] = 10,
    strategy: StrategyOption = "",
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Replaces the jobs'.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="Who simulates: local, ray or ray://HOST:10001: docs/engine.md.",
        ),
    ] = "local",
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="Processes of local; 0: one a core.")
    ] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Keeps reports; a sweep goes on from those there.")
    ] = Path("netsim-sweep"),
    as_json: JsonOption = False,
) -> None:
    """Simulate worlds by seeds in virtual time, several at a time; it resumes where it ended."""
    from netsim.cli.sweep import SweepOrder, run_sweep
    from netsim.run.choices import Choices

    order = SweepOrder(
        choices=tuple(
            Choices(world=str(world), strategy=strategy, rounds=rounds) for world in worlds
        ),
        seeds=tuple(range(seeds)),
        folder=out,
        engine=engine,
        processes=processes,
        is_json=as_json,
    )
    raise typer.Exit(run_sweep(order))


@app.command()
def plot(
    world: WorldArgument,
    *,
    out: Annotated[Path | None, typer.Option("--out", help="Else WORLD.svg here.")] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--for",
            parser=seconds_within(1, 86_400),
            metavar="DURATION",
            help="Length of the picture: 90s, 5m.",
            show_default="2m",
        ),
    ] = 120.0,
) -> None:
    """Draw rates, delays, losses and faults of a world's links as an SVG picture."""
    from netsim.cli.links import plot_world

    plot_world(world, out, seconds)


app.command()(compare)
