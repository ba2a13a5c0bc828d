"""What whoever holds network links open tells the programs that run over them, by the environment.

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
    """Goes before a command to run it here."""
    dials: str
    """Address under which the coordinator is reached from here, without a port; of the
    coordinator's site: the address to listen on.
    """

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What to start so that these run here."""
        return [*self.prefix, *arguments]


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator and its nodes run, and what is between them."""

    backend: str
    """proxy, tunnel or tc."""
    coordinator: Site
    nodes: Mapping[str, Site]
    ports: tuple[int, ...] = ()
    """Of the coordinator, which alone are forwarded; empty: all are."""
    control: str = ""
    """Path of the Unix socket that takes requests; see `netsim.network.ground.control`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of the coordinator, each once."""
        dialled = [self.coordinator.dials, *(site.dials for site in self.nodes.values())]
        return tuple(dict.fromkeys(dialled))


def told_sites(environment: Mapping[str, str] = os.environ) -> Sites | None:
    """What this program was told of its links; None when nobody holds any open for it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the variable was altered.
    """
    text = environment.get(SITES_VARIABLE, "")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Sites)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        fix = "leave it as `hypergpu netsim shape` set it"
        detail = f"{SITES_VARIABLE}: {broken}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from broken
