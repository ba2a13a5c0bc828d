"""Assignments of work, and the typed data (EIP-712) that is signed about it.

Pure: anybody can check a receipt without a chain. `hypergpu.wire.messages` translates them.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct

import msgspec

from hypergpu.crypto import (
    WIRE_BYTES,
    digest_of,
    keccak,
    signed_digest,
    signer,
    signer_of,
    struct_hash,
)
from hypergpu.ids import Address, Digest, JobId, JobKey, Keccak, NodeId, Slot
from hypergpu.optimizer import OptimizerRule
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples

OUT_OF_MEMORY = "out of memory"
"""How the reason begins with which a node hands work back that its memory is too small for."""
LEASE_ROUNDS_MOST = 16
"""Rounds that the work under one lease may take."""

ZERO_ADDRESS = Address("0x" + "00" * 20)
AMOUNT_MOST = 2**96 - 1
"""Largest amount that a ledger's fields hold, in the token's smallest unit."""

_ZERO_KEY = JobKey("0" * 64)
_ADDRESS_BYTES = 20
_NAME = keccak(b"HyperGPU")
_VERSION = keccak(b"2")
_DOMAIN_TYPE = keccak(
    b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)


class Domain(msgspec.Struct, frozen=True):
    """One ledger on one chain."""

    chain_id: int = 0
    """0 where no chain settles the job."""
    contract: Address = ZERO_ADDRESS

    def separator(self) -> bytes:
        """The 32 bytes that every signed digest begins with.

        Raises:
            ValueError: The contract's address is malformed.
            OverflowError: The chain id does not fit 256 bits.
        """
        chain_id = self.chain_id.to_bytes(32, "big")
        contract = bytes(12) + address_bytes(self.contract)
        return keccak(_DOMAIN_TYPE + _NAME + _VERSION + chain_id + contract)


class Terms(msgspec.Struct, frozen=True):
    """The ledger and the signer of a job's receipts, fixed from its creation to its end."""

    job: JobKey = _ZERO_KEY
    """Names ``coordinator`` as the job's owner."""
    coordinator: Address = ZERO_ADDRESS
    """Signer of the job's receipts."""
    domain: Domain = Domain()

    def match(self, job_id: JobId) -> bool:
        """Whether ``job`` is the key of this job with this owner."""
        return self.job == job_key(self.coordinator, job_id)


class JobTerms(msgspec.Struct, frozen=True):
    """Terms of a job with its id: the file ``terms.json`` of a node's ledger folder."""

    job_id: JobId
    terms: Terms


def terms_of(coordinator: Address, job_id: JobId, domain: Domain) -> Terms:
    """Terms of a job that a coordinator creates.

    Raises:
        ValueError: The address is malformed.
    """
    return Terms(job_key(coordinator, job_id), coordinator, domain)


@lru_cache
def separator_of(domain: Domain) -> bytes:
    """`Domain.separator`, computed once for each domain."""
    return domain.separator()


def job_key(owner: Address | NodeId, job_id: JobId) -> JobKey:
    """Name of a job on a ledger. It contains the owner, so that nobody else can open it first.

    Raises:
        ValueError: The owner's address is malformed.
    """
    return JobKey(keccak(bytes(12) + address_bytes(owner) + job_salt(job_id)).hex())


def job_salt(job_id: JobId) -> bytes:
    """The 32 bytes by which an owner tells its jobs apart on a ledger."""
    return keccak(job_id.encode())


def address_bytes(address: Address | NodeId) -> bytes:
    """The 20 bytes of an address.

    Raises:
        ValueError: The text is not ``0x`` and 40 lower-case hex digits.
    """
    content = _hex_bytes(address[2:])
    # `bytes.fromhex` skips blanks; writing the bytes back finds them in a third of a regex's time.
    if len(content) != _ADDRESS_BYTES or "0x" + content.hex() != address:
        raise ValueError(f"an address is 0x and 40 lower-case hex digits, not {address[:80]!r}")
    return content


