"""`check`: links measured beside what was asked, and what this machine can do."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from hypergpu.cli.output import Column, note, say, say_json, say_table
from netsim.commands.asked import asked_links
from netsim.ground.backend import Backend
from netsim.ground.measuring import claims_of, measurable
from netsim.link import Link
from netsim.measure.check import Reading, checked
from netsim.measure.network import Verdict
from netsim.refusal import RefusedError
from netsim.tc.capabilities import capabilities
from netsim.tunnel.requirements import require_machine

INVALID_STATUS = 1


class CheckedLink(msgspec.Struct, frozen=True, kw_only=True):
    """One link as it came out."""

    name: str
    backend: str
    readings: tuple[Reading, ...]
    verdict: Verdict


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured, and what this machine lacks."""

    backends: dict[str, str]
    """What keeps each from running here; empty: nothing."""
    links: tuple[CheckedLink, ...]


def check(
    named: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORLD.toml|PROFILE...]", help="Links; none: only the machine."),
    ] = None,
    *,
    backend: Annotated[Backend, typer.Option("--backend", help="How.")] = Backend.PROXY,
    seconds: Annotated[
        float, typer.Option("--for", min=0.5, max=120, metavar="SECONDS", help="A measurement.")
    ] = 3.0,
    seed: Annotated[int, typer.Option("--seed", help="Decides every chance.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
) -> None:
    """Say what this machine can do, and measure links beside what was asked of them."""
    links = asked_links(named, seed).nodes if named else {}
    machine = {each.value: _hindrance(each) for each in Backend}
    if not as_json:
        _say_machine(machine)
    found = []
    for name, shape in links.items():
        one = asyncio.run(_checked(name, backend, shape.link, seconds, seed))
        found.append(one)
        if not as_json:
            _say_link(one)
    if as_json:
        say_json(Checked(backends=machine, links=tuple(found)))
    if not all(each.verdict.is_valid for each in found):
        raise typer.Exit(INVALID_STATUS)


async def _checked(
    name: str, backend: Backend, link: Link, seconds: float, seed: int
) -> CheckedLink:
    note(f"measuring {name} over {backend}")
    async with measurable(backend, link, seed=seed) as network:
        readings = await checked(network, link, claims_of(backend), for_s=seconds)
        verdict = await network.verdict()
    return CheckedLink(name=name, backend=backend, readings=tuple(readings), verdict=verdict)


def _hindrance(backend: Backend) -> str:
    """What keeps a backend from running here, or from doing all that it could."""
    try:
        if backend is Backend.TUNNEL:
            require_machine()
        if backend is Backend.TC:
            lacks = capabilities().lacks
            return "; ".join(f"no {each.part}: {each.why}" for each in lacks)
    except RefusedError as refused:
        return str(refused)
    return ""


def _say_machine(machine: dict[str, str]) -> None:
    for name, hindrance in machine.items():
        say(f"{name:<7} {hindrance or 'can do all that it claims on this machine'}")


def _say_link(found: CheckedLink) -> None:
    say()
    say(f"{found.name} over {found.backend}, without what varies it over time")
    columns = ("", "asked", "measured", "error")
    titled = [Column(title, is_number=bool(title)) for title in columns]
    say_table(titled, [_row(each) for each in found.readings], empty="nothing is measured")
    say(found.verdict.sentence)


def _row(reading: Reading) -> Sequence[str]:
    ratio = f" ({reading.ratio:+.1%})" if reading.asked else ""
    return (
        reading.name,
        f"{reading.asked:.3f}",
        f"{reading.measured:.3f}",
        f"{reading.error:+.3f}{ratio}",
    )
