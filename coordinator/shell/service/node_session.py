"""How a node joins and stays: enrolment for a certificate, then its control stream with heartbeats
and progress up, work and cancels down.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from coordinator.core.hub.heartbeats import StreamPace
from coordinator.core.network.progress import LeaseProgress
from coordinator.core.training.job.state import Job
from coordinator.core.work.kind import PendingWork
from coordinator.shell import translate
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.performing import Performing
from coordinator.shell.kinds.performers.packed_work import PackedWorkPerformer
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.speed_keys import speed_sources
from coordinator.shell.nodes.control_stream import ControlStream, QueuedMessage
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.identity.authority import Authority, IssuedCertificate
from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.probe_tokens import RENEWAL_MS
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.service.calls import Caller, Requests
from coordinator.shell.service.gates import NodeGate, address_digest, peer_host
from coordinator.shell.service.greeting import Greeter
from coordinator.shell.service.versions import reject_other_version, version_message
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from coordinator.shell.store.journal.records import JournalError, NodeRecord
from hypergpu.clock import monotonic_ms, unix_s
from hypergpu.crypto import JoinClaim, node_id_of, verify
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentsPlugin
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.protocol import SOFTWARE
from hypergpu.v1 import measurement_pb2, node_pb2, work_pb2
from hypergpu.wire.credentials import Credential
from hypergpu.wire.messages import cause_value, lease_value, receipt_value
from hypergpu.wire.packing import MessagePacker

log = structlog.get_logger()

_SOFTWARE_LENGTH_MAX = 200
_ID_LENGTH_MAX = 40
"""A token's id is shorter; a longer one is nobody's."""


class Enrolment:
    """Admits nodes and renews their certificates; without an authority it issues none."""

    def __init__(
        self,
        *,
        authority: Authority | None,
        tokens: IssuedTokens,
        nodes: KnownNodes,
        guesses: GuessLimiter,
    ) -> None:
        self._authority = authority
        self._tokens = tokens
        self._nodes = nodes
        self._guesses = guesses
        self.node_port = self.bulk_port = 0
        """Port of the nodes' listener, once it is bound."""
        self.others = OtherCoordinators()
        """Those that nodes may dial when this one is gone."""

    @property
    def ports(self) -> tuple[int, int]:
        """Ports of nodes and of bulk."""
        return self.node_port, self.bulk_port

    async def join(self, request: node_pb2.JoinRequest, caller: Caller) -> node_pb2.JoinResponse:
        """Admit a node.

        Raises:
            HyperGPUError: the version, the token, the signature or the request will not do.
        """
        reject_other_version(request.version)
        # Of those who share a join line, whoever signs wrongly is told apart by the address.
        bearer = f"{request.token_id[:_ID_LENGTH_MAX]} at {peer_host(caller.peer)}"
        wrong = {
            Reason.TOKEN_INVALID: request.token_id[:_ID_LENGTH_MAX],
            Reason.SIGNATURE_INVALID: bearer,
            Reason.REQUEST_INVALID: bearer,
        }
        with self._guesses.count_failures(wrong):
            return await asyncio.to_thread(self._join, request)

    def _join(self, request: node_pb2.JoinRequest) -> node_pb2.JoinResponse:
        credential = Credential(TokenId(request.token_id), request.token_secret)
        node = node_id_of(request.public_key)
        # Before anything that costs more: a stranger is to make nobody sign or verify.
        self._tokens.check_join(credential, node, unix_s())
        claim = JoinClaim(credential.token_id, digest_of(request.certificate_request))
        if not verify(node, claim, request.signature):
            detail = "the signature is not the public key's over this request"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        self._nodes.check_not_revoked(node)
        record = _record(node, request)
        certificate = self._issue_certificate(node, request.certificate_request)
        self._tokens.spend(credential, node, unix_s())
        self._nodes.admit(record)
        if self._tokens.is_revoked(credential.token_id):
            # Since it was spent: the revocation may have found no node to shut out.
            self._nodes.revoke(node)
            raise HyperGPUError(Reason.TOKEN_REVOKED, f"token {credential.token_id} was revoked")
        log.info("a node joined", node=node, token_id=credential.token_id)
        # Whoever began to stand by a moment ago may be all that is left in a moment.
        with suppress(JournalError):
            self.others.refresh()
        return node_pb2.JoinResponse(
            version=version_message(),
            node_id=node,
            certificate=certificate.pem if certificate else b"",
            certificate_expires_unix_s=certificate.expires_s if certificate else 0,
            node_port=self.node_port,
            bulk_port=self.bulk_port,
            coordinators=self.others.node_addresses,
        )

    async def renew(
        self, node: NodeId, request: node_pb2.RenewCertificateRequest
    ) -> node_pb2.RenewCertificateResponse:
        """A fresh certificate for a node that still has a good one."""
        return await asyncio.to_thread(self._renew, node, request)

    def _renew(
        self, node: NodeId, request: node_pb2.RenewCertificateRequest
    ) -> node_pb2.RenewCertificateResponse:
        certificate = self._issue_certificate(node, request.certificate_request)
        if certificate is None:
            raise HyperGPUError(
                Reason.REQUEST_INVALID, "this coordinator runs without certificates"
            )
        return node_pb2.RenewCertificateResponse(
            certificate=certificate.pem, certificate_expires_unix_s=certificate.expires_s
        )

    def _issue_certificate(self, node: NodeId, request_pem: bytes) -> IssuedCertificate | None:
        if self._authority is None:
            return None
        return self._authority.issue(node, request_pem, unix_s())


