"""A TCP forwarder between one node and its coordinator that delays and records what passes.

A record's time is that of the node's end. The delay makes requests that go out together lie
together, before the first answer. gRPC's frames are read, since heartbeats share its connection.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from google.protobuf.message import DecodeError

from hypergpu.v1 import node_pb2
from hypergpu.wire.packing import MessageUnpacker

_CHUNK_BYTES = 1 << 16
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD_BYTES = 9
_DATA, _HEADERS = 0, 1
_MESSAGE_HEAD_BYTES = 5


class WireRecord(NamedTuple):
    """Bytes that passed the node's end of a connection."""

    at_s: float
    connection: int
    port: int
    is_up: bool
    """Whether the node sent them."""
    content: bytes


class DelayingProxy:
    """Forwards ports of one address to the same ports of another, each way later by a delay."""

    def __init__(self, listen: str, target: str, delay_s: float) -> None:
        self._listen, self._target, self._delay_s = listen, target, delay_s
        self._lock = threading.Lock()
        self._records: list[WireRecord] = []
        self._connections = 0

    def records(self) -> list[WireRecord]:
        """Everything so far, in order of time."""
        with self._lock:
            return sorted(self._records, key=lambda record: record.at_s)

    @contextmanager
    def serve(self, ports: Sequence[int]) -> Iterator[None]:
        """Take connections within the block, which a thread of its own forwards."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen_at(ports), loop).result()
            yield
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _listen_at(self, ports: Sequence[int]) -> None:
        for port in ports:

            async def forward(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                # It ends with the block; a task that is cancelled would be told as an error.
                with suppress(asyncio.CancelledError):
                    await self._forward(reader, writer, port)

            await asyncio.start_server(forward, self._listen, port)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        self._connections += 1
        number = self._connections
        try:
            target = await asyncio.open_connection(self._target, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._pump(reader, target[1], (number, port), is_up=True),
            self._pump(target[0], writer, (number, port), is_up=False),
        )

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        place: tuple[int, int],
        *,
        is_up: bool,
    ) -> None:
        loop = asyncio.get_running_loop()

        def deliver(chunk: bytes) -> None:
            if not is_up:
                self._record(place, chunk, is_up=False)
            if chunk:
                sink.write(chunk)
            else:
                sink.close()

        try:
            while chunk := await source.read(_CHUNK_BYTES):
                if is_up:
                    self._record(place, chunk, is_up=True)
                loop.call_later(self._delay_s, deliver, chunk)
        except OSError:
            pass
        loop.call_later(self._delay_s, deliver, b"")

    def _record(self, place: tuple[int, int], chunk: bytes, *, is_up: bool) -> None:
        if chunk:
            with self._lock:
                self._records.append(WireRecord(time.monotonic(), *place, is_up, chunk))


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class WireEvent(NamedTuple):
    """Part of a request or of an answer, or a mark of the control stream."""

    at_s: float
    is_up: bool
    mark: str = ""
    """``assignment`` or ``train``; empty: it is traffic that counts."""


class GrpcConnection:
    """Reads the frames of one connection of gRPC, both ways.

    Frames of its own account (settings, pings, windows) count for nothing, and neither does the
    control stream: heartbeats, probes, progress and measurements go there. Its assignments and the
    begins of training are marks.
    """

    def __init__(self) -> None:
        self._rests = {True: b"", False: b""}
        self._is_begun = False
        self._messages: dict[tuple[int, bool], bytes] = {}
        self._control_stream = 0
        self._unpacker = MessageUnpacker()

    def feed(self, record: WireRecord) -> Iterator[WireEvent]:
        """The events that a record completes."""
        raw = self._rests[record.is_up] + record.content
        if record.is_up and not self._is_begun:
            if len(raw) < len(_PREFACE):
                self._rests[True] = raw
                return
            raw, self._is_begun = raw.removeprefix(_PREFACE), True
        while len(raw) >= _FRAME_HEAD_BYTES:
            end = _FRAME_HEAD_BYTES + int.from_bytes(raw[:3], "big")
            if len(raw) < end:
                break
            stream = int.from_bytes(raw[5:_FRAME_HEAD_BYTES], "big") & 0x7FFFFFFF
            yield from self._frame(record, raw[3], stream, raw[_FRAME_HEAD_BYTES:end])
            raw = raw[end:]
        self._rests[record.is_up] = raw

    def _frame(
        self, record: WireRecord, kind: int, stream: int, content: bytes
    ) -> Iterator[WireEvent]:
        if kind == _DATA and content:
            whole = self._messages.pop((stream, record.is_up), b"") + content
            while len(whole) >= _MESSAGE_HEAD_BYTES:
                end = _MESSAGE_HEAD_BYTES + int.from_bytes(whole[1:_MESSAGE_HEAD_BYTES], "big")
                if len(whole) < end:
                    break
                yield from self._message(record, stream, whole[_MESSAGE_HEAD_BYTES:end])
                whole = whole[end:]
            self._messages[stream, record.is_up] = whole
        if kind in {_DATA, _HEADERS} and stream != self._control_stream:
            yield WireEvent(record.at_s, record.is_up)

    def _message(self, record: WireRecord, stream: int, raw: bytes) -> Iterator[WireEvent]:
        if record.is_up and is_hello(raw):
            self._control_stream, self._unpacker = stream, MessageUnpacker()
        if stream != self._control_stream:
            return
        if record.is_up:
            request = node_pb2.ControlRequest.FromString(raw)
            is_training = request.progress.phase == node_pb2.WORK_PHASE_TRAIN
            mark = "train" if request.HasField("progress") and is_training else ""
        else:
            response = self._unpacker.unpack(node_pb2.ControlResponse.FromString(raw))
            mark = "assignment" if response.HasField("assignment") else ""
        if mark:
            yield WireEvent(record.at_s, record.is_up, mark)


def is_hello(raw: bytes) -> bool:
    """Whether a call's first message opens a control stream."""
    try:
        request = node_pb2.ControlRequest.FromString(raw)
    except DecodeError:
        return False
    return request.HasField("hello") and bool(request.hello.version.software)


def wire_events(records: Sequence[WireRecord], bulk_port: int) -> list[WireEvent]:
    """Marks and the traffic that counts, in order of time."""
    connections: dict[int, GrpcConnection] = {}
    events: list[WireEvent] = []
    for record in records:
        if record.port == bulk_port:
            events.append(WireEvent(record.at_s, record.is_up))
        else:
            connection = connections.setdefault(record.connection, GrpcConnection())
            events += connection.feed(record)
    return events


class CountedTrips(NamedTuple):
    """Direction changes of one round, from a request to its answer."""

    down: int
    """Between the assignment and the first inner step."""
    up: int
    """After it and before the next assignment: inner steps themselves send nothing that counts."""


def round_trips(events: Sequence[WireEvent]) -> list[CountedTrips]:
    """Each round that began and ended with an assignment."""
    rounds: list[CountedTrips] = []
    counts: Mapping[bool, int] | None = None
    is_trained, was_up = False, False
    for event in events:
        if event.mark == "assignment":
            if counts is not None and is_trained:
                rounds.append(CountedTrips(down=counts[False], up=counts[True]))
            counts, is_trained, was_up = {False: 0, True: 0}, False, False
        elif event.mark == "train":
            is_trained, was_up = True, was_up and is_trained
        elif counts is not None:
            if was_up and not event.is_up:
                counts = {**counts, is_trained: counts[is_trained] + 1}
            was_up = event.is_up
    return rounds
