"""Random draws of answers: a number for each seed and position, the same on every machine."""

from blake3 import blake3

_DRAW_BITS = 53


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1), for the token at a position of the answer that a seed belongs to.

    Args:
        seed: 0 to 2^63 - 1.
        position: Of the token in the answer, from 0.
    """
    content = b"answer" + seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(blake3(content).digest()[:8], "little") >> (64 - _DRAW_BITS)
    return bits / (1 << _DRAW_BITS)
