"""Tickets for results of packed work pass through a gateway, which puts its own port in."""

import pytest

from coordinator.shell.gateway.tickets import OwnPorts, PortRewriter
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.authority import TLS_NAME


@pytest.mark.parametrize(
    ("url", "rewritten"),
    [
        (f"https://{TLS_NAME}:7702/a", f"https://{TLS_NAME}:9002/a"),
        ("https://bucket.example.org/a", "https://bucket.example.org/a"),
    ],
)
def test_a_ticket_for_a_result_names_the_gateways_port(url: str, rewritten: str) -> None:
    part = tensor_pb2.TicketRange(url=url, start=0, end=3, headers={"Authorization": "secret"})
    answer = node_pb2.OfferResultResponse(ticket=tensor_pb2.Ticket(ranges=[part], life_ms=60_000))
    raw = PortRewriter(OwnPorts(9_001, 9_002)).result(answer.SerializeToString())
    (passed_part,) = node_pb2.OfferResultResponse.FromString(raw).ticket.ranges
    assert (passed_part.url, passed_part.end) == (rewritten, 3)
    assert passed_part.headers["Authorization"] == "secret"
