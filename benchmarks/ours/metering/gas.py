"""Gas for one contribution, recorded and paid, beside a naive contract of one transaction each."""

from pathlib import Path

from benchmarks.ours.metering.plan import COORDINATOR, JOB, Plan
from benchmarks.ours.metering.settling import receipt_of
from benchmarks.ours.metering.stage import Stage, stage
from benchmarks.ours.metering.stakes import enlist
from coordinator.core.settlement.sealing import Metering
from coordinator.shell.chain.sending import Intent
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd
from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import ContractCall
from hypergpu.chain.signer import contract_address
from hypergpu.ledger.typed import Domain, address_bytes

_NAIVE_CALLS = 20
_NAIVE_GAS = 700_000


def of_an_epoch(folder: Path, metering: Metering, receipts: int, nodes: int = 10) -> float:
    """Gas a contribution of the second epoch: batch, close and payment of nodes paid before."""
    plan = Plan(
        folder=str(folder),
        url="",
        nodes=nodes,
        receipts_each=2 * receipts // nodes,
        rounds_per_epoch=receipts // nodes,
        round_ms=0,
    )
    with stage(folder, metering) as here:
        enlist(here.chain, here.settler.site.token(), here.settler.site.contract, plan.node_keys())
        for epoch in range(2):
            _earn(here, plan, epoch)
            here.rest()
        parts = [f"{part}/{JOB}/" for part in ("batch", "close", "pay")]
        used = [place.gas_used for part in parts for place in here.inclusions(part)[-1:]]
        counted = here.settler.site.counted(JOB, [key.node_id for key in plan.node_keys()])
        if sum(counted) != 2 * receipts:
            raise RuntimeError(f"{sum(counted)} receipts are on the chain, not {2 * receipts}")
    return sum(used) / receipts


def naive(folder: Path) -> float:
    """Gas a contribution in a contract that keeps each in storage, once everybody is known."""
    compiled = artifact("NaiveLedger")
    abi = Abi(compiled.abi)
    with stage(folder, Metering.EACH) as here:
        made_at = contract_address(address_bytes(COORDINATOR.node_id), here.account.next_nonce())
        head = here.chain.head()
        making = ContractCall(compiled.code, 2_000_000)
        here.account.seal([Intent("deploy/naive", b"", making)], head)
        node, word = address_bytes(COORDINATOR.node_id), bytes(31) + b"\x01"
        intents = []
        for sequence in range(_NAIVE_CALLS):
            words = (node, sequence, sequence, word, word, word, 320, 1_000, 9_000)
            call = abi.call("submitContribution", word, 0, words)
            intents.append(Intent(f"naive/{sequence}", made_at, ContractCall(call, _NAIVE_GAS)))
        here.account.seal(intents, head)
        here.rest()
        used = [place.gas_used for place in here.inclusions("naive/")]
    return sum(used[1:]) / (len(used) - 1)


def _earn(here: Stage, plan: Plan, epoch: int) -> None:
    separator = Domain().separator()
    first = epoch * plan.rounds_per_epoch
    for key in plan.node_keys():
        rounds = range(first, first + plan.rounds_per_epoch)
        receipts = tuple(receipt_of(key, plan, round_, separator) for round_ in rounds)
        here.journal.append([], (), Earnings(receipts))
    here.journal.append([], (), Earnings(ends=(EpochEnd(JOB, epoch),)))
