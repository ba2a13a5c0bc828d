"""Integer quantities. Floats are for tensors, rates and scores only."""

from typing import NewType

Microseconds = NewType("Microseconds", int)
Milliseconds = NewType("Milliseconds", int)
Bytes = NewType("Bytes", int)
Samples = NewType("Samples", int)
Wei = NewType("Wei", int)
