import sys
from pathlib import Path

from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.sealing import Metering, SealingRule
from coordinator.shell.chain.escrow import EscrowBook
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.settler import Settler, SettlingOptions
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd
from coordinator.shell.journal.memory import MemoryJournal
from hypergpu.chain.local.in_process import InProcessRpc
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.signer import Signer
from tests.chain.ground import JOB, NODES, ORDER
from tests.signed_receipts import COORDINATOR, Work, receipt_record


def test_a_chain_inside_the_process_settles_the_same_way(tmp_path: Path) -> None:
    profile = chain_profile("tester")
    rpc, journal = InProcessRpc(profile.chain_id), MemoryJournal()
    rule = SealingRule(metering=Metering.BATCHED, interval_ms=0)
    options = SettlingOptions(profile=profile, rule=rule, lock_folder=tmp_path)
    account = Account(Signer(COORDINATOR), journal, profile)
    settler = Settler(rpc, account, journal, options, EscrowBook(journal))
    receipts = tuple(receipt_record(JOB, Work(node=node, sequence=0)) for node in NODES)
    journal.append([], (), Earnings(receipts, (EpochEnd(JOB, 0, is_last=True),)))
    settler.turn([ORDER])
    for _ in range(6):
        settler.turn([])
    (record,) = journal.epochs()
    assert record.epoch.deferred == len(NODES)
    rpc.call(Call("evm_increaseTime", (profile.window_s + 1,)))
    rpc.call(Call("evm_mine"))
    for _ in range(6):
        settler.turn([])
    (record,) = journal.epochs(is_final_too=True)
    assert record.epoch.state is EpochState.FINAL
    job = settler.site.job(JOB)
    assert job is not None
    assert job.free == ORDER.escrow - 4 * 320 * 9_000 * 1_000 // 10**6


def test_it_leaves_the_depth_of_calls_as_it_was() -> None:
    before = sys.getrecursionlimit()
    InProcessRpc(1)
    assert sys.getrecursionlimit() == before
