"""Devices of a machine: a node each, and its part of what the owner allows. Pure."""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from gpu_node.core.limits import BITS_PER_S_MIN, OwnerLimits
from hypergpu.units import Bytes

CPU = "cpu"
DEVICES_MOST = 64
_DEVICE = re.compile(r"cpu|\d{1,3}|GPU-[0-9a-f-]{4,40}")


def chosen_devices(stated: str, limits: OwnerLimits, found: Sequence[str]) -> tuple[str, ...]:
    """The devices that get a node each; none: one node, on what its worker finds.

    Args:
        stated: Names with commas, as ``--device`` and ``HYPERGPU_NODE_DEVICES`` give them, ``cpu``
            among them as often as wanted; empty: all that the owner allows.
        limits: The owner's, who may allow some GPUs only.
        found: The machine's GPUs.

    Raises:
        ValueError: What is stated is no list of devices, or the owner allows others only.
    """
    devices = _whole_devices(stated, limits, found)
    if limits.shares == 1:
        return devices
    whole_devices = devices or (tuple(found[:1]) if limits.gpu != "none" else ()) or (CPU,)
    nodes = len(whole_devices) * limits.shares
    if nodes > DEVICES_MOST:
        raise ValueError(f"{nodes} nodes would share the devices, and at most {DEVICES_MOST} do")
    return tuple(device for device in whole_devices for _ in range(limits.shares))


def _whole_devices(stated: str, limits: OwnerLimits, found: Sequence[str]) -> tuple[str, ...]:
    allowed_devices = tuple(limits.gpu.split(",")) if limits.gpu not in {"", "none"} else ()
    if not stated:
        devices = allowed_devices or (() if limits.gpu == "none" else tuple(found))
        return devices[:DEVICES_MOST] if len(devices) > 1 else ()
    devices = tuple(word.strip() for word in stated.split(","))
    if len(devices) > DEVICES_MOST:
        raise ValueError(f"there are {len(devices)} devices, and at most {DEVICES_MOST} are served")
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"{device[:80]!r} is no device: give cpu, or a GPU's index or UUID")
        if device != CPU and limits.gpu and device not in allowed_devices:
            raise ValueError(f"the limit gpu allows {limits.gpu}, and not {device}")
        if device != CPU and devices.count(device) > 1:
            raise ValueError(f"the device {device} is given twice")
    return devices


def device_limits(limits: OwnerLimits, device: str, count: int) -> OwnerLimits:
    """An even part of the machine's limits for one of ``count`` devices, and that device alone."""
    return replace(
        limits,
        gpu="none" if device == CPU else device,
        disk_bytes=Bytes(limits.disk_bytes // count),
        memory_bytes=Bytes(limits.memory_bytes // count),
        threads=part_of(limits.threads, count),
        upload_bits_per_s=_rate_part(limits.upload_bits_per_s, count),
        download_bits_per_s=_rate_part(limits.download_bits_per_s, count),
    )


def part_of(whole: int, count: int) -> int:
    """A device's part of a limit of which one is the least; 0 stays no limit."""
    return max(1, whole // count) if whole else 0


def _rate_part(whole: int, count: int) -> int:
    return max(BITS_PER_S_MIN, whole // count) if whole else 0
