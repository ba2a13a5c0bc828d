"""How much of a job's work is paid for, in units of that work."""

import msgspec


class Funding(msgspec.Struct, frozen=True):
    """How much of the job's work its escrow covers, as payments stated last."""

    funded_units: int | None = msgspec.field(name="funded_samples")
    """How many units of work, of training samples, the escrow pays at full quality, counted from
    the job's start; None: no limit is known. Rows have the name of when all work was training.
    """
    reason: str = ""
    """Why it is no more, for users."""


def unfunded_left(funding: Funding | None, due: int, done: int) -> int | None:
    """Units that are still funded where they are fewer than are due; None: all that is due is.

    Args:
        funding: The job's; None: nothing limits its work.
        due: Units that are about to be leased.
        done: Units that were accepted or are leased already.
    """
    if funding is None or funding.funded_units is None:
        return None
    left_units = max(0, funding.funded_units - done)
    return None if due <= left_units else left_units
