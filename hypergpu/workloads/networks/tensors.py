"""A module's tensors by name, as a layout and as flat vectors."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hypergpu.tensors.layout import Flat, Layout, TensorKind, TensorSpec, layout_of, pack, unpack


def named_tensors(model: nn.Module) -> dict[str, tuple[TensorKind, Tensor]]:
    """Every tensor that makes the model, each once however many modules share it."""
    found = {
        name: (TensorKind.PARAMETER, tensor.detach()) for name, tensor in model.named_parameters()
    }
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in kept:  # the rest, such as masks, is made again by the constructor
            kind = TensorKind.STATISTIC if buffer.is_floating_point() else TensorKind.INTEGER
            found[name] = (kind, buffer.detach())
    return found


def module_layout(model: nn.Module) -> Layout:
    """The layout that node and coordinator derive alike."""
    return layout_of(
        TensorSpec(name, tuple(tensor.shape), kind)
        for name, (kind, tensor) in named_tensors(model).items()
    )


def store_module(model: nn.Module, layout: Layout, out: Flat) -> None:
    """Copy the module's tensors into flat vectors; waits for the device."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        name: tensor.cpu().numpy() for name, (_, tensor) in named_tensors(model).items()
    }
    pack(layout, arrays, out)


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
