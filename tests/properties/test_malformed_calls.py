"""Malformed calls of every service: each ends in a clean status, and none changes what it must not.

FUZZ_MESSAGES sets how many there are, as for the parsers.
"""

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import grpc
import psutil
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from google.protobuf.message import Message

from coordinator.core.training.job.events import AggregateReady, JobCreated, ModelInitialised
from coordinator.core.training.job.state import AcceptedUpdate, Job, Model
from coordinator.core.training.trust.quality import offered_contribution
from coordinator.core.work.work_events import NodeJoined, NodeLost
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.nodes.identity.tokens import TokenGrant
from coordinator.shell.rate import LineLimiter
from coordinator.shell.store.blob_collector import collect
from coordinator.shell.store.blobs.upload_store import QUARANTINE
from coordinator.shell.store.journal.journal import Journal
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, JoinClaim, sign
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId, TokenId
from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.ledger_terms import separator_of
from hypergpu.part_file import PartFile, Span
from hypergpu.protocol import PROTOCOL
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import TensorSpec, layout_of
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.credentials import Role
from hypergpu.wire.messages import digest_message
from tests.calls_in_process import CallContext, Method, ServedMethods
from tests.conformance.journal_stores import (
    DATABASES,
    POSTGRES_URL,
    STORES,
    JournalStore,
    postgres_schema,
)
from tests.malformed import fill, mutate
from tests.unit.shell.whole_shell import JOB, WholeShell, driving, services_in

CALLS = int(os.environ.get("FUZZ_MESSAGES", "100000")) // 20
RSS_BYTES_MAX = 50 << 20
LOG_BYTES_MAX = 1 << 20
LAYOUT = layout_of((TensorSpec("weight", (9, 33)), TensorSpec("bias", (5,))))
UPDATE_BYTES = update_bytes(LAYOUT, "int4")
SPEC = JobSpec(workload="digits-softmax", training=TrainingSettings(nodes=1, rounds=100_000))
CALLS_A_WORLD = 250
"""Calls of users until their coordinator begins anew: by then they have removed its job."""
UPDATES_SHARE = 0.05
LARGE = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
BY_NODES = frozenset({"UpdateRejected", "ShardHandedBack", "NodeDraining"})
"""Events that a refused call of a node may leave: what its stream said before, and its faults."""
OpenStore = Callable[[Path, str], AbstractContextManager[JournalStore]]
UNCLEAN = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})


