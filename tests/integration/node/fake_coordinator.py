"""FakeCoordinator as small as can be, on a real port, and a daemon that works for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil
from aiohttp import web

from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.service.calls import abort
from coordinator.shell.store.bulk.messages import Certificates
from coordinator.shell.store.bulk.server import tls_context
from gpu_node.config import NodeSettings
from gpu_node.core.commands import Leave
from gpu_node.core.limits import OwnerLimits
from gpu_node.shell.daemon.app import Daemon
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.channel import open_channel
from gpu_node.shell.worker.protocol import WorkerCapabilities
from hypergpu.assignment import Assignment
from hypergpu.clock import unix_ms
from hypergpu.crypto import node_id_of
from hypergpu.digests import digest_from_wire, digest_of, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest, JobId, NodeId, TokenId
from hypergpu.ledger_terms import Domain, Terms, terms_of
from hypergpu.part_file import Span
from hypergpu.protocol import PROTOCOL, PROTOCOL_ENTRY
from hypergpu.statements import Contribution, is_signed_by, shard_digest
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import measurement_pb2, node_pb2, node_pb2_grpc, optimizer_pb2, tensor_pb2
from hypergpu.wire.authority import TLS_NAME
from hypergpu.wire.bulk import BulkClient
from hypergpu.wire.credentials import Role, Token, split_address
from hypergpu.wire.messages import blob_value, terms_message
from hypergpu.wire.update_requests import (
    ANSWER_TYPE,
    OFFER_HEADER,
    UPDATE_PATH,
    UpdateAnswer,
    answer_bytes,
    offer_in,
    refusal_answer,
)
from hypergpu.workloads.layouts import numpy_layout
from hypergpu.workloads.registry import build, find

# ruff: noqa: N802 (the methods are named by the schema)


Context = Any
CHUNK_BYTES = 64 << 10
TIMEOUT_MS = Milliseconds(60_000)
SECRET = "s" * 24
WELCOME = node_pb2.Welcome(
    version=node_pb2.Version(protocol=PROTOCOL, software="test"), heartbeat_interval_ms=20_000
)


def terms_for(job_id: str) -> Terms:
    """What this side's jobs are signed under."""
    domain = Domain(31337, Address("0x" + "c0" * 20))
    return terms_of(Address("0x" + "b1" * 20), JobId(job_id), domain)


