"""`python -m benchmarks.ours.metering.settling PLAN`: earns receipts and settles them.

It may be killed at any instant and started again: what it has earned is in its journal.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.ours.metering.plan import (
    COORDINATOR,
    ESCROW,
    JOB,
    QUALITY_BPS,
    SAMPLES,
    STAKED,
    UNIT_PRICE,
    Plan,
    Progress,
)
from coordinator.core.settlement.sealing import SealingRule
from coordinator.shell.chain.founding import JobOrder
from coordinator.shell.chain.pipeline import Pipeline
from coordinator.shell.chain.settler import SettlingOptions
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd, ReceiptRecord
from coordinator.shell.journal.sql.store import SqlJournal
from coordinator.shell.logs import configure_logs
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import Signer
from hypergpu.digest import digest_of
from hypergpu.ids import Keccak
from hypergpu.ledger.receipt import SignedReceipt, leaf
from hypergpu.ledger.typed import (
    Contribution,
    Domain,
    Receipt,
    job_key,
    keccak_of,
    sign,
    struct_hash,
)
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples

_EVALUATOR = keccak_of("benchmark")
_MODEL = digest_of(b"model")
_LOOK_S = 0.05


def contribution_of(key: IdentityKey, plan: Plan, sequence: int) -> Contribution:
    """What a node signs in a round of the plan."""
    return Contribution(
        job=job_key(COORDINATOR.node_id, JOB),
        epoch=sequence // plan.rounds_per_epoch,
        round=sequence,
        node=key.node_id,
        shard=_MODEL,
        model=_MODEL,
        update=digest_of(b"%d of %s" % (sequence, key.node_id.encode())),
        samples=Samples(SAMPLES),
        inner_steps=10,
        compute_ms=Milliseconds(1_000),
        update_bytes=Bytes(4_096),
        lease=sequence + 1,
        nonce=sequence + 1,
    )


def receipt_of(key: IdentityKey, plan: Plan, sequence: int, separator: bytes) -> ReceiptRecord:
    """A node's contribution, signed by it and countersigned. About 0.15 ms."""
    contribution = contribution_of(key, plan, sequence)
    receipt = Receipt(
        job=contribution.job,
        epoch=contribution.epoch,
        round=sequence,
        node=key.node_id,
        sequence=sequence,
        contribution=Keccak(struct_hash(contribution).hex()),
        samples=Samples(SAMPLES),
        quality_bps=BasisPoints(QUALITY_BPS),
        evaluator=_EVALUATOR,
    )
    signed = SignedReceipt(
        receipt=receipt,
        signature=sign(COORDINATOR, separator, receipt),
        contribution=contribution,
        contribution_signature=sign(key, separator, contribution),
    )
    return ReceiptRecord(JOB, signed, leaf(receipt))


def pipeline_of(plan: Plan, journal: SqlJournal) -> Pipeline:
    """The pipeline as a coordinator makes it."""
    profile = chain_profile("anvil")
    rule = SealingRule(
        metering=plan.metering,
        interval_ms=250,
        receipts_max=plan.receipts_per_batch,
        in_flight_max=profile.in_flight_max,
    )
    options = SettlingOptions(profile=profile, rule=rule, lock_folder=Path(plan.folder))
    pipeline = Pipeline(
        lambda: HttpRpc(HttpTransport(plan.url), profile.pace),
        Signer(COORDINATOR),
        journal,
        options,
    )
    order = JobOrder(
        job_id=JOB,
        unit_price=UNIT_PRICE,
        escrow=ESCROW,
        guaranteed_bps=1_000,
        epochs=1 + plan.receipts_each // plan.rounds_per_epoch,
        model=_MODEL,
        dataset=_MODEL,
    )
    pipeline.order(order)
    return pipeline


def earn(plan: Plan, journal: SqlJournal, separator: bytes) -> Iterator[int]:
    """Earn round after round from where the journal ends; gives the receipts kept so far."""
    keys = plan.node_keys()
    counts = journal.receipt_counts(JOB)
    first = min((counts.get(key.node_id, 0) for key in keys), default=0)
    for round_ in range(first, plan.receipts_each):
        # All of a round in one transaction, as a fold journals them.
        records = tuple(receipt_of(key, plan, round_, separator) for key in keys)
        is_end = (round_ + 1) % plan.rounds_per_epoch == 0
        is_last = round_ + 1 == plan.receipts_each
        number = round_ // plan.rounds_per_epoch
        ends = (EpochEnd(JOB, number, is_last),) if is_end or is_last else ()
        journal.append([], (), Earnings(records, ends))
        with (Path(plan.folder) / "kept.txt").open("a") as file:
            file.write(f"{number} {time.time_ns() // 1_000_000} {len(keys)}\n")
        yield (round_ + 1) * len(keys)
        time.sleep(plan.round_ms / 1000)


def main() -> int:
    """Earn, settle, and say how far it is."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    configure_logs()
    journal = SqlJournal(str(Path(plan.folder) / "journal.sqlite3"))
    pipeline = pipeline_of(plan, journal)
    pipeline.start()
    while not _is_founded(plan, pipeline):
        _say(plan, journal, pipeline, 0)
        time.sleep(_LOOK_S)
    for kept in earn(plan, journal, Domain().separator()):
        pipeline.wake()
        _say(plan, journal, pipeline, kept)
    while not _say(plan, journal, pipeline, plan.receipts).is_done and not pipeline.state.halted:
        time.sleep(_LOOK_S)
    pipeline.stop()
    journal.close()
    return 1 if pipeline.state.halted else 0


def _is_founded(plan: Plan, pipeline: Pipeline) -> bool:
    """Whether work may begin: what is timed is the settling, not the deployment before it."""
    is_staked = not plan.has_stakes or Path(plan.folder, STAKED).exists()
    return bool(pipeline.state.halted) or (is_staked and pipeline.escrow.reading(JOB) is not None)


def _say(plan: Plan, journal: SqlJournal, pipeline: Pipeline, kept: int) -> Progress:
    state = pipeline.state
    epochs = [record.epoch for record in journal.epochs()]
    is_sealed = kept == plan.receipts and not journal.unsealed(1)
    progress = Progress(
        kept=kept,
        contract=state.contract or "",
        unpaid_epochs=len(epochs),
        waiting=state.waiting,
        is_sealed=is_sealed,
        deferred=sum(epoch.deferred for epoch in epochs),
        is_done=is_sealed and not epochs and not state.waiting and not state.mined,
        halted=state.halted,
    )
    sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
    sys.stdout.flush()
    return progress


if __name__ == "__main__":
    sys.exit(main())
