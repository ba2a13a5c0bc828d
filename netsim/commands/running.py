"""`run`: a world's job over the world's links."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from hypergpu.cli.machine.children import program
from netsim.commands.asked import links_of_world
from netsim.ground.backend import Backend
from netsim.ground.holding import held, opened
from netsim.run.deeds import refuse_unreal
from netsim.worldfile import WorldDescription, read_world_file


def run(
    world: Annotated[Path, typer.Argument(metavar="WORLD.toml", help="See docs/netsim.md.")],
    *,
    backend: Annotated[Backend, typer.Option("--backend", help="How.")] = Backend.PROXY,
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
    refuse_unreal(description)
    given = [str(world), "--out", str(out), "--worker", worker]
    given += ["--give-up-after", str(give_up_after), *(["--json"] if as_json else [])]
    status = asyncio.run(_run(description, backend, program("netsim.run", *given)))
    raise typer.Exit(status)


async def _run(world: WorldDescription, backend: Backend, command: list[str]) -> int:
    async with opened(backend, links_of_world(world)) as ground:
        return (await held(ground, command)).status
