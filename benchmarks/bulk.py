"""How fast bulk moves beside raw sockets and gloo, and what a hub pays while eight send."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from benchmarks import fanout
from benchmarks.ours.bulk_clients import STEP_BYTES, BulkWork, TlsPaths
from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError, Running
from benchmarks.ours.table import BenchmarkParts, PartFigures
from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.embedded import EmbeddedStore
from coordinator.shell.store.bulk.messages import Certificates
from coordinator.shell.store.bulk.server import tls_context
from gpu_node.shell.folder.state import StatePaths, certificate_request_pem, tls_key_pem
from hypergpu.blobs import BlobRef
from hypergpu.clock import unix_s
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.units import Bytes
from hypergpu.user.client import ConnectionTarget
from hypergpu.user.client.connection import CoordinatorCalls
from hypergpu.user.client.values import blob_ref
from hypergpu.user.cluster.processes import kill_group
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.credentials import parse_token

NODES = 8
SIZE_BYTES = 100 << 20
SESSIONS = 100
STALLED = 2_000
LOADING_NICE = 10
_SAMPLE_S = 0.05
_ENDLESS = 1_000_000


class _Amount(NamedTuple):
    size_bytes: int
    times: int
    """By one client; several share it."""
    hub: fanout.Load


def parts(is_quick: bool) -> BenchmarkParts:
    """Every way of moving, then the hub under load."""
    hub = fanout.Load(SESSIONS, 2.0, 10.0 if is_quick else 40.0)
    amount = _Amount(SIZE_BYTES // (4 if is_quick else 1), 2 if is_quick else 8, hub)
    return BenchmarkParts(
        title="Bulk through the hub on loopback",
        columns=("", "up GB/s", "down GB/s", "raw socket GB/s", "gloo GB/s"),
        parts={
            "plain": lambda: line_figures(amount, is_plaintext=True),
            "tls": lambda: line_figures(amount, is_plaintext=False),
            "hub": lambda: hub_figures(amount),
            "stalled": lambda: stalled_figures(amount),
        },
        notes=lambda: (
            f"Files of {amount.size_bytes >> 20} MiB by a process each, one connection a node.",
            "Up is written to files and recorded; down, raw and gloo end in memory.",
            f"The hub: {NODES} machines at nice {LOADING_NICE} send one file again and again,",
            f"which is not checked, while {SESSIONS} sessions of the daemon beat.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def line_figures(amount: _Amount, *, is_plaintext: bool) -> PartFigures:
    """One node and eight, by HTTP beside a raw socket, and beside gloo where it can do it."""
    kind, rows, metrics = ("plain" if is_plaintext else "tls"), [], dict[str, float]()
    for nodes in (1, NODES):
        speeds = asyncio.run(_speeds(amount, nodes, is_plaintext=is_plaintext))
        raw = asyncio.run(_raw_speed(amount, nodes, is_plaintext=is_plaintext))
        gloo = asyncio.run(_gloo_speed(amount)) if is_plaintext and nodes == 1 else None
        gloo_text = "-" if gloo is None else f"{gloo:.2f}"
        rows.append([f"{kind}, {nodes}", *(f"{each:.2f}" for each in (*speeds, raw)), gloo_text])
        for name, speed in zip(("up", "down"), speeds, strict=True):
            metrics[f"{name}_gb_s_{kind}_{nodes}"] = speed
            metrics[f"{name}_over_raw_{kind}_{nodes}"] = speed / raw
        if gloo is not None:
            metrics["up_over_gloo_plain_1"] = speeds[0] / gloo
    return PartFigures(rows=rows, metrics=metrics)


async def _speeds(amount: _Amount, nodes: int, *, is_plaintext: bool) -> tuple[float, float]:
    """Bytes per second up and down through a store of its own, in GB/s."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = os.urandom(amount.size_bytes)
        blobs = BlobStore(folder, Space(folder, 0))
        uploads = UploadStore(folder, blobs, blobs.space)
        (folder / "source").write_bytes(content)
        store = EmbeddedStore(folder, uploads, lambda _: None)
        authority = Authority.open(folder / "identity", unix_s())
        identity = authority.server_identity(["127.0.0.1"], unix_s())
        certificates = Certificates(identity.chain_pem, identity.private_key_pem, authority.pem)
        await store.bind("127.0.0.1", 0, None if is_plaintext else certificates)
        store_task = asyncio.create_task(store.run())
        blob = blobs.put(content)
        speeds = []
        for kind in ("put", "get"):
            works = []
            for number in range(nodes):
                paths, key = StatePaths(folder / f"node-{kind}-{number}"), IdentityKey.generate()
                tls = None if is_plaintext else _tls_paths(authority, paths, key)
                fresh = BlobRef(digest_of(f"{number}".encode()), Bytes(amount.size_bytes))
                upload = uploads.open(upload_name(f"{number}"), fresh)
                ticket = await (
                    store.upload_ticket(key.node_id, upload)
                    if kind == "put"
                    else store.ticket(key.node_id, blob)
                )
                works.append(_work(kind, folder / "source", amount, nodes, ticket.ranges[0], tls))
            speeds.append(await _speed_of(works))
        store_task.cancel()
        await asyncio.wait([store_task])
    return speeds[0], speeds[1]


