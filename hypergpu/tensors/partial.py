"""A part of a mixture's model: the tensors that all experts share, and those of some experts.

The tensors of a part keep the whole layout's order, and each is in the same section of an update as
in the whole: large, small or statistics. So whatever knows a model by its layout alone, codecs and
deltas included, knows a part as a model of its own.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hypergpu.digests import RunningDigest
from hypergpu.ids import Digest
from hypergpu.tensors.codec import Section
from hypergpu.tensors.layout import Flat, Float32s, Layout, Octets, TensorKind, TensorSpec, unpack
from hypergpu.tensors.records import RECORD
from hypergpu.units import Bytes

_SPAN = 1 << 18
"""Values copied at a time."""


def expert_of(tensor: TensorSpec) -> int | None:
    """The expert that a tensor belongs to; None: all share it."""
    return None if tensor.expert is msgspec.UNSET else tensor.expert


def part_layout(layout: Layout, experts: Collection[int]) -> Layout:
    """The layout of what all share and of these experts."""
    return Layout(
        tuple(
            each
            for each in layout.tensors
            if (expert := expert_of(each)) is None or expert in experts
        )
    )


class PartRun(NamedTuple):
    """A tensor in the whole layout, and where it is in a part's. Places count within a section."""

    whole_start: int
    part_start: int | None
    """None: the part lacks it."""
    values_count: int
    expert: int | None


def section_of(tensor: TensorSpec) -> int:
    """Section of a tensor's values: 0 large, 1 small, 2 statistics, 3 integers."""
    if tensor.kind is TensorKind.PARAMETER:
        return 0 if tensor.is_large else 1
    return 2 if tensor.kind is TensorKind.STATISTIC else 3


def part_runs(layout: Layout, part: Layout) -> tuple[list[PartRun], ...]:
    """The whole layout's tensors in order, by section, and where each is in the part."""
    names = {each.name for each in part.tensors}
    runs: tuple[list[PartRun], ...] = ([], [], [], [])
    whole_ends, part_ends = [0] * 4, [0] * 4
    for tensor in layout.tensors:
        place, is_held = section_of(tensor), tensor.name in names
        start = part_ends[place] if is_held else None
        runs[place].append(PartRun(whole_ends[place], start, tensor.count, expert_of(tensor)))
        whole_ends[place] += tensor.count
        part_ends[place] += tensor.count if is_held else 0
    return runs


def decode_range(section: Section, payload: Octets, start: int, stop: int) -> Float32s:
    """Values [start, stop) of a section of an update, wherever they begin.

    Args:
        section: Of the update.
        payload: The whole update.
        start: First value, counted within the section.
        stop: Behind the last.
    """
    first = start // RECORD * RECORD
    last = min(section.values_count, -(-stop // RECORD) * RECORD)
    values = np.empty(last - first, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # A useless update may say anything.
        section.codec.decode(payload[section.bytes_of(first, last - first)], values)
    return values[start - first : stop - first]


def spread_update(layout: Layout, part: Layout, update: Flat, base: Flat) -> Flat:
    """A part's update as one of the whole model: of what the part lacks it says that nothing
    changed.

    Args:
        layout: Of the whole.
        part: Of the part.
        update: The part's; its statistics and integers are values after training.
        base: The whole model that it was made from.
    """
    spread = Flat(np.zeros_like(base.parameters), base.statistics.copy(), base.integers.copy())
    whole_tensors, part_tensors = unpack(layout, spread), unpack(part, update)
    for name, values in part_tensors.items():
        whole_tensors[name][...] = values
    return spread


class WrittenPart(NamedTuple):
    """A part of a model that was written to a file."""

    digest: Digest
    size_bytes: Bytes


def write_part(model: Octets, layout: Layout, part: Layout, path: Path) -> WrittenPart:
    """Write the part of a model's bytes to a file, in flat memory; it is not synced.

    Raises:
        OSError: The file cannot be written.
    """
    running_digest = RunningDigest()
    with path.open("wb") as out:
        for octets in _part_octets(Flat.view(layout, model), layout, part):
            running_digest.update(octets.data)
            out.write(octets.data)
    return WrittenPart(running_digest.digest(), part.model_bytes)


def _part_octets(flat: Flat, layout: Layout, part: Layout) -> Iterator[Octets]:
    names = {each.name for each in part.tensors}
    for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
        if tensor.name in names:
            vector = flat.of_kind(tensor.kind)
            for first in range(start, start + tensor.count, _SPAN):
                stop = min(first + _SPAN, start + tensor.count)
                yield np.ascontiguousarray(vector[first:stop]).view(np.uint8)
