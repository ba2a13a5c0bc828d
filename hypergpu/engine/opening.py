"""Which engine computes."""

import re

from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.engine.ray_engine import RayEngine
from hypergpu.errors import HyperGPUError, Reason

_RAY = re.compile(r"ray(://[^\s/]+)?")


def open_engine(address: str) -> Engine | None:
    """Open the engine that the configuration names; None: threads of this process compute.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it names none; MACHINE_UNFIT, Ray is not installed.
    """
    if not address:
        return None
    if address == "local":
        return LocalEngine()
    if not _RAY.fullmatch(address):
        fix = "name local, ray, or ray://HOST:10001"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"there is no engine {address!r}", fix=fix)
    return RayEngine(address)
