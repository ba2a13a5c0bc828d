"""A coordinator's journal without a coordinator: rounds are appended, the payments fold them.

The journal lies in a file, so that a process may be killed at any instant and started again.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy.engine import Connection

from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, keccak, sign
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.extension import JournalRow
from hypergpu.ids import JobId, Keccak, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.journal.events import (
    JobCreatedEvent,
    JobEndedEvent,
    JournalledModel,
    ModelInitialisedEvent,
    ParametersChangedEvent,
    RoundMeasuredEvent,
)
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.worth import worth
from hypergpu.ledger_terms import Terms, keccak_of, separator_of
from hypergpu.statements import Contribution, Receipt, SignedReceipt, contribution_hash
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples
from hypergpu.work_units import WorkUnit
from payments.shell.chains import PaymentSettings
from payments.shell.plugin import CoordinatorPayments

JOB = JobId("job-00000000000a")
UNIT_PRICE = 1_000
ESCROW = 10**15
SAMPLES = Samples(320)
QUALITY_BPS = BasisPoints(9_000)
COORDINATOR = IdentityKey(keccak(b"a benchmark's coordinator"))
_MODEL = digest_of(b"model")


class _Line(msgspec.Struct, array_like=True):
    job_id: JobId
    kind: str
    body: bytes


class JournalHost:
    """`hypergpu.extension.CoordinatorHost` over a file of rows."""

    def __init__(
        self, folder: Path, key: IdentityKey = COORDINATOR, database_url: str = ""
    ) -> None:
        self.data_dir = folder
        self.database_url = database_url
        self.key = key
        self.received: dict[NodeId, list[SignedReceipt]] = defaultdict(list)
        """Receipts that were handed out, by node."""
        self.away: set[NodeId] = set()
        """Nodes that are not connected."""
        self.funding: dict[JobId, tuple[int | None, str]] = {}
        self._rows: dict[JobId, list[JournalRow]] = defaultdict(list)
        self._file = folder / "journal.jsonl"
        if self._file.exists():
            for line in self._file.read_bytes().splitlines():
                self._add(msgspec.json.decode(line, type=_Line))

    def jobs(self) -> tuple[JobId, ...]:
        return tuple(self._rows)

    def rows(self, job_id: JobId, from_sequence: int, limit: int) -> Sequence[JournalRow]:
        return self._rows[job_id][from_sequence : from_sequence + limit]

    def node_name(self, node: NodeId) -> str:
        return ""

    def send_receipts(self, node: NodeId, job_id: JobId, receipts: Sequence[SignedReceipt]) -> bool:
        if node in self.away:
            return False
        self.received[node] += receipts
        return True

    def fence(self, connection: Connection) -> None:
        """Nobody else drives."""

    def check_driving(self) -> None:
        """Nobody else drives."""

    async def change_funding(self, job_id: JobId, funded_samples: int | None, reason: str) -> str:
        self.funding[job_id] = funded_samples, reason
        return ""

    def append(self, job_id: JobId, rows: Iterable[tuple[str, msgspec.Struct]]) -> None:
        """Journal some events at once."""
        lines = [_Line(job_id, kind, msgspec.json.encode(body)) for kind, body in rows]
        with self._file.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        for line in lines:
            self._add(line)

    def copy(self, job_id: JobId, rows: Iterable[JournalRow]) -> None:
        """Take over rows of another journal."""
        for row in rows:
            self._add(_Line(job_id, row.kind, row.body))

    def _add(self, line: _Line) -> None:
        rows = self._rows[line.job_id]
        rows.append(JournalRow(len(rows), line.kind, line.body))


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A job that trains nothing."""

    job_id: JobId = JOB
    nodes: int = 10
    rounds_per_epoch: int = 5
    rounds: int = 100
    unit_price: int = UNIT_PRICE
    escrow: int = ESCROW

    @property
    def keys(self) -> list[IdentityKey]:
        """The nodes' keys, the same each time."""
        return [node_key(number) for number in range(self.nodes)]

    @property
    def spec(self) -> JobSpec:
        """The job file."""
        pay = Pay(
            unit_price=self.unit_price, escrow=self.escrow, rounds_per_epoch=self.rounds_per_epoch
        )
        training = TrainingSettings(rounds=self.rounds, nodes=self.nodes)
        return JobSpec(workload="digits-softmax", training=training, pay=pay)

    @property
    def unit(self) -> WorkUnit:
        """What its work is counted in."""
        return WorkUnit.SAMPLES

    def first_rows(self, terms: Terms) -> list[tuple[str, msgspec.Struct]]:
        """The rows that a job begins with."""
        creation = JobCreatedEvent(
            job_id=self.job_id, spec=msgspec.to_builtins(self.spec), terms=terms
        )
        model = ModelInitialisedEvent(model=JournalledModel(BlobRef(_MODEL, Bytes(0))))
        return [("JobCreated", creation), ("ModelInitialised", model)]

    def round_row(
        self, round_: int, terms: Terms, keys: Sequence[IdentityKey] | None = None
    ) -> tuple[str, RoundMeasuredEvent]:
        """The row of a round in which every node's update was accepted."""
        separator = separator_of(terms.domain)
        works = []
        for key in self.keys if keys is None else keys:
            contribution = self.contribution(key, round_, terms)
            works.append(
                MeasuredWork(
                    contribution=contribution,
                    signature=sign(key, separator, contribution),
                    quality_bps=QUALITY_BPS,
                    evaluator="benchmark",
                )
            )
        return "RoundMeasured", RoundMeasuredEvent(round=round_, updates=tuple(works))

    def escrow_row(self, escrow: int) -> tuple[str, msgspec.Struct]:
        """The row of a raised escrow."""
        plan = msgspec.structs.replace(self, escrow=escrow)
        return "ParametersChanged", ParametersChangedEvent(spec=msgspec.to_builtins(plan.spec))

    def receipt(
        self, work: MeasuredWork, key: IdentityKey, terms: Terms, sequence: int
    ) -> SignedReceipt:
        """A receipt of a measured update, signed with any key."""
        contribution = work.contribution
        receipt = Receipt(
            job=contribution.job,
            epoch=contribution.epoch,
            round=contribution.round,
            node=contribution.node,
            sequence=sequence,
            contribution=Keccak(contribution_hash(contribution).hex()),
            samples=contribution.samples,
            quality_bps=QUALITY_BPS,
            evaluator=keccak_of("benchmark"),
            total_score=(sequence + 1) * SAMPLES * QUALITY_BPS,
        )
        return SignedReceipt(
            receipt=receipt,
            signature=sign(key, separator_of(terms.domain), receipt),
            contribution=contribution,
            contribution_signature=work.signature,
        )

    def contribution(self, key: IdentityKey, round_: int, terms: Terms) -> Contribution:
        """A node's signed statement about a round."""
        return Contribution(
            job=terms.job,
            epoch=round_ // self.rounds_per_epoch,
            round=round_,
            node=key.node_id,
            shard=_MODEL,
            model=_MODEL,
            update=digest_of(b"%d of %s" % (round_, key.node_id.encode())),
            samples=SAMPLES,
            inner_steps=10,
            compute_ms=Milliseconds(1_000),
            update_bytes=Bytes(4_096),
            lease=round_ + 1,
            nonce=round_ + 1,
        )


