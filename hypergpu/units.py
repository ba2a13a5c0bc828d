"""Integer quantities, and counts in sentences. Floats are for tensors, rates and scores only."""

from typing import NewType

Microseconds = NewType("Microseconds", int)
Milliseconds = NewType("Milliseconds", int)
Bytes = NewType("Bytes", int)
Samples = NewType("Samples", int)
BasisPoints = NewType("BasisPoints", int)
"""Ten-thousandths: 10,000 is the whole."""
Wei = NewType("Wei", int)
"""Smallest unit of the currency that a job pays in; its decimals matter only for display."""


def several(count: int, what: str, ending: str = "s") -> str:
    """Return a count with its noun: ``1 batch``, ``2 batches``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{ending}"


def round_text(number: int) -> str:
    """Return the name of a round for people, who count from 1; ``number`` counts from 0."""
    return f"round #{number + 1}"


def are(count: int) -> str:
    """Return the verb for a count."""
    return "is" if count == 1 else "are"
