"""The commands on links: list profiles, check, keep open for a program, draw over time."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import typer

from hypergpu.sites import SITES_VARIABLE, Sites
from hypergpu.user.terminal.output import Column, note, numbers, say, say_json, say_table
from netsim.link import Link, LinkDirection, NetsimError, Shape
from netsim.measure.lateness import LatenessVerdict
from netsim.measure.probe import LinkReading, check_link
from netsim.network.backends import BACKENDS, Links, choose_backend, profile_links, world_links
from netsim.network.options import Backend, Fallback
from netsim.network.picture import world_svg
from netsim.network.profiles import PROFILES, Profile
from netsim.network.programs import keep_open, run_program, run_to_end, sites_json
from netsim.network.world_file import read_world_file


def links_by_name(names: Sequence[str], seed: int) -> Links:
    """Return the links of one world file, or of profiles.

    Raises:
        NetsimError: A name is neither, or a file is among other names.
    """
    files = [name for name in names if name.endswith(".toml")]
    if not files:
        return profile_links(names, seed)
    if len(names) > 1:
        raise NetsimError(f"{files[0]} beside other names", "give one world file, or profiles")
    return world_links(read_world_file(Path(files[0])))


def backend_for(backend: Backend, links: Links, fallback: Fallback) -> Backend:
    """Choose the backend of links, and print why it is not the requested one.

    Raises:
        NetsimError: The kernel lacks what they need and no fallback was requested.
    """
    choice, reason = choose_backend(backend, links, fallback)
    if reason:
        note(f"falling back to the {choice}: {reason}")
    return choice


class ProfileList(msgspec.Struct, frozen=True):
    """Every profile."""

    profiles: tuple[Profile, ...]


def list_profiles(*, as_json: bool) -> None:
    """Print every profile with the sources of its numbers."""
    if as_json:
        say_json(ProfileList(tuple(PROFILES.values())))
        return
    columns = (
        Column("name"),
        *numbers("rtt ms", "jitter ms", "loss % / burst", "down / up Mbit/s", "queue ms"),
        Column("source"),
    )
    say_table(columns, [_profile_row(each) for each in PROFILES.values()], empty="there are none")


def _profile_row(profile: Profile) -> tuple[str, ...]:
    link = profile.shape.link
    up, down = link.up, link.down
    return (
        profile.name,
        f"{link.rtt_us / 1000:g}",
        f"{up.jitter_us / 1000:.1f}",
        _loss(up),
        f"{down.bits_per_s / 1e6:g} / {up.bits_per_s / 1e6:g}",
        str(up.queue_ms),
        profile.source,
    )


def _loss(direction: LinkDirection) -> str:
    if not direction.loss:
        return "0"
    return f"{direction.loss * 100:g} / {direction.burst_packets:g}"


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


def check_links(
    names: Sequence[str],
    *,
    backend: Backend,
    fallback: Fallback,
    seconds: float,
    seed: int,
    as_json: bool,
) -> None:
    """Describe this machine, then measure each distinct link and print its readings.

    Args:
        names: A world file, or profiles; none: only the machine is described.
        backend: What carries the packets.
        fallback: What to do where tc lacks a part.
        seconds: Length of each measurement.
        seed: Seeds losses.
        as_json: Print one JSON document.

    Raises:
        NetsimError: A name is neither, or the backend cannot carry the links.
    """
    links = distinct_links(links_by_name(names, seed).nodes if names else {})
    steady = Links(nodes={name: Shape(link=link) for name, link in links.items()})
    backend = backend_for(backend, steady, fallback)
    machine = {each.value: _limits(each) for each in Backend}
    if not as_json:
        for title, limits in machine.items():
            say(f"{title:<7} {limits or 'can do all that it claims on this machine'}")
    readings = []
    for name, link in links.items():
        measurement = _measure(name, backend, link, seconds=seconds, seed=seed)
        readings.append(run_to_end(measurement))
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


async def _measure(
    name: str, backend: Backend, link: Link, *, seconds: float, seed: int
) -> CheckedLink:
    longest_s = 5 * seconds
    note(f"measuring {name} over {backend}, up to {longest_s:.0f} s and the time to open it")
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
    say_table(columns, [_reading_row(each) for each in found.readings], empty="nothing is measured")
    say(found.verdict.sentence)


def _reading_row(reading: LinkReading) -> tuple[str, ...]:
    ratio = f" ({reading.ratio:+.1%})" if reading.configured else ""
    error = f"{reading.error:+.3f}{ratio}"
    return reading.name, f"{reading.configured:.3f}", f"{reading.measured:.3f}", error


def shape_links(backend: Backend, links: Links, command: list[str]) -> int:
    """Keep links open while a command runs, or without one until a signal; return its status."""
    return run_to_end(_shape(backend, links, command))


async def _shape(backend: Backend, links: Links, command: list[str]) -> int:
    async with BACKENDS[backend].open(links) as open_links:
        for line in greeting(open_links.sites):
            note(line)
        if command:
            status, verdict = await run_program(open_links, command)
        else:
            status, verdict = 0, await keep_open(open_links, _announce)
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


def plot_world(world: Path, out: Path | None, seconds: float) -> None:
    """Write the picture of a world file, by default as WORLD.svg in the working directory.

    Raises:
        NetsimError: The file describes no world, or the picture cannot be written.
    """
    description = read_world_file(world)
    path = out or Path(f"{description.name}.svg")
    try:
        path.write_text(world_svg(description, round(seconds * 1e6)), encoding="utf-8")
    except OSError as error:
        fix = "name a file that may be written: --out FILE.svg"
        raise NetsimError(f"{path} cannot be written: {error.strerror}", fix) from error
    say(f"written: {path}")
