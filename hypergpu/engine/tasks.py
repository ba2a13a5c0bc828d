"""A task is the name of what computes it, and bytes: names of files, ranges and small values go in,
digests and verdicts come out.

It may be computed any number of times, by anybody who has the files: no tensor and no object goes
through an engine. Its kind is an entry point of HyperGPU's own package, in the group
``hypergpu.tasks``: a message can name none that is not listed there.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec

GROUP = "hypergpu.tasks"


class EngineTask(msgspec.Struct, frozen=True):
    """A piece of computing."""

    kind: str
    """Name of the function that computes it, from bytes to bytes."""
    arguments: bytes
    """In the kind's own encoding, as its result is."""
    wants_gpu: bool = False
    """It is computed on a GPU where an engine has one to give."""
    limit_s: float = 600.0
    """Seconds after which an engine that counts takes it for lost."""


class UnknownTaskError(Exception):
    """No function computes tasks of this kind: another version of HyperGPU made it."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineTask)


def encode_task(task: EngineTask) -> bytes:
    """The bytes in which a task travels."""
    return _encoder.encode(task)


def compute(task: EngineTask) -> bytes:
    """Compute a task here. Blocks.

    Raises:
        UnknownTaskError: Its kind is not known here.
    """
    return _function(task.kind)(task.arguments)


def compute_encoded(payload: bytes) -> bytes:
    """The same for a task as bytes: what other processes call."""
    return compute(_decoder.decode(payload))


@cache
def _function(kind: str) -> Callable[[bytes], bytes]:
    for point in distribution("hypergpu").entry_points.select(group=GROUP, name=kind):
        function: Callable[[bytes], bytes] = point.load()
        return function
    raise UnknownTaskError(f"nothing computes tasks of the kind {kind[:40]!r}")


def encode_path(value: Any) -> str:
    """Hook of msgspec's encoders for paths."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def decode_path(kind: type, value: Any) -> Any:
    """Hook of msgspec's decoders for paths."""
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError
