"""Count sketches: 1,021 numbers that keep inner products of long vectors to within a few percent.

Two updates' sketches have about the cosine that the updates have, over all of their coordinates;
the standard error is ``1/sqrt(1,021)``. Signs and places follow from a secret of the coordinator,
so that nobody can build an update that only its sketch likes (Charikar, Chen, Farach-Colton 2002).

A sketch is a sum over blocks of 33 rows of 1,021 coordinates: each block times a table of signs,
its rows added up, turned by an offset and given a sign, both drawn for the block. Coordinates of
different blocks share a place only by chance. Those of one block do by their distance, a multiple
of 1,021: a prime, so that no column of a layer of usual width falls into one place.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from coordinator.shell.aggregation.layer_groups import LayerGroups, LayerRun, one_group
from coordinator.shell.aggregation.part_values import PartValues
from hypergpu.tensors.codec import Section, sections_of
from hypergpu.tensors.layout import Float32s, Layout
from hypergpu.tensors.records import GROUP, groups

WIDTH = 1_021
"""Numbers in a sketch."""
COSINE_ERROR = WIDTH**-0.5
"""Standard error of a cosine between two sketches."""
Sketch = npt.NDArray[np.float64]
"""``float64[WIDTH]``."""
Sketches = npt.NDArray[np.float64]
"""``float64[groups, WIDTH]``."""
_NO_LAYERS: Sketches = np.zeros((0, WIDTH))


class SketchKey:
    """The secret signs and places of one job's sketches."""

    def __init__(self, secret: bytes) -> None:
        """Draw them from a secret; the same one gives sketches that can be compared."""
        self._secret = secret
        bits = np.frombuffer(blake3(secret + b"/signs").digest(length=GROUP // 8), np.uint8)
        self.signs: npt.NDArray[np.float32] = 1 - 2 * np.unpackbits(bits).astype(np.float32)

    def blocks(self, count: int) -> npt.NDArray[np.uint16]:
        """Draw of each of ``count`` blocks: its sign in the lowest bit, its offset above it."""
        draws = blake3(self._secret + b"/blocks").digest(length=2 * count)
        return np.frombuffer(draws, np.uint16)


class UpdateSketch(NamedTuple):
    """Measures of one update, over all of its coordinates."""

    sketch: Sketch
    """Sketch of the pseudo-gradient."""
    norm: float
    """Euclidean norm of the pseudo-gradient."""
    statistics_norm: float
    """Euclidean distance of the statistics from those of the base; 0 where a model has none."""
    layers: Sketches = _NO_LAYERS
    """Sketches of its groups of layers, whose sum ``sketch`` is."""

    @property
    def is_sound(self) -> bool:
        """Whether it can be part of a sum: no value is so large that another overflows by it."""
        is_finite = math.isfinite(self.norm + self.statistics_norm)
        return is_finite and bool(np.isfinite(self.sketch).all())


class _Summation:
    """The sketches of long vectors, fed in order, all at once.

    Args:
        key: Of the job.
        groups: Of layers.
        vectors: How many there are.
        has_squares: Whether their squared norms are wanted.
    """

    def __init__(
        self, key: SketchKey, groups: LayerGroups, vectors: int = 1, *, has_squares: bool = False
    ) -> None:
        self._key = key
        self._runs = iter(groups.runs)
        self._run = LayerRun(0, 0)
        self._place = 0
        blocks = sum(-(-run.values_count // GROUP) + 2 for run in groups.runs)
        self._draws = key.blocks(blocks + 2)
        self._block = 0
        self._has_squares = has_squares
        self.layers: Sketches = np.zeros((vectors, groups.groups_count, WIDTH))
        self.squares = [0.0] * vectors

    def begin_section(self) -> None:
        """Count places anew: blocks begin at multiples of `GROUP` in each section."""
        self._place = 0

    def add(self, values: Float32s) -> None:
        """Take in the next values, ``float32[vectors, count]``, however many. A block ends with a
        section and with a run.
        """
        start, end = 0, values.shape[1]
        while start < end:
            while not self._run.values_count:
                self._run = next(self._runs)
            size = min(end - start, self._run.values_count, GROUP - self._place % GROUP)
            self._add_block(values[:, start : start + size])
            start += size
            self._run = self._run._replace(values_count=self._run.values_count - size)
            self._place += size

    def _add_block(self, values: Float32s) -> None:
        draw = int(self._draws[self._block])
        vectors, size = values.shape
        end = size - size % WIDTH
        rest, signs = values[:, end:], self._key.signs
        # einsum adds in one order, whatever the number of threads, as a BLAS may not.
        whole = values[:, :end].reshape(vectors, -1, WIDTH)
        column_sums = np.einsum("nrc,rc->nc", whole, signs[:end].reshape(-1, WIDTH))
        column_sums[:, : rest.shape[1]] += rest * signs[end:size]
        sums, offset = self.layers[:, self._run.group], (draw >> 1) % WIDTH
        move = np.add if draw & 1 else np.subtract
        for there, here in (
            (sums[:, offset:], column_sums[:, : WIDTH - offset]),
            (sums[:, :offset], column_sums[:, WIDTH - offset :]),
        ):
            move(there, here, out=there)
        if self._has_squares:
            for row, each in enumerate(values):
                self.squares[row] += float(np.einsum("i,i->", each, each))
        self._block += 1


def sketch_vector(
    key: SketchKey, layout: Layout, parameters: Float32s, groups: LayerGroups | None = None
) -> Sketch:
    """Sketch a whole vector of parameters, as `sketch_update` does those of an update.

    Args:
        key: Of the job.
        layout: Of the vector.
        parameters: The vector.
        groups: Those that the other vectors are sketched by. Sketches by other groups have other
            signs, and cannot be compared.
    """
    layers = sketch_layers(key, layout, parameters, groups or one_group(layout))
    sketch: Sketch = layers.sum(axis=0)
    return sketch


def sketch_layers(
    key: SketchKey, layout: Layout, parameters: Float32s, groups: LayerGroups
) -> Sketches:
    """Sketch each group of layers of a whole vector of parameters."""
    layers: Sketches = sketch_rows(key, layout, parameters[None], groups)[0]
    return layers


def sketch_rows(
    key: SketchKey, layout: Layout, rows: Float32s, groups: LayerGroups
) -> npt.NDArray[np.float64]:
    """Sketch each group of layers of several vectors of parameters, to the same bits as one by one.

    Args:
        key: Of the job.
        layout: Of each vector.
        rows: ``float32[vectors, parameters]``.
        groups: Of layers.

    Returns:
        ``float64[vectors, groups, WIDTH]``.
    """
    total = _Summation(key, groups, len(rows))
    with np.errstate(all="ignore"):
        total.add(rows[:, : layout.large_count])
        total.begin_section()
        total.add(rows[:, layout.large_count :])
    return total.layers


def sketch_update(  # noqa: PLR0913 - files, and what they are read by
    key: SketchKey,
    layout: Layout,
    codec: str,
    path: Path,
    base: Path,
    layers: LayerGroups | None = None,
    *,
    part: Layout | None = None,
) -> UpdateSketch:
    """Measure an update on disk. Blocks; about 4 ns a coordinate, most of it for decoding.

    Args:
        base: The model that its node started from.
        layers: Groups of layers to measure one by one; None: none are.
        part: Layout of the update where it is one of some experts: what it lacks counts as
            unchanged. None: it is the layout.

    Raises:
        OSError: A file cannot be read, or has another size than the layout says.
    """
    total = _Summation(key, layers or one_group(layout), has_squares=True)
    sections = sections_of(part or layout, codec)
    payload = mapped_file(path, sections.integers.stop)
    spread_values = None if part is None else PartValues(layout, part, codec, payload)
    with np.errstate(all="ignore"):  # A useless update may hold anything.
        for place, section in enumerate((sections.large, sections.small)):
            total.begin_section()
            if spread_values is None:
                _add_section(total, section, payload)
                continue
            for values in spread_values.groups(place):
                total.add(values[None])
        before = _statistics_before(layout, base)
        if spread_values is None:
            moved_distance = _distance(payload, sections.statistics, before)
        else:
            moved_distance = _part_distance(spread_values, before)
    norm, (sketches,) = math.sqrt(total.squares[0]), total.layers
    if layers is None:
        return UpdateSketch(sketches[0], norm, moved_distance)
    return UpdateSketch(sketches.sum(axis=0), norm, moved_distance, sketches)


def _add_section(total: _Summation, section: Section, payload: npt.NDArray[np.uint8]) -> None:
    octets = payload[section.bytes]
    scratch = np.empty(min(section.codec.group, section.values_count), np.float32)
    for here, there in groups(section.codec, section.values_count):
        total.add(section.codec.values(octets[there], scratch[: here.stop - here.start])[None])


def _statistics_before(layout: Layout, base: Path) -> Float32s:
    """Statistics of the base; its file is not looked at where there are none."""
    if not layout.statistics_count:
        return np.empty(0, np.float32)
    model = mapped_file(base, layout.model_bytes)
    start = 4 * layout.parameters_count
    return model[start : start + 4 * layout.statistics_count].view(np.float32)


def _part_distance(update: PartValues, before: Float32s) -> float:
    after = update.groups(2, before)
    squares = (
        np.square(values.astype(np.float64) - before[GROUP * at : GROUP * at + values.size]).sum()
        for at, values in enumerate(after)
    )
    return math.sqrt(float(sum(squares)))


def _distance(payload: npt.NDArray[np.uint8], statistics: Section, before: Float32s) -> float:
    if not statistics.values_count:
        return 0.0
    after = np.frombuffer(payload[statistics.bytes].tobytes(), np.float32)
    return math.sqrt(float(np.square(after.astype(np.float64) - before).sum()))


def mapped_file(path: Path, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Map an update's or a model's bytes.

    Raises:
        OSError: The file cannot be read, or has another size.
    """
    if path.stat().st_size != size_bytes:
        raise OSError(f"{path.name} has {path.stat().st_size} bytes, not {size_bytes}")
    if not size_bytes:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")
