"""`run`: trains a world's job over the world's links."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from hypergpu.cluster.folder import require_own
from hypergpu.cluster.processes import program
from hypergpu.digest import digest_of
from hypergpu.terminal.options import YEAR_S, seconds_within
from hypergpu.terminal.output import note, say, say_json
from hypergpu.units import several
from hypergpu.workloads.registry import find
from netsim.cli.links import FallbackOption, backend_for
from netsim.link.error import NetsimError
from netsim.network.backends import BACKENDS, Backend, Fallback, Links, world_links
from netsim.network.programs import run_program
from netsim.network.signals import run_to_end
from netsim.network.timeline import require_real_faults
from netsim.network.world import WorldDescription
from netsim.run.choices import Choices, chosen_world, data_listing, require_worker, required_job
from netsim.run.job import netsim_folder
from netsim.run.report import RunProspect, summary_lines
from netsim.run.virtual import run_virtually

UNFINISHED_STATUS = 1
JobOption = Annotated[
    Path | None, typer.Option("--job", metavar="JOB.toml", help="Replaces the world's job.")
]
StrategyOption = Annotated[
    str, typer.Option("--strategy", help="sync, fedavg, diloco or aware; replaces the job's.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, help="Replaces the world's and the job's.")
]
RoundsOption = Annotated[int | None, typer.Option("--rounds", min=1, help="Replaces the job's.")]
TargetOption = Annotated[
    float | None, typer.Option("--target", min=0, help="Ends the job at this metric; 0: never.")
]
LanOption = Annotated[bool, typer.Option("--lan", help="The same nodes on a LAN, without faults.")]


OutOption = Annotated[Path, typer.Option("--out", help="Gets logs and state.")]
WorkerOption = Annotated[
    str, typer.Option("--worker", help="torch, numpy or null; else the one installed.")
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
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check, and print what would run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One report at the end.")]
WorldArgument = Annotated[
    Path, typer.Argument(metavar="WORLD.toml", help="See docs/netsim/README.md.")
]


class AnyBackend(StrEnum):
    """The ways to run a world: over one of the backends, or in virtual time."""

    PROXY = Backend.PROXY
    TUNNEL = Backend.TUNNEL
    TC = Backend.TC
    WORLD = "world"


AnyBackendOption = Annotated[
    AnyBackend, typer.Option("--backend", help="world is virtual time, without processes.")
]


def run(  # noqa: PLR0913 - each is an option
    world: WorldArgument,
    *,
    backend: AnyBackendOption = AnyBackend.PROXY,
    fallback: FallbackOption = Fallback.REFUSE,
    job: JobOption = None,
    strategy: StrategyOption = "",
    seed: SeedOption = None,
    rounds: RoundsOption = None,
    target: TargetOption = None,
    lan: LanOption = False,
    out: OutOption = Path("netsim-out"),
    worker: WorkerOption = "auto",
    give_up_after: GiveUpOption = 3600.0,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a world's job over its links, with the world's faults."""
    choices = Choices(
        world=str(world),
        job="" if job is None else str(job),
        strategy=strategy,
        seed=seed,
        rounds=rounds,
        target=target,
        is_near=lan,
    )
    description = chosen_world(choices)
    if backend is AnyBackend.WORLD:
        _refuse_fallback(fallback)
        raise typer.Exit(_run_virtually(description, as_json=as_json))
    require_real_faults(description)
    require_worker(required_job(description), worker)
    links = world_links(description)
    if dry_run:
        carrier = backend_for(Backend(backend), links, fallback)
        BACKENDS[carrier].limits()
        _say_prospect(prospect(description, choices, carrier, worker), as_json=as_json)
        return
    require_own(netsim_folder(out))
    given = [msgspec.json.encode(choices).decode(), "--out", str(out), "--worker", worker]
    given += ["--give-up-after", str(give_up_after), *(["--json"] if as_json else [])]
    command = program("netsim.run", *given)
    carrier = backend_for(Backend(backend), links, fallback)
    raise typer.Exit(run_to_end(_run(links, carrier, command)))


def prospect(
    world: WorldDescription, choices: Choices, backend: Backend, worker: str
) -> RunProspect:
    """Describe a run of a world without starting it.

    Raises:
        NetsimError: The world has no job that can be run.
    """
    spec = required_job(world)
    inputs = (world, backend.value, worker, data_listing(spec, choices.beside))
    return RunProspect(
        world=world.name,
        seed=world.seed,
        backend=backend,
        nodes=len(world.nodes),
        workload=spec.workload,
        strategy=spec.strategy,
        rounds=spec.training.rounds,
        target=spec.evaluation.target,
        metric_name=find(spec.workload).metric,
        inputs=digest_of(msgspec.json.encode(inputs, order="sorted")),
    )


def _say_prospect(found: RunProspect, *, as_json: bool) -> None:
    if as_json:
        say_json(found)
        return
    goal = f", to {found.metric_name} {found.target:g}" if found.target else ""
    say(f"{found.world}, seed {found.seed}, over {found.backend}: {several(found.nodes, 'node')}")
    say(f"{found.workload} by {found.strategy}, {several(found.rounds, 'round')} at most{goal}")


def _refuse_fallback(fallback: Fallback) -> None:
    if fallback is not Fallback.REFUSE:
        raise NetsimError("virtual time has no fallback", "leave out --fallback")


def _run_virtually(world: WorldDescription, *, as_json: bool) -> int:
    note(f"simulating {world.name} with {several(len(world.nodes), 'node')}")
    report = run_virtually(world)
    if as_json:
        say_json(report)
    else:
        for line in summary_lines(report):
            say(line)
    return 0 if report.is_good else UNFINISHED_STATUS


async def _run(links: Links, backend: Backend, command: list[str]) -> int:
    async with BACKENDS[backend].open(links) as opened:
        return (await run_program(opened, command)).status
