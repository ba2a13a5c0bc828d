"""The error of everything that netsim cannot do, with what would help."""

from hypergpu.errors import HyperGPUError, Reason


class NetsimError(HyperGPUError):
    """Nothing was started, or everything that was started is gone again.

    Args:
        detail: What is impossible and where: a file's key, a device, a number.
        fix: What the reader should do.
    """

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(Reason.NETWORK_REFUSED, detail, fix=fix)
