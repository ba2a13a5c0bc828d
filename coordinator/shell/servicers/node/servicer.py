"""NodeService: one method a call; the gate has told which node speaks."""

from collections.abc import AsyncIterator

from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.access import NodeGate
from coordinator.shell.servicers.node import updates
from coordinator.shell.servicers.node.control import control
from coordinator.shell.servicers.node.enrolment import Enrolment
from coordinator.shell.servicers.serving import BlobRange, fetch_blob
from coordinator.shell.servicers.wire.handlers import Caller, Requests
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import digest_value

JOIN = frozenset({"Join"})
"""What the main listener serves: the caller has no certificate yet."""


class NodeServicer:
    """Both listeners share it; each serves its own methods."""

    def __init__(self, services: Services, gate: NodeGate, enrolment: Enrolment) -> None:
        self._services = services
        self._gate = gate
        self._enrolment = enrolment

    async def join(self, request: node_pb2.JoinRequest, caller: Caller) -> node_pb2.JoinResponse:
        return await self._enrolment.join(request, caller)

    async def renew_certificate(
        self, request: node_pb2.RenewCertificateRequest, caller: Caller
    ) -> node_pb2.RenewCertificateResponse:
        return await self._enrolment.renew(self._gate.node(caller), request)

    def control(
        self, requests: Requests, caller: Caller
    ) -> AsyncIterator[node_pb2.ControlResponse]:
        return control(self._services, self._gate, self._gate.node(caller), requests)

    def fetch_blob(
        self, request: node_pb2.FetchBlobRequest, caller: Caller
    ) -> AsyncIterator[bytes]:
        wanted = BlobRange(digest_value(request.digest), request.offset, request.end)
        return fetch_blob(self._services, self._gate.node(caller), wanted)

    async def query_upload(
        self, request: node_pb2.QueryUploadRequest, caller: Caller
    ) -> node_pb2.QueryUploadResponse:
        return await updates.query_upload(self._services, self._gate.node(caller), request)

    async def submit_update(
        self, requests: Requests, caller: Caller
    ) -> node_pb2.SubmitUpdateResponse:
        node = self._gate.node(caller)
        return await updates.submit_update(self._services, node, requests)
