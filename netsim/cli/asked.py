"""Links out of a command's arguments: a world file, or profiles by name."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hypergpu.terminal.output import note
from netsim.error import NetsimError
from netsim.link.shape import COORDINATOR_LINK, Shape
from netsim.network.ground.backend import Backend
from netsim.network.ground.choosing import chosen
from netsim.network.ground.interface import Links
from netsim.network.profiles import profile
from netsim.network.world import WorldDescription
from netsim.network.world_file import read_world_file
from netsim.tc.choice import Fallback

FallbackOption = Annotated[
    Fallback,
    typer.Option("--fallback", help="What is done where tc lacks a part that the links need."),
]


def links_of_profiles(names: Sequence[str], seed: int) -> Links:
    """One node for each name; a name that comes twice is numbered.

    Raises:
        NetsimError: There is no such profile.
    """
    found = [profile(name) for name in names]
    often = Counter(each.name for each in found)
    seen: Counter[str] = Counter()
    nodes: dict[str, Shape] = {}
    for each in found:
        seen[each.name] += 1
        name = f"{each.name}-{seen[each.name]}" if often[each.name] > 1 else each.name
        nodes[name] = Shape(link=each.link, variation=each.variation)
    return Links(nodes=nodes, coordinator=Shape(link=COORDINATOR_LINK), seed=seed)


def links_of_world(world: WorldDescription) -> Links:
    """Each node's link with what changes it; faults are not the links'."""
    return Links(
        nodes={
            node.name: Shape(
                link=node.link,
                variation=node.variation,
                traces=node.traces,
                starts_at_hour=world.starts_at_hour,
            )
            for node in world.nodes
        },
        coordinator=Shape(link=world.coordinator),
        seed=world.seed,
    )


def asked_links(named: Sequence[str], seed: int) -> Links:
    """Links of one world file, or of profiles.

    Raises:
        NetsimError: A name is neither, or a file among other names.
    """
    files = [name for name in named if name.endswith(".toml")]
    if not files:
        return links_of_profiles(named, seed)
    if len(named) > 1:
        raise NetsimError(f"{files[0]} beside other names", "give one world file, or profiles")
    return links_of_world(read_world_file(Path(files[0])))


def settled(backend: Backend, links: Links, fallback: Fallback) -> Backend:
    """Return the backend that the links get, and say why it is not the one that was asked for.

    Raises:
        NetsimError: The kernel lacks what they need and no fallback was asked for.
    """
    found = chosen(backend, links, fallback)
    if found.reason:
        note(f"falling back to the {found.backend}: {found.reason}")
    return found.backend
