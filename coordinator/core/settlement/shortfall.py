"""What a job's escrow owes where redeemed vouchers have gone ahead of the shares.

Theory of operation. A voucher is paid out of what the escrow has free, before the epoch of its work
is closed, and its node's next shares make that good: then it is free again. Where the escrow is
tight, an epoch that is closed in between has a smaller pool than its receipts are worth, and every
node of it a smaller share. Nothing is lost: the rest is in each node's voucher, and is redeemed as
soon as the escrow has it again.
"""

from collections.abc import Iterable
from typing import NamedTuple

from hypergpu.ids import JobId


class ShortEpoch(NamedTuple):
    """A closed epoch whose pool is less than its receipts are worth."""

    number: int
    pool: int
    worth: int


def shortfall(job_id: JobId, epochs: Iterable[ShortEpoch], lacking: int, free: int) -> str:
    """What to say of a job whose epochs were closed short; empty once nothing of it is lacking.

    Args:
        job_id: Which.
        epochs: That were.
        lacking: What their nodes have not been paid.
        free: Of the escrow, now.
    """
    if not lacking:
        return ""
    told = ", ".join(
        f"epoch {one.number} {one.worth - one.pool} short ({one.pool} of {one.worth})"
        for one in epochs
    )
    return (
        f"{job_id} closed {told}: more was not free of its escrow, out of which redeemed vouchers"
        f" are paid until shares make them good. {lacking} of it is not paid, {free} is free now:"
        " its nodes redeem the rest with hypergpu ledger claim"
    )
