"""OperatorService: nodes and tokens."""

import asyncio

import msgspec
import structlog

from coordinator.core.round.assignment import node_band
from coordinator.shell import translate
from coordinator.shell.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.journal.records import NodeRecord
from coordinator.shell.runtime.nodes import KnownNodes
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.calls import Caller, page_of
from coordinator.shell.translate import Capabilities, reading_message
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.streams import monotonic_ms, unix_s
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.credentials import Role, token_text

log = structlog.get_logger()

_LABEL_LENGTH_MAX = 200
_TTL_S_MAX = 10 * 365 * 24 * 3600


class OperatorServicer:
    """One method a call; the gate has admitted an operator."""

    def __init__(
        self, services: Services, *, tokens: IssuedTokens, nodes: KnownNodes, authority: Digest
    ) -> None:
        self._services = services
        self._tokens = tokens
        self._nodes = nodes
        self._authority = authority
        self.addresses: tuple[str, ...] = ()
        """What tokens name, once the listener is bound."""

    async def list_nodes(
        self, request: job_pb2.ListNodesRequest, caller: Caller
    ) -> job_pb2.ListNodesResponse:
        # In the writer's thread no counts are on their way to the journal meanwhile.
        records = await self._services.driver.in_writer(self._services.journal.nodes)
        own = await self._own_nodes(caller)
        summaries = [
            self._summary(record) for record in records if own is None or record.node in own
        ]
        page, next_page = page_of(summaries, request.page)
        for summary in page:
            self._add_reading(summary)
        return job_pb2.ListNodesResponse(nodes=page, next_page=next_page)

    async def _own_nodes(self, caller: Caller) -> frozenset[NodeId] | None:
        """Nodes that joined with a node's token; None for the other roles, which see all."""
        token = caller.token
        if token is None or token.role is not Role.NODE:
            return None
        return await asyncio.to_thread(self._tokens.joined_nodes, token.token_id)

    def _add_reading(self, summary: job_pb2.NodeSummary) -> None:
        """Add the measurements of a node that was here since this process began, and its health."""
        node, readings = NodeId(summary.node_id), self._services.readings
        if readings.knows(node):
            summary.reading.CopyFrom(reading_message(readings.reading(node), monotonic_ms()))
        runtime = self._services.allocator.runtime_of(node)
        if runtime is not None and (found := node_band(runtime.job, node)) is not None:
            summary.health, summary.health_reason = found

    def _summary(self, record: NodeRecord) -> job_pb2.NodeSummary:
        connected, node = self._services.nodes, record.node
        session = connected.streams.get(node)
        runtime = self._services.allocator.runtime_of(node)
        capabilities = session.capabilities if session else _stored_capabilities(record)
        silent_ms = connected.silent_ms(node)
        away_ms = max(0, unix_s() * 1000 - record.last_seen_ms)
        accepted, refused = connected.unstored_counts(node)
        state, reason = self._state(record)
        return job_pb2.NodeSummary(
            node_id=node,
            state=state,
            capabilities=translate.capabilities_message(capabilities),
            job_id=runtime.job.job_id if runtime else "",
            last_seen_ms_ago=away_ms if silent_ms is None else silent_ms,
            software=session.software if session else record.software,
            updates_accepted=record.updates_accepted + accepted,
            updates_refused=record.updates_refused + refused,
            reason=reason,
        )

    def _state(self, record: NodeRecord) -> tuple[str, str]:
        connected, node = self._services.nodes, record.node
        if record.is_revoked:
            return "revoked", "the operator revoked it"
        if node not in connected.streams:
            return "away", "it has no control stream"
        if reason := connected.drain_reason(node):
            return "draining", reason
        if self._services.readings.reading(node).is_starting:
            return "starting", "its worker is starting"
        runtime = self._services.allocator.runtime_of(node)
        if runtime is None:
            return "idle", "no job can use it now"
        return "working", runtime.job.reason

    async def drain_node(
        self, request: job_pb2.DrainNodeRequest, caller: Caller
    ) -> job_pb2.DrainNodeResponse:
        node = NodeId(request.node_id)
        own = await self._own_nodes(caller)
        if own is not None and node not in own:
            detail = f"node {node[:64]} did not join with this token"
            raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail, fix="use the token it joined with")
        if node not in self._services.nodes.streams:
            raise HyperGPUError(Reason.NODE_UNKNOWN, f"node {node[:64]} is not connected")
        reason = "drained by its operator"
        self._services.nodes.send(
            node, node_pb2.ControlResponse(drain=node_pb2.Drain(reason=reason))
        )
        await self._services.allocator.drain(node, reason)
        log.info("a node is drained", node=node)
        return job_pb2.DrainNodeResponse()

    async def revoke_node(
        self, request: job_pb2.RevokeNodeRequest, caller: Caller
    ) -> job_pb2.RevokeNodeResponse:
        node = NodeId(request.node_id)
        await asyncio.to_thread(self._nodes.revoke, node)
        log.info("a node was revoked", node=node)
        await self._services.allocator.lose(node, "revoked by its operator")
        self._services.readings.forget(node)
        return job_pb2.RevokeNodeResponse()

    async def readmit_node(
        self, request: job_pb2.ReadmitNodeRequest, caller: Caller
    ) -> job_pb2.ReadmitNodeResponse:
        await asyncio.to_thread(self._nodes.readmit, NodeId(request.node_id))
        log.info("a node was admitted again", node=request.node_id)
        return job_pb2.ReadmitNodeResponse()

    async def create_token(
        self, request: job_pb2.CreateTokenRequest, caller: Caller
    ) -> job_pb2.CreateTokenResponse:
        role = translate.role_value(request.role)
        if role is None:
            raise HyperGPUError(
                Reason.REQUEST_INVALID, "the role is node, viewer, user or operator"
            )
        if request.ttl_s > _TTL_S_MAX:
            raise HyperGPUError(Reason.REQUEST_INVALID, f"ttl_s is at most {_TTL_S_MAX}")
        grant = TokenGrant(role, request.ttl_s, request.uses, request.label[:_LABEL_LENGTH_MAX])
        token = await asyncio.to_thread(
            self._tokens.create,
            grant,
            addresses=self.addresses,
            authority=self._authority,
            now_s=unix_s(),
        )
        log.info("a token was created", token_id=token.id, role=role.value)
        return job_pb2.CreateTokenResponse(token=token_text(token), token_id=token.id)

    async def list_tokens(
        self, request: job_pb2.ListTokensRequest, caller: Caller
    ) -> job_pb2.ListTokensResponse:
        now_s = unix_s()
        return job_pb2.ListTokensResponse(
            tokens=[translate.token_summary(record, now_s) for record in self._tokens.tokens()]
        )

    async def revoke_token(
        self, request: job_pb2.RevokeTokenRequest, caller: Caller
    ) -> job_pb2.RevokeTokenResponse:
        await asyncio.to_thread(self._tokens.revoke, TokenId(request.token_id))
        log.info("a token was revoked", token_id=request.token_id)
        return job_pb2.RevokeTokenResponse()


def _stored_capabilities(record: NodeRecord) -> Capabilities:
    try:
        return msgspec.json.decode(record.capabilities_json, type=Capabilities)
    except (msgspec.MsgspecError, UnicodeError):
        return Capabilities()
