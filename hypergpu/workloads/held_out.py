"""The draw of held-out samples where nobody has set some apart: the same on every machine, and
independent of the order's period.
"""

from collections import Counter
from collections.abc import Hashable, Iterable

from blake3 import blake3

_SEED = 20_261_128
EVERY = 10
"""One sample in so many is held out."""


class HeldOutDraw:
    """Draws one in each ten samples of a class, in the order in which they come.

    A class's first sample is trained on, so that no class is held out alone. Needs no pass over the
    samples before; takes memory for each class.
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def is_held_out(self, label: Hashable = None) -> bool:
        """Whether the next sample, one of this class, is held out.

        Args:
            label: A text, number or None, the class; alike for all samples without classes.
        """
        block, place = divmod(self._counts[label], EVERY)
        self._counts[label] += 1
        draw_bytes = blake3(f"hypergpu.held_out\0{_SEED}\0{label!r}\0{block}".encode()).digest(8)
        number = int.from_bytes(draw_bytes, "little")
        return place == (number % EVERY if block else 1 + number % (EVERY - 1))


def held_out_places(labels: Iterable[Hashable]) -> list[bool]:
    """Which samples are held out: one at least where there are two.

    Classes of a few samples may give none; then the last sample is held out.
    """
    draw = HeldOutDraw()
    places = [draw.is_held_out(label) for label in labels]
    if len(places) > 1 and not any(places):
        places[-1] = True
    return places
