"""Integer quantities. Floats are for tensors, rates and scores only."""

from typing import NewType

Microseconds = NewType("Microseconds", int)
Milliseconds = NewType("Milliseconds", int)
Bytes = NewType("Bytes", int)
Samples = NewType("Samples", int)
BasisPoints = NewType("BasisPoints", int)
"""Ten-thousandths: 10,000 is the whole."""
Wei = NewType("Wei", int)
"""The smallest unit of whatever currency a job pays in. How many decimals it has is only shown."""