def word_bytes(word: Digest | JobKey | Keccak) -> bytes:
    """The 32 bytes of a digest or a key.

    Raises:
        ValueError: The text is not 64 lower-case hex digits.
    """
    content = _hex_bytes(word)
    if len(content) != WIRE_BYTES or content.hex() != word:
        raise ValueError(f"32 bytes are 64 lower-case hex digits, not {word[:80]!r}")
    return content


@lru_cache
def keccak_of(name: str) -> Keccak:
    """Hash of a short name, as receipts carry it."""
    return Keccak(keccak(name.encode()).hex())


def _hex_bytes(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return b""


class Lease(msgspec.Struct, frozen=True):
    """Names one assignment. ``number`` is a fencing token: a participant's newest counts."""

    job_id: JobId
    round: int
    number: int


class BlobRef(msgspec.Struct, frozen=True):
    """A blob by name; it can be fetched by digest."""

    digest: Digest
    size_bytes: Bytes


class Delta(msgspec.Struct, frozen=True):
    """A compressed difference: the model ``base`` plus it is the next model."""

    base: Digest
    blob: BlobRef
    codec: str


class InitialModel(msgspec.Struct, frozen=True):
    """A job's first model: it follows from the workload, its options and ``seed``."""

    digest: Digest
    seed: int


class SampleRange(msgspec.Struct, frozen=True):
    """Positions [start, start + count) of a partition's endless sample stream."""

    start: int
    count: Samples


class Prefetch(msgspec.Struct, frozen=True):
    """Inner steps of a round that a node takes from its own end of the round before, while that
    round's updates travel.

    Everything that decides them is stated with the round before: a node that has to take them again
    takes the same.
    """

    round: int
    """The round that they are the first steps of."""
    inner_steps: int
    ranges: tuple[SampleRange, ...]
    """The beginning of the node's shard in that round."""
    seed: int
    global_samples: Samples = Samples(0)
    """Index of schedules: as if the round before were done."""
    total_samples: Samples = Samples(0)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the update's bytes, besides the end state that training starts from.

    Two assignments of one round with equal tasks have the same update, whatever their leases.
    """

    workload: str
    workload_version: int
    options: dict[str, str | int | float | bool] = {}
    inner_steps: int
    batch_size: int
    """Samples in an inner step of this node."""
    stated_batch_size: int = 0
    """As the job file has it; 0: the same."""
    learning_rate: float
    optimizer: OptimizerRule = OptimizerRule()
    warmup_steps: int = 0
    schedule: str = "constant"
    """One of `hypergpu.optimizer.SCHEDULES`."""
    codec: str
    """Codec of the update."""
    seed: int
    """Keyed by (job seed, slot, round): whatever the model draws while it trains."""
    global_samples: Samples = Samples(0)
    """Samples the whole job had processed when the round began."""
    total_samples: Samples = Samples(0)
    """Schedules end here; 0 with ``constant``."""
    partition: int = 0
    partitions: int = 1
    skew_alpha: float = 0.0
    """Dirichlet concentration of the label skew; 0 is IID."""
    data_seed: int = 0
    """Keys partitions and permutations: the same for every node of the job."""
    ranges: tuple[SampleRange, ...]
    model: BlobRef
    layout: Digest
    manifest: BlobRef | None = None
    """The user's files; None for the workload's own data."""
    data_name: str = ""
    """The data set of the node's own that its owner must have named a folder for; empty: none."""
    prefetched: Prefetch | None = None
    """The first steps of the shard; without the end state of the round before they are steps like
    all others.
    """

    @property
    def full_steps(self) -> float:
        """Inner steps, counted in steps of the job's own batch."""
        return self.inner_steps * self.batch_size / self.usual_batch_size

    @property
    def usual_batch_size(self) -> int:
        """Samples in an inner step of the job, whatever they are on this node."""
        return self.stated_batch_size or self.batch_size

    @property
    def samples(self) -> Samples:
        """Samples of the shard."""
        return Samples(sum(run.count for run in self.ranges))


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work: a shard of one round of one job, under a lease."""

    lease: Lease
    slot: Slot
    task: Task
    deltas: tuple[Delta, ...] = ()
    """Newest last: each leads to the base of the next, the last one to the assigned model."""
    initial: InitialModel | None = None
    """The job's first model, where the assigned one is it or ``deltas`` lead on from it."""
    last_accepted: Digest | None = None
    """The newest update of this node that the coordinator accepted in this job."""
    deadline_in_ms: Milliseconds = Milliseconds(0)
    """Time left when it was sent until the round closes regardless; 0: none."""
    upload_after_ms: Milliseconds = Milliseconds(0)
    """How long a finished update waits, so that all nodes' uploads do not begin at once."""
    connections: int = 1
    """Connections to move the model and the update over."""
    terms: Terms = Terms()
    """For whom and on which ledger the work is signed; the training does not depend on it."""
    epoch: int = 0
    """Number of the epoch that the round is settled in."""
    prefetch: Prefetch | None = None
    """First steps of the next round, to take once this one's update is out."""
    reason: str = ""

    @property
    def newest_blob(self) -> BlobRef:
        """Blob that a node with the model before lacks: the newest delta, or the whole model."""
        return self.deltas[-1].blob if self.deltas else self.task.model


_CONTRIBUTION_TYPE = keccak(
    b"Contribution(bytes32 job,uint32 epoch,uint32 round,address node,bytes32 shard,bytes32 model,"
    b"bytes32 update,uint64 samples,uint32 innerSteps,uint64 computeMs,uint64 updateBytes,"
    b"uint64 lease,uint64 nonce)"
)
_CONTRIBUTION_WORDS = Struct(">32s32s28xI28xI12x20s32s32s32s24xQ28xI24xQ24xQ24xQ24xQ")
_SHARD = Struct(">II")
_RANGE = Struct(">QQ")


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """An update that a node made under a lease, signed by the node when it submits it.

    The upload's offsets and stripes are not part of it: digest and size are, and the bytes are
    checked against both once they are complete.
    """

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    shard: Digest
    """Digest of the positions trained on: see `shard_digest`."""
    model: Digest
    """Digest of the parameters that the training started from."""
    update: Digest
    samples: Samples
    """Samples assigned."""
    inner_steps: int
    """Inner steps taken."""
    compute_ms: Milliseconds
    """The node's own measurement; pay does not depend on it."""
    update_bytes: Bytes
    lease: int
    nonce: int

    def encode_data(self) -> bytes:
        """See `Statement.encode_data`."""
        return _CONTRIBUTION_WORDS.pack(
            _CONTRIBUTION_TYPE,
            word_bytes(self.job),
            self.epoch,
            self.round,
            address_bytes(self.node),
            word_bytes(self.shard),
            word_bytes(self.model),
            word_bytes(self.update),
            self.samples,
            self.inner_steps,
            self.compute_ms,
            self.update_bytes,
            self.lease,
            self.nonce,
        )


@lru_cache(2_048)
def contribution_hash(contribution: Contribution) -> bytes:
    """`struct_hash` of a contribution, remembered for the receipt that its round brings later.

    Two rounds of a thousand nodes, a kilobyte each: that much a coordinator grows after its start.

    Raises:
        ValueError: As `struct_hash`.
    """
    return struct_hash(contribution)


def is_signed_by(
    node: NodeId, separator: bytes, contribution: Contribution, signature: bytes
) -> bool:
    """Whether ``node`` is the contribution's node and signed it.

    Safe for content from outside: it never raises.
    """
    try:
        digest = signed_digest(separator, contribution_hash(contribution))
    except ValueError:
        return False
    return contribution.node == node and signer_of(digest, signature) == node


def shard_digest(partition: int, ranges: Iterable[tuple[int, Samples]]) -> Digest:
    """Name of the data that a participant trains on in a round.

    The canonical bytes are ``u32 partition | u32 count of ranges | (u64 start | u64 count)...``,
    big-endian. The job determines the samples at these positions.

    Args:
        partition: Partition of the job's data.
        ranges: Start and count, in the order in which they are trained on.

    Raises:
        ValueError: A number does not fit its field.
    """
    try:
        packed = [_RANGE.pack(start, count) for start, count in ranges]
        return digest_of(b"".join((_SHARD.pack(partition, len(packed)), *packed)))
    except struct.error as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken


WHOLE_BPS = BasisPoints(10_000)
RECEIPTS_MOST = 2**32 - 1
"""Receipts of one node in one job that a ledger can count."""

_RECEIPT_TYPE = keccak(
    b"Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,"
    b"bytes32 contribution,uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore)"
)
_RECEIPT_WORDS = Struct(">32s32s28xI28xI12x20s24xQ32s24xQ30xH32s24xQ")
_SHARED = ("job", "epoch", "round", "node")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted contribution, signed by the coordinator once the round's quality is known."""

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    sequence: int
    """Dense for each node in a job, from 0."""
    contribution: Keccak
    """`struct_hash` of the contribution."""
    samples: Samples
    """Samples assigned and checked."""
    quality_bps: BasisPoints
    evaluator: Keccak
    """Keccak-256 of a short name of the measurement."""
    total_score: int
    """Sum of samples x quality_bps over the node's receipts in the job, this one included."""

    @property
    def score(self) -> int:
        """This receipt's part of ``total_score``."""
        return self.samples * self.quality_bps

    def encode_data(self) -> bytes:
        """See `Statement.encode_data`."""
        return _RECEIPT_WORDS.pack(
            _RECEIPT_TYPE,
            word_bytes(self.job),
            self.epoch,
            self.round,
            address_bytes(self.node),
            self.sequence,
            word_bytes(self.contribution),
            self.samples,
            self.quality_bps,
            word_bytes(self.evaluator),
            self.total_score,
        )


class SignedReceipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receipt with its contribution and both signatures."""

    receipt: Receipt
    signature: bytes
    """The coordinator's signature of the receipt."""
    contribution: Contribution
    contribution_signature: bytes
    """The node's signature of the contribution."""


def receipt_fault(signed: SignedReceipt, domain: Domain, coordinator: Address) -> str:
    """Reason why a ledger would not take a signed receipt; empty if it is sound.

    Safe for content from outside: it never raises. About 0.2 ms, two signatures.
    """
    receipt, contribution = signed.receipt, signed.contribution
    try:
        hashed = contribution_hash(contribution).hex()
    except ValueError as broken:
        return f"its contribution cannot be encoded: {broken}"
    if receipt.contribution != hashed:
        return "it is for another contribution"
    if any(getattr(receipt, name) != getattr(contribution, name) for name in _SHARED):
        return "its job, epoch, round or node differs from its contribution's"
    if fault := _figure_fault(receipt, contribution):
        return fault
    separator = separator_of(domain)
    if signer(separator, receipt, signed.signature) != coordinator:
        return f"the coordinator {coordinator} did not sign it"
    if signer(separator, contribution, signed.contribution_signature) != receipt.node:
        return f"the node {receipt.node} did not sign its contribution"
    return ""


def _figure_fault(receipt: Receipt, contribution: Contribution) -> str:
    if receipt.samples > contribution.samples:
        return f"{receipt.samples} samples were checked, {contribution.samples} assigned"
    if receipt.quality_bps > WHOLE_BPS:
        return f"its quality is {receipt.quality_bps} of {WHOLE_BPS}"
    if not 0 <= receipt.sequence < RECEIPTS_MOST:
        return f"its sequence is {receipt.sequence}, a ledger counts {RECEIPTS_MOST} receipts"
    if receipt.total_score < receipt.score:
        return f"its total score {receipt.total_score} is less than its own {receipt.score}"
    return ""