class World:
    """A coordinator with one job, whose one node says anything."""

    def __init__(self, services: WholeShell, runtime: JobRuntime, key: IdentityKey) -> None:
        self.services = services
        self.calls = ServedMethods(services, services.settings.data_dir)
        self.key, self.node = key, key.node_id
        self._runtime = runtime
        self._nonce = 0
        tokens = self.calls.tokens
        grant = TokenGrant(Role.NODE, ttl_s=0, uses=0)
        self._token = tokens.create(
            grant, addresses=("host:7700",), authority=digest_of(b""), now_s=1_900_000_000
        )
        self._csr = certificate_request(self.node)
        self._seeds: dict[str, Callable[[random.Random], Message]] = {
            "NodeService.Join": self.join,
            "NodeService.RenewCertificate": lambda _: node_pb2.RenewCertificateRequest(
                certificate_request=self._csr
            ),
            "NodeService.Control": self.hello,
            "NodeService.ResolveBlob": self.blob,
            "NodeService.OfferUpdate": self.offer,
            "JobService.CreateJob": lambda dice: job_pb2.CreateJobRequest(
                request_id=str(dice.randrange(50)), spec_json=spec_json(SPEC)
            ),
        }

    @property
    def job(self) -> Job:
        return self._runtime.job

    def join(self, dice: random.Random) -> node_pb2.JoinRequest:
        """A join that is signed as it should be, for a request that may be anything."""
        key = IdentityKey.generate() if dice.random() < 0.5 else self.key
        return self._signed_join(key, mutate(self._csr, dice))

    async def admit(self) -> None:
        """Have the node join as it should."""
        join_request = self._signed_join(self.key, self._csr)
        outcome = await self.call("NodeService.Join", [join_request.SerializeToString()])
        assert outcome.status is grpc.StatusCode.OK

    def _signed_join(self, key: IdentityKey, wanted: bytes) -> node_pb2.JoinRequest:
        claim = JoinClaim(TokenId(self._token.id), digest_of(wanted))
        return node_pb2.JoinRequest(
            version=node_pb2.Version(protocol=PROTOCOL, software="\x00\x1b[2J"),
            token_id=self._token.id,
            token_secret=self._token.secret,
            public_key=key.public_key,
            certificate_request=wanted,
            signature=key.sign(claim),
        )

    def hello(self, dice: random.Random) -> node_pb2.ControlRequest:
        """A hello, whose receipts and leases may be anything."""
        hello = node_pb2.Hello()
        if dice.random() < 0.5:
            fill(hello, dice)
        hello.version.CopyFrom(node_pb2.Version(protocol=PROTOCOL, software="test"))
        for each in hello.newest_receipts:
            each.job_id = JOB
        return node_pb2.ControlRequest(hello=hello)

    def blob(self, _dice: random.Random) -> node_pb2.ResolveBlobRequest:
        assert self.job.model is not None
        return node_pb2.ResolveBlobRequest(digest=digest_message(self.job.model.blob.digest))

    def offer(self, dice: random.Random) -> node_pb2.OfferUpdateRequest:
        """An offer that is signed as it should be, with any figures."""
        self._nonce += 1
        nonce = dice.choice((0, 2**63, 2**64 - 1)) if dice.random() < 0.05 else self._nonce
        return self.signed_offer(dice.randbytes(UPDATE_BYTES), nonce, dice)

    def signed_offer(
        self, content: bytes, nonce: int, dice: random.Random
    ) -> node_pb2.OfferUpdateRequest:
        """An offer of these bytes."""
        round_ = self.job.round
        participant = round_.participants.get(self.node) if round_ is not None else None
        if round_ is None or participant is None:
            return node_pb2.OfferUpdateRequest()
        update = AcceptedUpdate(
            blob=BlobRef(digest_of(content), Bytes(len(content))),
            samples=Samples(0),
            inner_steps=0,
            compute_ms=Milliseconds(dice.choice(LARGE)),
            nonce=nonce,
            signature=b"",
        )
        statement = offered_contribution(self.job, self.node, update)
        request = node_pb2.OfferUpdateRequest(
            lease=node_pb2.Lease(job_id=JOB, round=round_.number, number=participant.lease),
            digest=digest_message(update.blob.digest),
            size_bytes=update.blob.size_bytes,
            nonce=nonce,
            signature=sign(self.key, separator_of(self.job.terms.domain), statement),
        )
        fill(request.report, dice)
        request.report.compute_ms = update.compute_ms
        return request

    async def send_update(self, dice: random.Random) -> CallContext:
        """Have an update accepted whose report may say anything, or refused for its content."""
        await self._take_part()
        self._nonce += 1
        content = bytes(UPDATE_BYTES) if dice.random() < 0.5 else dice.randbytes(UPDATE_BYTES)
        offer = self.signed_offer(content, self._nonce, dice)
        outcome = await self.call("NodeService.OfferUpdate", [offer.SerializeToString()])
        ticket = node_pb2.OfferUpdateResponse.FromString(outcome.answer).ticket
        for ticket_range in ticket.ranges:
            name = ticket_range.url.rpartition("/")[2]
            path = self.services.settings.data_dir / QUARANTINE / name
            write_part(path, content)
        commit = node_pb2.CommitUpdateRequest(lease=offer.lease, digest=offer.digest)
        outcome = await self.call("NodeService.CommitUpdate", [commit.SerializeToString()])
        if outcome.status is grpc.StatusCode.OK and self.job.round is not None:
            number = self.job.round.number
            await collect(self.services.storage, self.services.needs)
            new_model = kept_model(self.services, number + 1)
            fold_event = AggregateReady(at_ms=Milliseconds(0), round=number, model=new_model)
            assert await self.services.driver.submit(JOB, fold_event) == ""
        return outcome

    async def _take_part(self) -> None:
        """Have the node work again where it handed its shard back or said that it leaves."""
        self.services.nodes.forget(self.node)
        for event in (
            NodeLost(at_ms=Milliseconds(0), node=self.node, reason="cable"),
            NodeJoined(at_ms=Milliseconds(0), node=self.node),
        ):
            assert await self.services.driver.submit(JOB, event) == ""

    async def call(self, name: str, messages: list[bytes]) -> CallContext:
        """Call a method as the job's node, and look at what the call left."""
        before = self._runtime.next_sequence
        method = next(each for each in self.calls.methods if each.name == name)
        outcome = await self.calls.call(method, messages, self.node)
        assert outcome.status not in UNCLEAN, (name, outcome.details)
        if outcome.status is not grpc.StatusCode.OK:
            entries = self._runtime.recent_entries(before)
            assert entries is not None
            assert {entry.kind for entry in entries} <= BY_NODES, (name, outcome.details)
        return outcome

    async def say_anything(self, dice: random.Random, methods: Sequence[Method]) -> CallContext:
        """Call any of the methods with anything."""
        method = dice.choice(methods)
        count = dice.randrange(1, 6) if method.handler.request_streaming else 1
        messages = [self._message(method, dice, is_first=at == 0) for at in range(count)]
        return await self.call(method.name, messages)

    def _message(self, method: Method, dice: random.Random, *, is_first: bool) -> bytes:
        """The bytes of a message, as they should be, with a few changes, or of any fields."""
        seed = self._seeds.get(method.name)
        is_right = seed is not None and is_first and dice.random() < 0.7
        message = seed(dice) if seed is not None and is_right else fill(method.kind(), dice)
        content = message.SerializeToString()
        return content if dice.random() < 0.7 else mutate(content, dice)


