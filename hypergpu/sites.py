"""The network links that netsim holds open, as programs learn of them from the environment.

Nobody has to hold any: a program that is told nothing runs on this machine as it is.
"""

import os
from collections.abc import Mapping, Sequence

import msgspec

from hypergpu.errors import HyperGPUError, Reason

SITES_VARIABLE = "NETSIM_SITES"
"""Holds `Sites` as JSON."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a link."""

    prefix: tuple[str, ...] = ()
    """Words before a command that run it at this end."""
    dials: str
    """Address under which the coordinator is reached from here, without a port; of the
    coordinator's site: the address to listen on.
    """

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a program at this end."""
        return [*self.prefix, *arguments]


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """The ends at which a coordinator and its nodes run, and the links between them."""

    backend: str
    """proxy, tunnel or tc."""
    coordinator: Site
    nodes: Mapping[str, Site]
    ports: tuple[int, ...] = ()
    """Forwarded ports of the coordinator; empty: all are."""
    control: str = ""
    """Path of the Unix socket that takes requests; see `netsim.network.programs`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of the coordinator, each once."""
        dialled_addresses = [self.coordinator.dials, *(site.dials for site in self.nodes.values())]
        return tuple(dict.fromkeys(dialled_addresses))


def told_sites(environment: Mapping[str, str] = os.environ) -> Sites | None:
    """Return the links that this program runs over; None when netsim holds none open for it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the variable was altered.
    """
    text = environment.get(SITES_VARIABLE, "")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Sites)
    except (msgspec.MsgspecError, UnicodeError) as error:
        fix = "leave it as `hypergpu netsim shape` set it"
        detail = f"{SITES_VARIABLE}: {error}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
