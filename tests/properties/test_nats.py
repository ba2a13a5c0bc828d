"""Whatever is sent: a NAT lets in what it should, and its rewritten packets are whole."""

from hypothesis import given
from hypothesis import strategies as st

from hypergpu.units import Microseconds
from netsim.link.nat import BEHAVIOURS, Dependence, Nat, NatKind, PacketEnd
from netsim.tunnel.nat_box import NatBox
from tests.packets import TCP, UDP, checksums_are_right, ip_packet

TIMEOUT_US = Microseconds(1000)
# Few ends, so that senders meet mappings of others.
insides = st.builds(PacketEnd, st.just(b"\x0a\x4e\0\2"), st.integers(1, 3))
remotes = st.builds(PacketEnd, st.sampled_from([b"\1\0\0\1", b"\1\0\0\2"]), st.integers(1, 3))
sends = st.lists(st.tuples(st.integers(0, 600), insides, remotes), min_size=1, max_size=30)
kinds = st.sampled_from(NatKind)


class NatHistory:
    """A NAT, and all that was sent through it."""

    def __init__(self, kind: NatKind, sends: list[tuple[int, PacketEnd, PacketEnd]]) -> None:
        self.nat = Nat(kind, key="1", timeout_us=TIMEOUT_US)
        self.sends: list[tuple[int, PacketEnd, PacketEnd, int]] = []
        self.now_us = 0
        for gap_us, inside, remote in sends:
            self.now_us += gap_us
            port = self.nat.let_out(self.now_us, inside, remote)
            assert port is not None
            self.sends.append((self.now_us, inside, remote, port))

    def recent(self) -> list[tuple[int, PacketEnd, PacketEnd, int]]:
        return [each for each in self.sends if self.now_us - each[0] < TIMEOUT_US]


def _is_same(dependence: Dependence, one: PacketEnd, other: PacketEnd) -> bool:
    if dependence is Dependence.ADDRESS_AND_PORT:
        return one == other
    return dependence is Dependence.ENDPOINT_INDEPENDENT or one.address == other.address


@given(kinds, sends, remotes, st.integers(0, 1200), st.data())
def test_a_packet_enters_exactly_where_something_was_sent_that_its_sender_may_answer(
    kind: NatKind,
    sends: list[tuple[int, PacketEnd, PacketEnd]],
    sender: PacketEnd,
    gap_us: int,
    draws: st.DataObject,
) -> None:
    history = NatHistory(kind, sends)
    history.now_us += gap_us
    *_, port = draws.draw(st.sampled_from(history.sends))
    filter_kind = BEHAVIOURS[kind].filtering
    owners = {
        inside
        for _, inside, remote, sent_port in history.recent()
        if sent_port == port and _is_same(filter_kind, remote, sender)
    }
    inside_end = history.nat.let_in(history.now_us, sender, port)
    assert {inside_end} - {None} == owners


@given(kinds, sends)
def test_ports_are_shared_by_one_socket_alone_and_as_the_mapping_has_it(
    kind: NatKind, sends: list[tuple[int, PacketEnd, PacketEnd]]
) -> None:
    recent = NatHistory(kind, sends).recent()
    mapping_kind = BEHAVIOURS[kind].mapping
    for at_us, inside, remote, port in recent:
        for later_us, other_inside, other_remote, other_port in recent:
            is_same_mapping = inside == other_inside and _is_same(
                mapping_kind, remote, other_remote
            )
            if port == other_port:
                assert is_same_mapping
            elif is_same_mapping:
                raise AssertionError((at_us, later_us))


@given(kinds, sends)
def test_equal_keys_give_equal_ports(
    kind: NatKind, sends: list[tuple[int, PacketEnd, PacketEnd]]
) -> None:
    assert NatHistory(kind, sends).sends == NatHistory(kind, sends).sends


addresses = st.binary(min_size=4, max_size=4)
ends = st.builds(PacketEnd, addresses, st.integers(0, 65_535))


@given(st.sampled_from([UDP, TCP]), kinds, st.binary(max_size=60), ends, ends, addresses)
def test_rewritten_packets_have_the_checksums_of_packets_made_so(
    protocol: int,
    kind: NatKind,
    payload: bytes,
    inside: PacketEnd,
    remote: PacketEnd,
    public: bytes,
) -> None:
    box = NatBox(kind, inside=inside.address, public=public, key="1")
    out = box.let_out(0, ip_packet(protocol, inside, remote, payload))
    assert out is not None
    assert checksums_are_right(out)
    public_end = PacketEnd(public, int.from_bytes(out[20:22]))
    assert out == ip_packet(protocol, public_end, remote, payload)
    answer = box.let_in(0, ip_packet(protocol, remote, public_end, payload))
    assert answer == ip_packet(protocol, remote, inside, payload)
