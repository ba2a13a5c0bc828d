"""Integer quantities, and how counts are said. Floats are for tensors, rates and scores only."""

from typing import NewType

Microseconds = NewType("Microseconds", int)
Milliseconds = NewType("Milliseconds", int)
Bytes = NewType("Bytes", int)
Samples = NewType("Samples", int)
BasisPoints = NewType("BasisPoints", int)
"""Ten-thousandths: 10,000 is the whole."""
Wei = NewType("Wei", int)
"""The smallest unit of whatever currency a job pays in. How many decimals it has is only shown."""


def several(count: int, what: str, ending: str = "s") -> str:
    """So many of something: ``1 batch``, ``2 batches``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{ending}"


def are(count: int) -> str:
    """The verb of so many."""
    return "is" if count == 1 else "are"
