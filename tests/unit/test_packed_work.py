"""Packed work: its size is checked before anything of it is read, and only its kind reads it."""

import msgspec
import pytest

from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, Slot
from hypergpu.packed_work import BODY_BYTES_MOST, PackedWork, pack_work, unpack_work
from hypergpu.v1 import work_pb2
from hypergpu.wire.work import work_assignment_message, work_assignment_value, work_value


class Square(msgspec.Struct, frozen=True):
    """A struct of some kind."""

    side: int


def test_a_struct_comes_back_as_it_was() -> None:
    assert unpack_work(pack_work("squares", Square(3)), "squares", Square) == Square(3)


def test_work_of_another_kind_is_refused_by_its_name() -> None:
    with pytest.raises(HyperGPUError, match="of kind 'circles', not 'squares'"):
        unpack_work(pack_work("circles", Square(3)), "squares", Square)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\x03", msgspec.msgpack.encode({"side": "x"})])
def test_malformed_work_is_refused(body: bytes) -> None:
    with pytest.raises(HyperGPUError, match="malformed"):
        unpack_work(PackedWork("squares", body), "squares", Square)


def test_work_that_is_too_large_is_refused_before_it_is_read() -> None:
    large = PackedWork("squares", bytes(BODY_BYTES_MOST + 1))
    with pytest.raises(HyperGPUError, match="has 65537 bytes, and 65536 at most"):
        unpack_work(large, "squares", Square)
    with pytest.raises(HyperGPUError, match="has 65537 bytes"):
        work_value(work_pb2.PackedWork(kind="squares", body=large.body))


def test_a_struct_that_is_too_large_is_not_packed() -> None:
    with pytest.raises(HyperGPUError, match="65536 at most"):
        pack_work("texts", "x" * BODY_BYTES_MOST)


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(HyperGPUError, match="64 characters at most"):
        pack_work("k" * 65, Square(3))


def test_an_assignment_comes_off_the_wire_as_it_was() -> None:
    assignment = PackedAssignment(
        lease=Lease(JobId("job-1"), 4, 7),
        slot=Slot(2),
        work=pack_work("squares", Square(3)),
        reason="item 5 of 9",
    )
    assert work_assignment_value(work_assignment_message(assignment)) == assignment
