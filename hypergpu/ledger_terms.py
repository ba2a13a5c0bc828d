"""Terms of a job's ledger, which everything that is signed about its work is signed for."""

from functools import lru_cache

import msgspec

from hypergpu.crypto import keccak
from hypergpu.digests import WIRE_BYTES
from hypergpu.ids import Address, Digest, JobId, JobKey, Keccak, NodeId
from hypergpu.work_units import WorkUnit

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
    """The ledger, the signer and the unit of a job's receipts, fixed from its creation to its end.

    The unit is part of the job's key, which every statement names: whoever signs for a key signs
    for its unit, and no job has two.
    """

    job: JobKey = _ZERO_KEY
    """Names ``coordinator`` as the job's owner."""
    coordinator: Address = ZERO_ADDRESS
    """Signer of the job's receipts."""
    domain: Domain = Domain()
    stated_unit: WorkUnit | msgspec.UnsetType = msgspec.UNSET
    """Unset where the unit is samples, as in all terms before there were others: their bytes stay.
    """

    @property
    def unit(self) -> WorkUnit:
        """What the job's work is counted in: the numbers of its receipts are whole units."""
        unit = self.stated_unit
        return WorkUnit.SAMPLES if isinstance(unit, msgspec.UnsetType) else unit

    def match(self, job_id: JobId) -> bool:
        """Whether ``job`` is the key of this job with this owner and unit."""
        return self.job == job_key(self.coordinator, job_id, self.unit)


class JobTerms(msgspec.Struct, frozen=True):
    """Terms of a job with its id: the file ``terms.json`` of a node's ledger folder."""

    job_id: JobId
    terms: Terms


def terms_of(
    coordinator: Address, job_id: JobId, domain: Domain, unit: WorkUnit = WorkUnit.SAMPLES
) -> Terms:
    """Terms of a job that a coordinator creates.

    Raises:
        ValueError: The address is malformed.
    """
    stated_unit = msgspec.UNSET if unit is WorkUnit.SAMPLES else unit
    return Terms(job_key(coordinator, job_id, unit), coordinator, domain, stated_unit)


@lru_cache
def separator_of(domain: Domain) -> bytes:
    """`Domain.separator`, computed once for each domain."""
    return domain.separator()


def job_key(owner: Address | NodeId, job_id: JobId, unit: WorkUnit = WorkUnit.SAMPLES) -> JobKey:
    """Name of a job on a ledger. It contains the owner, so that nobody else can open it first.

    Raises:
        ValueError: The owner's address is malformed.
    """
    return JobKey(keccak(bytes(12) + address_bytes(owner) + job_salt(job_id, unit)).hex())


def job_salt(job_id: JobId, unit: WorkUnit = WorkUnit.SAMPLES) -> bytes:
    """The 32 bytes by which an owner tells its jobs apart on a ledger. They contain the unit that
    the job's work is counted in, samples aside: jobs before there were others keep their keys.
    """
    if unit is WorkUnit.SAMPLES:
        return keccak(job_id.encode())
    # No id of a job has a byte of zero.
    return keccak(job_id.encode() + b"\0" + unit.value.encode())


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
