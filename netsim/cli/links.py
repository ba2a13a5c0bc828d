"""Links from the names on a command line: a world file, or profiles."""

from collections.abc import Sequence
from pathlib import Path

from hypergpu.terminal.output import note
from netsim.link.error import NetsimError
from netsim.network.backends import Links, choose_backend, profile_links, world_links
from netsim.network.options import Backend, Fallback
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
    chosen, reason = choose_backend(backend, links, fallback)
    if reason:
        note(f"falling back to the {chosen}: {reason}")
    return chosen
