"""`run`: a world's job over the world's links."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hypergpu.cli.machine.children import program
from hypergpu.cli.output import note, say, say_json
from netsim.commands.asked import FallbackOption, links_of_world, settled
from netsim.ground.backend import Backend
from netsim.ground.holding import held, opened
from netsim.ground.interface import Links
from netsim.ground.signals import completed
from netsim.refusal import RefusedError
from netsim.run.deeds import refuse_unreal
from netsim.run.preparation import require_free_folder, require_worker, required_job
from netsim.run.report import summary_lines
from netsim.run.virtual import run_virtually
from netsim.tc.choice import Fallback
from netsim.worldfile import WorldDescription, read_world_file

UNFINISHED_STATUS = 1


class AnyBackend(StrEnum):
    """How a world is run: over one of the backends, or in virtual time."""

    PROXY = Backend.PROXY
    TUNNEL = Backend.TUNNEL
    TC = Backend.TC
    WORLD = "world"


def run(  # noqa: PLR0913 - each is an option
    world: Annotated[Path, typer.Argument(metavar="WORLD.toml", help="See docs/netsim/README.md.")],
    *,
    backend: Annotated[
        AnyBackend, typer.Option("--backend", help="How; world is virtual time, without processes.")
    ] = AnyBackend.PROXY,
    fallback: FallbackOption = Fallback.REFUSE,
    out: Annotated[Path, typer.Option("--out", help="Gets logs and state.")] = Path("netsim-out"),
    worker: Annotated[
        str, typer.Option("--worker", help="torch, numpy or null; else what is installed.")
    ] = "auto",
    give_up_after: Annotated[
        float, typer.Option("--give-up-after", min=1, metavar="SECONDS", help="Then it is ended.")
    ] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One report at the end.")] = False,
) -> None:
    """Train a world's job over its links, with everything that goes wrong in it."""
    description = read_world_file(world)
    if backend is AnyBackend.WORLD:
        _refuse_fallback(fallback)
        raise typer.Exit(_run_virtually(description, as_json=as_json))
    refuse_unreal(description)
    require_worker(required_job(description), worker)
    require_free_folder(out)
    given = [str(world), "--out", str(out), "--worker", worker]
    given += ["--give-up-after", str(give_up_after), *(["--json"] if as_json else [])]
    command = program("netsim.run", *given)
    links = links_of_world(description)
    ground = settled(Backend(backend), links, fallback)
    raise typer.Exit(completed(_run(links, ground, command)))


def _refuse_fallback(fallback: Fallback) -> None:
    if fallback is not Fallback.REFUSE:
        raise RefusedError("virtual time has no fallback", "leave out --fallback")


def _run_virtually(world: WorldDescription, *, as_json: bool) -> int:
    note(f"simulating {world.name} with {len(world.nodes)} nodes")
    report = run_virtually(world)
    if as_json:
        say_json(report)
    else:
        for line in summary_lines(report):
            say(line)
    return 0 if report.is_good else UNFINISHED_STATUS


async def _run(links: Links, backend: Backend, command: list[str]) -> int:
    async with opened(backend, links) as ground:
        return (await held(ground, command)).status
