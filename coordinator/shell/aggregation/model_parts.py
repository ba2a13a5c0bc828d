"""Parts of a mixture's model as files: whole ones, and their next ones by a compressed change.

A part has its own exact values to go to, those of the whole model, and its own error: what
compression leaves out of one change is in the next.
"""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from coordinator.shell.aggregation.fold_request import FoldedFile
from coordinator.shell.aggregation.sketch import mapped_file
from hypergpu.digests import RunningDigest
from hypergpu.tensors.codec import sections_of
from hypergpu.tensors.layout import Layout, Octets
from hypergpu.tensors.partial import write_part
from hypergpu.tensors.records import groups
from hypergpu.units import Bytes


class PartFiles(NamedTuple):
    """The next model of a part's holders; not synced yet."""

    model: FoldedFile
    delta: FoldedFile | None
    """None: they fetch the model whole."""


def whole_part(model: Path, layout: Layout, part: Layout, path: Path) -> FoldedFile:
    """Write a part of a model. Blocks.

    Raises:
        OSError: A file cannot be read or written, or has another size than its layout says.
    """
    octets = np.asarray(mapped_file(model, layout.model_bytes))
    file = write_part(octets, layout, part, path)
    return FoldedFile(path, file.digest, file.size_bytes)


def next_part(
    model: Path,
    base: Path,
    layouts: tuple[Layout, Layout],
    codec: str,
    new_path: Callable[[], Path],
) -> PartFiles:
    """Write the next model of a part's holders, and the change that leads to it. Blocks, in flat
    memory.

    Args:
        model: The whole model that the part is to come as near to as the codec does.
        base: What the holders have.
        layouts: Of the whole and of the part.
        codec: Of the change; fp32: there is none.
        new_path: Gives paths that nobody has.

    Raises:
        OSError: A file cannot be read or written, or has another size than its layout says.
    """
    layout, part = layouts
    exact = whole_part(model, layout, part, new_path())
    if codec == "fp32":
        return PartFiles(exact, None)
    try:
        exact_octets = np.asarray(mapped_file(exact.path, part.model_bytes))
        base_octets = np.asarray(mapped_file(base, part.model_bytes))
        with _Output(new_path()) as next_model, _Output(new_path()) as delta:
            _write_change(exact_octets, base_octets, part, codec, next_model, delta)
    finally:
        exact.path.unlink()
    return PartFiles(next_model.file, delta.file)


class _Output:
    """A file that is digested while it is written, and removed where that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = RunningDigest()
        self._size = 0
        self._out: BinaryIO = path.open("wb")

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._out.close()
        if kind is not None:
            self._path.unlink()

    def write(self, octets: Octets) -> None:
        """Append bytes."""
        self._digest.update(octets.data)
        self._out.write(octets.data)
        self._size += octets.size

    @property
    def file(self) -> FoldedFile:
        """What was written, once that is closed."""
        return FoldedFile(self._path, self._digest.digest(), Bytes(self._size))


def _write_change(
    exact: Octets, base: Octets, part: Layout, codec: str, model: _Output, delta: _Output
) -> None:
    sections = sections_of(part, codec)
    for section in (sections.large, sections.small):
        for here, there in groups(section.codec, section.values_count):
            place = slice(
                4 * (section.values_start + here.start), 4 * (section.values_start + here.stop)
            )
            before = base[place].view(np.float32)
            change = exact[place].view(np.float32) - before
            payload = np.empty(there.stop - there.start, np.uint8)
            section.codec.encode(change, payload)
            section.codec.decode(payload, change)
            model.write((before + change).view(np.uint8))
            delta.write(payload)
    rest = exact[4 * part.parameters_count :]
    model.write(rest)
    delta.write(rest)
