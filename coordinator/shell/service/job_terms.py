"""Terms and funding that a new job begins with."""

from typing import NamedTuple

from coordinator.core.work.funding import Funding
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentsPlugin
from hypergpu.ids import Address, JobId
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger_terms import Domain, Terms, terms_of
from hypergpu.work_units import WorkUnit

UNFUNDED = Funding(0, "the escrow is not on the ledger yet")
"""A paid job starts with this: its first round waits for `FundingChanged`."""


class NewJobTerms(NamedTuple):
    """What a new job begins with, with and without the payments package."""

    owner: Address
    payments: PaymentsPlugin | None

    def terms(self, job_id: JobId, pay: Pay, unit: WorkUnit = WorkUnit.SAMPLES) -> Terms:
        """Terms under which the work of a new job is signed.

        Args:
            job_id: The job.
            pay: Its price.
            unit: What its work is counted in.

        Raises:
            HyperGPUError: The job pays, and nothing here can pay it.
        """
        if self.payments is not None:
            return self.payments.terms(job_id, pay, unit)
        if pay.unit_price:
            detail = "the job pays, and this coordinator has no payments package"
            fix = "remove unit_price from [pay], or install it: pip install 'hypergpu[chain]'"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
        return terms_of(self.owner, job_id, Domain(), unit)

    def funding(self, pay: Pay) -> Funding | None:
        """Funding of a new job; None: nothing limits its work."""
        return UNFUNDED if self.payments is not None and pay.unit_price else None
