"""When a job ends on the ledger, once its owner has announced that, and what follows."""

from typing import NamedTuple

from hypergpu.chain.ledger import JobOnChain
from hypergpu.chain.moments import moment
from hypergpu.ids import JobId
from hypergpu.units import several


class Ending(NamedTuple):
    """Announced by whoever owns the job there, for good. By the chain's clock."""

    job_id: JobId
    recorded_until_s: int
    """From then on nothing new of it is recorded."""
    ends_at_s: int
    """From then on its owner may take back what is free of its escrow."""

    def is_over(self, at_s: int) -> bool:
        """Whether what is signed from then on can no longer be recorded."""
        return at_s >= self.recorded_until_s

    @property
    def brief(self) -> str:
        """For a list of jobs."""
        return f"recorded on the ledger until {moment(self.recorded_until_s)}"

    @property
    def announced(self) -> str:
        """Why no new round is begun."""
        return (
            f"the end of {self.job_id} is announced on the ledger: what it has earned is recorded"
            f" until {moment(self.recorded_until_s)}, and no new round is paid. Fix: stop it, and"
            " submit it again as another job"
        )

    @property
    def over(self) -> str:
        """Why no new work is paid at all."""
        return (
            f"{self.job_id} has ended on the ledger: since {moment(self.recorded_until_s)} nothing"
            " new of it is recorded. Fix: stop it, and submit it again as another job"
        )

    def unrecorded(self, receipts: int, worth: int) -> str:
        """What is to be said of receipts that came too late.

        Args:
            receipts: How many.
            worth: Of all together, in the token's smallest unit.
        """
        return (
            f"what was left of {self.job_id}, {several(receipts, 'receipt')} worth {worth}"
            f" together, was not recorded before {moment(self.recorded_until_s)}, when it ended on"
            " the ledger, and is given up. Fix: have its nodes redeem their vouchers with hypergpu"
            " ledger claim"
            f" before {moment(self.ends_at_s)}, when its owner may take back the rest"
        )


def ending_of(job_id: JobId, job: JobOnChain | None, window_s: int) -> Ending | None:
    """When a job ends; None: nobody has announced that, or it is not open.

    Args:
        job_id: Which.
        job: It, as it stands on the ledger.
        window_s: The ledger's challenge window: so long before its end nothing is recorded.
    """
    if job is None or not job.ends_at_s:
        return None
    return Ending(job_id, job.ends_at_s - window_s, job.ends_at_s)