def _work(
    kind: str,
    path: Path,
    amount: _Amount,
    nodes: int,
    ranged: tensor_pb2.TicketRange,
    tls: TlsPaths | None,
) -> BulkWork:
    times = max(1, amount.times // nodes)
    authorization = ranged.headers["Authorization"]
    return BulkWork(kind, str(path), amount.size_bytes, times, ranged.url, authorization, tls=tls)


def _tls_paths(authority: Authority, paths: StatePaths, key: IdentityKey) -> TlsPaths:
    """Files of a node that has a certificate."""
    paths.authority.parent.mkdir(parents=True, exist_ok=True)
    tls_key_pem(paths)
    certificate = authority.issue(
        key.node_id, certificate_request_pem(paths, key.node_id), unix_s()
    )
    paths.authority.write_bytes(authority.pem)
    paths.certificate.write_bytes(certificate.pem)
    return TlsPaths(str(paths.authority), str(paths.certificate), str(paths.tls_key))


async def _raw_speed(amount: _Amount, nodes: int, *, is_plaintext: bool) -> float:
    """The same bytes over blocking sockets into memory, a thread each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").write_bytes(os.urandom(amount.size_bytes))
        authority = Authority.open(folder / "identity", unix_s())
        identity = authority.server_identity(["127.0.0.1"], unix_s())
        context = tls_context(
            Certificates(identity.chain_pem, identity.private_key_pem, authority.pem)
        )
        (folder / "ca").write_bytes(authority.pem)
        tls = None if is_plaintext else TlsPaths(str(folder / "ca"), "", "")
        listener = socket.create_server(("127.0.0.1", 0))
        port, times = listener.getsockname()[1], max(1, amount.times // nodes)
        for _ in range(nodes):
            arguments = (listener, None if is_plaintext else context, amount.size_bytes)
            threading.Thread(target=_receive_raw, args=arguments, daemon=True).start()
        path = str(folder / "source")
        work = BulkWork("raw", path, amount.size_bytes, times, port=port, tls=tls)
        speed = await _speed_of([work] * nodes)
        listener.close()
    return speed


def _receive_raw(listener: socket.socket, context: ssl.SSLContext | None, size: int) -> None:
    link, _ = listener.accept()
    if context is not None:
        link = context.wrap_socket(link, server_side=True)
    memory = memoryview(bytearray(size))
    while True:
        filled_bytes = 0
        while filled_bytes < size:
            count = link.recv_into(memory[filled_bytes : filled_bytes + STEP_BYTES])
            if not count:
                return
            filled_bytes += count
        link.sendall(b"1")


async def _gloo_speed(amount: _Amount) -> float:
    """The same bytes from one process of gloo to another."""
    with tempfile.TemporaryDirectory() as name:
        work = BulkWork("gloo", f"{name}/meeting", amount.size_bytes, amount.times)
        receive_thread = threading.Thread(target=_receive_gloo, args=(work,), daemon=True)
        receive_thread.start()
        return await _speed_of([work])


def _receive_gloo(work: BulkWork) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", f"file://{work.path}", rank=0, world_size=2)
    tensor = torch.empty(work.size_bytes // 4)
    distributed.barrier()
    for _ in range(work.times):
        distributed.recv(tensor, 1)
    distributed.barrier()
    distributed.destroy_process_group()


async def _speed_of(works: Sequence[BulkWork]) -> float:
    """GB/s of all clients together, from the word to the last one's end."""
    command = (sys.executable, "-m", "benchmarks.ours.bulk_clients")
    environment = {**os.environ, **ONE_THREAD}
    clients = []
    for work in works:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=environment
        )
        _tell(child, msgspec.json.encode(work))
        clients.append(child)
    for child in clients:
        await _hear(child, b"ready\n")
    began_s = time.monotonic()
    for child in clients:
        _tell(child, b"go")
    for child in clients:
        await _hear(child, b"done\n")
    took_s = time.monotonic() - began_s
    for child in clients:
        await child.wait()
    return sum(work.size_bytes * work.times for work in works) / took_s / 1e9


