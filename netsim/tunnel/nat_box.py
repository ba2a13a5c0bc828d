"""The NAT between a host and its line: rewrites the addresses of UDP and TCP packets.

Whatever else a host sends (ICMP, fragments, IPv6) does not pass, and there is no ICMP from the box.
"""

import msgspec

from netsim.link.nat import TCP_TIMEOUT_US, UDP_TIMEOUT_US, Nat, NatKind, PacketEnd
from netsim.tunnel.stage import NS_PER_US

_TCP, _UDP = 6, 17
_HEADER_BYTES_MIN = 20
# Where the checksum of each protocol's header stands, counted from that header.
_CHECKSUM_AT = {_TCP: 16, _UDP: 6}
# Of an IPv4 header: more fragments, or an offset.
_FRAGMENT_BITS = 0x3FFF


class NatCount(msgspec.Struct, kw_only=True):
    """Packets that a box did not let through."""

    outward: int = 0
    """Neither UDP nor TCP, or without a free port."""
    inward: int = 0
    """Without a mapping, or from a sender that the filter keeps out."""


class NatBox:
    """Translates one host's packets.

    Args:
        kind: Which box.
        inside: The host's own address.
        public: The address under which others see it.
        key: Seeds the public ports.
    """

    def __init__(self, kind: NatKind, *, inside: bytes, public: bytes, key: str) -> None:
        self._inside, self._public = inside, public
        self._nats = {
            _UDP: Nat(kind, key=f"{key}/udp", timeout_us=UDP_TIMEOUT_US),
            _TCP: Nat(kind, key=f"{key}/tcp", timeout_us=TCP_TIMEOUT_US),
        }
        self.counts = NatCount()

    def let_out(self, at_ns: int, packet: bytes) -> bytes | None:
        """Return a packet of the host as others see it; None: it does not pass."""
        if (at := _ports_at(packet)) is None or packet[12:16] != self._inside:
            self.counts.outward += 1
            return None
        source, target = _ends(packet, at)
        port = self._nats[packet[9]].let_out(at_ns // NS_PER_US, source, target)
        if port is None:
            self.counts.outward += 1
            return None
        return _rewrite(packet, at, 12, at, PacketEnd(self._public, port))

    def let_in(self, at_ns: int, packet: bytes) -> bytes | None:
        """Return a packet to the public address as the host gets it; None: it does not enter."""
        inside = None
        if (at := _ports_at(packet)) is not None:
            source, target = _ends(packet, at)
            inside = self._nats[packet[9]].let_in(at_ns // NS_PER_US, source, target.port)
        if at is None or inside is None:
            self.counts.inward += 1
            return None
        return _rewrite(packet, at, 16, at + 2, inside)


def _ports_at(packet: bytes) -> int | None:
    """Return where the ports begin; None: the packet has none that could be translated."""
    if len(packet) < _HEADER_BYTES_MIN or packet[0] >> 4 != 4 or packet[9] not in _CHECKSUM_AT:
        return None
    if int.from_bytes(packet[6:8]) & _FRAGMENT_BITS:
        return None
    at = (packet[0] & 15) * 4
    is_whole = at >= _HEADER_BYTES_MIN and len(packet) >= at + _CHECKSUM_AT[packet[9]] + 2
    return at if is_whole else None


def _ends(packet: bytes, at: int) -> tuple[PacketEnd, PacketEnd]:
    """Return source and target."""
    return (
        PacketEnd(packet[12:16], int.from_bytes(packet[at : at + 2])),
        PacketEnd(packet[16:20], int.from_bytes(packet[at + 2 : at + 4])),
    )


def _rewrite(packet: bytes, at: int, address_at: int, port_at: int, end: PacketEnd) -> bytes:
    """Put an end in place of another and mend both checksums by the difference (RFC 1624)."""
    new = bytearray(packet)
    new[address_at : address_at + 4] = end.address
    new[port_at : port_at + 2] = end.port.to_bytes(2)
    address_change = _words(end.address) - _words(packet[address_at : address_at + 4])
    port_change = end.port - int.from_bytes(packet[port_at : port_at + 2])
    _mend(new, 10, address_change)
    checksum_at = at + _CHECKSUM_AT[packet[9]]
    # A UDP packet whose checksum is 0 has none.
    if packet[9] != _UDP or packet[checksum_at : checksum_at + 2] != b"\0\0":
        _mend(new, checksum_at, address_change + port_change)
        if packet[9] == _UDP and not any(new[checksum_at : checksum_at + 2]):
            new[checksum_at : checksum_at + 2] = b"\xff\xff"
    return bytes(new)


def _words(address: bytes) -> int:
    return int.from_bytes(address[:2]) + int.from_bytes(address[2:])


def _mend(packet: bytearray, at: int, change: int) -> None:
    """Change a checksum as if its words had grown by ``change`` in sum."""
    # The sum is of ones' complement, so modulo 65535; 0 and 65535 are the same sum.
    total = (0xFFFF - int.from_bytes(packet[at : at + 2]) + change) % 0xFFFF
    packet[at : at + 2] = (0xFFFF - (total or 0xFFFF)).to_bytes(2)
