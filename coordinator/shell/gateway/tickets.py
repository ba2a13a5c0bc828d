"""Ports that messages name on the host that was dialled: a gateway's own are put there."""

from typing import NamedTuple

from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.authority import TLS_NAME

_NAMED = TLS_NAME.encode()


class OwnPorts(NamedTuple):
    """Where nodes reach a gateway."""

    node_port: int
    bulk_port: int


class PortRewriter:
    """Rewrites answers of one coordinator; others pass as they are."""

    def __init__(self, own: OwnPorts) -> None:
        self._own = own

    def join(self, raw: bytes) -> bytes:
        """Rewrite the answer to a join."""
        answer = node_pb2.JoinResponse.FromString(raw)
        # Made anew: whatever else a coordinator says of addresses is not for nodes of a gateway.
        own = node_pb2.JoinResponse(
            version=answer.version,
            node_id=answer.node_id,
            certificate=answer.certificate,
            certificate_expires_unix_s=answer.certificate_expires_unix_s,
            node_port=self._own.node_port,
            bulk_port=self.bulk_port(answer.bulk_port),
        )
        return own.SerializeToString()

    def bulk_port(self, named: int) -> int:
        """The bulk port to name in place of a coordinator's; 0: an object store carries bytes."""
        return self._own.bulk_port if named else 0

    def blob(self, raw: bytes) -> bytes:
        """Rewrite the answer to a node that wants to fetch a blob."""
        if _NAMED not in raw:
            return raw
        answer = node_pb2.ResolveBlobResponse.FromString(raw)
        self.ticket(answer.ticket)
        return answer.SerializeToString()

    def result(self, raw: bytes) -> bytes:
        """Rewrite the answer to a node that wants to send the blob of a result."""
        if _NAMED not in raw:
            return raw
        answer = node_pb2.OfferResultResponse.FromString(raw)
        self.ticket(answer.ticket)
        return answer.SerializeToString()

    def ticket(self, ticket: tensor_pb2.Ticket) -> None:
        """Rewrite a ticket of the coordinator's own store in place; an object store's stays."""
        for each in ticket.ranges:
            scheme, _, rest = each.url.partition("://")
            authority, slash, path = rest.partition("/")
            if authority.partition(":")[0] == TLS_NAME:
                each.url = f"{scheme}://{TLS_NAME}:{self._own.bulk_port}{slash}{path}"
