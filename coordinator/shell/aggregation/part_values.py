"""An update of some experts of a mixture, read as one of the whole model."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hypergpu.tensors.codec import sections_of
from hypergpu.tensors.layout import Float32s, Layout, Octets
from hypergpu.tensors.partial import decode_range, part_runs
from hypergpu.tensors.records import GROUP


class PartValues(NamedTuple):
    """Values of an update of a part in their places in the whole; others where the part has none.

    Args:
        layout: Of the whole model.
        part: Of the update.
        codec: Of the update.
        payload: The update.
    """

    layout: Layout
    part: Layout
    codec: str
    payload: Octets

    def groups(self, place: int, others: Float32s | None = None) -> Iterator[Float32s]:
        """Values of a section of the whole layout in order, ``GROUP`` at a time.

        Args:
            place: Which: 0 large, 1 small, 2 statistics.
            others: Values of the section that the part lacks; None: zeros.
        """
        section = sections_of(self.part, self.codec).floats[place]
        runs = part_runs(self.layout, self.part)[place]
        count, at = sum(run.values_count for run in runs), 0
        for start in range(0, count, GROUP):
            stop = min(start + GROUP, count)
            values = np.zeros(stop - start, np.float32) if others is None else others[start:stop]
            values = np.array(values, np.float32)
            while runs[at].whole_start + runs[at].values_count <= start:
                at += 1
            for run in runs[at:]:
                if run.whole_start >= stop:
                    break
                first = max(start, run.whole_start)
                last = min(stop, run.whole_start + run.values_count)
                if run.part_start is not None and last > first:
                    shift = run.part_start - run.whole_start
                    part_values = decode_range(section, self.payload, first + shift, last + shift)
                    values[first - start : last - start] = part_values
            yield values