def _record(node: NodeId, request: node_pb2.JoinRequest) -> NodeRecord:
    now_ms = time.time_ns() // 1_000_000
    capabilities = translate.capabilities_value(request.capabilities)
    return NodeRecord(
        node=node,
        public_key=request.public_key,
        capabilities_json=msgspec.json.encode(capabilities),
        software=_printable(request.version.software)[:_SOFTWARE_LENGTH_MAX],
        first_seen_ms=now_ms,
        last_seen_ms=now_ms,
    )


_REASON_LENGTH_MAX = 500


@dataclass(frozen=True)
class ControlSessions:
    """Serves control streams."""

    gate: NodeGate
    greeter: Greeter
    driver: Driver
    fleet: Fleet
    performing: Performing
    payments: PaymentsPlugin | None

    async def control(
        self, caller: Caller, requests: Requests
    ) -> AsyncIterator[node_pb2.ControlResponse]:
        """Serve one control stream until either side ends it."""
        node = self.gate.node(caller)
        session, packer = await self._open_session(caller, requests)
        listen_task = asyncio.create_task(self._listen(session, requests))
        try:
            while (message := await session.outbox.get()) is not None:
                yield _with_blob(message, packer)
                session.note_written(message)
            if listen_task.done() and (exception := listen_task.exception()) is not None:
                raise exception
        finally:
            _end(listen_task)
            self.fleet.nodes.disconnect(session)
            self._note_absence(node)
            self._left_for_good(session)
            log.info("a node's control stream ended", node=node)

    async def _open_session(
        self, caller: Caller, requests: Requests
    ) -> tuple[ControlStream, MessagePacker | None]:
        node = self.gate.node(caller)
        first = await requests.next(self.greeter.settings.read_timeout_ms)
        self.gate.check(node)  # It may have been revoked before it said hello.
        if first is None or first.WhichOneof("message") != "hello":
            raise HyperGPUError(Reason.REQUEST_INVALID, "a control stream begins with a hello")
        self.gate.let_in(node)
        hello = first.hello
        reject_other_version(hello.version)
        capabilities = translate.capabilities_value(hello.capabilities)
        newest = {
            JobId(each.job_id): receipt_value(each.receipt, node) for each in hello.newest_receipts
        }
        session = ControlStream(node, capabilities, _printable(hello.version.software))
        session.pace = StreamPace.begin(self.greeter.usual_pace())
        session.is_watched = caller.gateway is not None
        session.address_digest = address_digest(caller.peer, is_gateway=caller.gateway is not None)
        session.note_abilities(hello)
        welcome = self.greeter.welcome(session)
        if hello.unpacks:
            welcome.welcome.known_address = session.known_address = self.greeter.bulk.known_address
        session.send(welcome)
        self.fleet.nodes.connect(session)
        self.fleet.readings.mark_present(node)
        if hello.is_starting:
            self.fleet.readings.mark_starting(node)
        log.info("a node is connected", node=node, software=session.software, ours=SOFTWARE)
        self._resume(session, hello.working)
        if self.payments is not None:
            self.payments.greet(node, newest)
        self.fleet.allocator.review()
        return session, MessagePacker() if hello.unpacks else None

    def _resume(self, session: ControlStream, working: Sequence[node_pb2.Lease]) -> None:
        """Say again what the node is to do, and end what it no longer should."""
        runtime = self.fleet.allocator.runtime_of(session.node)
        if runtime is not None and runtime.is_recovering:
            return  # Its work goes out when the job is checked.
        pending_works: dict[tuple[JobId, int], PendingWork] = {}
        if runtime is not None:
            works = self.driver.kinds.of_job(runtime.job).core.pending(runtime.job, session.node)
            pending_works = {(runtime.job.job_id, each.lease): each for each in works}
        held_leases = {(JobId(lease.job_id), lease.number) for lease in working}
        for lease in working:
            if (JobId(lease.job_id), lease.number) not in pending_works:
                cancel = node_pb2.Cancel(lease=lease, reason="the lease is no longer current")
                session.send(node_pb2.ControlResponse(cancel=cancel))
        for key, pending_work in pending_works.items():
            if runtime is not None and key not in held_leases:
                self.performing.perform(runtime, pending_work.command)

    async def _listen(self, session: ControlStream, requests: Requests) -> None:
        """Take in what the node says; ends the session when it says no more."""
        renewal_ms = monotonic_ms() + RENEWAL_MS
        try:
            while (message := await requests.next(session.silence_limit_ms)) is not None:
                self.gate.check(session.node)  # It may have been revoked, and read nothing.
                self.gate.count_message(session.node)
                self.fleet.nodes.mark_heard(session.node)
                if self.greeter.is_outdated(session) or monotonic_ms() >= renewal_ms:
                    renewal_ms = monotonic_ms() + RENEWAL_MS
                    session.send(self.greeter.welcome(session))
                if not self._hear_of_line(session, message):
                    await self._hear_of_work(session, message)
        finally:
            session.close()

    def _hear_of_line(self, session: ControlStream, message: node_pb2.ControlRequest) -> bool:
        """Take in what only says how the node is, at once; False for everything else."""
        match message.WhichOneof("message"):
            case "heartbeat":
                echo = node_pb2.HeartbeatEcho(sequence=message.heartbeat.sequence)
                session.send(node_pb2.ControlResponse(heartbeat_echo=echo))
            case "round_trip_probe":
                back = measurement_pb2.RoundTripEcho(sequence=message.round_trip_probe.sequence)
                session.send(node_pb2.ControlResponse(round_trip_echo=back))
            case "measured":
                self.fleet.readings.record_report(session.node, message.measured)
            case "worker_ready":
                self.fleet.readings.mark_present(session.node)
            case _:
                return False
        return True

    async def _hear_of_work(self, session: ControlStream, message: node_pb2.ControlRequest) -> None:
        node = session.node
        match message.WhichOneof("message"):
            case "progress":
                session.note_work()
                self._note_progress(node, message.progress)
            case "hand_back":
                await self._hand_back(node, message.hand_back)
            case "work_outputs":
                self._hear_of_calls(session, message.work_outputs)
            case "draining":
                reason = _printable(message.draining.reason)
                await self.fleet.allocator.drain(node, reason or "the node is draining")
            case _:
                raise HyperGPUError(Reason.REQUEST_INVALID, "an empty control message")

    def _hear_of_calls(self, session: ControlStream, message: work_pb2.WorkOutputs) -> None:
        for output in message.outputs:
            runtime = self.driver.runtimes.get(JobId(output.job_id))
            if runtime is None:
                continue
            performer = self.performing.performer_of(runtime)
            if isinstance(performer, PackedWorkPerformer):
                performer.take_output(runtime, session, output)

    def _note_progress(self, node: NodeId, progress: node_pb2.Progress) -> None:
        self.fleet.nodes.record_progress(node, translate.progress_value(progress))
        runtime = self.driver.runtimes_of(JobRuntime).get(JobId(progress.lease.job_id))
        if runtime is None:
            return
        runtime.progress_version += 1
        lease_state = lease_progress(runtime.job, node, progress.lease.number, progress.steps_done)
        if lease_state is not None:
            source = speed_sources(runtime.job, self.fleet.nodes.streams, [node]).get(node)
            self.fleet.readings.record_progress(node, lease_state, source)

    async def _hand_back(self, node: NodeId, message: node_pb2.HandBack) -> None:
        reason = _printable(message.reason) or "handed back"
        lease = lease_value(message.lease)
        refusal = f"there is no job {lease.job_id}"
        if (runtime := self.driver.runtimes.get(lease.job_id)) is not None:
            machine = self.driver.kinds.of_job(runtime.job).core
            event = machine.hand_back_event(node, lease, reason, cause_value(message))
            refusal = await self.driver.insist(lease.job_id, event)
        if refusal:
            # A node may say this as often as it likes.
            log.debug("no work was handed back", node=node, reason=reason, refused=refusal)
            return
        log.info("work was handed back", node=node, reason=reason)
        self.fleet.allocator.review()

    def _note_absence(self, node: NodeId) -> None:
        if node not in self.fleet.nodes.streams:
            self.fleet.readings.mark_absent(node)
            self.greeter.echo.forget(node)

    def _left_for_good(self, session: ControlStream) -> None:
        """A draining node that holds no work and closes its stream is not waited for."""
        node = session.node
        is_replaced = node in self.fleet.nodes.streams
        if is_replaced or not self.fleet.nodes.drain_reason(node):
            return
        if self.fleet.allocator.runtime_of(node) is None:
            self.fleet.nodes.forget(node)


