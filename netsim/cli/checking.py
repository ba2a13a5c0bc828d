"""`check`: links measured beside what was asked, and what this machine can do."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import typer

from hypergpu.extras import missing_extra
from hypergpu.terminal.options import seconds_within
from hypergpu.terminal.output import Column, note, say, say_json, say_table
from netsim.cli.asked import FallbackOption, asked_links, settled
from netsim.error import NetsimError
from netsim.link import UNLIMITED, Link
from netsim.link.shape import Shape
from netsim.measure.check import Reading, checked
from netsim.measure.network import Verdict
from netsim.network.ground.backend import Backend
from netsim.network.ground.interface import Links
from netsim.network.ground.measuring import claims_of, measurable
from netsim.network.ground.signals import completed
from netsim.tc.choice import Fallback
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
    fallback: FallbackOption = Fallback.REFUSE,
    seconds: Annotated[
        float,
        typer.Option(
            "--for",
            parser=seconds_within(0.5, 120),
            metavar="DURATION",
            help="A measurement: 500ms, 10s.",
            show_default="3s",
        ),
    ] = 3.0,
    seed: Annotated[int, typer.Option("--seed", help="Decides every chance.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
) -> None:
    """Say what this machine can do, and measure links beside what was asked of them."""
    links = different(asked_links(named, seed).nodes if named else {})
    backend = settled(backend, unvarying(links), fallback)
    machine = {each.value: _hindrance(each) for each in Backend}
    if not as_json:
        _say_machine(machine)
    found = []
    for name, link in links.items():
        one = completed(_checked(name, backend, link, seconds, seed))
        found.append(one)
        if not as_json:
            _say_link(one)
    if as_json:
        say_json(Checked(backends=machine, links=tuple(found)))
    if not all(each.verdict.is_valid for each in found):
        raise typer.Exit(INVALID_STATUS)


def different(shapes: Mapping[str, Shape]) -> dict[str, Link]:
    """Each link once, by the name of the first node that has it and the number of the others."""
    names: dict[Link, list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(shape.link, []).append(name)
    return {
        first if not others else f"{first} and {len(others)} like it": link
        for link, (first, *others) in names.items()
    }


def unvarying(links: Mapping[str, Link]) -> Links:
    """What is measured: links without what varies them, behind a coordinator without limits."""
    return Links(
        nodes={name: Shape(link=link) for name, link in links.items()},
        coordinator=Shape(link=UNLIMITED),
    )


async def _checked(
    name: str, backend: Backend, link: Link, seconds: float, seed: int
) -> CheckedLink:
    note(f"measuring {name} over {backend}, up to {5 * seconds:.0f} s and what opening takes")
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
            from netsim.tc.capabilities import capabilities

            lacks = capabilities().lacks
            return "; ".join(f"no {each.part}: {each.why}" for each in lacks)
    except NetsimError as refused:
        return str(refused)
    except ModuleNotFoundError as missing:
        if (lacking := missing_extra(missing)) is None:
            raise
        return lacking.message
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
