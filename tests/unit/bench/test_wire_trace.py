"""Round trips as they are counted on the wire."""

import pytest

from benchmarks.ours.wire_trace import (
    CountedTrips,
    GrpcConnection,
    WireEvent,
    WireRecord,
    round_trips,
)
from hypergpu.v1 import node_pb2

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def events(text: str) -> list[WireEvent]:
    """``a`` and ``t`` are marks, ``>`` is a request's part and ``<`` an answer's."""
    marks = {"a": "assignment", "t": "train"}
    return [WireEvent(float(at), each in ">t", marks.get(each, "")) for at, each in enumerate(text)]


@pytest.mark.parametrize(
    ("wire", "rounds"),
    [
        ("a><t><><><a", [CountedTrips(down=1, up=3)]),
        ("at>>><<a", [CountedTrips(down=0, up=1)]),
        ("a>>><<<t>>><a", [CountedTrips(down=1, up=1)]),
        ("><a><t><", []),
        ("a><a><t><a", [CountedTrips(down=1, up=1)]),
    ],
)
def test_a_request_and_its_answer_count_once(wire: str, rounds: list[CountedTrips]) -> None:
    assert round_trips(events(wire)) == rounds


def frame(kind: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + content


def call(stream: int, message: bytes) -> bytes:
    return frame(0, stream, b"\0" + len(message).to_bytes(4, "big") + message)


def hello() -> bytes:
    version = node_pb2.Version(protocol=1, software="1.0")
    return node_pb2.ControlRequest(hello=node_pb2.Hello(version=version)).SerializeToString()


def read(connection: GrpcConnection, *, is_up: bool, content: bytes) -> list[str]:
    return [event.mark for event in connection.feed(WireRecord(0.0, 1, 1, is_up, content))]


def test_only_calls_beside_the_control_stream_count() -> None:
    connection = GrpcConnection()
    assert read(connection, is_up=True, content=_PREFACE + frame(4, 0, b"")) == []
    assert read(connection, is_up=True, content=call(1, hello())) == []
    beat = node_pb2.ControlRequest(heartbeat=node_pb2.Heartbeat(sequence=1)).SerializeToString()
    assert read(connection, is_up=True, content=call(1, beat)) == []
    assert read(connection, is_up=True, content=call(3, b"offer")) == [""]
    assignment = node_pb2.ControlResponse(assignment=node_pb2.Assignment(slot=1))
    raw = call(1, assignment.SerializeToString())
    assert read(connection, is_up=False, content=raw[:7]) == []
    assert read(connection, is_up=False, content=raw[7:]) == ["assignment"]
