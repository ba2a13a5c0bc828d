"""A node's stream through a gateway that breaks at an awkward moment."""

import asyncio
from typing import Any

import grpc
import pytest

from coordinator.shell.gateway.counts import GatewayCounts
from coordinator.shell.gateway.session import (
    GREETING_MS_MAX,
    CoordinatorGoneError,
    GatewaySession,
    SessionParts,
)
from coordinator.shell.gateway.tickets import OwnPorts, PortRewriter
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import ProbeTokens
from hypergpu.ids import NodeId
from hypergpu.v1 import node_pb2, tensor_pb2

NODE = NodeId("0x" + "a1" * 20)
PORTS = PortRewriter(OwnPorts(node_port=1, bulk_port=2))


class EndedStream:
    """Either side of a stream that is over: gRPC's own errors for whoever uses it."""

    async def read(self) -> object:
        raise grpc.aio.UsageError("the call is over")

    async def write(self, _message: bytes) -> None:
        raise grpc.aio.UsageError("the call is over")

    def cancel(self) -> bool:
        return False


class ClosedChannelCall(EndedStream):
    """A call whose channel this side has closed: its reader is cancelled."""

    async def read(self) -> object:
        raise asyncio.CancelledError

    async def write(self, _message: bytes) -> None:
        return


class SilentStream(EndedStream):
    """A node that says no more."""

    async def read(self) -> object:
        return grpc.aio.EOF


def session(context: Any, call: Any) -> GatewaySession:
    echo = ProbeEcho(ProbeTokens(), lambda _: True)
    return GatewaySession(
        NODE,
        context,
        call,
        SessionParts(GatewayCounts(), echo, PORTS, lambda _: None, lambda: 15_000),
    )


async def test_what_is_due_when_a_stream_has_just_ended_breaks_nothing() -> None:
    gateway_session = session(EndedStream(), EndedStream())
    gateway_session._welcome = node_pb2.Welcome()
    assert gateway_session.is_due(0)
    await gateway_session.flush()


async def test_a_node_that_waits_for_its_greeting_is_not_silent() -> None:
    gateway_session = session(SilentStream(), EndedStream())
    assert gateway_session.silence_limit_ms == GREETING_MS_MAX
    gateway_session._welcome = node_pb2.Welcome()
    assert gateway_session.silence_limit_ms == 15_000


async def test_a_stream_ends_with_the_channel_that_was_closed_under_it() -> None:
    with pytest.raises(CoordinatorGoneError):
        await session(SilentStream(), ClosedChannelCall()).run(b"")


def test_tickets_of_the_coordinators_own_store_name_the_gateways_port() -> None:
    own = "https://hypergpu-coordinator:7702/digest"
    bucket = "https://bucket.example.org:9000/hypergpu-coordinator/digest"
    ticket = tensor_pb2.Ticket(ranges=[tensor_pb2.TicketRange(url=url) for url in (own, bucket)])
    PORTS.ticket(ticket)
    urls = [each.url for each in ticket.ranges]
    assert urls == ["https://hypergpu-coordinator:2/digest", bucket]


def test_answers_to_joins_name_no_address_but_the_gateways() -> None:
    answer = node_pb2.JoinResponse(node_id=NODE, certificate=b"pem", node_port=7701, bulk_port=7702)
    own = node_pb2.JoinResponse.FromString(PORTS.join(answer.SerializeToString()))
    assert (own.node_id, own.certificate, own.node_port, own.bulk_port) == (NODE, b"pem", 1, 2)
