"""`shape`: links held open for any program."""

import asyncio
import shlex
import sys
from typing import Annotated

import typer

from hypergpu.cli.output import note
from netsim.commands.asked import asked_links
from netsim.ground.backend import Backend
from netsim.ground.holding import Held, held, opened
from netsim.ground.interface import Ground, Links


def shape(
    context: typer.Context,
    named: Annotated[
        list[str],
        typer.Argument(
            metavar="WORLD.toml|PROFILE... [-- COMMAND]",
            help="A world file, or a profile for each node; then what to run at the"
            " coordinator's end. Without a command the links stay open until Ctrl-C.",
        ),
    ],
    *,
    backend: Annotated[Backend, typer.Option("--backend", help="How.")] = Backend.PROXY,
    seed: Annotated[int, typer.Option("--seed", help="Decides every chance.")] = 0,
) -> None:
    """Hold links open for a program, which finds where to run and dial in NETSIM_SITES."""
    links = asked_links(named, seed)
    command: list[str] = context.obj or [sys.executable, "-c", _WAIT]
    outcome = asyncio.run(_held(backend, links, command))
    note(outcome.verdict.sentence)
    raise typer.Exit(outcome.status)


_WAIT = """
import os, signal
print(os.environ["NETSIM_SITES"], flush=True)
signal.sigwait({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""


async def _held(backend: Backend, links: Links, command: list[str]) -> Held:
    async with opened(backend, links) as ground:
        note(_greeting(ground))
        return await held(ground, command)


def _greeting(ground: Ground) -> str:
    lines = [f"{len(ground.sites.nodes)} links are open ({ground.sites.backend})"]
    for name, site in ground.sites.nodes.items():
        where = f", run there with: {shlex.join(site.prefix)}" if site.prefix else ""
        lines.append(f"  {name}: the coordinator is {site.dials}{where}")
    return "\n".join(lines)
