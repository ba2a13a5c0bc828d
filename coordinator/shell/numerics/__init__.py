"""The coordinator's arithmetic: updates on disk become the next model, in flat memory."""

from coordinator.shell.numerics.fold import fold
from coordinator.shell.numerics.request import (
    BaseDamagedError,
    DivergedError,
    FoldedFile,
    FoldError,
    FoldRequest,
    FoldResult,
    NoUpdatesError,
    OuterRule,
    RefusedUpdate,
    StoredBlob,
    StoredUpdate,
)

__all__ = [
    "BaseDamagedError",
    "DivergedError",
    "FoldError",
    "FoldRequest",
    "FoldResult",
    "FoldedFile",
    "NoUpdatesError",
    "OuterRule",
    "RefusedUpdate",
    "StoredBlob",
    "StoredUpdate",
    "fold",
]
