"""How the training of a shard and the worker's loop see each other."""

from collections.abc import Callable
from typing import NamedTuple

from gpu_node.shell.worker.messages import ShardProgress


class ShardError(Exception):
    """The shard cannot be trained; the worker itself is well. The text says why."""


class ShardAbortedError(Exception):
    """The daemon does not want the shard any more."""


class ShardCallbacks(NamedTuple):
    """Functions that a training calls between inner steps."""

    raise_if_aborted: Callable[[], None]
    """Raises `ShardAbortedError` when the shard is not wanted any more."""
    report: Callable[[ShardProgress], None]
    log: Callable[[str], None]
