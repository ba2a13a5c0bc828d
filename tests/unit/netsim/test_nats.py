"""Which pairs of NATs let two hosts reach each other, and what a box does to packets."""

import itertools

import pytest

from netsim.link.nat import PORT_COUNT, UDP_TIMEOUT_US, Nat, NatKind, PacketEnd
from netsim.tunnel.nat_box import NatBox
from tests.packets import TCP, UDP, checksums_are_right, ip_packet

SERVER = PacketEnd(b"\x0a\x4d\0\1", 7000)
REMOTE = PacketEnd(b"\x0a\x4d\0\3", 53)
HOST = PacketEnd(b"\x0a\x4e\0\2", 4000)
PUBLIC = b"\x0a\x4d\0\2"
CLOSED_PAIRS = {
    frozenset({NatKind.SYMMETRIC}),
    frozenset({NatKind.SYMMETRIC, NatKind.PORT_RESTRICTED}),
}


class PunchingHost:
    """A host that asks a server for its public end and then sends to another host's."""

    def __init__(self, kind: NatKind, address: bytes) -> None:
        self._nat = Nat(kind, key=str(address))
        self._address = address
        self.learned = self.send(SERVER)
        self.target: PacketEnd | None = None
        self.has_heard = False

    def send(self, remote: PacketEnd) -> PacketEnd:
        port = self._nat.let_out(0, HOST, remote)
        assert port is not None
        return PacketEnd(self._address, port)

    def receive(self, sender: PacketEnd, target: PacketEnd) -> None:
        if self._nat.let_in(0, sender, target.port) == HOST:
            self.has_heard, self.target = True, sender


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(NatKind, repeat=2)))
def test_hosts_that_send_to_each_other_meet_unless_their_ports_cannot_be_known(
    ours: NatKind, theirs: NatKind
) -> None:
    one, other = PunchingHost(ours, b"\1\1\1\1"), PunchingHost(theirs, b"\2\2\2\2")
    one.target, other.target = other.learned, one.learned
    for _ in range(3):
        for sender, receiver in ((one, other), (other, one)):
            assert sender.target is not None
            receiver.receive(sender.send(sender.target), sender.target)
    is_open = frozenset({ours, theirs}) not in CLOSED_PAIRS
    assert (one.has_heard, other.has_heard) == (is_open, is_open)


def test_a_box_whose_ports_are_all_taken_lets_nothing_new_out_until_they_time_out() -> None:
    nat = Nat(NatKind.PORT_RESTRICTED, key="1")
    senders = [PacketEnd(HOST.address, port) for port in range(PORT_COUNT)]
    more = PacketEnd(HOST.address, PORT_COUNT)
    ports = {nat.let_out(0, sender, SERVER) for sender in senders}
    assert len(ports) == PORT_COUNT
    assert nat.let_out(1, more, SERVER) is None
    assert nat.let_out(UDP_TIMEOUT_US, more, SERVER) in ports


@pytest.mark.parametrize("protocol", [UDP, TCP])
def test_a_box_shows_its_own_address_and_gives_answers_back_to_the_host(protocol: int) -> None:
    box = NatBox(NatKind.PORT_RESTRICTED, inside=HOST.address, public=PUBLIC, key="1")
    out = box.let_out(0, ip_packet(protocol, HOST, REMOTE, b"question"))
    assert out is not None
    assert out[12:16] == PUBLIC
    assert checksums_are_right(out)
    public_end = PacketEnd(PUBLIC, int.from_bytes(out[20:22]))
    answer = ip_packet(protocol, REMOTE, public_end, b"answer")
    assert box.let_in(1, answer) == ip_packet(protocol, REMOTE, HOST, b"answer")
    stranger = PacketEnd(REMOTE.address, REMOTE.port + 1)
    assert box.let_in(1, ip_packet(protocol, stranger, public_end, b"unasked")) is None
    assert box.counts.inward == 1


def test_a_udp_mapping_ends_two_minutes_after_its_last_packet_out() -> None:
    box = NatBox(NatKind.FULL_CONE, inside=HOST.address, public=PUBLIC, key="1")
    out = box.let_out(0, ip_packet(UDP, HOST, REMOTE, b""))
    assert out is not None
    public_end = PacketEnd(PUBLIC, int.from_bytes(out[20:22]))
    end_ns = UDP_TIMEOUT_US * 1000
    assert box.let_in(end_ns - 1, ip_packet(UDP, REMOTE, public_end, b"")) is not None
    assert box.let_in(end_ns, ip_packet(UDP, REMOTE, public_end, b"")) is None


def test_a_permission_ends_by_itself_while_packets_to_others_keep_the_mapping() -> None:
    nat = Nat(NatKind.PORT_RESTRICTED, key="1")
    half_us = UDP_TIMEOUT_US // 2
    port = nat.let_out(0, HOST, SERVER)
    assert nat.let_out(half_us, HOST, REMOTE) == port
    assert port is not None
    just_before_us = UDP_TIMEOUT_US - 1
    assert nat.let_in(just_before_us, SERVER, port) == HOST
    assert nat.let_in(UDP_TIMEOUT_US, SERVER, port) is None
    assert nat.let_in(UDP_TIMEOUT_US, REMOTE, port) == HOST


@pytest.mark.parametrize("protocol", [UDP, TCP])
def test_a_checksum_that_becomes_nothing_is_written_as_the_protocol_has_it(protocol: int) -> None:
    at = 20 + {UDP: 6, TCP: 16}[protocol]

    def send(payload: bytes) -> bytes:
        box = NatBox(NatKind.SYMMETRIC, inside=HOST.address, public=PUBLIC, key="1")
        out = box.let_out(0, ip_packet(protocol, HOST, REMOTE, payload))
        assert out is not None
        return out

    # What a checksum lacks of nothing, as data, takes it there.
    out = send(send(bytes(2))[at : at + 2])
    assert out[at : at + 2] == {UDP: b"\xff\xff", TCP: b"\0\0"}[protocol]
    assert checksums_are_right(out)


def test_a_udp_packet_without_a_checksum_keeps_none() -> None:
    box = NatBox(NatKind.FULL_CONE, inside=HOST.address, public=PUBLIC, key="1")
    packet = bytearray(ip_packet(UDP, HOST, REMOTE, b"data"))
    packet[26:28] = b"\0\0"
    out = box.let_out(0, bytes(packet))
    assert out is not None
    assert out[26:28] == b"\0\0"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({0: 0x65}, id="ipv6"),
        pytest.param({9: 1}, id="icmp"),
        pytest.param({6: 0x20}, id="a first fragment"),
        pytest.param({7: 1}, id="a later fragment"),
        pytest.param({0: 0x4F}, id="a header longer than the packet"),
        pytest.param({15: 9}, id="a sender that is not the host"),
    ],
)
def test_a_box_passes_nothing_that_it_cannot_translate(change: dict[int, int]) -> None:
    box = NatBox(NatKind.FULL_CONE, inside=HOST.address, public=PUBLIC, key="1")
    packet = bytearray(ip_packet(UDP, HOST, REMOTE, b""))
    for at, value in change.items():
        packet[at] = value
    assert box.let_out(0, bytes(packet)) is None
    assert box.let_out(0, bytes(packet[:10])) is None
    assert box.counts.outward == 2
