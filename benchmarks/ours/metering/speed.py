"""How many receipts a second reach the chain: pre-signed, from end to end, and one by one."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.metering.plan import COORDINATOR, JOB, QUALITY_BPS, SAMPLES, Plan
from benchmarks.ours.metering.settling import pipeline_of, receipt_of
from benchmarks.ours.metering.stage import stage
from coordinator.core.settlement.epoch import Epoch
from coordinator.core.settlement.sealing import Metering
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pipeline import Pipeline
from coordinator.shell.chain.sending import Intent
from coordinator.shell.journal.ledger.records import Earnings, ReceiptRecord
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.chain.ledger import Batch, LedgerCalls, NodeTotals
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.receipt import SignedReceipt, leaf
from hypergpu.ledger.typed import (
    Domain,
    address_bytes,
    is_contribution_of,
    job_key,
    sign,
    word_bytes,
)

_LOOK_S = 0.02
_NODES = 10
_APPEND = 500


class Rate(NamedTuple):
    """So many receipts in so many seconds, each of them found on the chain."""

    receipts: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Receipts a second."""
        return self.receipts / self.seconds


def presigned(folder: Path, batches: int, receipts_per_batch: int) -> Rate:
    """Send batches that were signed before: from the first byte to the last block."""
    each = receipts_per_batch // _NODES
    plan = _plan(folder, "", each * batches)
    keys = plan.node_keys()
    with stage(folder, Metering.BATCHED, block_time_s=1) as here:
        site = here.settler.site
        intents = []
        for number in range(batches):
            totals = [
                NodeTotals(
                    key.node_id,
                    number * each,
                    each,
                    each * SAMPLES,
                    each * SAMPLES * QUALITY_BPS,
                )
                for key in keys
            ]
            batch = Batch(site.job_key(JOB), 0, number, keccak(b"%d" % number))
            call = site.calls.record(batch, totals)
            intents.append(Intent(f"load/{number}", site.contract, call))
        here.account.seal(intents, here.chain.head())
        rows = here.journal.transactions(
            here.account.name, states=[TransactionState.WAITING], limit=0
        )
        raws = [(row.attempts[0].attempt.hash, row.attempts[0].raw) for row in rows]
        begun_s = time.monotonic()
        here.chain.send(raws)
        nonce = here.account.next_nonce()
        while here.chain.next_nonce(here.account.address) < nonce:
            time.sleep(_LOOK_S)
        seconds = time.monotonic() - begun_s
        here.inclusions("load/")
        counted = site.counted(JOB, [key.node_id for key in keys])
        _must(sum(counted), batches * each * _NODES)
    return Rate(batches * each * _NODES, seconds)


def end_to_end(folder: Path, receipts: int) -> Rate:
    """Verify, countersign, keep, seal and send: until the last receipt is in a block."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(), log=folder / "anvil.log") as anvil:
        plan = _plan(folder, anvil.url, receipts // _NODES)
        separator = Domain().separator()
        arrived = [
            receipt_of(key, plan, round_, separator)
            for round_ in range(plan.receipts_each)
            for key in plan.node_keys()
        ]
        journal, pipeline = _founded(plan)
        parts = [arrived[first : first + _APPEND] for first in range(0, len(arrived), _APPEND)]
        begun_s = time.monotonic()
        # Signatures are checked and made outside of the interpreter's lock, one thread a core.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for part in pool.map(lambda each: _all_countersigned(each, separator), parts):
                journal.append([], (), Earnings(part))
                pipeline.wake()
        return _until_counted(plan, journal, pipeline, begun_s)


def one_by_one(folder: Path, receipts: int) -> Rate:
    """A transaction for each receipt, from the journal to the last block."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(), log=folder / "anvil.log") as anvil:
        plan = _plan(folder, anvil.url, receipts // _NODES, Metering.EACH)
        separator = Domain().separator()
        made = tuple(
            receipt_of(key, plan, round_, separator)
            for round_ in range(plan.receipts_each)
            for key in plan.node_keys()
        )
        journal, pipeline = _founded(plan)
        begun_s = time.monotonic()
        journal.append([], (), Earnings(made))
        return _until_counted(plan, journal, pipeline, begun_s)


def _founded(plan: Plan) -> tuple[SqlJournal, Pipeline]:
    """A pipeline whose job is open on the chain."""
    journal = SqlJournal(str(Path(plan.folder, "journal.sqlite3")))
    pipeline = pipeline_of(plan, journal)
    pipeline.start()
    while pipeline.escrow.reading(JOB) is None:
        time.sleep(_LOOK_S)
        _alive(pipeline)
    return journal, pipeline


def _until_counted(plan: Plan, journal: SqlJournal, pipeline: Pipeline, begun_s: float) -> Rate:
    pipeline.wake()
    while journal.unsealed(1) or pipeline.state.waiting or not _is_all_mined(journal):
        time.sleep(_LOOK_S)
        _alive(pipeline)
    seconds = time.monotonic() - begun_s
    pipeline.stop()
    journal.close()
    chain = EvmChain(HttpRpc(HttpTransport(plan.url)))
    _check_counted(plan, pipeline, chain)
    chain.rpc.close()
    return Rate(plan.receipts, seconds)


def _is_all_mined(journal: SqlJournal) -> bool:
    epochs: list[Epoch] = [record.epoch for record in journal.epochs()]
    return all(0 < epoch.batch.sealed == epoch.batch.mined for epoch in epochs)


def _check_counted(plan: Plan, pipeline: Pipeline, chain: EvmChain) -> None:
    calls, job = LedgerCalls(), word_bytes(job_key(COORDINATOR.node_id, JOB))
    contract = address_bytes(pipeline.state.contract or COORDINATOR.node_id)
    counted = 0
    for key in plan.node_keys():
        call = calls.abi.call("getAccount", job, address_bytes(key.node_id))
        counted += calls.account(chain.read(contract, call)).counted
    _must(counted, plan.receipts)


def _all_countersigned(
    arrived: Sequence[ReceiptRecord], separator: bytes
) -> tuple[ReceiptRecord, ...]:
    return tuple(_countersigned(one, separator) for one in arrived)


def _countersigned(arrived: ReceiptRecord, separator: bytes) -> ReceiptRecord:
    """What a coordinator does with a contribution once its quality is known."""
    signed = arrived.signed
    node, contribution = signed.receipt.node, signed.contribution
    if not is_contribution_of(node, separator, contribution, signed.contribution_signature):
        raise RuntimeError("a contribution's signature is wrong")
    fresh = SignedReceipt(
        receipt=signed.receipt,
        signature=sign(COORDINATOR, separator, signed.receipt),
        contribution=contribution,
        contribution_signature=signed.contribution_signature,
    )
    return ReceiptRecord(arrived.job_id, fresh, leaf(signed.receipt))


def _plan(
    folder: Path, url: str, receipts_each: int, metering: Metering = Metering.BATCHED
) -> Plan:
    return Plan(
        folder=str(folder),
        url=url,
        nodes=_NODES,
        receipts_each=receipts_each,
        # One epoch that does not end: what is measured is the recording.
        rounds_per_epoch=receipts_each + 1,
        round_ms=0,
        metering=metering,
    )


def _alive(pipeline: Pipeline) -> None:
    if pipeline.state.halted:
        raise RuntimeError(pipeline.state.halted)


def _must(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} receipts are on the chain, not {wanted}")
