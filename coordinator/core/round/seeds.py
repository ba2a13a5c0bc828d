"""Randomness without dice: a hash of the job's seed, a purpose and what it is for."""

from blake3 import blake3


def seed_for(job_seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = "/".join((str(job_seed), purpose, *map(str, keys)))
    return int.from_bytes(blake3(text.encode()).digest(8), "big") >> 1
