"""Keeps links open for any program."""

import shlex

from hypergpu.sites import SITES_VARIABLE, Sites
from hypergpu.terminal.output import note, say
from netsim.network.backends import BACKENDS, Links
from netsim.network.options import Backend
from netsim.network.programs import keep_open, run_program, sites_json
from netsim.network.signals import run_to_end


def shape_links(backend: Backend, links: Links, command: list[str]) -> int:
    """Keep links open while a command runs, or without one until a signal; return its status."""
    return run_to_end(_shape(backend, links, command))


async def _shape(backend: Backend, links: Links, command: list[str]) -> int:
    async with BACKENDS[backend].open(links) as opened:
        for line in greeting(opened.sites):
            note(line)
        if command:
            status, verdict = await run_program(opened, command)
        else:
            status, verdict = 0, await keep_open(opened, _announce)
        note(verdict.sentence)
        return status


def greeting(sites: Sites) -> list[str]:
    """Return lines that say where each end runs and dials."""
    count = len(sites.nodes)
    links = "1 link is" if count == 1 else f"{count} links are"
    ports = f"ports {' and '.join(map(str, sites.ports))} only" if sites.ports else "any port"
    listens = f"{sites.coordinator.dials}, {ports}"
    lines = [f"{links} open ({sites.backend}); the coordinator listens on {listens}"]
    for name, site in sites.nodes.items():
        inside = f", from inside: {shlex.join(site.command(['COMMAND']))}" if site.prefix else ""
        lines.append(f"  {name} dials {site.dials}{inside}")
    return lines


def _announce(sites: Sites) -> None:
    note("Ctrl-C closes them. To tell programs in another terminal of them, run there:")
    say(f"export {SITES_VARIABLE}={shlex.quote(sites_json(sites))}")