def certificate_request(node: NodeId) -> bytes:
    """A request as nodes make it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    request_builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    signed_request = request_builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed_request.public_bytes(Encoding.PEM)


def write_part(path: Path, content: bytes) -> None:
    """Write all of an upload."""
    part = PartFile(path, Bytes(len(content)))
    part.write_unrecorded(0, content)
    part.record(Span(0, len(content)))
    part.close()


def kept_model(services: WholeShell, rounds: int) -> Model:
    """A model of the layout, on disk."""
    content = rounds.to_bytes(4, "little") + bytes(LAYOUT.model_bytes - 4)
    return Model(rounds, services.blobs.put(content, keep_s=0))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The file with the log, as a coordinator limits it."""
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as file:
        structlog.configure(
            processors=[
                LineLimiter(),
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.PrintLoggerFactory(file),
            cache_logger_on_first_use=False,
        )
        yield path
        structlog.reset_defaults()


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """An empty PostgreSQL schema; empty text where there is no server."""
    with postgres_schema() if POSTGRES_URL else nullcontext("") as url:
        yield url


@asynccontextmanager
async def world_in(
    folder: Path, opening: AbstractContextManager[JournalStore]
) -> AsyncIterator[World]:
    """A coordinator whose one node is in its job's round 0."""
    with opening as store:
        async with world_over(store.journal, folder) as world:
            yield world


@asynccontextmanager
async def world_over(journal: Journal, folder: Path) -> AsyncIterator[World]:
    """The same over an open journal."""
    services, key = services_in(folder, journal), IdentityKey.generate()
    async with driving(services):
        creation = JobCreated(at_ms=Milliseconds(0), job_id=JOB, spec=SPEC)
        assert await services.driver.submit(JOB, creation) == ""
        runtime = services.jobs[JOB]
        runtime.layout = LAYOUT
        world = World(services, runtime, key)
        await world.admit()
        first = ModelInitialised(
            at_ms=Milliseconds(0),
            model=kept_model(services, 0),
            partition_sizes=(Samples(1000),),
        )
        for event in (first, NodeJoined(at_ms=Milliseconds(0), node=key.node_id)):
            assert await services.driver.submit(JOB, event) == ""
        yield world


class Bounds:
    """Memory and log, which no number of malformed calls makes grow without end."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = psutil.Process()
        self._rss_bytes = self._process.memory_info().rss

    def check(self) -> str:
        """Say how much both grew."""
        rss_bytes = self._process.memory_info().rss - self._rss_bytes
        log_bytes = self._log.stat().st_size
        assert rss_bytes <= RSS_BYTES_MAX
        assert log_bytes <= LOG_BYTES_MAX, self._log.read_text()[-2000:]
        return f"memory +{rss_bytes >> 20} MiB, log {log_bytes >> 10} KiB"


def said_of(ended: Counter[grpc.StatusCode], bounds: Bounds) -> str:
    counts = ", ".join(f"{code.name} {count}" for code, count in ended.most_common())
    return f"{counts}; {bounds.check()}"


@pytest.mark.parametrize("database", DATABASES)
async def test_malformed_calls_of_a_node_end_in_a_clean_status_and_change_nothing(
    database: str,
    postgres_url: str,
    tmp_path: Path,
    log: Path,
    record_property: Callable[[str, object], None],
) -> None:
    status_counts = Counter[grpc.StatusCode]()
    async with world_in(tmp_path, STORES[database](tmp_path, postgres_url)) as world:
        methods = [each for each in world.calls.methods if each.name.startswith("NodeService.")]
        bounds = Bounds(log)
        for seed in range(CALLS // 2):
            dice = random.Random(seed)
            is_update = dice.random() < UPDATES_SHARE
            call = world.send_update(dice) if is_update else world.say_anything(dice, methods)
            status_counts[(await call).status] += 1
        again = await world.send_update(random.Random(0))
        assert again.status is grpc.StatusCode.OK
        record_property("said", said_of(status_counts, bounds))


@pytest.mark.parametrize("database", DATABASES)
async def test_malformed_calls_of_users_end_in_a_clean_status(
    database: str,
    postgres_url: str,
    tmp_path: Path,
    log: Path,
    record_property: Callable[[str, object], None],
) -> None:
    status_counts, bounds = Counter[grpc.StatusCode](), Bounds(log)
    for seed in range(0, CALLS // 2, CALLS_A_WORLD):
        folder = tmp_path / str(seed)
        folder.mkdir(mode=0o700)
        async with world_in(folder, STORES[database](folder, postgres_url)) as world:
            methods = [each for each in world.calls.methods if "NodeService." not in each.name]
            for each in range(seed, seed + CALLS_A_WORLD):
                status_counts[(await world.say_anything(random.Random(each), methods)).status] += 1
        shutil.rmtree(folder)
    record_property("said", said_of(status_counts, bounds))
