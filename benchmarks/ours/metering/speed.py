"""How many receipts a second reach the chain: pre-signed, from end to end, and one by one."""

import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.ours.metering.arriving import arriving, take_in
from benchmarks.ours.metering.limits import (
    chain_cpu_s,
    gas_limit_per_s,
    into_blocks,
    signatures_per_s,
    signed,
    transfers_per_s,
)
from benchmarks.ours.metering.plan import COORDINATOR, JOB, QUALITY_BPS, SAMPLES, Plan
from benchmarks.ours.metering.settling import pipeline_of, receipt_of
from benchmarks.ours.metering.stage import stage
from coordinator.core.settlement.epoch import Epoch
from coordinator.core.settlement.sealing import Metering
from coordinator.shell.chain.pipeline import Pipeline
from coordinator.shell.chain.sending import Intent
from coordinator.shell.journal.ledger.records import Earnings
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.chain.ledger import Batch, LedgerCalls, NodeTotals
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.typed import Domain, address_bytes, job_key, word_bytes

_LOOK_S = 0.02
_NODES = 10


class Limit(NamedTuple):
    """What nothing of the kind can be faster than, measured in the same run."""

    name: str
    per_s: float


class Rate(NamedTuple):
    """So many receipts in so many seconds, each of them found on the chain."""

    receipts: int
    seconds: float
    cpu_us: float
    """Of this process, for one receipt."""
    chain_cpu_us: float
    """Of Anvil."""
    limits: tuple[Limit, ...] = ()

    @property
    def per_s(self) -> float:
        """Receipts a second."""
        return self.receipts / self.seconds


class _Watch:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        self._begun = _spent()

    def rate(self, receipts: int) -> Rate:
        """So many by now."""
        wall_s, cpu_s, chain_s = (
            now - before for now, before in zip(_spent(), self._begun, strict=True)
        )
        return Rate(receipts, wall_s, 1e6 * cpu_s / receipts, 1e6 * chain_s / receipts)


def _spent() -> tuple[float, float, float]:
    return time.monotonic(), time.process_time(), chain_cpu_s()


def presigned(folder: Path, batches: int, receipts_per_batch: int) -> Rate:
    """Send batches that were signed before: from the first byte to the last block."""
    each = receipts_per_batch // _NODES
    keys = _plan(folder, "", each * batches).node_keys()
    receipts = batches * each * _NODES
    with stage(folder, Metering.BATCHED, block_time_s=1) as here:
        site = here.settler.site
        intents = []
        for number in range(batches):
            samples = each * SAMPLES
            totals = [
                NodeTotals(key.node_id, number * each, each, samples, samples * QUALITY_BPS)
                for key in keys
            ]
            batch = Batch(site.job_key(JOB), 0, number, keccak(b"%d" % number))
            call = site.calls.record(batch, totals)
            intents.append(Intent(f"load/{number}", site.contract, call))
        transactions = signed(here, intents)
        watch = _Watch()
        into_blocks(here, transactions)
        rate = watch.rate(receipts)
        gas_each = mean(place.gas_used for place in here.inclusions("load/"))
        _must(sum(site.counted(JOB, [key.node_id for key in keys])), receipts)
    limit = Limit("the blocks' gas", gas_limit_per_s(gas_each) * receipts_per_batch)
    return rate._replace(limits=(limit,))


def end_to_end(folder: Path, receipts: int) -> Rate:
    """Verify, countersign, keep, seal and send: until the last receipt is in a block."""
    folder.mkdir(parents=True, exist_ok=True)
    limit = Limit("libsecp256k1 alone on every core", signatures_per_s())
    with running_anvil(AnvilOptions(), log=folder / "anvil.log") as anvil:
        plan = _plan(folder, anvil.url, receipts // _NODES)
        rounds = arriving(plan)
        journal, pipeline = _founded(plan)
        watch = _Watch()
        take_in(rounds, journal, pipeline)
        _wait_until_counted(journal, pipeline)
        rate = watch.rate(plan.receipts)
        _end(plan, journal, pipeline)
    return rate._replace(limits=(limit,))


def one_by_one(folder: Path, receipts: int) -> Rate:
    """A transaction for each receipt, from the journal to the last block."""
    folder.mkdir(parents=True, exist_ok=True)
    bare = Limit("Anvil's bare transfers", transfers_per_s(folder / "bare", receipts))
    with running_anvil(AnvilOptions(), log=folder / "anvil.log") as anvil:
        plan = _plan(folder, anvil.url, receipts // _NODES, Metering.EACH)
        separator = Domain().separator()
        made = tuple(
            receipt_of(key, plan, round_, separator)
            for round_ in range(plan.receipts_each)
            for key in plan.node_keys()
        )
        journal, pipeline = _founded(plan)
        watch = _Watch()
        journal.append([], (), Earnings(made))
        _wait_until_counted(journal, pipeline)
        rate = watch.rate(plan.receipts)
        gas_each = _end(plan, journal, pipeline)
    gas = Limit("the blocks' gas", gas_limit_per_s(gas_each))
    return rate._replace(limits=(bare, gas))


def _founded(plan: Plan) -> tuple[SqlJournal, Pipeline]:
    """A pipeline whose job is open on the chain."""
    journal = SqlJournal(str(Path(plan.folder, "journal.sqlite3")))
    pipeline = pipeline_of(plan, journal)
    pipeline.start()
    while pipeline.escrow.reading(JOB) is None:
        time.sleep(_LOOK_S)
        _alive(pipeline)
    return journal, pipeline


def _wait_until_counted(journal: SqlJournal, pipeline: Pipeline) -> None:
    pipeline.wake()
    while journal.waiting_counts() or pipeline.state.waiting or not _is_all_mined(journal):
        time.sleep(_LOOK_S)
        _alive(pipeline)


def _is_all_mined(journal: SqlJournal) -> bool:
    epochs: list[Epoch] = [record.epoch for record in journal.epochs()]
    return all(0 < epoch.batch.sealed == epoch.batch.mined for epoch in epochs)


def _end(plan: Plan, journal: SqlJournal, pipeline: Pipeline) -> float:
    """Check what the chain counts. Returns the gas of a batch's transaction, on average."""
    pipeline.stop()
    chain = EvmChain(HttpRpc(HttpTransport(plan.url)))
    account = pipeline.account.name
    rows = [
        journal.transaction_for(account, purpose) for purpose in journal.purposes(account, "batch/")
    ]
    hashes = [row.attempts[-1].attempt.hash for row in rows if row is not None]
    places = [place for place in chain.inclusions(hashes) if place is not None]
    calls, job = LedgerCalls(), word_bytes(job_key(COORDINATOR.node_id, JOB))
    contract = address_bytes(pipeline.state.contract or COORDINATOR.node_id)
    counted = 0
    for key in plan.node_keys():
        call = calls.abi.call("getAccount", job, address_bytes(key.node_id))
        counted += calls.account(chain.read(contract, call)).counted
    chain.rpc.close()
    journal.close()
    _must(counted, plan.receipts)
    return mean(place.gas_used for place in places)


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
