"""How a shard's training and the outside see each other."""

from collections.abc import Callable
from typing import NamedTuple

from gpu_node.shell.worker.messages import Progress


class ShardError(Exception):
    """The shard cannot be trained; the worker itself is well. The text says why."""


class ShardAbortedError(Exception):
    """The daemon does not want the shard any more."""


class Watch(NamedTuple):
    """What a training asks and says between inner steps."""

    refuse_aborted: Callable[[], None]
    """Raises `ShardAbortedError` when the shard is not wanted any more."""
    report: Callable[[Progress], None]
    log: Callable[[str], None]
