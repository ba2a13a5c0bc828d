"""Kind ``map/program``: the outputs of a module of the user's own, which came as a program.

A program is a graph of torch's operators, checked before torch sees it; no code of the user runs
here. Items are rows of Arrow files, each field a column of raw bytes of one sample, or pictures,
which are decoded to the form of the program's only field.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from gpu_node.shell.worker.farm.bundle_output import BundleCourse, vector_output
from gpu_node.shell.worker.farm.chunk_items import json_items
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.farm.array_items import read_array_items
from hypergpu.farm.bundle_results import VectorResults
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.item_chunks import ItemEncoding
from hypergpu.packed_work import unpack_work
from hypergpu.programs.checks import parse_program
from hypergpu.programs.container import SIZE_MOST, Program, ProgramError
from hypergpu.workloads.networks.graph_runner import ReadyGraph
from hypergpu.workloads.networks.program import ready_graphs
from hypergpu.workloads.networks.task import chosen_device

PROGRAM_FILE = "program"
TENSORS_FILE = "tensors"
_Arrays = list[NDArray[Any]]


class LoadedProgram(NamedTuple):
    """A program on its device."""

    program: Program
    graph: ReadyGraph
    tensors: list[torch.Tensor]
    device: torch.device

    @classmethod
    def load(cls, request: DoWork, bundle: Bundle) -> "LoadedProgram":
        """The program of a bundle's files.

        Raises:
            ShardError: It has none that may run.
        """
        for name in (PROGRAM_FILE, TENSORS_FILE):
            if name not in bundle.files:
                raise ShardError(f"the job has no file {name!r}")
        blob = bundle.files[PROGRAM_FILE]
        if blob.size_bytes > SIZE_MOST:
            raise ShardError(f"the program is larger than {SIZE_MOST >> 20} MB")
        device = torch.device(chosen_device().kind)
        try:
            program = parse_program(request.input_path(blob).read_bytes())
            tensors = load(request.input_path(bundle.files[TENSORS_FILE]).read_bytes())
            graph = ready_graphs(program)[False]
        except (ProgramError, SafetensorError) as error:
            raise ShardError(f"the program cannot run: {error}") from error
        if len(program.output_names) != 1:
            raise ShardError(f"the program has {len(program.output_names)} outputs, not 1")
        return cls(program, graph, _checked_tensors(program, tensors, device), device)

    @torch.inference_mode()
    def outputs(self, fields: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """``float32[items, ...]``: what the module gives of a batch.

        Raises:
            ShardError: It fails, or gives something else.
        """
        inputs = [torch.from_numpy(np.array(field)).to(self.device) for field in fields]
        try:
            values = self.graph.run([*self.tensors, *inputs], self.device)
        except ProgramError as error:
            raise ShardError(f"the program cannot run: {error}") from error
        output = values[-1]
        if output.ndim == 0 or len(output) != len(inputs[0]):
            raise ShardError(f"the output is {list(output.shape)} of {len(inputs[0])} items")
        array: NDArray[np.float32] = output.detach().cpu().float().numpy()
        return array


def _checked_tensors(
    program: Program, tensors: dict[str, torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    ordered_tensors = []
    for each in program.tensors:
        tensor = tensors.get(each.name)
        form = (each.shape, getattr(torch, each.dtype))
        if tensor is None or (tuple(tensor.shape), tensor.dtype) != form:
            raise ShardError(f"the tensor {each.name} is not as the program says")
        ordered_tensors.append(tensor.to(device))
    return ordered_tensors


def program_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What runs programs over bundles; it keeps the newest one."""
    programs: dict[str, LoadedProgram] = {}

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        course = BundleCourse(request, callbacks, bundle.items)
        course.advance(0)
        key = repr(sorted(bundle.files.items()))
        if key not in programs:
            programs.clear()
            programs[key] = LoadedProgram.load(request, bundle)
        program = programs[key]
        samples = bundle_samples(request, bundle, program.program)
        values, at_once = [], program.program.evaluation_batch
        for first in range(0, bundle.items, at_once):
            values.append(program.outputs(samples.batch(first, at_once)))
            course.advance(len(values[-1]))
        outputs = np.concatenate(values)
        is_finite = np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1)
        reason = "the output holds values that are not finite numbers"
        errors = {int(place): reason for place in np.flatnonzero(~is_finite)}
        errors |= samples.errors
        count = len(outputs) - len(errors)
        return vector_output(request, course, VectorResults(outputs, errors), count)

    return perform


class BundleSamples(Protocol):
    """The items of a bundle as a program takes them."""

    @property
    def errors(self) -> Mapping[int, str]:
        """Why items cannot be done, by place, of those that were in a batch; a batch has zeros in
        their places.
        """
        ...

    def batch(self, first: int, items: int) -> _Arrays:
        """Some of the items, an array for each of the program's fields."""
        ...


class _ArraySamples:
    """Items that are arrays."""

    def __init__(self, arrays: _Arrays) -> None:
        self.errors: dict[int, str] = {}
        self._arrays = arrays

    def batch(self, first: int, items: int) -> _Arrays:
        """See `BundleSamples`."""
        return [array[first : first + items] for array in self._arrays]


def bundle_samples(request: DoWork, bundle: Bundle, program: Program) -> BundleSamples:
    """The items of a bundle.

    Raises:
        ShardError: A chunk is not what bundle and program say.
    """
    if bundle.encoding is ItemEncoding.JSONL:
        # Imported here: only pictures need Pillow.
        from gpu_node.shell.worker.farm.program_pictures import PictureSamples

        return PictureSamples(json_items(request, bundle), program)
    return _ArraySamples(bundle_arrays(request, bundle, program))


def bundle_arrays(request: DoWork, bundle: Bundle, program: Program) -> _Arrays:
    """The items of a bundle, an array for each of the program's fields.

    Raises:
        ShardError: A chunk is not what bundle and program say.
    """
    if bundle.encoding is not ItemEncoding.ARROW:
        raise ShardError(f"items of this kind are Arrow files, not {bundle.encoding.value}")
    parts: list[_Arrays] = []
    end = bundle.start + bundle.items
    for chunk in bundle.chunks:
        first, last = max(bundle.start, chunk.start), min(end, chunk.start + chunk.items)
        try:
            content = request.input_path(chunk.blob).read_bytes()
            arrays = read_array_items(content, program.fields, chunk.items)
        except OSError as error:
            raise ShardError(f"a chunk cannot be read: {error.strerror}") from error
        except HyperGPUError as error:
            raise ShardError(error.message) from error
        parts.append([array[first - chunk.start : last - chunk.start] for array in arrays])
    arrays = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if not arrays or len(arrays[0]) != bundle.items:
        raise ShardError("the chunks do not hold all items of the bundle")
    return arrays


perform = program_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