def _with_blob(queued: QueuedMessage, packer: MessagePacker | None) -> node_pb2.ControlResponse:
    """A message as it goes out. A blob goes beside what is packed: it would not get smaller, and is
    no text that later messages are like.
    """
    message = queued.message if packer is None else packer.pack(queued.message)
    if queued.content:
        message.blob = queued.content
    return message


def lease_progress(job: Job, node: NodeId, lease: int, steps: int) -> LeaseProgress | None:
    """A node's progress in work that it was given; None: it has no such work, or not so much."""
    participant = job.participant(node)
    if participant is None or participant.lease != lease or not participant.is_open:
        return None
    if steps > participant.inner_steps:
        return None
    stated_batch = job.spec.training.batch_size
    full_steps = steps * participant.plan.batch(stated_batch) / stated_batch
    return LeaseProgress(job.job_id, lease, full_steps, monotonic_ms())


def _printable(reason: str) -> str:
    """A node's words without what would act on the terminals that show them."""
    return "".join(each for each in reason[:_REASON_LENGTH_MAX] if each.isprintable())


def _end(listening: "asyncio.Task[None]") -> None:
    """Stop listening; an error that ended it before was raised already or died with the stream."""
    listening.cancel()
    if listening.done() and not listening.cancelled():
        listening.exception()
