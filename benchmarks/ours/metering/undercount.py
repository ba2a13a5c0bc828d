"""A coordinator records too little and vanishes: each node claims with its newest receipt."""

from pathlib import Path
from typing import Any

from benchmarks.ours.metering.chain import ask_anvil, mine
from benchmarks.ours.metering.gas import WINDOW_S, GasLedger
from benchmarks.ours.metering.host import COORDINATOR, JOB, QUALITY_BPS, SAMPLES, JobPlan
from hypergpu.ids import Address
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.domain import Domain, terms_of, word_bytes
from hypergpu.statements.signing import chain_form
from payments.shell.anvil import AnvilOptions, running_anvil

_PLAN = JobPlan(rounds=20, rounds_per_epoch=10)


def measure_unpaid(folder: Path) -> int:
    """Units that the nodes' work is worth and that they did not get.

    Half of the rounds are recorded, for a quarter of their score. Nothing but the nodes' own
    transactions follows.

    Raises:
        RuntimeError: A transaction reverted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        ledger = GasLedger(anvil.url, _PLAN.nodes)
        recorded = _PLAN.rounds // 2
        ledger.settle(0, [(recorded, recorded * SAMPLES * QUALITY_BPS // 4)] * _PLAN.nodes)
        functions = ledger.contract.functions
        for key, node in zip(_PLAN.keys, ledger.nodes, strict=True):
            mine(ledger.web3, functions.submitContribution(*_newest(ledger, key), 1), node)
        ask_anvil(ledger.web3, "evm_increaseTime", WINDOW_S)
        mine(ledger.web3, functions.closeEpoch(ledger.job, 1), ledger.nodes[0])
        ask_anvil(ledger.web3, "evm_increaseTime", WINDOW_S)
        for node in ledger.nodes:
            mine(ledger.web3, functions.distributePayments(ledger.job, 1, [node]), node)
        return ledger.missing_pay(_PLAN.rounds)


def _newest(ledger: GasLedger, key: IdentityKey) -> tuple[Any, bytes, bytes]:
    """A node's newest receipt with both signatures, as the contract takes it."""
    address = Address(ledger.contract.address.lower())
    terms = terms_of(COORDINATOR.address, JOB, Domain(ledger.web3.eth.chain_id, address))
    _, measured = _PLAN.round_row(_PLAN.rounds - 1, terms, [key])
    signed = _PLAN.receipt(measured.updates[0], COORDINATOR, terms, _PLAN.rounds - 1)
    receipt = signed.receipt
    words = (
        *(word_bytes(receipt.job), receipt.epoch, receipt.round),
        *(ledger.web3.to_checksum_address(receipt.node), receipt.sequence),
        *(word_bytes(receipt.contribution), receipt.samples, receipt.quality_bps),
        *(word_bytes(receipt.evaluator), receipt.total_score),
    )
    own, counter = signed.contribution_signature, signed.signature
    return words, chain_form(own), chain_form(counter)
