"""Calls to the ledger as signed transactions.

Gas limits are formulas, nothing is estimated on the way: an estimate would have to wait until the
transaction before is in a block. Each is an upper bound measured on the contract with cold storage
(``tests/chain``) with a margin; what a transaction does not use is not paid, but on few chains.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import rlp

from hypergpu.crypto import IdentityKey, chain_form, keccak
from hypergpu.ids import Address, NodeId
from hypergpu.ledger_terms import address_bytes, job_salt, word_bytes
from hypergpu.statements import Receipt, SignedReceipt
from payments.core.transactions import (
    Approve,
    ChainCall,
    Distribute,
    FundJob,
    OpenJob,
    Reclaim,
    RecordBatch,
    RecordReceipt,
    RequestReclaim,
)
from payments.shell.ethereum import Contract, ledger_contract, token_contract

DEPLOY_GAS = 6_000_000
_APPROVE_GAS = 80_000
_OPEN_GAS = 420_000
_FUND_GAS = 140_000
_RECORD_GAS = 240_000
_RECLAIM_GAS = 140_000
_BATCH_GAS, _ENTRY_GAS = 130_000, 100_000
_PAYMENT_GAS, _PAYEE_GAS = 150_000, 110_000

LedgerCall = OpenJob | FundJob | RecordBatch | RecordReceipt | Distribute | RequestReclaim | Reclaim
FindReceipt = Callable[[NodeId, int], SignedReceipt]
"""A node's receipt by its sequence, in the call's job."""


_EIP1559 = b"\x02"


class LedgerAddresses(NamedTuple):
    """Addresses that calls go to."""

    ledger: Address
    token: Address


class Payload(NamedTuple):
    """What a transaction does, before it has a nonce and a fee."""

    to: bytes
    """20 bytes; empty: it creates a contract."""
    data: bytes
    gas: int


class TransactionFee(NamedTuple):
    """Price of a unit of gas."""

    most_wei: int
    tip_wei: int


def sign_transaction(
    key: IdentityKey, chain_id: int, nonce: int, payload: Payload, fee: TransactionFee
) -> bytes:
    """An EIP-1559 transaction, the same bytes each time. 0.08 ms, a fifth of eth-account's time."""
    numbers = chain_id, nonce, fee.tip_wei, fee.most_wei, payload.gas
    fields: list[Any] = [*map(_shortest_bytes, numbers), payload.to, b"", payload.data, []]
    signature = key.sign_digest(keccak(_EIP1559 + rlp.encode(fields, infer_serializer=False)))
    signature_parts = [signature[64:], signature[:32], signature[32:64]]
    fields += [part.lstrip(b"\0") for part in signature_parts]
    return _EIP1559 + bytes(rlp.encode(fields, infer_serializer=False))


def read_transaction(raw: bytes) -> tuple[Payload, TransactionFee]:
    """What a signed transaction does and pays."""
    _, _, tip, fee, gas, to, _, calldata, *_ = rlp.decode(raw[1:])
    tip_wei, most_wei, limit = (int.from_bytes(each, "big") for each in (tip, fee, gas))
    return Payload(bytes(to), bytes(calldata), limit), TransactionFee(most_wei, tip_wei)


def payload(call: ChainCall, target: LedgerAddresses, find_receipt: FindReceipt) -> Payload:
    """The transaction that makes a call."""
    if isinstance(call, Approve):
        calldata = token_contract().encode("approve", target.ledger, call.amount)
        return Payload(address_bytes(target.token), calldata, _APPROVE_GAS)
    calldata, gas = _ledger_call(call, ledger_contract(), find_receipt)
    return Payload(address_bytes(target.ledger), calldata, gas)


def _ledger_call(
    call: LedgerCall, ledger: Contract, find_receipt: FindReceipt
) -> tuple[bytes, int]:
    if isinstance(call, OpenJob):
        digests = word_bytes(call.model), word_bytes(call.dataset)
        terms = (call.coordinator, *digests, call.unit_price, call.epochs)
        return ledger.encode(
            "openJob", job_salt(call.job_id, call.unit), terms, call.escrow
        ), _OPEN_GAS
    if isinstance(call, RecordReceipt):
        signed_receipt = find_receipt(call.entry.node, call.entry.count - 1)
        return record_data(signed_receipt, call.epoch), _RECORD_GAS
    job = word_bytes(call.job)
    match call:
        case RecordBatch():
            words = [entry.word() for entry in call.entries]
            arguments = (job, call.epoch, call.sequence, call.root, words)
            return ledger.encode("submitAggregate", *arguments), _BATCH_GAS + _ENTRY_GAS * len(
                words
            )
        case Distribute():
            gas = _PAYMENT_GAS + _PAYEE_GAS * len(call.nodes)
            return ledger.encode("distributePayments", job, call.epoch, call.nodes), gas
        case FundJob():
            return ledger.encode("fund", job, call.amount), _FUND_GAS
        case RequestReclaim() | Reclaim():
            name = "reclaim" if isinstance(call, Reclaim) else "requestReclaim"
            return ledger.encode(name, job), _RECLAIM_GAS


def record_data(signed: SignedReceipt, epoch: int) -> bytes:
    """Call data of `submitContribution`, which anybody may send."""
    return ledger_contract().encode(
        "submitContribution",
        receipt_tuple(signed.receipt),
        chain_form(signed.contribution_signature),
        chain_form(signed.signature),
        epoch,
    )


def receipt_tuple(receipt: Receipt) -> tuple[object, ...]:
    """A receipt as the contract's struct."""
    return (
        *(word_bytes(receipt.job), receipt.epoch, receipt.round, receipt.node, receipt.sequence),
        *(word_bytes(receipt.contribution), receipt.samples, receipt.quality_bps),
        *(word_bytes(receipt.evaluator), receipt.total_score),
    )


def _shortest_bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")
