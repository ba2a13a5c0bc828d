"""Packing changes no message and no address, and unpacking takes nothing else."""

import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.packing import (
    PACKED_BYTES_MIN,
    MessagePacker,
    MessageUnpacker,
    pack_addresses,
    unpack_addresses,
)

KNOWN = (
    "https://store.example/bucket/0x0549/uploads/?X-Amz-Algorithm=AWS4-HMAC-SHA256"
    "&X-Amz-Date=20261126T223800Z&X-Amz-Expires=960&X-Amz-Signature="
)
HEX = st.text("0123456789abcdef", min_size=30, max_size=1100)
URLS = st.lists(st.one_of(st.text(), HEX, st.just(KNOWN[:60]), st.just(KNOWN)), max_size=6)


def address(key: str, signature: str) -> str:
    return KNOWN.replace("uploads/", f"uploads/{key}") + signature


def ticket_of(*urls: str) -> tensor_pb2.Ticket:
    ranges = [tensor_pb2.TicketRange(url=url, end=5) for url in urls]
    return tensor_pb2.Ticket(ranges=ranges, life_ms=60_000)


def assignment(round_: int, reason: str) -> node_pb2.ControlResponse:
    lease = node_pb2.Lease(job_id="job-000000000001", round=round_, number=round_)
    work = node_pb2.Assignment(lease=lease, reason=reason, workload_options="{}" * 40)
    return node_pb2.ControlResponse(assignment=work)


@given(st.lists(st.tuples(st.integers(0, 1 << 31), st.text(max_size=3000)), max_size=20))
def test_messages_come_out_as_they_went_in(said: list[tuple[int, str]]) -> None:
    packer, unpacker = MessagePacker(), MessageUnpacker()
    for each in said:
        message = assignment(*each)
        packed_message = node_pb2.ControlResponse.FromString(
            packer.pack(message).SerializeToString()
        )
        assert unpacker.unpack(packed_message) == message


def test_a_message_like_the_one_before_it_is_small() -> None:
    packer = MessagePacker()
    first, second = (packer.pack(assignment(each, "as planned")) for each in (1, 2))
    assert second.ByteSize() < first.ByteSize() / 2
    assert second.ByteSize() < assignment(2, "as planned").ByteSize() / 4


def test_small_messages_and_welcomes_are_sent_as_they_are() -> None:
    echo = node_pb2.ControlResponse(heartbeat_echo=node_pb2.HeartbeatEcho(sequence=3))
    token = bytes(2 * PACKED_BYTES_MIN)
    welcome = node_pb2.ControlResponse(welcome=node_pb2.Welcome(probe_token=token))
    packer, unpacker = MessagePacker(), MessageUnpacker()
    for message in (echo, welcome):
        assert packer.pack(message) == message
        assert unpacker.unpack(message) == message


@given(parts=st.lists(URLS, max_size=3))
def test_addresses_come_out_as_they_went_in(parts: list[list[str]]) -> None:
    ticket = ticket_of(*("".join(each).replace("\0", "") for each in parts))
    for known_address in (KNOWN, ""):
        assert unpack_addresses(pack_addresses(ticket, known_address), known_address) == ticket


def test_an_address_is_packed_to_its_key_and_signature() -> None:
    ticket = ticket_of(address("5d" * 15 + "07", "9f" * 31 + "a1"))
    (packed_range,) = pack_addresses(ticket, KNOWN).ranges
    assert not packed_range.url
    assert len(packed_range.packed_url) < 70


def test_an_address_is_whole_for_who_knows_none() -> None:
    ticket = ticket_of(address("5d" * 16, "9f" * 32))
    assert pack_addresses(ticket, "") == ticket


@pytest.mark.parametrize("packed", [b"no stream", zlib.compress(b"a header")])
def test_what_nobody_packed_is_rejected(packed: bytes) -> None:
    ticket_range = tensor_pb2.TicketRange(packed_url=packed)
    with pytest.raises(HyperGPUError, match="unpacked"):
        MessageUnpacker().unpack(node_pb2.ControlResponse(packed=packed))
    with pytest.raises(HyperGPUError, match="unpacked"):
        unpack_addresses(tensor_pb2.Ticket(ranges=[ticket_range]), KNOWN)


@given(packed=st.binary(max_size=200))
def test_unpacking_ends_in_a_message_or_an_error_of_ours(packed: bytes) -> None:
    ticket_range = tensor_pb2.TicketRange(packed_url=_deflate(packed))
    with suppress(HyperGPUError):
        MessageUnpacker().unpack(node_pb2.ControlResponse(packed=_deflate(packed)))
    with suppress(HyperGPUError):
        unpack_addresses(tensor_pb2.Ticket(ranges=[ticket_range]), KNOWN)


def _deflate(raw: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-13)
    return packer.compress(raw) + packer.flush()


def test_a_message_that_unpacks_to_too_much_is_rejected() -> None:
    huge = MessagePacker().pack(assignment(1, "x" * (5 << 20)))
    with pytest.raises(HyperGPUError) as failure:
        MessageUnpacker().unpack(huge)
    assert failure.value.reason is Reason.CALL_BROKEN


def test_a_message_of_another_stream_is_rejected() -> None:
    packer = MessagePacker()
    packer.pack(assignment(1, "as planned"))
    with pytest.raises(HyperGPUError) as failure:
        MessageUnpacker().unpack(packer.pack(assignment(2, "as planned")))
    assert failure.value.reason is Reason.CALL_BROKEN
