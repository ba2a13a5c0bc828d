"""Whether a node keeps a spare worker: one that has imported what it needs and seen no job."""

from hypergpu.units import Bytes

SPARE_BYTES = Bytes(700_000_000)
"""More than a worker with torch takes before it has work (0.2 to 0.5 GB, by the build of torch)."""
FREE_BYTES = Bytes(1_500_000_000)
"""What a spare leaves free on the machine."""


def spare_refusal(*, limit_bytes: int, worker_bytes: int, available_bytes: int) -> str:
    """Why there is to be no spare now; empty: there may be one.

    Args:
        limit_bytes: The owner's limit of the worker's memory; 0: none.
        worker_bytes: Memory that the worker takes now.
        available_bytes: Memory that the machine could still give, a spare that is there included.
    """
    if limit_bytes and worker_bytes + SPARE_BYTES > limit_bytes:
        return "it does not fit into the memory that the owner allows"
    if available_bytes < SPARE_BYTES + FREE_BYTES:
        return "the machine is short of memory"
    return ""
