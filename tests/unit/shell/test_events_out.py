"""Which stream an address names, and what health and doctor say of it."""

from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from coordinator.shell.app.listeners import HealthServicer
from coordinator.shell.outbox.messages import messages_of
from coordinator.shell.outbox.redis_stream import parse_address
from coordinator.shell.store.journal.records import Entry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.user.cli.verdicts import FAIL, OK, events_check, events_failure

NOBODY: Any = None


def test_address_names_server_stream_and_length() -> None:
    address = parse_address("redis://:secret@host:6379/2?stream=mine&maxlen=50")
    assert (address.url, address.stream) == ("redis://:secret@host:6379/2", "mine")
    assert address.length_max == 50
    assert address.public_url == "redis://host:6379/2"


def test_address_without_more_has_the_usual_stream() -> None:
    address = parse_address("redis://host")
    assert (address.stream, address.length_max) == ("hypergpu", 1_000_000)


@pytest.mark.parametrize(
    "text",
    [
        "host:6379",
        "http://host",
        "redis://h?maxlen=x",
        "redis://h?stream=",
        "redis://h?maxlength=1",
    ],
)
def test_address_that_names_no_stream_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(HyperGPUError) as failure:
        parse_address(text)
    assert failure.value.reason is Reason.ARGUMENT_INVALID
    assert "redis://HOST:6379/0?stream=NAME&maxlen=N" in failure.value.fix


def test_rows_that_concern_only_the_coordinator_are_not_sent() -> None:
    assert messages_of(Entry(JobId("j"), 3, 0, "NodeJoined", b"{}"), ()) == []


async def test_health_of_events_is_its_own() -> None:
    health = HealthServicer()
    health.set_serving(is_serving=True)
    health.set_part("hypergpu.events", False)
    statuses = []
    for service in ("", "hypergpu.events", "hypergpu.others"):
        request = health_pb2.HealthCheckRequest(service=service)
        statuses.append((await health.check(request, NOBODY)).status)
    response_type = health_pb2.HealthCheckResponse
    assert statuses == [
        response_type.SERVING,
        response_type.NOT_SERVING,
        response_type.SERVICE_UNKNOWN,
    ]


def test_doctor_asks_the_stream() -> None:
    assert events_check("").verdict == OK
    assert events_check("it is away").verdict == FAIL
    assert "Error 111 connecting to 127.0.0.1:9" in events_failure("redis://127.0.0.1:9/0")