def _tell(child: Process, line: bytes) -> None:
    if child.stdin is None:
        raise AssertionError("the child was spawned with a pipe")
    child.stdin.write(line + b"\n")


async def _hear(child: Process, expected: bytes) -> None:
    if child.stdout is None or await child.stdout.readline() != expected:
        raise BenchmarkError("a client ended before it had moved everything")


class _Usage(NamedTuple):
    cpu_s: float
    memory_bytes: int


class HubLoad:
    """Eight machines that send all the time, and what the hub's processes pay meanwhile."""

    def __init__(self) -> None:
        self.cpu_s = self.moved_gb = 0.0
        self.peak_bytes = 0
        self._is_over = threading.Event()

    @contextmanager
    def on(self, cluster: Running) -> Iterator[None]:
        """Load the hub while the block runs."""
        hub, source = psutil.Process(cluster.coordinator.pid), cluster.folder / "source"
        source.write_bytes(os.urandom(SIZE_BYTES))
        idle = _usage(hub)
        works = asyncio.run(_endless_uploads(cluster, source))
        clients = [_loading_client(work) for work in works]
        for client in clients:
            if client.stdin is not None:
                client.stdin.write("go\n")
                client.stdin.flush()
        before, received_bytes = _usage(hub), _received_bytes()
        watch_thread = threading.Thread(target=self._watch, args=(hub, idle.memory_bytes))
        watch_thread.start()
        yield
        after = _usage(hub)
        self.moved_gb = (_received_bytes() - received_bytes) / 1e9
        self.cpu_s = after.cpu_s - before.cpu_s
        self._is_over.set()
        watch_thread.join()
        for client in clients:
            kill_group(client)
            if client.returncode != -signal.SIGKILL:
                raise BenchmarkError("a client ended before the hub was measured")

    def _watch(self, hub: psutil.Process, idle_bytes: int) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, _usage(hub).memory_bytes - idle_bytes)


