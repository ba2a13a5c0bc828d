"""How many durable bundles a coordinator leases and accepts a second while it is killed.

256 nodes reduced to their wire dial by real gRPC, a connection each, and answer every bundle at
once with a signed result whose blob comes beside it. The load generator runs on the same machine.
After the job's end each item must have one accepted result.
"""

import asyncio
import contextlib
import random
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.killed_coordinator import KilledCoordinator
from benchmarks.ours.table import PartFigures
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, JoinClaim, sign
from hypergpu.digests import digest_of
from hypergpu.errors import Reason
from hypergpu.farm.bundles import Bundle, BundleResult
from hypergpu.farm.item_chunks import ItemChunk, ItemEncoding, ItemManifest, manifest_bytes
from hypergpu.farm.map_request import MapRequest
from hypergpu.ids import TokenId
from hypergpu.ledger_terms import separator_of
from hypergpu.packed_work import WorkAmount, pack_work, unpack_work
from hypergpu.protocol import PROTOCOL, PROTOCOL_ENTRY
from hypergpu.result_statements import result_contribution, work_digest
from hypergpu.units import Bytes
from hypergpu.user.client import Coordinator
from hypergpu.user.client.bundles import ResultView
from hypergpu.v1 import node_pb2, node_pb2_grpc
from hypergpu.wire.credentials import Role, Token, parse_token
from hypergpu.wire.errors import error_in
from hypergpu.wire.messages import blob_message
from hypergpu.wire.work import work_assignment_value, work_message

if TYPE_CHECKING:
    from hypergpu.v1.node_pb2_grpc import NodeServiceAsyncStub

KIND = "map/checksum"
BUNDLE_ITEMS = 50
_CHUNK_ITEMS = 25_000
_REST_S = 0.1
_CALL_S = 30.0


class FarmLoad(NamedTuple):
    """How much is asked of the coordinator."""

    nodes: int
    items: int
    kill_every_s: float
    """Mean time between a start and the next kill, which comes by chance from a tenth of it to
    nearly twice it; 0: it is not killed.
    """
    kills_most: int = 1_000_000


