"""Terms, contributions, receipts and vouchers on the wire: what both ends must read alike."""

from hypergpu.digest import digest_from_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobKey, Keccak, NodeId
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import (
    Contribution,
    Domain,
    Receipt,
    address_bytes,
    struct_hash,
    word_bytes,
)
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples
from hypergpu.v1 import receipt_pb2, tensor_pb2

_WORD_BYTES = 32
_ADDRESS_BYTES = 20


def terms_message(terms: Terms, epoch: int) -> receipt_pb2.Terms:
    """A job's terms, with the epoch of one of its rounds."""
    return receipt_pb2.Terms(
        job=word_bytes(terms.job),
        epoch=epoch,
        chain_id=terms.domain.chain_id,
        contract=address_bytes(terms.domain.contract),
        coordinator=address_bytes(terms.coordinator),
    )


def terms_value(message: receipt_pb2.Terms) -> Terms:
    """A job's terms off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, a field has another size.
    """
    domain = Domain(message.chain_id, address_value(message.contract))
    return Terms(JobKey(word_value(message.job)), address_value(message.coordinator), domain)


def word_value(octets: bytes) -> str:
    """A 32-byte word off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, it has another size.
    """
    if len(octets) != _WORD_BYTES:
        detail = f"a hash has {_WORD_BYTES} bytes, not {len(octets)}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return octets.hex()


def address_value(octets: bytes) -> Address:
    """An address off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, it has another size.
    """
    if len(octets) != _ADDRESS_BYTES:
        detail = f"an address has {_ADDRESS_BYTES} bytes, not {len(octets)}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return Address("0x" + octets.hex())


def receipt_message(signed: SignedReceipt) -> receipt_pb2.Receipt:
    """A countersigned receipt."""
    receipt, made = signed.receipt, signed.contribution
    return receipt_pb2.Receipt(
        job=word_bytes(receipt.job),
        epoch=receipt.epoch,
        round=receipt.round,
        sequence=receipt.sequence,
        contribution=receipt_pb2.Contribution(
            shard=tensor_pb2.Digest(value=word_bytes(made.shard)),
            model=tensor_pb2.Digest(value=word_bytes(made.model)),
            update=tensor_pb2.Digest(value=word_bytes(made.update)),
            inner_steps=made.inner_steps,
            compute_ms=made.compute_ms,
            update_bytes=made.update_bytes,
            lease=made.lease,
            nonce=made.nonce,
            signature=signed.contribution_signature,
        ),
        samples=receipt.samples,
        quality_bps=receipt.quality_bps,
        evaluator=word_bytes(receipt.evaluator),
        signature=signed.signature,
    )


def receipt_value(message: receipt_pb2.Receipt, node: NodeId) -> SignedReceipt:
    """A receipt off the wire; nothing in it is checked but its sizes.

    Raises:
        HyperGPUError: REQUEST_INVALID, a field has another size.
    """
    made = message.contribution
    contribution = Contribution(
        job=JobKey(word_value(message.job)),
        epoch=message.epoch,
        round=message.round,
        node=node,
        shard=digest_from_wire(made.shard.value),
        model=digest_from_wire(made.model.value),
        update=digest_from_wire(made.update.value),
        samples=Samples(message.samples),
        inner_steps=made.inner_steps,
        compute_ms=Milliseconds(made.compute_ms),
        update_bytes=Bytes(made.update_bytes),
        lease=made.lease,
        nonce=made.nonce,
    )
    receipt = Receipt(
        job=contribution.job,
        epoch=message.epoch,
        round=message.round,
        node=node,
        sequence=message.sequence,
        contribution=Keccak(struct_hash(contribution).hex()),
        samples=Samples(message.samples),
        quality_bps=BasisPoints(message.quality_bps),
        evaluator=Keccak(word_value(message.evaluator)),
    )
    return SignedReceipt(
        receipt=receipt,
        signature=message.signature,
        contribution=contribution,
        contribution_signature=made.signature,
    )
