"""For whom and where the work of a job counts: what a node has to know to sign its updates."""

from functools import lru_cache

import msgspec

from hypergpu.ids import Address, JobId, JobKey
from hypergpu.ledger.typed import NOWHERE, Domain, job_key

_NOBODYS = JobKey("0" * 64)


class Terms(msgspec.Struct, frozen=True):
    """The same for every update of a job, from its creation to its end."""

    job: JobKey = _NOBODYS
    """Names ``coordinator`` as the job's owner."""
    coordinator: Address = NOWHERE
    """Who signs the job's receipts and vouchers."""
    domain: Domain = Domain()

    def is_of(self, job_id: JobId) -> bool:
        """Whether ``job`` is the key that this job has with this owner."""
        return self.job == job_key(self.coordinator, job_id)


def kept_terms(content: bytes, job_id: JobId) -> Terms:
    """A job's terms as a file has them.

    Raises:
        ValueError: it has none, or another job's, and why.
    """
    try:
        terms = msgspec.json.decode(content, type=Terms)
        separator_of(terms.domain)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as broken:
        raise ValueError(f"these are no terms: {broken}") from broken
    if not terms.is_of(job_id):
        raise ValueError(f"these are no terms of {job_id}")
    return terms


@lru_cache
def separator_of(domain: Domain) -> bytes:
    """`Domain.separator`, computed once for each."""
    return domain.separator()


def terms_of(coordinator: Address, job_id: JobId, domain: Domain) -> Terms:
    """The terms of a job that a coordinator creates.

    Raises:
        ValueError: the address is malformed.
    """
    return Terms(job_key(coordinator, job_id), coordinator, domain)
