"""Workloads of torch: a module, its tensors by name, a dataset, and how the one is measured on
the other; and the device that it runs on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import psutil
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from hypergpu.tensors.layout import (
    Flat,
    Layout,
    LayoutError,
    TensorKind,
    TensorSpec,
    layout_of,
    pack,
    unpack,
)
from hypergpu.units import Bytes, several
from hypergpu.workloads.datasets import Array, Dataset
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.examples import Example, labelled_images
from hypergpu.workloads.node_data import NodeDataReaders
from hypergpu.workloads.workload import MixtureWorkload, Workload


class Device(NamedTuple):
    """Device on which torch computes."""

    kind: str
    """``cuda``, ``mps`` or ``cpu``."""
    name: str
    memory_bytes: Bytes
    has_bf16: bool
    """Whether autocast to bfloat16 is wanted. Never on a CPU, which stays exact and reproducible.
    """


def chosen_device() -> Device:
    """The best device that multiplies two matrices correctly."""
    if torch.cuda.is_available() and _computes("cuda"):
        properties = torch.cuda.get_device_properties(0)
        return Device(
            "cuda", properties.name, Bytes(properties.total_memory), torch.cuda.is_bf16_supported()
        )
    memory_bytes = Bytes(psutil.virtual_memory().total)
    if torch.backends.mps.is_available() and _computes("mps"):
        return Device("mps", "Apple GPU", memory_bytes, has_bf16=False)
    threads = several(psutil.cpu_count() or 1, "thread")
    return Device("cpu", f"CPU, {threads}", memory_bytes, has_bf16=False)


def _computes(kind: str) -> bool:
    try:
        square = torch.ones(64, 64, device=kind)
        return float((square @ square).sum()) == 64.0**3
    except RuntimeError:
        return False


class PartModule(nn.Module):
    """A module of which only what is trained, and its own buffers, make the job's model: every node
    makes the rest for itself, alike.
    """


@runtime_checkable
class CheckpointedModule(Protocol):
    """A module that can compute activations again in its backward pass, rather than keep them."""

    def checkpoint_activations(self, *, is_on: bool) -> None:
        """Begin or cease to do so; gradients stay the same."""


def named_tensors(model: nn.Module) -> dict[str, tuple[TensorKind, Tensor]]:
    """Every tensor that makes the model, each once however many modules share it."""
    is_part = isinstance(model, PartModule)
    tensors = {
        name: (TensorKind.PARAMETER, tensor.detach())
        for name, tensor in model.named_parameters()
        if tensor.requires_grad or not is_part
    }
    state_names = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers(recurse=not is_part):
        if name in state_names:  # the rest, such as masks, is made again by the constructor
            kind = TensorKind.STATISTIC if buffer.is_floating_point() else TensorKind.INTEGER
            tensors[name] = (kind, buffer.detach())
    return tensors


def smallest_pass(model: nn.Module) -> int:
    """Least samples that a training step of a module can take: BatchNorm needs two."""
    own: object = getattr(model, "smallest_pass", None)
    if isinstance(own, int):
        return own
    is_normalised = any(isinstance(each, _BatchNorm) for each in model.modules())
    return 2 if is_normalised else 1


def module_layout(model: nn.Module) -> Layout:
    """The layout that node and coordinator derive alike."""
    return layout_of(
        TensorSpec(name, tuple(tensor.shape), kind)
        for name, (kind, tensor) in named_tensors(model).items()
    )


def workload_layout(workload: object, model: nn.Module) -> Layout:
    """The layout of a workload's module; of a mixture, with each tensor's expert.

    Raises:
        LayoutError: An expert is none of the mixture's, or does not count its tokens.
        MixtureError: Its numbers of experts cannot be.
    """
    layout = module_layout(model)
    if not isinstance(workload, MixtureWorkload):
        return layout
    workload.mixture.check()
    tensors = []
    for tensor in layout.tensors:
        expert = workload.expert_of(tensor.name)
        if expert is not None and not 0 <= expert < workload.mixture.experts:
            count = several(workload.mixture.experts, "expert")
            raise LayoutError(f"tensor {tensor.name!r} is of expert {expert}: there are {count}")
        tensors.append(tensor if expert is None else replace(tensor, expert=expert))
    return layout_of(tensors)


def store_module(model: nn.Module, layout: Layout, out: Flat) -> None:
    """Copy the module's tensors into flat vectors; waits for the device."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        name: _numpy_values(tensor) for name, (_, tensor) in named_tensors(model).items()
    }
    pack(layout, arrays, out)