ENDED: tuple[str, msgspec.Struct] = ("JobEnded", JobEndedEvent(phase="finished", reason=""))


def node_key(number: int) -> IdentityKey:
    """The key of a node, the same each time."""
    return IdentityKey(keccak(b"a benchmark's node %d" % number))


def worth_of(receipts: int, unit_price: int = UNIT_PRICE) -> int:
    """Amount that so many receipts of a node are worth."""
    return worth(unit_price, receipts * SAMPLES * QUALITY_BPS)


_LOOK_S = 0.05


class SettlementRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, the same for every start of its process."""

    folder: str
    url: str
    job: JobPlan
    round_ms: int = 0
    """Time between two rounds."""
    metering: Literal["batched", "each"] = "batched"

    @property
    def receipts(self) -> int:
        """Receipts of all nodes."""
        return self.job.nodes * self.job.rounds


class RunningPayments(NamedTuple):
    """Payments that run, with the job in the journal and its escrow on the chain."""

    host: JournalHost
    payments: CoordinatorPayments
    terms: Terms
    first_round: int
    """The first one that the journal does not have."""

    def end(self, plan: SettlementRun) -> None:
        """Journal the job's end, once."""
        last = self.host.rows(plan.job.job_id, plan.job.rounds + 2, 1)
        if not last:
            self.host.append(plan.job.job_id, [ENDED])


@asynccontextmanager
async def run_payments(plan: SettlementRun) -> AsyncIterator[RunningPayments]:
    """Run the payments until the block is left."""
    host = JournalHost(Path(plan.folder))
    settings = PaymentSettings(chain="anvil", chain_url=plan.url, metering=plan.metering)
    payments = CoordinatorPayments(host, settings)
    await payments.start()
    payments_task = asyncio.create_task(payments.run())
    job = plan.job
    try:
        while (terms := _known_terms(payments, job)) is None:
            await _look(payments_task)
        if not host.jobs():
            host.append(job.job_id, job.first_rows(terms))
        payments.wake()
        while not (host.funding.get(job.job_id) or (0,))[0]:
            await _look(payments_task)
        rows = len(host.rows(job.job_id, 0, job.rounds + 2))
        yield RunningPayments(host, payments, terms, rows - len(job.first_rows(terms)))
    finally:
        payments_task.cancel()
        await asyncio.gather(payments_task, return_exceptions=True)
        await payments.stop()


def _known_terms(payments: CoordinatorPayments, job: JobPlan) -> Terms | None:
    try:
        return payments.terms(job.job_id, job.spec.pay, job.unit)
    except HyperGPUError:
        return None


async def _look(running: "asyncio.Task[None]") -> None:
    """Wait a moment; a task that ended raises its error."""
    if running.done():
        running.result()
        raise RuntimeError("payments ended by themselves")
    await asyncio.sleep(_LOOK_S)
