"""A module of the user's own and its arrays as the items and files of a farm job."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.programs.container import ProgramError
from hypergpu.programs.samples import FieldArrays, SamplesError, stored_array
from hypergpu.user.farm.input_chunks import write_array_chunks
from hypergpu.user.farm.starting import JobParts, MapOrder
from hypergpu.user.training.datasets import DataSource

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module


def program_parts(module: "Module", order: MapOrder, folder: Path) -> JobParts:
    """Items that are arrays, and the program of a module.

    Raises:
        HyperGPUError: The module cannot be traced, or the data cannot be used.
    """
    # Imported here: it needs torch, which takes seconds.
    from hypergpu.workloads.networks.forward_program import forward_program

    with _translate_program_errors():
        batches = DataSource(order.data, "data").batches
        first = next(_program_batches(batches(), 0), None)
        if first is None:
            return JobParts(write_array_chunks([], folder), {})
        program = forward_program(module, first)
        items = write_array_chunks(_program_batches(batches(), order.limit), folder)
    files = {name: folder / name for name in ("program", "tensors")}
    files["program"].write_bytes(program.program)
    files["tensors"].write_bytes(program.tensors)
    return JobParts(items, files)


def _program_batches(batches: Iterator[FieldArrays], limit: int) -> Iterator[Mapping[str, Any]]:
    """Batches as programs take them, of ``limit`` items in all unless that is 0."""
    count = 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        kept_size = min(size, limit - count) if limit else size
        if kept_size <= 0:
            return
        count += kept_size
        yield {
            name: np.asarray(stored_array("data", name, array[:kept_size]))
            for name, array in batch.items()
        }


@contextlib.contextmanager
def _translate_program_errors() -> Iterator[None]:
    """Raise errors of programs and samples as those of HyperGPU."""
    try:
        yield
    except (ProgramError, SamplesError) as error:
        detail, _, fix = str(error).partition(" Fix: ")
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, detail.rstrip("."), fix=fix or "see docs/farm.md"
        ) from error