class FakeCoordinator(node_pb2_grpc.NodeServiceServicer):
    """A coordinator's side with its state in the open."""

    bulk_port = 0
    ticket_life_ms = 60_000
    open_epoch = 0
    """Offers that are signed for an earlier epoch are told this one."""
    tickets = 0
    """Tickets that were asked for so far, to fetch and to send."""
    assigns_tickets = False
    """Whether assignments bring the ticket for their model."""
    blob_beside = b""
    """Bytes that come beside each assignment, as if they were its model's newest blob."""
    heartbeat_at_s = 0.0
    longest_silence_s = 0.0
    """Between two heartbeats."""

    node_port = 0

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.break_after_bytes: int | None = None
        """The next transfer breaks once so many bytes have moved."""
        self.breaking: dict[int, asyncio.Event] = {}
        """Downloads from these offsets bring nothing and break, once that has happened."""
        self.kill_after_bytes: int | None = None
        """`kill` is called once an upload has brought so many bytes."""
        self.kill: Callable[[], None] = lambda: None
        self.rejection: HyperGPUError | None = None
        """What the next update or control stream meets."""
        self.join_error: HyperGPUError | None = None
        self.heartbeat = asyncio.Event()
        self.offsets: list[int] = []
        self.asked_bytes = 0
        """Bytes of blobs that were asked for so far."""
        self.nonces: list[int] = []
        self.offers: list[node_pb2.OfferUpdateRequest] = []
        self.offered, self.stored, self.held = b"", bytearray(), list[Span]()
        """Digest of the newest update, its bytes, and its ranges that came."""
        self.arrived: asyncio.Queue[Digest] = asyncio.Queue()
        self.contributed: asyncio.Queue[node_pb2.ContributeRequest] = asyncio.Queue()
        """Results of packed work."""
        self.accepted: set[Digest] = set()
        self.authority: Authority | None = None
        self.joins: list[node_pb2.JoinRequest] = []
        self.renewed = asyncio.Event()
        self.welcome = WELCOME
        self.echoes = True
        self.said: asyncio.Queue[node_pb2.ControlRequest] = asyncio.Queue()
        self.to_say: asyncio.Queue[node_pb2.ControlResponse | None] = asyncio.Queue()

    def put(self, content: bytes) -> tensor_pb2.BlobRef:
        """Hold a blob."""
        digest = digest_of(content)
        self.blobs[digest] = content
        return tensor_pb2.BlobRef(
            digest=tensor_pb2.Digest(value=digest_to_wire(digest)), size_bytes=len(content)
        )

    async def ResolveBlob(
        self, request: node_pb2.ResolveBlobRequest, context: Context
    ) -> node_pb2.ResolveBlobResponse:
        digest = digest_from_wire(request.digest.value)
        content = self.blobs.get(digest)
        if content is None:
            await abort(context, HyperGPUError(Reason.BLOB_UNKNOWN, "it is not here"))
            return node_pb2.ResolveBlobResponse()
        self.tickets += 1
        return node_pb2.ResolveBlobResponse(
            size_bytes=len(content), ticket=self.ticket(digest, len(content))
        )

    def ticket(self, digest: Digest, size_bytes: int) -> tensor_pb2.Ticket:
        """A ticket for a blob, which need not be here."""
        scheme = "http" if self.authority is None else "https"
        whole = tensor_pb2.TicketRange(
            url=f"{scheme}://{TLS_NAME}:{self.bulk_port}/{digest}", end=size_bytes
        )
        return tensor_pb2.Ticket(ranges=[whole], life_ms=self.ticket_life_ms)

    async def serve_range(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request at the bulk port."""
        if request.path == UPDATE_PATH:
            answer = await self._answer_update(request)
            body = answer_bytes(answer)
            return web.Response(status=answer.status, body=body, content_type=ANSWER_TYPE)
        return await (self._take(request) if request.method == "PUT" else self._give(request))

    async def _answer_update(self, request: web.BaseRequest) -> UpdateAnswer:
        offer = node_pb2.OfferUpdateRequest.FromString(
            offer_in(request.headers[OFFER_HEADER]) or b""
        )
        if offer.nonce not in self.nonces:
            self.nonces.append(offer.nonce)
            self.offers.append(offer)
        rejection, self.rejection = self.rejection, None
        if rejection is not None:
            return refusal_answer(rejection)
        if offer.epoch < self.open_epoch:
            return UpdateAnswer(open_epoch=self.open_epoch)
        digest = digest_from_wire(offer.digest.value)
        if digest not in self.accepted:
            self._begin(offer)
            if request.body_exists:
                await self._take(request)
            if missing_ranges := missing(self.held, offer.size_bytes):
                return UpdateAnswer(missing=tuple(missing_ranges))
            if digest_of(self.stored) != digest:
                return refusal_answer(HyperGPUError(Reason.OFFSET_MISMATCH, "not all is here"))
            self.accepted.add(digest)
        self.arrived.put_nowait(digest)
        return UpdateAnswer(is_accepted=True)

    def _begin(self, offer: node_pb2.OfferUpdateRequest) -> None:
        """Begin an upload, or go on with it."""
        if self.offered != offer.digest.value:
            self.offered = offer.digest.value
            self.stored, self.held = bytearray(offer.size_bytes), []

    async def _give(self, request: web.BaseRequest) -> web.StreamResponse:
        content = self.blobs[Digest(request.path.removeprefix("/"))]
        span = request.http_range
        self.offsets.append(span.start)
        stop_at, self.break_after_bytes = self.break_after_bytes, None
        self.asked_bytes += span.stop - span.start
        response = web.StreamResponse(status=206)
        response.content_length = span.stop - span.start
        await response.prepare(request)
        if (may_break := self.breaking.pop(span.start, None)) is not None:
            await may_break.wait()
            stop_at = 0
        end = span.stop if stop_at is None else span.start + stop_at
        await response.write(content[span.start : end])
        if stop_at is not None:
            assert request.transport is not None
            request.transport.close()
        return response

    async def _take(self, request: web.BaseRequest) -> web.StreamResponse:
        start, last = map(int, request.headers["Content-Range"][6:-2].split("-"))
        self.offsets.append(start)
        stop_at, self.break_after_bytes = self.break_after_bytes, None
        at = start
        async for piece in request.content.iter_chunked(CHUNK_BYTES):
            self.stored[at : at + len(piece)] = piece
            at += len(piece)
            self.held.append(Span(start, at))
            if self.kill_after_bytes is not None and at >= self.kill_after_bytes:
                self.kill_after_bytes = None
                self.kill()
            if stop_at is not None and at - start >= stop_at:
                assert request.transport is not None
                request.transport.close()
                break
        return web.Response(status=204 if at == last + 1 else 400)

    async def OfferUpdate(
        self, request: node_pb2.OfferUpdateRequest, context: Context
    ) -> node_pb2.OfferUpdateResponse:
        self.nonces.append(request.nonce)
        self.offers.append(request)
        rejection, self.rejection = self.rejection, None
        if rejection is not None:
            await abort(context, rejection)
        if request.epoch < self.open_epoch:
            return node_pb2.OfferUpdateResponse(open_epoch=self.open_epoch)
        if (digest := digest_from_wire(request.digest.value)) in self.accepted:
            self.arrived.put_nowait(digest)
            return node_pb2.OfferUpdateResponse(is_accepted=True)
        self._begin(request)
        scheme = "http" if self.authority is None else "https"
        url = f"{scheme}://{TLS_NAME}:{self.bulk_port}/upload"
        ranges = [
            tensor_pb2.TicketRange(url=url, start=start, end=end)
            for start, end in missing(self.held, request.size_bytes)
        ]
        ticket = tensor_pb2.Ticket(ranges=ranges, life_ms=self.ticket_life_ms)
        self.tickets += 1
        return node_pb2.OfferUpdateResponse(ticket=ticket)

    async def CommitUpdate(
        self, request: node_pb2.CommitUpdateRequest, context: Context
    ) -> node_pb2.CommitUpdateResponse:
        digest = digest_of(self.stored)
        if digest != digest_from_wire(request.digest.value):
            await abort(context, HyperGPUError(Reason.OFFSET_MISMATCH, "not all is here"))
        self.accepted.add(digest)
        self.arrived.put_nowait(digest)
        return node_pb2.CommitUpdateResponse()

    async def OfferResult(
        self, request: node_pb2.OfferResultRequest, context: Context
    ) -> node_pb2.OfferResultResponse:
        if len(self.stored) != request.blob.size_bytes:
            self.stored, self.held = bytearray(request.blob.size_bytes), []
        scheme = "http" if self.authority is None else "https"
        url = f"{scheme}://{TLS_NAME}:{self.bulk_port}/upload"
        ranges = [
            tensor_pb2.TicketRange(url=url, start=start, end=end)
            for start, end in missing(self.held, request.blob.size_bytes)
        ]
        ticket = tensor_pb2.Ticket(ranges=ranges, life_ms=self.ticket_life_ms)
        return node_pb2.OfferResultResponse(ticket=ticket)

    async def Contribute(
        self, request: node_pb2.ContributeRequest, context: Context
    ) -> node_pb2.ContributeResponse:
        self.contributed.put_nowait(request)
        return node_pb2.ContributeResponse()

    async def Join(self, request: node_pb2.JoinRequest, context: Context) -> node_pb2.JoinResponse:
        self.joins.append(request)
        if self.join_error is not None:
            await abort(context, self.join_error)
        node = node_id_of(request.public_key)
        return node_pb2.JoinResponse(
            version=WELCOME.version,
            node_id=node,
            certificate=self._certificate(node, request.certificate_request),
            certificate_expires_unix_s=unix_ms() // 1000 + 24 * 3600,
            node_port=self.node_port,
        )

    async def RenewCertificate(
        self, request: node_pb2.RenewCertificateRequest, context: Context
    ) -> node_pb2.RenewCertificateResponse:
        self.renewed.set()
        (name,) = context.auth_context()["x509_common_name"]
        return node_pb2.RenewCertificateResponse(
            certificate=self._certificate(NodeId(name.decode()), request.certificate_request),
            certificate_expires_unix_s=unix_ms() // 1000 + 24 * 3600,
        )

    def _certificate(self, node: NodeId, request: bytes) -> bytes:
        if self.authority is None:
            return b""
        return self.authority.issue(node, request, unix_ms() // 1000).pem

    async def Control(
        self, requests: AsyncIterator[node_pb2.ControlRequest], context: Context
    ) -> AsyncIterator[node_pb2.ControlResponse]:
        rejection, self.rejection = self.rejection, None
        if rejection is not None:
            await abort(context, rejection)
        # Bound here: a stream whose node was killed must not speak for the next one.
        to_say = self.to_say
        listen_task = asyncio.create_task(self._listen(requests, to_say))
        welcome = node_pb2.Welcome()
        welcome.CopyFrom(self.welcome)
        welcome.bulk_port = self.bulk_port
        yield node_pb2.ControlResponse(welcome=welcome)
        while (message := await to_say.get()) is not None:
            yield message
        listen_task.cancel()

    async def _listen(
        self,
        requests: AsyncIterator[node_pb2.ControlRequest],
        to_say: asyncio.Queue[node_pb2.ControlResponse | None],
    ) -> None:
        async for request in requests:
            if request.HasField("heartbeat"):
                self.heartbeat.set()
                before_s, self.heartbeat_at_s = self.heartbeat_at_s, time.monotonic()
                if before_s:
                    silence_s = self.heartbeat_at_s - before_s
                    self.longest_silence_s = max(self.longest_silence_s, silence_s)
                if not self.echoes:
                    continue
                echo = node_pb2.HeartbeatEcho(sequence=request.heartbeat.sequence)
                to_say.put_nowait(node_pb2.ControlResponse(heartbeat_echo=echo))
            elif request.HasField("round_trip_probe") and self.echoes:
                back = measurement_pb2.RoundTripEcho(sequence=request.round_trip_probe.sequence)
                to_say.put_nowait(node_pb2.ControlResponse(round_trip_echo=back))
            else:
                self.said.put_nowait(request)
        to_say.put_nowait(None)

    def begin(self) -> None:
        """Hold no update and no messages of earlier rounds."""
        self.offered = b""
        self.offers.clear()
        self.forget_said()

    def forget_said(self) -> None:
        """Drop what earlier streams left behind."""
        self.said = asyncio.Queue()
        self.to_say = asyncio.Queue()

    async def next_said(self, kind: str) -> Any:
        """The next message of a kind; others are passed over."""
        while True:
            message = await self.said.get()
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)


class Served(NamedTuple):
    """A service that is listening, and how to reach it."""

    service: FakeCoordinator
    token: Token
    server: grpc.aio.Server

    @property
    def address(self) -> str:
        """Address of the main listener."""
        return self.token.addresses[0]


@asynccontextmanager
async def serve(folder: Path | None = None, node_port: int = 0) -> AsyncIterator[Served]:
    """Serve on loopback: with TLS and an authority in ``folder``, else in the clear."""
    service = FakeCoordinator()
    server = grpc.aio.server()
    context = None
    node_pb2_grpc.add_NodeServiceServicer_to_server(service, server)
    if folder is None:
        port = service.node_port = server.add_insecure_port("127.0.0.1:0")
    else:
        service.authority = Authority.open(folder, unix_ms() // 1000)
        identity = service.authority.server_identity(["127.0.0.1"], unix_ms() // 1000)
        pair = [(identity.private_key_pem, identity.chain_pem)]
        open_to_all = grpc.ssl_server_credentials(pair)
        for_nodes = grpc.ssl_server_credentials(pair, service.authority.pem, True)
        service.node_port = server.add_secure_port(f"127.0.0.1:{node_port}", for_nodes)
        port = server.add_secure_port("127.0.0.1:0", open_to_all)
        context = tls_context(
            Certificates(identity.chain_pem, identity.private_key_pem, service.authority.pem)
        )
    authority = Digest("") if service.authority is None else service.authority.digest
    token = Token((f"127.0.0.1:{port}",), authority, Role.NODE, TokenId("0123456789ab"), SECRET)
    await server.start()
    ranges = web.Server(service.serve_range)
    bulk = await asyncio.get_running_loop().create_server(ranges, "127.0.0.1", 0, ssl=context)
    service.bulk_port = bulk.sockets[0].getsockname()[1]
    try:
        yield Served(service, token, server)
    finally:
        service.to_say.put_nowait(None)
        bulk.close()
        await ranges.shutdown()
        await server.stop(None)


def open_calls(address: str, timeout_ms: Milliseconds = TIMEOUT_MS) -> Calls:
    """Calls over a channel of their own, in the clear."""
    host, _ = split_address(address)
    return Calls(open_channel(address, None), (PROTOCOL_ENTRY,), timeout_ms, BulkClient(host, None))


@asynccontextmanager
async def calls_to(address: str) -> AsyncIterator[Calls]:
    """Calls in the clear."""
    calls = open_calls(address)
    try:
        yield calls
    finally:
        await calls.close()


@contextmanager
def state_paths_in(folder: Path) -> Iterator[StatePaths]:
    """A state folder, locked."""
    with StatePaths(folder / "node") as paths:
        yield paths


def is_signed(node: NodeId, offer: node_pb2.OfferUpdateRequest, work: Assignment) -> bool:
    """Whether the node signed this offer as its contribution to the work."""
    ranges = [(run.start, run.count) for run in work.task.ranges]
    contribution = Contribution(
        job=work.terms.job,
        epoch=work.epoch,
        round=offer.lease.round,
        node=node,
        shard=shard_digest(work.task.partition, ranges),
        model=work.task.model.digest,
        update=digest_from_wire(offer.digest.value),
        samples=Samples(sum(count for _, count in ranges)),
        inner_steps=work.task.inner_steps,
        compute_ms=Milliseconds(offer.report.compute_ms),
        update_bytes=Bytes(offer.size_bytes),
        lease=offer.lease.number,
        nonce=offer.nonce,
    )
    separator = work.terms.domain.separator()
    return is_signed_by(node, separator, contribution, offer.signature)


JOB = JobId("job-000000000001")
OTHER_JOB = JobId("job-000000000002")
CAPABILITIES = WorkerCapabilities(
    device="cpu",
    device_name="",
    memory_bytes=Bytes(0),
    kind="numpy",
    workloads={"digits-softmax": 1},
)


def missing(held: list[Span], size_bytes: int) -> list[Span]:
    """What no range holds."""
    gaps, at = [], 0
    for start, end in sorted(held):
        if start > at:
            gaps.append(Span(at, start))
        at = max(at, end)
    return [*gaps, Span(at, size_bytes)] if at < size_bytes else gaps


def message_of(digest: Digest) -> tensor_pb2.Digest:
    return tensor_pb2.Digest(value=digest_to_wire(digest))


class DaemonKit:
    """A service with a job to give, and a daemon that serves it."""

    def __init__(self, there: Served, folder: Path) -> None:
        self.there = there
        self.service: FakeCoordinator = there.service
        self.folder = folder
        self.settings = NodeSettings(
            state_dir=folder / "node", worker="numpy", drain_limit_ms=20_000
        )
        self.layout = numpy_layout(build(find("digits-softmax"), {}))
        flat = Flat.empty(self.layout)
        flat.parameters[:] = 0
        self.model = there.service.put(flat.parameters.tobytes())
        self.running: Daemon | None = None
        self.limits = OwnerLimits()
        self.capabilities = CAPABILITIES

    @asynccontextmanager
    async def daemon(self, token: Token | None) -> AsyncIterator["asyncio.Task[Leave]"]:
        """A daemon over the kit's state folder; stopped at the end if it still runs."""
        with state_paths_in(self.folder) as paths:
            self.running = Daemon(self.settings, paths, token=token, limits=self.limits)
            serve_task = asyncio.create_task(self.running.run(self.capabilities))
            yield serve_task
            self.running.stop("the test is over")
            await serve_task

    def signal_worker(self, number: int) -> None:
        """Send a signal to the daemon's worker and to the sandbox around it."""
        assert self.running is not None
        assert self.running.worker_process_id is not None
        outer = psutil.Process(self.running.worker_process_id)
        for process in (*outer.children(recursive=True), outer):
            process.send_signal(number)

    def assign(
        self,
        round_number: int,
        number: int,
        *,
        accepted: Digest | None = None,
        samples: int = 16,
        job: JobId = JOB,
        model: tensor_pb2.ModelRef | None = None,
        workload: str = "digits-softmax",
        options: str = "",
        manifest: tensor_pb2.BlobRef | None = None,
        data_name: str = "",
    ) -> node_pb2.Assignment:
        """Give work on a model; on the kit's own, which no node can draw, unless told which."""
        message = node_pb2.Assignment(
            lease=node_pb2.Lease(job_id=job, round=round_number, number=number),
            workload=workload,
            workload_version=1,
            workload_options=options,
            training=node_pb2.Training(
                inner_steps=2,
                batch_size=8,
                learning_rate=0.01,
                codec="int8",
                schedule="constant",
                optimizer=optimizer_pb2.Optimizer(name="sgd"),
            ),
            shard=node_pb2.Shard(
                partitions=1, ranges=[node_pb2.SampleRange(start=0, count=samples)]
            ),
            model=model or self.plain(),
            terms=terms_message(terms_for(job), epoch=round_number // 2),
            data_name=data_name,
        )
        if manifest is not None:
            message.manifest.CopyFrom(manifest)
        if accepted is not None:
            message.last_accepted.CopyFrom(message_of(accepted))
        if self.service.assigns_tickets:
            blob = blob_value(message.model.blob)
            message.model_ticket.CopyFrom(self.service.ticket(blob.digest, blob.size_bytes))
        response = node_pb2.ControlResponse(assignment=message, blob=self.service.blob_beside)
        self.service.to_say.put_nowait(response)
        return message

    def plain(self) -> tensor_pb2.ModelRef:
        """The kit's model, of which nothing is said but its name."""
        return tensor_pb2.ModelRef(blob=self.model, layout=message_of(self.layout.digest))

    async def training_progress(self) -> None:
        """Wait until a worker has trained: progress is told from the download on."""
        while (await self.service.next_said("progress")).steps_done == 0:
            pass

    async def update(self) -> Digest:
        """The digest of the next update that arrives whole."""
        async with asyncio.timeout(240):
            return await self.service.arrived.get()
