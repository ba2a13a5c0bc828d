"""Tensors of a model that are one and the same, by object or by the memory that they lie in."""

from typing import Any

Tie = tuple[object, ...]
"""Equal for two names of one tensor."""


def tie_of(tensor: Any) -> Tie:
    """What a torch tensor has in common with those that an optimizer steps together with it: the
    same elements of the same memory, in the same order.
    """
    if not tensor.numel() or tensor.device.type == "meta":
        return (id(tensor),)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        str(tensor.dtype),
    )
