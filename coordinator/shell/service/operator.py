"""OperatorService: nodes and tokens."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import structlog

from coordinator.core.training.assignment import newest_plan_reason, plan_reason
from coordinator.core.work.work_events import NodeReadmitted
from coordinator.shell import translate
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.training.job_runtime import JobRuntime, training_of
from coordinator.shell.kinds.training.waiting_reasons import WaitingReasons
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.service.calls import Caller, page_of
from coordinator.shell.service.gateways import GatewayCertifier
from coordinator.shell.service.telemetry import (
    LOOK_MS,
    NODES_A_MESSAGE,
    NewestLevels,
    node_state,
)
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from coordinator.shell.store.journal.records import NodeRecord
from coordinator.shell.translate import (
    Capabilities,
    health_history_message,
    health_message,
    reading_message,
)
from hypergpu.clock import monotonic_ms, unix_s
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.units import Milliseconds
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.credentials import token_text

log = structlog.get_logger()

_LABEL_LENGTH_MAX = 200
_TTL_S_MAX = 10 * 365 * 24 * 3600


@dataclass(kw_only=True)
class OperatorServicer:
    """One method a call; the gate has admitted an operator."""

    driver: Driver
    fleet: Fleet
    tokens: IssuedTokens
    known: KnownNodes
    others: OtherCoordinators
    """Coordinators that may take over from this one."""
    reasons: WaitingReasons
    authority: Digest
    """BLAKE3 of the CA's certificate, which tokens name."""
    addresses: tuple[str, ...] = ()
    """What tokens name, once the listener is bound."""
    gateways: GatewayCertifier | None = None
    """None before the listeners are bound."""

    def __post_init__(self) -> None:
        self._jobs = self.driver.runtimes_of(JobRuntime)
        self._levels = NewestLevels(self.fleet, self._jobs, self.known)

    async def list_nodes(
        self, request: job_pb2.ListNodesRequest, caller: Caller
    ) -> job_pb2.ListNodesResponse:
        # In the writer's thread no counts are on their way to the journal meanwhile.
        records = await self.driver.in_writer(self.driver.journal.nodes)
        own = caller.own_nodes
        own_records = [record for record in records if own is None or record.node in own]
        page, next_page = page_of(own_records, request.page)
        summaries = [self._summary(record) for record in page]
        for summary in summaries:
            self._add_reading(summary)
        return job_pb2.ListNodesResponse(nodes=summaries, next_page=next_page)

    async def watch_telemetry(
        self, _request: job_pb2.WatchTelemetryRequest, caller: Caller
    ) -> AsyncIterator[job_pb2.WatchTelemetryResponse]:
        told_versions: dict[NodeId, int] = {}
        own, nodes = caller.own_nodes, self._levels.nodes
        while not self.driver.is_closing:
            caller.recheck()
            self._levels.refresh(monotonic_ms())
            if own is not None and caller.token is not None and self._levels.nodes != nodes:
                joined_nodes = self.tokens.joined_nodes
                own = await asyncio.to_thread(joined_nodes, caller.token.token_id)
                nodes = self._levels.nodes
            news = self._levels.news(told_versions, own)
            if news:
                yield job_pb2.WatchTelemetryResponse(nodes=news)
            if len(news) < NODES_A_MESSAGE:
                await asyncio.sleep(LOOK_MS / 1000)

    def _add_reading(self, summary: job_pb2.NodeSummary) -> None:
        """Add a node's health, the measurements of one that was here since this process began, and
        what plans said of it.
        """
        node, readings = NodeId(summary.node_id), self.fleet.readings
        health = self.fleet.health.health(node)
        summary.health.CopyFrom(health_message(health.parts, health.exclusion))
        summary.health_history.CopyFrom(health_history_message(health.history))
        if readings.knows(node):
            summary.reading.CopyFrom(reading_message(readings.reading(node), monotonic_ms()))
        runtime = training_of(self.fleet.allocator.runtime_of(node))
        if runtime is not None:
            summary.plan_reason = plan_reason(runtime.job, node)
            return
        jobs = (each.job for each in reversed(list(self._jobs.values())))
        summary.plan_reason = newest_plan_reason(jobs, node)

    def _summary(self, record: NodeRecord) -> job_pb2.NodeSummary:
        nodes, node = self.fleet.nodes, record.node
        session = nodes.streams.get(node)
        job_runtime = self.fleet.allocator.runtime_of(node)
        runtime = training_of(job_runtime)
        capabilities = session.capabilities if session else _stored_capabilities(record)
        silent_ms = nodes.silent_ms(node)
        away_ms = max(0, unix_s() * 1000 - record.last_seen_ms)
        accepted_count, rejected_count = nodes.unstored_counts(node)
        state, reason = node_state(self.fleet, self._jobs, node, is_revoked=record.is_revoked)
        return job_pb2.NodeSummary(
            node_id=node,
            state=state,
            capabilities=translate.capabilities_message(capabilities),
            job_id=job_runtime.job.job_id if job_runtime else "",
            last_seen_ms_ago=away_ms if silent_ms is None else silent_ms,
            software=session.software if session else record.software,
            updates_accepted=record.updates_accepted + accepted_count,
            updates_rejected=record.updates_rejected + rejected_count,
            reason=(self.reasons.obstacle(runtime) if runtime else "") or reason,
            pause_reason=nodes.pause_reason(node),
            trust_labels=sorted(nodes.trust_labels(node)),
        )

    async def drain_node(
        self, request: job_pb2.DrainNodeRequest, caller: Caller
    ) -> job_pb2.DrainNodeResponse:
        node = _steered_node(request.node_id, caller)
        if node not in self.fleet.nodes.streams:
            raise HyperGPUError(Reason.NODE_UNKNOWN, f"node {node[:64]} is not connected")
        reason = "drained by its operator"
        self.fleet.nodes.send(node, node_pb2.ControlResponse(drain=node_pb2.Drain(reason=reason)))
        await self.fleet.allocator.drain(node, reason)
        log.info("a node is drained", node=node)
        return job_pb2.DrainNodeResponse()

    async def pause_node(
        self, request: job_pb2.PauseNodeRequest, caller: Caller
    ) -> job_pb2.PauseNodeResponse:
        by = "an operator" if caller.own_nodes is None else "its owner"
        reason = f"paused by {by}"
        node = await self._set_pause(request.node_id, caller, reason)
        self.fleet.nodes.pause(node, reason)
        self.fleet.allocator.review()
        return job_pb2.PauseNodeResponse()

    async def resume_node(
        self, request: job_pb2.ResumeNodeRequest, caller: Caller
    ) -> job_pb2.ResumeNodeResponse:
        node = await self._set_pause(request.node_id, caller, "")
        self.fleet.nodes.end_pause(node)
        self.fleet.allocator.review()
        return job_pb2.ResumeNodeResponse()

    async def _set_pause(self, node_id: str, caller: Caller, reason: str) -> NodeId:
        """Store a node's pause, or its end."""
        node = _steered_node(node_id, caller)
        self.known.check(node)
        await asyncio.to_thread(self.driver.journal.set_pause, node, reason)
        log.info("a node's pause was changed", node=node, reason=reason or "resumed")
        return node

    async def revoke_node(
        self, request: job_pb2.RevokeNodeRequest, caller: Caller
    ) -> job_pb2.RevokeNodeResponse:
        node = NodeId(request.node_id)
        await asyncio.to_thread(self.known.revoke, node)
        log.info("a node was revoked", node=node)
        await self._lose(node, "revoked by its operator")
        return job_pb2.RevokeNodeResponse()

    async def _lose(self, node: NodeId, reason: str) -> None:
        """End the streams and the work of a node that was revoked."""
        await self.fleet.allocator.lose(node, reason)
        self.fleet.readings.forget(node)

    async def readmit_node(
        self, request: job_pb2.ReadmitNodeRequest, caller: Caller
    ) -> job_pb2.ReadmitNodeResponse:
        node = NodeId(request.node_id)
        await asyncio.to_thread(self.known.readmit, node)
        for job_id, runtime in self.driver.runtimes.items():
            member = runtime.job.members.get(node)
            has_ended = self.driver.kinds.of_job(runtime.job).core.has_ended
            if member is not None and member.ban and not has_ended(runtime.job):
                readmission = NodeReadmitted(at_ms=Milliseconds(0), node=node)
                await self.driver.submit(job_id, readmission)
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
            self.tokens.create,
            grant,
            addresses=(*self.addresses, *self.others.addresses),
            authority=self.authority,
            now_s=unix_s(),
        )
        log.info("a token was created", token_id=token.id, role=role.value)
        return job_pb2.CreateTokenResponse(token=token_text(token), token_id=token.id)

    async def list_tokens(
        self, request: job_pb2.ListTokensRequest, caller: Caller
    ) -> job_pb2.ListTokensResponse:
        now_s = unix_s()
        page, next_page = page_of(self.tokens.tokens(), request.page)
        summaries = [translate.token_summary(record, now_s) for record in page]
        return job_pb2.ListTokensResponse(tokens=summaries, next_page=next_page)

    async def certify_gateway(
        self, request: job_pb2.CertifyGatewayRequest, caller: Caller
    ) -> job_pb2.CertifyGatewayResponse:
        if self.gateways is None or caller.token is None:
            raise HyperGPUError(Reason.NOT_READY, "no gateway can be certified yet")
        return await asyncio.to_thread(self.gateways.certify, caller.token.token_id, request)

    async def revoke_token(
        self, request: job_pb2.RevokeTokenRequest, caller: Caller
    ) -> job_pb2.RevokeTokenResponse:
        # Whoever asked may go away meanwhile: no node is to stay.
        nodes = await asyncio.shield(self._revoke_token(TokenId(request.token_id)))
        return job_pb2.RevokeTokenResponse(nodes=nodes)

    async def _revoke_token(self, token_id: TokenId) -> int:
        """Void a token and lose the nodes that joined with it; returns how many they are."""
        nodes = await asyncio.to_thread(self.tokens.revoke, token_id)
        self.known.learn_revoked(nodes)
        log.info("a token was revoked", token_id=token_id, nodes=len(nodes))
        for node in nodes:
            await self._lose(node, f"token {token_id}, with which it joined, was revoked")
        return len(nodes)


def _steered_node(node_id: str, caller: Caller) -> NodeId:
    """The node, if the caller may steer it.

    Raises:
        HyperGPUError: ROLE_FORBIDDEN, it did not join with the caller's token.
    """
    if caller.own_nodes is not None and node_id not in caller.own_nodes:
        detail = f"node {node_id[:64]} did not join with this token"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail, fix="use the token it joined with")
    return NodeId(node_id)


def _stored_capabilities(record: NodeRecord) -> Capabilities:
    try:
        return msgspec.json.decode(record.capabilities_json, type=Capabilities)
    except (msgspec.MsgspecError, UnicodeError):
        return Capabilities()
