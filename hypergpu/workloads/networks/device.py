"""Choosing the device by running on it: a driver that lists a GPU may still fail to launch a
kernel.
"""

from typing import NamedTuple

import psutil
import torch

from hypergpu.units import Bytes, several


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