class StalledLoad:
    """A machine with many requests that send nothing."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        """The longest life of one of them."""

    @contextmanager
    def on(self, cluster: Running) -> Iterator[None]:
        """Stall while the block runs."""
        work, *_ = asyncio.run(_endless_uploads(cluster, cluster.folder))
        client = _loading_client(msgspec.structs.replace(work, kind="stall", times=STALLED))
        if client.stdin is None or client.stdout is None:
            raise AssertionError("the child was spawned with pipes")
        client.stdin.write("go\n")
        client.stdin.flush()
        self.worst_s = float(client.stdout.readline())
        yield
        kill_group(client)


async def _endless_uploads(cluster: Running, source: Path) -> list[BulkWork]:
    """What each client sends again and again: its ticket lasts a minute."""
    text = await asyncio.to_thread(Path(cluster.ready.operator_token_file).read_text)
    target = ConnectionTarget(cluster.ready.address, parse_token(text), timeout_s=60.0)
    calls = await CoordinatorCalls.open(target)
    works = []
    for number in range(NODES):
        blob = blob_ref(digest_of(f"{number}".encode()), SIZE_BYTES)
        request = job_pb2.OfferDataRequest(blob=blob)
        ticket_range = (await calls.call(calls.jobs.OfferData, request)).ticket.ranges[0]
        authorization = ticket_range.headers["Authorization"]
        works.append(
            BulkWork("put", str(source), SIZE_BYTES, _ENDLESS, ticket_range.url, authorization)
        )
    await calls.close()
    return works


def _loading_client(work: BulkWork) -> "subprocess.Popen[str]":
    """A client that waits for the word, at a lower priority than the hub."""
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ours.bulk_clients"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **ONE_THREAD},
        start_new_session=True,
        text=True,
    )
    psutil.Process(client.pid).nice(LOADING_NICE)
    if client.stdin is None or client.stdout is None:
        raise AssertionError("the child was spawned with pipes")
    client.stdin.write(msgspec.json.encode(work).decode() + "\n")
    client.stdin.flush()
    client.stdout.readline()
    return client


def _received_bytes() -> int:
    """Bytes that came over loopback, the sessions' heartbeats among them."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_recv)


def _usage(hub: psutil.Process) -> _Usage:
    """Usage of the coordinator and its bulk processes. Shared pages count once for each."""
    processes = [hub, *(each for each in hub.children() if "bulk" in " ".join(each.cmdline()))]
    times = [each.cpu_times() for each in processes]
    return _Usage(
        sum(each.user + each.system for each in times),
        sum(each.memory_info().rss for each in processes),
    )


def stalled_figures(amount: _Amount) -> PartFigures:
    """Heartbeats while many requests send nothing."""
    stalled_load = StalledLoad()
    with tempfile.TemporaryDirectory() as name:
        outcome = fanout.coordinator_outcome(Path(name), amount.hub, stalled_load.on)
    p99_ms = outcome.percentile_ms(99)
    life = f"closed within {stalled_load.worst_s:.1f} s"
    return PartFigures(
        rows=[[f"hub, {STALLED:,} stalled PUTs", f"p99 {p99_ms:.1f} ms", life, "", ""]],
        metrics={"stalled_heartbeat_p99_ms": p99_ms, "stalled_closed_s": stalled_load.worst_s},
    )


def hub_figures(amount: _Amount) -> PartFigures:
    """Heartbeats, CPU and memory of the hub while eight machines send."""
    hub_load = HubLoad()
    with tempfile.TemporaryDirectory() as name:
        outcome = fanout.coordinator_outcome(Path(name), amount.hub, hub_load.on)
    p99_ms, gb = outcome.percentile_ms(99), hub_load.moved_gb
    load_text = f"p99 {p99_ms:.1f} ms, {hub_load.cpu_s / gb:.2f} CPU s/GB"
    return PartFigures(
        rows=[[f"hub, {gb:.0f} GB", load_text, f"+{hub_load.peak_bytes / 1e6:.0f} MB", "", ""]],
        metrics={
            "heartbeat_p99_ms": p99_ms,
            "hub_cpu_s_per_gb": hub_load.cpu_s / gb,
            "hub_peak_mb": hub_load.peak_bytes / 1e6,
        },
    )
