"""When receipts that wait are signed into a transaction."""

from enum import Enum

import msgspec

from hypergpu.units import Milliseconds


class Metering(Enum):
    """How receipts reach the chain."""

    EACH = "each"
    """One transaction for each contribution, its receipt in the call data."""
    PACKED = "packed"
    """One transaction for many, every receipt in the call data: 16 bytes each."""
    BATCHED = "batched"
    """One transaction for many: their sums and the root of their tree."""


class SealingRule(msgspec.Struct, frozen=True, kw_only=True):
    """How receipts are gathered."""

    metering: Metering = Metering.BATCHED
    interval_ms: int = 1_000
    """A receipt waits at most so long for others."""
    receipts_max: int = 5_000
    """In one batch; pools take no transaction of more than 128 KiB, which packed ones reach at
    8,000."""
    in_flight_max: int = 64
    """Transactions of the account in no block; pools drop what is beyond their own limit."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Receipts of one epoch that are in no transaction."""

    receipts: int
    oldest_age_ms: Milliseconds
    """Since the sealer first saw one of them."""
    is_ended: bool
    """The job has left the epoch."""


def seal_reason(waiting: Waiting, in_flight: int, rule: SealingRule) -> str:
    """Why what waits is sealed now; empty while it is better to wait.

    A full pool holds receipts back without harm: they stay in the journal, and batches grow.
    """
    if not waiting.receipts or in_flight >= rule.in_flight_max:
        return ""
    if rule.metering is Metering.EACH:
        return "each contribution has a transaction of its own"
    if waiting.is_ended:
        return "the epoch has ended"
    if waiting.receipts >= rule.receipts_max:
        return f"{waiting.receipts} receipts wait, {rule.receipts_max} fill a batch"
    if waiting.oldest_age_ms >= rule.interval_ms:
        return f"the oldest receipt has waited for {waiting.oldest_age_ms} ms"
    return ""
