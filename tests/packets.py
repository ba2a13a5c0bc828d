"""IPv4 packets for tests, with checksums computed whole."""

from netsim.link.nat import PacketEnd

UDP, TCP = 17, 6


def _sum(words: bytes) -> int:
    """Return the ones' complement sum of 16-bit words, the last one even_words with a zero byte."""
    even_words = words + bytes(len(words) % 2)
    total = sum(int.from_bytes(even_words[at : at + 2]) for at in range(0, len(even_words), 2))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _pseudo_header(protocol: int, source: bytes, target: bytes, length: int) -> bytes:
    return source + target + bytes([0, protocol]) + length.to_bytes(2)


def ip_packet(protocol: int, source: PacketEnd, target: PacketEnd, payload: bytes) -> bytes:
    """Return a UDP datagram or a TCP segment with both checksums."""
    ports = source.port.to_bytes(2) + target.port.to_bytes(2)
    if protocol == UDP:
        body, at = ports + (8 + len(payload)).to_bytes(2) + bytes(2) + payload, 6
    else:
        body, at = ports + bytes(8) + b"\x50\x10\xff\xff" + bytes(4) + payload, 16
    pseudo_header = _pseudo_header(protocol, source.address, target.address, len(body))
    checksum = 0xFFFF - _sum(pseudo_header + body)
    if protocol == UDP:
        checksum = checksum or 0xFFFF
    body = body[:at] + checksum.to_bytes(2) + body[at + 2 :]
    length = (20 + len(body)).to_bytes(2)
    header = b"\x45\0" + length + bytes(4) + bytes([64, protocol]) + bytes(2)
    header += source.address + target.address
    header_checksum = 0xFFFF - _sum(header)
    return header[:10] + header_checksum.to_bytes(2) + header[12:] + body


def checksums_are_right(packet: bytes) -> bool:
    """Whether the checksums of IP and of UDP or TCP hold, as a receiver computes them."""
    header, body = packet[:20], packet[20:]
    pseudo_header = _pseudo_header(packet[9], packet[12:16], packet[16:20], len(body))
    return _sum(header) == _sum(pseudo_header + body) == 0xFFFF
