"""The memory that a program's results would take, found on tensors without data."""

from typing import Any

import psutil
from torch import Tensor

from hypergpu.programs.container import ProgramMemoryError

_RESULT_MOST = 1 << 38
"""Bytes of one result with a small batch, beyond which no machine that we know could train."""


class AliveBytes:
    """Adds up the bytes of results that are still needed. Views count nothing.

    Args:
        most: Bytes; None: the memory of this machine.
        holder: Who has these bytes, for messages.
    """

    def __init__(self, most: int | None = None, holder: str = "this machine") -> None:
        self._holder = holder
        self._most = psutil.virtual_memory().total if most is None else most
        self._uses: dict[int, int] = {}
        self._total = 0

    def add(self, value: Any) -> None:
        """Count a call's result.

        Raises:
            ProgramMemoryError: The result, or all together, take more than there is.
        """
        for part in _tensors_of(value):
            shape = tuple(part.shape)
            if part.numel() * part.element_size() > _RESULT_MOST:
                raise ProgramMemoryError(f"a result of shape {shape} is too large")
            key = _storage_key(part)
            self._uses[key] = self._uses.get(key, 0) + 1
            if self._uses[key] == 1:
                self._total += _storage_bytes(part)
        if self._total > self._most:
            raise ProgramMemoryError(
                f"the results until here take {self._total / (1 << 30):,.1f} GiB, and"
                f" {self._holder} has {self._most / (1 << 30):,.1f} GiB of memory"
            )

    def drop(self, value: Any) -> None:
        """Forget a result that no later call needs."""
        for part in _tensors_of(value):
            key = _storage_key(part)
            if key not in self._uses:
                continue
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self._total -= _storage_bytes(part)


def _tensors_of(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


def _storage_key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - a storage has no public identity
    return key


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
