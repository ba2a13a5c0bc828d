"""Any statement that somebody could sign."""

from hypothesis import strategies as st

from hypergpu.ids import Address, Digest, JobKey, Keccak, NodeId
from hypergpu.ledger.typed import Contribution, Domain, Receipt, Voucher
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei

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
)
vouchers = st.builds(
    Voucher,
    job=words.map(JobKey),
    node=addresses.map(NodeId),
    sequence=u64,
    amount=st.integers(0, 2**128 - 1).map(Wei),
)
statements = st.one_of(contributions, receipts, vouchers)
