"""Where the programs of a world run and whom they dial: what a program under links is told."""

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from netsim.refusal import RefusedError

SITES_VARIABLE = "NETSIM_SITES"
"""Holds `Sites` as JSON in the environment of the program that the links are held open for."""


class Backend(StrEnum):
    """What stands between the sites."""

    PROXY = "proxy"
    """User-space forwarding on loopback: any machine, no root."""
    TUNNEL = "tunnel"
    """Real packets through network namespaces and a user-space router: root and TUN."""
    TC = "tc"
    """Real packets through the kernel's own queues: root and a kernel that has them."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a link."""

    prefix: tuple[str, ...] = ()
    """Goes before a command to run it here."""
    dials: str
    """Address under which the coordinator is reached from here; the coordinator's: what it listens
    on."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What to start so that these run here."""
        return [*self.prefix, *arguments]


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a program needs to know of the links it runs over."""

    backend: Backend
    coordinator: Site
    nodes: Mapping[str, Site]
    ports: tuple[int, ...] = ()
    """Of the coordinator, which alone are forwarded; empty: all are."""
    control: str = ""
    """Path of the Unix socket that takes requests; see `netsim.ground.control`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of the coordinator, each once."""
        return tuple(
            dict.fromkeys([self.coordinator.dials, *(s.dials for s in self.nodes.values())])
        )


def told_sites(environment: Mapping[str, str] = os.environ) -> Sites:
    """What this program was told of its links.

    Raises:
        RefusedError: Nobody holds any open for it.
    """
    text = environment.get(SITES_VARIABLE, "")
    if not text:
        fix = "start it as `hypergpu netsim shape WORLD.toml -- COMMAND`"
        raise RefusedError(f"no links are held open for this program ({SITES_VARIABLE})", fix)
    try:
        return msgspec.json.decode(text, type=Sites)
    except msgspec.MsgspecError as error:
        raise RefusedError(f"{SITES_VARIABLE} is damaged: {error}", "leave it as it is") from error
