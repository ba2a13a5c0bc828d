"""Any statement that somebody could sign, and receipts with real signatures."""

from dataclasses import dataclass

from hypothesis import strategies as st

from hypergpu.crypto import IdentityKey, keccak, sign, struct_hash
from hypergpu.digests import digest_of
from hypergpu.ids import Address, Digest, JobId, JobKey, Keccak, NodeId
from hypergpu.ledger_terms import Domain, Terms, keccak_of, terms_of
from hypergpu.statements import Contribution, Receipt, SignedReceipt
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples

words = st.binary(min_size=32, max_size=32).map(bytes.hex)
addresses = st.binary(min_size=20, max_size=20).map(lambda raw: "0x" + raw.hex())
keys = st.integers(1, 2**200).map(lambda number: IdentityKey(number.to_bytes(32, "big")))
u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))

domains = st.builds(Domain, chain_id=st.integers(0, 2**256 - 1), contract=addresses.map(Address))
contributions = st.builds(
    Contribution,
    job=words.map(JobKey),
    epoch=u32,
    round=u32,
    node=addresses.map(NodeId),
    shard=words.map(Digest),
    model=words.map(Digest),
    update=words.map(Digest),
    samples=u64.map(Samples),
    inner_steps=u32,
    compute_ms=u64.map(Milliseconds),
    update_bytes=u64.map(Bytes),
    lease=u64,
    nonce=u64,
)
receipts = st.builds(
    Receipt,
    job=words.map(JobKey),
    epoch=u32,
    round=u32,
    node=addresses.map(NodeId),
    sequence=u64,
    contribution=words.map(Keccak),
    samples=u64.map(Samples),
    quality_bps=u16.map(BasisPoints),
    evaluator=words.map(Keccak),
    total_score=u64,
)
statements = st.one_of(contributions, receipts)

JOB = JobId("job-0123456789ab")
COORDINATOR = IdentityKey(keccak(b"a coordinator's key"))
EVALUATOR = keccak_of("agreement/1")
TERMS = terms_of(COORDINATOR.address, JOB, Domain(31_337, Address("0x" + "ab" * 20)))


def node_key(number: int) -> IdentityKey:
    """Key of a test's node; the same each time."""
    return IdentityKey(keccak(b"the key of node %d" % number))


@dataclass(frozen=True)
class Work:
    """The figures of one accepted update."""

    round: int = 0
    epoch: int = 0
    samples: int = 320
    quality_bps: int = 9_000


def contribution_of(node: IdentityKey, work: Work, terms: Terms = TERMS) -> Contribution:
    """The contribution of a node's update."""
    return Contribution(
        job=terms.job,
        epoch=work.epoch,
        round=work.round,
        node=node.node_id,
        shard=digest_of(b"shard"),
        model=digest_of(b"model %d" % work.round),
        update=digest_of(b"update %d of %s" % (work.round, node.node_id.encode())),
        samples=Samples(work.samples),
        inner_steps=10,
        compute_ms=Milliseconds(1_000),
        update_bytes=Bytes(4_096),
        lease=work.round + 1,
        nonce=work.round + 1,
    )


def signed_receipt(
    node: IdentityKey, work: Work, *, sequence: int = 0, before: int = 0, terms: Terms = TERMS
) -> SignedReceipt:
    """A sound receipt.

    Args:
        node: Key of the node.
        work: The update.
        sequence: Receipts of the node before it.
        before: Their total score.
        terms: Of the job, whose coordinator is `COORDINATOR`.
    """
    separator = terms.domain.separator()
    contribution = contribution_of(node, work, terms)
    receipt = Receipt(
        job=terms.job,
        epoch=work.epoch,
        round=work.round,
        node=node.node_id,
        sequence=sequence,
        contribution=Keccak(struct_hash(contribution).hex()),
        samples=Samples(work.samples),
        quality_bps=BasisPoints(work.quality_bps),
        evaluator=EVALUATOR,
        total_score=before + work.samples * work.quality_bps,
    )
    return SignedReceipt(
        receipt=receipt,
        signature=sign(COORDINATOR, separator, receipt),
        contribution=contribution,
        contribution_signature=sign(node, separator, contribution),
    )
