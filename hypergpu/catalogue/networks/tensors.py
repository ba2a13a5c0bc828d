"""A module's tensors by name, as a layout and as flat vectors."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hypergpu.layout import Flat, Kind, Layout, TensorSpec, layout_of, pack, unpack


def named_tensors(model: nn.Module) -> dict[str, tuple[Kind, Tensor]]:
    """Every tensor that makes the model, each once however many modules share it."""
    found = {name: (Kind.PARAMETER, tensor.detach()) for name, tensor in model.named_parameters()}
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in kept:  # the rest, such as masks, is made again by the constructor
            kind = Kind.STATISTIC if buffer.is_floating_point() else Kind.INTEGER
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