def _numpy_values(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A tensor's values; numpy has no bfloat16."""
    values = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: npt.NDArray[np.generic] = values.cpu().numpy()
    return array


def load_module(model: nn.Module, layout: Layout, flat: Flat) -> None:
    """Copy flat vectors into the module's tensors, wherever they are."""
    arrays = unpack(layout, flat)
    with torch.no_grad():
        for name, (_, tensor) in named_tensors(model).items():
            # A copy, since torch warns of memory that it may not write to.
            tensor.copy_(torch.from_numpy(arrays[name].copy()))


def module_initial(make: Callable[[], nn.Module], seed: int) -> Flat:
    """The first model of a job with this seed, as node and coordinator draw it alike.

    It is drawn on the CPU and by one thread: what a value is rounded to may depend on where a
    thread's share of a tensor ends.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(seed & (2**63 - 1))
        model = make()
    finally:
        torch.set_num_threads(threads)
    layout = module_layout(model)
    flat = Flat.empty(layout)
    store_module(model, layout, flat)
    return flat


class TorchWorkload(Workload, Protocol):
    """A module whose gradient torch finds.

    Its floating-point parameters are trained; floating-point buffers are statistics, which nodes
    average; integer buffers are taken from the lowest slot.
    """

    def model(self) -> nn.Module:
        """A fresh module. Whatever it draws comes from torch's global generator, which the caller
        seeds.
        """

    def loss(self, model: nn.Module, *fields: Any, **named: Any) -> Tensor:
        """Mean loss over the batch, with its graph.

        Args:
            model: As ``model`` made it.
            fields: What `SampleSource.batch` gives, as tensors: inputs and targets.
            named: None are given; with them any arguments in the fields' place satisfy the types.
        """

    def evaluate(self, model: nn.Module, *fields: Any, **named: Any) -> Sums:
        """Loss and score over the batch; called without a graph, in evaluation mode."""


@runtime_checkable
class CountedLoss(Protocol):
    """A workload whose loss is a mean over something else than samples. A batch in several passes
    so gives the same gradient as in one.
    """

    def loss_count(self, *fields: Array) -> int:
        """How many losses are averaged over these samples, at least 1; fields as `SampleSource` has
        them.
        """


class Classification(NamedTuple):
    """One label a sample: cross-entropy and correct predictions. Implements `TorchWorkload`."""

    make: Callable[[], nn.Module]
    read: Callable[[str], Dataset]
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float
    """Stored inputs to the model's."""
    augment: Callable[[Tensor], Tensor] | None = None
    """Random changes of prepared inputs, in training only."""
    draw: Callable[[Array], Array] | None = None
    """Stored inputs as images for people, ``uint8[b, height, width]`` or ``[b, height, width, 3]``;
    None: they are no images.
    """
    node_data: NodeDataReaders | None = None
    """None: it cannot train on data that stay on nodes."""

    def load(self, data_dir: str) -> Dataset:
        """See `Workload`."""
        return self.read(data_dir)

    def model(self) -> nn.Module:
        """See `TorchWorkload`."""
        return self.make()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `TorchWorkload`."""
        prepared_inputs = self.prepare(inputs)
        if self.augment is not None:
            prepared_inputs = self.augment(prepared_inputs)
        return F.cross_entropy(model(prepared_inputs), targets)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """See `TorchWorkload`."""
        logits = model(self.prepare(inputs)).float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        hits = (logits.argmax(dim=1) == targets).sum()
        return Sums(float(loss), float(hits), len(targets))

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """See `ExampleWorkload`."""
        return labelled_images(self.draw(inputs), targets) if self.draw is not None else []

    def outputs(self, model: nn.Module, inputs: Tensor) -> list[int | str]:
        """Predicted classes."""
        if self.draw is None:
            return []
        return [*map(int, model(self.prepare(inputs)).argmax(dim=1))]


PROMPT_BYTES = 80
CONTINUATION_BYTES = 120
_TEMPERATURE = 0.7
"""Below 1: a small model's likeliest bytes. At 0 it repeats itself."""


class NextByte(NamedTuple):
    """The next byte at every place of a block: cross-entropy. Implements `TorchWorkload`."""

    make: Callable[[], nn.Module]
    read: Callable[[str], Dataset]
    node_data: NodeDataReaders | None = None
    """None: it cannot train on data that stay on nodes."""

    def load(self, data_dir: str) -> Dataset:
        """See `Workload`."""
        return self.read(data_dir)

    def model(self) -> nn.Module:
        """See `TorchWorkload`."""
        return self.make()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `TorchWorkload`."""
        logits = model(inputs.long())  # [b, t, 256]
        return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """See `TorchWorkload`."""
        logits = model(inputs.long()).float()
        labels = targets.long()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        hits = (logits.argmax(dim=2) == labels).sum()
        return Sums(float(loss), float(hits), labels.numel())

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """The beginning of a held-out text, from its first whole line on."""
        return [Example(text=_decode(_prompt(inputs[0]).tobytes()))]

    def outputs(self, model: nn.Module, inputs: Tensor) -> list[int | str]:
        """Text that the model writes after the beginning, drawn with a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        start = torch.from_numpy(_prompt(inputs[0].cpu().numpy()).copy())
        text = start.long().to(inputs.device)
        for _ in range(CONTINUATION_BYTES):
            window = text[-inputs.shape[1] :]
            logits = model(window[None])[0, -1].float().cpu()
            next_byte = torch.multinomial(
                F.softmax(logits / _TEMPERATURE, 0), 1, generator=generator
            )
            text = torch.cat([text, next_byte.to(text.device)])
        text_bytes = text[len(start) :].to(torch.uint8).cpu().numpy().tobytes()
        return [_decode(text_bytes)]


def _prompt(block: Array) -> Array:
    """The first bytes of a block, without the rest of a line that began before it."""
    ends = np.flatnonzero(block[: len(block) // 2] == ord("\n"))
    start = int(ends[0]) + 1 if len(ends) else 0
    return block[start : start + PROMPT_BYTES]


def _decode(content: bytes) -> str:
    """Text for people: bytes that are none show as one mark."""
    text = content.decode("utf-8", errors="replace")
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
