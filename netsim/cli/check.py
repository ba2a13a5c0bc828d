"""`check`: compares links' configured and measured behaviour, and lists this machine's limits."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from hypergpu.terminal.options import seconds_within
from hypergpu.terminal.output import Column, note, say, say_json, say_table
from netsim.cli.links import BackendOption, FallbackOption, backend_for, named_links
from netsim.link import Link, Shape
from netsim.link.error import NetsimError
from netsim.measure.check import LinkReading, check_link
from netsim.measure.lateness import LatenessVerdict
from netsim.network.backends import BACKENDS, Backend, Fallback, Links
from netsim.network.signals import run_to_end

INVALID_STATUS = 1


class CheckedLink(msgspec.Struct, frozen=True, kw_only=True):
    """One link's readings."""

    name: str
    backend: str
    readings: tuple[LinkReading, ...]
    verdict: LatenessVerdict


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every measured link, and what this machine lacks."""

    backends: dict[str, str]
    """What keeps each backend from running here; empty: nothing."""
    links: tuple[CheckedLink, ...]


def check(
    named: Annotated[
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
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
) -> None:
    """List what this machine can do, and compare links' configured and measured behaviour."""
    links = distinct_links(named_links(named, seed).nodes if named else {})
    steady = Links(nodes={name: Shape(link=link) for name, link in links.items()})
    backend = backend_for(backend, steady, fallback)
    machine = {each.value: _limits(each) for each in Backend}
    if not as_json:
        for name, limits in machine.items():
            say(f"{name:<7} {limits or 'can do all that it claims on this machine'}")
    measured = []
    for name, link in links.items():
        measured.append(run_to_end(_measure(name, backend, link, seconds, seed)))
        if not as_json:
            _say_link(measured[-1])
    if as_json:
        say_json(CheckReport(backends=machine, links=tuple(measured)))
    if not all(each.verdict.is_valid for each in measured):
        raise typer.Exit(INVALID_STATUS)


def distinct_links(shapes: Mapping[str, Shape]) -> dict[str, Link]:
    """Return each link once, named by the first node that has it and a count of the others."""
    names: dict[Link, list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(shape.link, []).append(name)
    return {
        first if not others else f"{first} and {len(others)} like it": link
        for link, (first, *others) in names.items()
    }


async def _measure(
    name: str, backend: Backend, link: Link, seconds: float, seed: int
) -> CheckedLink:
    note(f"measuring {name} over {backend}, up to {5 * seconds:.0f} s and the time to open it")
    entry = BACKENDS[backend]
    async with entry.probe(Shape(link=link), seed) as network:
        readings = await check_link(network, link, entry.claims(), for_s=seconds)
        verdict = await network.verdict()
    return CheckedLink(name=name, backend=backend, readings=tuple(readings), verdict=verdict)


def _limits(backend: Backend) -> str:
    try:
        return BACKENDS[backend].limits()
    except NetsimError as error:
        return error.message


def _say_link(found: CheckedLink) -> None:
    say()
    say(f"{found.name} over {found.backend}, without what varies it over time")
    titles = ("", "configured", "measured", "error")
    columns = [Column(title, is_number=bool(title)) for title in titles]
    say_table(columns, [_row(each) for each in found.readings], empty="nothing is measured")
    say(found.verdict.sentence)


def _row(reading: LinkReading) -> tuple[str, ...]:
    ratio = f" ({reading.ratio:+.1%})" if reading.configured else ""
    error = f"{reading.error:+.3f}{ratio}"
    return reading.name, f"{reading.configured:.3f}", f"{reading.measured:.3f}", error
