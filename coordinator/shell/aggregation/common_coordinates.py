"""What dense and sparse updates of one round have in common: the coordinates that both send."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.shell.aggregation.sketch import mapped_file
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import SPARSE_CODECS
from hypergpu.tensors.codec import Section, sections_of
from hypergpu.tensors.layout import Layout
from hypergpu.tensors.records import GROUP


class UpdateFile(NamedTuple):
    """An update on disk."""

    node: NodeId
    codec: str
    path: Path

    @property
    def is_sparse(self) -> bool:
        """Whether it has a part of the coordinates only."""
        return self.codec in SPARSE_CODECS


def common_norms(
    layout: Layout, updates: Sequence[UpdateFile]
) -> dict[NodeId, dict[NodeId, float]]:
    """Length of each dense update over the coordinates that each sparse one sends, by both nodes.

    Blocks; it decodes each update once, and squares as many values as there are pairs of them.

    Raises:
        OSError: A file cannot be read, or has another size than the layout says.
    """
    dense = [each for each in updates if not each.is_sparse]
    sparse = [each for each in updates if each.is_sparse]
    squares = np.zeros((len(dense), len(sparse)))
    sections = {each.node: sections_of(layout, each.codec) for each in updates}
    payloads = {
        each.node: mapped_file(each.path, sections[each.node].integers.stop) for each in updates
    }
    if not dense or not sparse:
        return {}

    def values(each: UpdateFile, part: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        section: Section = getattr(sections[each.node], part)
        octets = payloads[each.node][section.bytes_of(start, stop - start)]
        return section.codec.values(octets, np.empty(stop - start, np.float32))

    with np.errstate(all="ignore"):  # A useless update may hold anything.
        for part in ("large", "small"):
            count = getattr(sections[updates[0].node], part).values_count
            for start in range(0, count, GROUP):
                stop = min(start + GROUP, count)
                rows = [np.square(values(each, part, start, stop)) for each in dense]
                masks = [values(each, part, start, stop) != 0 for each in sparse]
                wide = (np.stack(each).astype(np.float64) for each in (rows, masks))
                # einsum adds in one order, whatever the number of threads, as a BLAS may not.
                squares += np.einsum("dc,sc->ds", *wide)
    return {
        one.node: {
            other.node: float(np.sqrt(squares[row, column])) for column, other in enumerate(sparse)
        }
        for row, one in enumerate(dense)
    }
