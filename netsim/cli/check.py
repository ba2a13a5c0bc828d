"""Compares links' configured and measured behaviour, and lists this machine's limits."""

from collections.abc import Mapping, Sequence

import msgspec
import typer

from hypergpu.terminal.output import Column, note, say, say_json, say_table
from netsim.cli.links import backend_for, links_by_name
from netsim.link import Link, Shape
from netsim.link.error import NetsimError
from netsim.measure.check import LinkReading, check_link
from netsim.measure.lateness import LatenessVerdict
from netsim.network.backends import BACKENDS, Links
from netsim.network.options import Backend, Fallback
from netsim.network.signals import run_to_end

INVALID_STATUS = 1


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The links to measure, and how."""

    names: Sequence[str]
    """A world file, or profiles; none: only the machine is described."""
    backend: Backend
    fallback: Fallback
    seconds: float
    """Length of each measurement."""
    seed: int


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


def check_links(order: CheckOrder, *, as_json: bool) -> None:
    """Describe this machine, then measure each distinct link and print its readings."""
    links = distinct_links(links_by_name(order.names, order.seed).nodes if order.names else {})
    steady = Links(nodes={name: Shape(link=link) for name, link in links.items()})
    backend = backend_for(order.backend, steady, order.fallback)
    machine = {each.value: _limits(each) for each in Backend}
    if not as_json:
        for name, limits in machine.items():
            say(f"{name:<7} {limits or 'can do all that it claims on this machine'}")
    readings = []
    for name, link in links.items():
        readings.append(run_to_end(_measure(name, backend, link, order)))
        if not as_json:
            _say_link(readings[-1])
    if as_json:
        say_json(CheckReport(backends=machine, links=tuple(readings)))
    if not all(each.verdict.is_valid for each in readings):
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


async def _measure(name: str, backend: Backend, link: Link, order: CheckOrder) -> CheckedLink:
    longest_s = 5 * order.seconds
    note(f"measuring {name} over {backend}, up to {longest_s:.0f} s and the time to open it")
    entry = BACKENDS[backend]
    async with entry.probe(Shape(link=link), order.seed) as network:
        readings = await check_link(network, link, entry.claims(), for_s=order.seconds)
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
