"""Which engine computes."""

import re

from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.engine.ray_engine import RayEngine
from hypergpu.errors import HyperGPUError, Reason

_RAY = re.compile(r"ray(://[^\s/]+)?")


def open_engine(address: str, processes: int = 0) -> Engine:
    """Open an engine; it starts nothing yet.

    Args:
        address: ``local``, ``ray`` (one of its own on this machine) or ``ray://HOST:PORT``.
        processes: How many ``local`` has; 0: as many as there are cores.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it names none; MACHINE_UNFIT, Ray is not installed.
    """
    if address == "local":
        return LocalEngine(processes)
    if not _RAY.fullmatch(address):
        fix = "name local, ray, or ray://HOST:10001"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"there is no engine {address!r}", fix=fix)
    return RayEngine(address)
