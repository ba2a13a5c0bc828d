"""Launches a real kernel on each device, in a process of its own: a driver fault would kill it.

``torch.cuda.is_available()`` says yes on cards that die at the first kernel, so only a result that
was computed there counts. Prints one JSON object.
"""

import importlib
import sys
from typing import Any

import msgspec

SIDE = 64


class DeviceFound(msgspec.Struct, frozen=True):
    """One device and what became of a kernel on it."""

    device: str
    """``cpu``, ``mps`` or ``cuda:N``."""
    name: str = ""
    capability: str = ""
    """``sm_90`` and the like; empty off CUDA."""
    memory_bytes: int = 0
    failure: str = ""
    """Why the kernel gave no right result; empty when it did."""


class TorchFound(msgspec.Struct, frozen=True):
    """What there is to train with."""

    version: str = ""
    """Empty: no torch."""
    failure: str = ""
    """Why torch cannot be imported although it is installed."""
    cuda: str = ""
    architectures: tuple[str, ...] = ()
    """What the wheel was compiled for."""
    devices: tuple[DeviceFound, ...] = ()


def probe() -> TorchFound:
    """Import torch and try every device it names."""
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        return TorchFound() if error.name == "torch" else TorchFound(failure=str(error))
    except (ImportError, OSError) as error:
        return TorchFound(failure=str(error))
    devices = [DeviceFound("cpu", name="cpu", failure=_failure(torch, "cpu"))]
    if torch.cuda.is_available():
        devices += [_cuda(torch, number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(DeviceFound("mps", name="Apple GPU", failure=_failure(torch, "mps")))
    return TorchFound(
        version=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        architectures=tuple(torch.cuda.get_arch_list()),
        devices=tuple(devices),
    )


def _cuda(torch: Any, number: int) -> DeviceFound:
    device = f"cuda:{number}"
    try:
        properties = torch.cuda.get_device_properties(number)
    except RuntimeError as error:
        return DeviceFound(device, failure=_first_line(error))
    return DeviceFound(
        device,
        name=str(properties.name),
        capability=f"sm_{properties.major}{properties.minor}",
        memory_bytes=int(properties.total_memory),
        failure=_failure(torch, device),
    )


def _failure(torch: Any, device: str) -> str:
    """Multiply two matrices of ones there; every element must be `SIDE`."""
    try:
        ones = torch.ones((SIDE, SIDE), device=device)
        total = float((ones @ ones).sum().to("cpu"))
    except (RuntimeError, NotImplementedError) as error:
        return _first_line(error)
    return "" if total == SIDE**3 else f"a matrix product came out as {total}, not {SIDE**3}"


def _first_line(broken: Exception) -> str:
    return (str(broken).strip() or type(broken).__name__).splitlines()[0]


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe()).decode("utf-8"))
