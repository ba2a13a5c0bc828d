"""A network address translator as pure data and seeded functions, in the terms of RFC 4787.

A host behind it is seen by others under a public address and a *mapping*'s port. Packets from
outside enter only where the mapping exists and the *filter* lets their sender in. One `Nat` is one
protocol of one box; time is given, and never read.
"""

from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from hypergpu.units import Microseconds


class NatKind(StrEnum):
    """The four usual boxes, by their old names, as a world file gives them."""

    FULL_CONE = "full-cone"
    RESTRICTED = "restricted"
    PORT_RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"


class Dependence(Enum):
    """How much of the remote endpoint a mapping or a filter distinguishes."""

    ENDPOINT_INDEPENDENT = auto()
    ADDRESS = auto()
    ADDRESS_AND_PORT = auto()


class NatBehaviour(NamedTuple):
    """What RFC 4787 tells boxes apart by."""

    mapping: Dependence
    """For which remote ends a host's socket gets a public port of its own."""
    filtering: Dependence
    """Whom the socket must have sent to, so that packets of a remote end enter."""


BEHAVIOURS: Mapping[NatKind, NatBehaviour] = MappingProxyType(
    {
        NatKind.FULL_CONE: NatBehaviour(
            Dependence.ENDPOINT_INDEPENDENT, Dependence.ENDPOINT_INDEPENDENT
        ),
        NatKind.RESTRICTED: NatBehaviour(Dependence.ENDPOINT_INDEPENDENT, Dependence.ADDRESS),
        NatKind.PORT_RESTRICTED: NatBehaviour(
            Dependence.ENDPOINT_INDEPENDENT, Dependence.ADDRESS_AND_PORT
        ),
        NatKind.SYMMETRIC: NatBehaviour(Dependence.ADDRESS_AND_PORT, Dependence.ADDRESS_AND_PORT),
    }
)

UDP_TIMEOUT_US = Microseconds(120 * 1_000_000)
"""The least that RFC 4787 allows (its REQ-5)."""
TCP_TIMEOUT_US = Microseconds(7440 * 1_000_000)
"""The least that RFC 5382 allows of an established connection (its REQ-5): 2 h 4 min."""
# The dynamic ports of RFC 6335, and as many below them.
PORT_LEAST, PORT_COUNT = 32_768, 32_768
# What timed out is dead at once, and forgotten so many times in a timeout.
_SWEEPS = 16


class PacketEnd(NamedTuple):
    """An IPv4 address as it stands in a packet, and a port."""

    address: bytes
    port: int


_ANY = PacketEnd(b"", 0)


class _PortEntry:
    """One mapping: whose it is, and when what was last sent through it, for each remote part."""

    def __init__(self, inside: PacketEnd, part: PacketEnd, public_port: int) -> None:
        self.inside = inside
        self.part = part
        self.public_port = public_port
        self.sent_us = 0
        self.permissions_us: dict[PacketEnd, int] = {}


class Nat:
    """The mappings of one protocol.

    Only what goes out keeps mappings and permissions alive (REQ-6 of RFC 4787). Public ports are
    drawn: nothing works here because a port happened to be kept.

    Args:
        kind: Which box.
        key: Seeds the ports. Equal keys and packets give equal ports.
        timeout_us: After so long without a packet out, a mapping or a permission is gone.
    """

    def __init__(
        self, kind: NatKind, *, key: str, timeout_us: Microseconds = UDP_TIMEOUT_US
    ) -> None:
        self._behaviour = BEHAVIOURS[kind]
        self._timeout_us = timeout_us
        self._sweep_us = 0
        self._dice = Random(key)
        self._by_inside: dict[tuple[PacketEnd, PacketEnd], _PortEntry] = {}
        self._by_port: dict[int, _PortEntry] = {}

    def let_out(self, now_us: int, inside: PacketEnd, remote: PacketEnd) -> int | None:
        """Return the public port of a packet to ``remote``; None: every port is taken."""
        if now_us >= self._sweep_us:
            self._forget_dead(now_us)
        part = _part(self._behaviour.mapping, remote)
        entry = self._by_inside.get((inside, part))
        if entry is None or not self._is_alive(now_us, entry.sent_us):
            entry = self._bind(inside, part)
            if entry is None:
                return None
        entry.sent_us = now_us
        entry.permissions_us[_part(self._behaviour.filtering, remote)] = now_us
        return entry.public_port

    def let_in(self, now_us: int, remote: PacketEnd, public_port: int) -> PacketEnd | None:
        """Return the inside end of a packet from ``remote``; None: it does not enter."""
        entry = self._by_port.get(public_port)
        if entry is None or not self._is_alive(now_us, entry.sent_us):
            return None
        sent_us = entry.permissions_us.get(_part(self._behaviour.filtering, remote))
        if sent_us is None or not self._is_alive(now_us, sent_us):
            return None
        return entry.inside

    def _is_alive(self, now_us: int, sent_us: int) -> bool:
        return now_us - sent_us < self._timeout_us

    def _bind(self, inside: PacketEnd, part: PacketEnd) -> _PortEntry | None:
        if dead := self._by_inside.pop((inside, part), None):
            del self._by_port[dead.public_port]
        if len(self._by_port) == PORT_COUNT:
            return None
        number = self._dice.randrange(PORT_COUNT)
        while PORT_LEAST + number in self._by_port:
            number = (number + 1) % PORT_COUNT
        entry = _PortEntry(inside, part, PORT_LEAST + number)
        self._by_inside[inside, part] = self._by_port[entry.public_port] = entry
        return entry

    def _forget_dead(self, now_us: int) -> None:
        """Drop what timed out. A step for each mapping and permission, a few times a timeout."""
        self._sweep_us = now_us + self._timeout_us // _SWEEPS
        for entry in list(self._by_port.values()):
            if not self._is_alive(now_us, entry.sent_us):
                del self._by_port[entry.public_port]
                del self._by_inside[entry.inside, entry.part]
                continue
            entry.permissions_us = {
                part: sent_us
                for part, sent_us in entry.permissions_us.items()
                if self._is_alive(now_us, sent_us)
            }


def _part(dependence: Dependence, remote: PacketEnd) -> PacketEnd:
    """Return the part of a remote end that is told apart."""
    if dependence is Dependence.ENDPOINT_INDEPENDENT:
        return _ANY
    return PacketEnd(remote.address, 0) if dependence is Dependence.ADDRESS else remote
