"""`shape`: links held open for any program."""

import shlex
from typing import Annotated

import typer

from hypergpu.sites import SITES_VARIABLE, Sites
from hypergpu.terminal.output import note, say
from netsim.cli.asked import FallbackOption, asked_links, settled
from netsim.network.ground.backend import Backend
from netsim.network.ground.holding import held, kept, opened, sites_text
from netsim.network.ground.interface import Links
from netsim.network.ground.signals import completed
from netsim.tc.choice import Fallback


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
    fallback: FallbackOption = Fallback.REFUSE,
    seed: Annotated[
        int, typer.Option("--seed", help="Decides every chance; a world file has its own.")
    ] = 0,
) -> None:
    """Hold links open for a program, which finds where to run and dial in NETSIM_SITES."""
    links = asked_links(named, seed)
    command: list[str] = context.obj
    backend = settled(backend, links, fallback)
    raise typer.Exit(completed(_held(backend, links, command)))


async def _held(backend: Backend, links: Links, command: list[str]) -> int:
    async with opened(backend, links) as ground:
        for line in greeting(ground.sites):
            note(line)
        if command:
            status, verdict = await held(ground, command)
        else:
            status, verdict = 0, await kept(ground, _say_how)
        note(verdict.sentence)
        return status


def greeting(sites: Sites) -> list[str]:
    """Who finds whom where."""
    count = len(sites.nodes)
    links = "1 link is" if count == 1 else f"{count} links are"
    ports = f"ports {' and '.join(map(str, sites.ports))} only" if sites.ports else "any port"
    listens = f"{sites.coordinator.dials}, {ports}"
    lines = [f"{links} open ({sites.backend}); the coordinator listens on {listens}"]
    for name, site in sites.nodes.items():
        inside = f", from inside: {shlex.join(site.command(['COMMAND']))}" if site.prefix else ""
        lines.append(f"  {name} dials {site.dials}{inside}")
    return lines


def _say_how(sites: Sites) -> None:
    note("Ctrl-C closes them. In another terminal this line tells programs of them:")
    say(f"export {SITES_VARIABLE}={shlex.quote(sites_text(sites))}")
