"""The embedded store as the coordinator holds it: its port, its processes, and tickets for it."""

import asyncio
import contextlib
import errno
import itertools
import os
import secrets
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

import msgspec
import structlog

from coordinator.shell.store.blobs.store import BLOBS
from coordinator.shell.store.blobs.upload_store import QUARANTINE, OpenUpload, UploadStore
from coordinator.shell.store.bulk.messages import (
    BulkStart,
    BytesReceived,
    BytesServed,
    Certificates,
    CloseUpload,
    FromProcess,
    ToProcess,
    UpdateBrought,
    UpdateOffered,
    UploadClosed,
)
from coordinator.shell.store.bulk.store import UpdateTaker
from coordinator.shell.store.bulk.tickets import LIFE_MS, SECRET_BYTES, Claims, authorization
from coordinator.shell.store.bulk.update_judgements import UpdateJudgements
from hypergpu.blobs import BlobRef
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.frames import FrameError, frame, next_frame
from hypergpu.ids import Digest, NodeId
from hypergpu.part_file import Span
from hypergpu.privacy import public_environment
from hypergpu.units import Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.authority import TLS_NAME

log = structlog.get_logger()

PROCESSES = max(1, min(4, (os.cpu_count() or 1) // 2))
_COMMAND = (sys.executable, "-m", "coordinator.shell.store.bulk")
_STOP_TIMEOUT_S = 5.0
_RESTART_S = 1.0
_PORT_TIMEOUT_S = 5.0
_PORT_AGAIN_S = 0.05
_UNACKNOWLEDGED_MS = 40_000
"""A peer that acknowledges nothing for so long, or takes nothing, is gone."""


class EmbeddedStore:
    """Bulk processes beside the coordinator. A request that comes while none runs waits."""

    def __init__(
        self,
        folder: Path,
        uploads: UploadStore,
        on_bytes: Callable[[BytesServed | BytesReceived], None],
    ) -> None:
        """Serve the coordinator's folder, and hear of bytes that were sent and received."""
        self.obstacle = self.known_address = ""
        self._folder = folder
        self._uploads = uploads
        self._on_bytes = on_bytes
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._socket: socket.socket | None = None
        self._certificates: Certificates | None = None
        self.port = 0
        """0 before `bind`."""
        self.processes: dict[Process, dict[int, asyncio.Future[None]]] = {}
        """Those that run, and what is asked of each by its number."""
        self._numbers = itertools.count()
        self._judgements = UpdateJudgements()

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> None:
        """Take a port. Processes of a coordinator that was killed let go of it within moments.

        Raises:
            HyperGPUError: ADDRESS_UNUSABLE, somebody else has it or it is not this machine's.
        """
        self._certificates = certificates
        give_up_s = asyncio.get_running_loop().time() + _PORT_TIMEOUT_S
        while self._socket is None:
            try:
                self._socket = _listening(host, port)
            except OSError as error:
                is_over = asyncio.get_running_loop().time() > give_up_s
                if error.errno != errno.EADDRINUSE or is_over:
                    detail = f"{host}:{port} cannot be bound"
                    raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail) from error
                await asyncio.sleep(_PORT_AGAIN_S)
        self.port = int(self._socket.getsockname()[1])

    async def ticket(
        self, node: NodeId | None, blob: BlobRef, purpose: str = ""
    ) -> tensor_pb2.Ticket:
        """A ticket to fetch a blob. Nothing is waited for."""
        return self._fetch_ticket(node, blob, purpose)

    def ready_ticket(self, node: NodeId, blob: BlobRef, purpose: str) -> tensor_pb2.Ticket:
        """The same ticket."""
        return self._fetch_ticket(node, blob, purpose)

    async def upload_ticket(self, node: NodeId | None, upload: OpenUpload) -> tensor_pb2.Ticket:
        """A ticket to send what is missing of an upload. Nothing is waited for."""
        claims = Claims("PUT", upload.name, upload.size_bytes, node, "", self._expiry_ms())
        return self._ticket(claims, upload.missing)

    async def receive_upload(self, name: str, blob: BlobRef) -> Path:
        """Seal an upload, and have every process close it."""
        sealed_path = await asyncio.to_thread(self._uploads.seal, name, blob)
        await self.close_upload(name)
        return sealed_path

    async def doubt(self, digest: Digest) -> None:
        """There are no copies: the coordinator's own file is served."""

    def take_updates(self, taker: UpdateTaker) -> None:
        """Let updates in. Those that come before are told to come later."""
        self._judgements.taker = taker

    def remove(self, digests: Collection[Digest]) -> None:
        """There are no copies."""

    async def close_upload(self, name: str) -> None:
        """Have no process write to an upload any more, whose file has another name already.

        A process that does not answer is killed, which closes it too.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answers = []
        for process, close_answers in self.processes.items():
            close_answers[number] = loop.create_future()
            answers.append(close_answers[number])
            _say(process, CloseUpload(number, name))
        if answers:
            await asyncio.wait(answers, timeout=_STOP_TIMEOUT_S)
        for process, close_answers in self.processes.items():
            if number in close_answers:
                log.error("a bulk process does not answer and is killed", pid=process.pid)
                process.kill()
        await asyncio.gather(*answers)

    def _fetch_ticket(self, node: NodeId | None, blob: BlobRef, purpose: str) -> tensor_pb2.Ticket:
        claims = Claims("GET", blob.digest, blob.size_bytes, node, purpose, self._expiry_ms())
        return self._ticket(claims, [Span(0, blob.size_bytes)])

    def _ticket(self, claims: Claims, spans: Iterable[Span]) -> tensor_pb2.Ticket:
        scheme = "http" if self._certificates is None else "https"
        url = f"{scheme}://{TLS_NAME}:{self.port}/{claims.name}"
        headers = {"Authorization": authorization(claims, self._secret)}
        ranges = [
            tensor_pb2.TicketRange(url=url, start=start, end=end, headers=headers)
            for start, end in spans
        ]
        return tensor_pb2.Ticket(ranges=ranges, life_ms=LIFE_MS)

    def _expiry_ms(self) -> Milliseconds:
        return Milliseconds(monotonic_ms() + LIFE_MS)

    async def run(self) -> None:
        """Keep the processes running until cancelled."""
        assert self._socket is not None  # noqa: S101 - `bind` comes first
        try:
            with self._socket:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(PROCESSES):
                        tasks.create_task(self._keep_running(self._socket.fileno()))
        finally:
            self._judgements.close()

    async def _keep_running(self, listener: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                process = await _start(listener)
            except OSError as error:
                log.warning("a bulk process cannot be started", reason=str(error))
                await asyncio.sleep(_RESTART_S)
                continue
            self.processes[process] = {}
            try:
                await self._listen(process, listener)
            finally:
                await _end(process)
                # Until now it could write, and had to be asked.
                for answer in self.processes.pop(process).values():
                    _answer(answer)
            log.error("a bulk process ended and is started again", status=process.returncode)
            await asyncio.sleep(max(0.0, began_s + _RESTART_S - loop.time()))

    async def _listen(self, process: Process, listener: int) -> None:
        """Tell the process what to serve and hear what it says, until it ends."""
        assert process.stdout is not None  # noqa: S101 - a pipe
        blobs, uploads = self._folder / BLOBS, self._folder / QUARANTINE
        _say(
            process,
            BulkStart(listener, str(blobs), str(uploads), self._secret, self._certificates),
        )
        with contextlib.suppress(FrameError, ConnectionError, msgspec.MsgspecError):
            while (payload := await next_frame(process.stdout)) is not None:
                self._hear(process, msgspec.msgpack.decode(payload, type=FromProcess))

    def _hear(self, process: Process, message: FromProcess) -> None:
        match message:
            case UpdateOffered() | UpdateBrought():
                self._judgements.begin(message, partial(_say, process))
            case UploadClosed(number=number):
                if (answer := self.processes[process].pop(number, None)) is not None:
                    _answer(answer)
            case _:
                self._on_bytes(message)


async def _start(listener: int) -> Process:
    """Start a process. One that is being started when the caller is cancelled ends again."""
    start_task = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *_COMMAND, stdin=PIPE, stdout=PIPE, pass_fds=(listener,), env=public_environment()
        )
    )
    try:
        return await asyncio.shield(start_task)
    except asyncio.CancelledError:
        await _end(await start_task)
        raise


def _answer(asked: "asyncio.Future[None]") -> None:
    if not asked.cancelled():
        asked.set_result(None)


def _say(process: Process, message: ToProcess) -> None:
    assert process.stdin is not None  # noqa: S101 - a pipe
    process.stdin.write(frame(msgspec.msgpack.encode(message)))


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host.strip("[]"), port),
        family=family,
        backlog=socket.SOMAXCONN,
        dualstack_ipv6=family is socket.AF_INET6 and socket.has_dualstack_ipv6(),
    )
    # Sockets that it accepts inherit this.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return listener


async def _end(process: Process) -> None:
    """Let a process end by itself, which it does at once, or kill it."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