class LoadNode:
    """One node: joined, with a connection of its own."""

    def __init__(self, coordinator: KilledCoordinator, token: Token) -> None:
        self._key = IdentityKey.generate()
        self._token = token
        self._metadata = (PROTOCOL_ENTRY, ("hypergpu-node", self._key.node_id))
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
        self._main = coordinator.ready.address
        self._channel = grpc.aio.insecure_channel(coordinator.node_address, options=options)
        self._stub = _stub(self._channel)
        self._open: dict[int, node_pb2.Lease] = {}
        self.accepted = 0

    async def join(self) -> None:
        """Trade the token for admission."""
        claim = JoinClaim(TokenId(self._token.id), digest_of(b""))
        request = node_pb2.JoinRequest(
            version=node_pb2.Version(protocol=PROTOCOL, software="benchmark"),
            token_id=self._token.id,
            token_secret=self._token.secret,
            public_key=self._key.public_key,
            signature=self._key.sign(claim),
        )
        async with grpc.aio.insecure_channel(self._main) as main:
            await _stub(main).Join(request, metadata=(PROTOCOL_ENTRY,), timeout=_CALL_S)

    async def run(self) -> None:
        """Answer bundles until cancelled; a broken stream is opened again."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
                    call = self._stub.Control(metadata=self._metadata)
                    await call.write(self._hello())
                    async for message in call:
                        if message.HasField("work_assignment"):
                            work = message.work_assignment
                            if work.lease.number not in self._open:
                                self._open[work.lease.number] = work.lease
                                tasks.create_task(self._answer(work))
                await asyncio.sleep(_REST_S)

    def _hello(self) -> node_pb2.ControlRequest:
        capabilities = node_pb2.Capabilities(
            workloads=[node_pb2.WorkloadVersion(name=KIND, version=1)]
        )
        hello = node_pb2.Hello(
            version=node_pb2.Version(protocol=PROTOCOL, software="benchmark"),
            capabilities=capabilities,
            working=list(self._open.values()),
            signs_results=True,
        )
        return node_pb2.ControlRequest(hello=hello)

    async def _answer(self, work: node_pb2.WorkAssignment) -> None:
        request = self._result(work)
        try:
            while True:
                try:
                    await self._stub.Contribute(request, metadata=self._metadata, timeout=_CALL_S)
                except grpc.aio.AioRpcError as error:
                    if error_in(error.trailing_metadata()) is not None and _is_void(error):
                        return
                    await asyncio.sleep(_REST_S)
                else:
                    self.accepted += 1
                    return
        finally:
            self._open.pop(work.lease.number, None)

    def _result(self, work: node_pb2.WorkAssignment) -> node_pb2.ContributeRequest:
        assignment = work_assignment_value(work)
        bundle = unpack_work(assignment.work, KIND, Bundle)
        places = range(bundle.start, bundle.start + bundle.items)
        content = b"".join(b'{"value":%d}\n' % place for place in places)
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        result = BundleResult(blob=blob, items=bundle.items, units=bundle.items)
        signature = b""
        if assignment.terms is not None:
            statement = result_contribution(
                assignment.terms,
                assignment.lease,
                self._key.node_id,
                work_digest(assignment.work),
                blob,
                WorkAmount(bundle.items),
            )
            signature = sign(self._key, separator_of(assignment.terms.domain), statement)
        return node_pb2.ContributeRequest(
            lease=work.lease,
            result=work_message(pack_work(KIND, result)),
            blob=blob_message(blob),
            signature=signature,
            content=content,
        )


def _stub(channel: grpc.aio.Channel) -> "NodeServiceAsyncStub":
    return node_pb2_grpc.NodeServiceStub(channel)  # type: ignore[return-value]


def _is_void(error: grpc.aio.AioRpcError) -> bool:
    """Whether nobody will ever take the result."""
    numbered_error = error_in(error.trailing_metadata())
    reason = getattr(numbered_error, "reason", None)
    return reason in {Reason.LEASE_STALE, Reason.REQUEST_INVALID, Reason.JOB_UNKNOWN}


def _create_job(client: Coordinator, folder: Path, items: int) -> str:
    """Send numbers as items, and create the job."""
    chunks: list[ItemChunk] = []
    paths: list[Path] = []
    for start_item in range(0, items, _CHUNK_ITEMS):
        places = range(start_item, min(items, start_item + _CHUNK_ITEMS))
        content = b"".join(b"%d\n" % place for place in places)
        paths.append(folder / f"chunk-{len(chunks)}")
        paths[-1].write_bytes(content)
        chunks.append(ItemChunk(digest_of(content), Bytes(len(content)), len(places)))
    manifest = manifest_bytes(ItemManifest(encoding=ItemEncoding.JSONL, chunks=tuple(chunks)))
    paths.append(folder / "manifest")
    paths[-1].write_bytes(manifest)
    client.send_blobs(paths, step="items")
    request = MapRequest(
        item_kind="checksum",
        manifest=BlobRef(digest_of(manifest), Bytes(len(manifest))),
        items=items,
        bundle_items_most=BUNDLE_ITEMS,
        checked_permille=0,
    )
    return client.create_map(request, request_id=uuid.uuid4().hex)


def _all_results(client: Coordinator, job_id: str) -> list[ResultView]:
    """Every accepted result."""
    results: list[ResultView] = []
    while True:
        page = client.results(job_id, len(results))
        results += page.results
        if page.is_over and not page.results:
            return results


def lost_or_doubled(results: Sequence[ResultView], items: int) -> int:
    """Items that have no accepted result, and those that have more than one, once each more."""
    counts = bytearray(items)
    repeat_count = 0
    for result in results:
        for place in range(result.start, result.start + result.items):
            repeat_count += counts[place] > 0
            counts[place] = 1
    return repeat_count + counts.count(0)


async def _drive(
    coordinator: KilledCoordinator, load: FarmLoad, job_id: str, token: Token
) -> float:
    """Have the job done while the coordinator is killed; returns the seconds that it took."""
    nodes = [LoadNode(coordinator, token) for _ in range(load.nodes)]
    for node in nodes:
        await node.join()
    begin_s = time.monotonic()
    tasks = [asyncio.create_task(node.run()) for node in nodes]
    chance = random.Random(0)
    try:
        while not await asyncio.to_thread(_has_ended, coordinator, job_id):
            if not load.kill_every_s or coordinator.kills == load.kills_most:
                await asyncio.sleep(_REST_S)
                continue
            await asyncio.sleep(load.kill_every_s * chance.uniform(0.1, 1.9))
            await asyncio.to_thread(coordinator.kill)
            coordinator.kills += 1
            await asyncio.to_thread(coordinator.start)
        return time.monotonic() - begin_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _has_ended(coordinator: KilledCoordinator, job_id: str) -> bool:
    with coordinator.client() as client:
        phase = client.job(job_id).job.phase
    if phase not in {"working", "finished"}:
        raise BenchmarkError(f"the job is {phase}")
    return phase == "finished"


def load_figures(load: FarmLoad) -> PartFigures:
    """Measure bundles and items a second, and count what was lost or doubled."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        coordinator = KilledCoordinator(folder, ("--lost-after-ms", "300000"))
        try:
            coordinator.start()
            with coordinator.client() as client:
                token = client.create_token(Role.NODE, ttl_s=3_600, uses=0, label="benchmark")
                job_id = _create_job(client, folder, load.items)
            seconds = asyncio.run(_drive(coordinator, load, job_id, parse_token(token.token)))
            with coordinator.client() as client:
                results = _all_results(client, job_id)
        finally:
            coordinator.kill()
    wrong_items = lost_or_doubled(results, load.items)
    leases_per_s, items_per_s = len(results) / seconds, load.items / seconds
    return PartFigures(
        rows=[
            ("bundles a second", f"{leases_per_s:,.0f}", f"{coordinator.kills} kills"),
            ("items a second", f"{items_per_s:,.0f}", f"{seconds:.1f} s"),
            ("items lost or doubled", str(wrong_items), ""),
        ],
        metrics={
            "leases_per_s": round(leases_per_s, 1),
            "items_per_s": round(items_per_s),
            "items_lost_or_doubled": wrong_items,
            "load_kills": coordinator.kills,
        },
        notes=[
            (
                f"{load.nodes} connections by gRPC without TLS, bundles of {BUNDLE_ITEMS} items,"
                " one open a node, results signed; the load generator included"
            )
        ],
    )
