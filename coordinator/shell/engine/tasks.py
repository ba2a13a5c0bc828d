"""What an engine computes. A task is names of files and ranges, its result a digest or a verdict.

A task may be computed any number of times, by anybody who has the files: no tensor and no object
goes through an engine.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from coordinator.shell.aggregation.fold import ShardRequest, fold_shard
from coordinator.shell.aggregation.fold_files import InputError
from hypergpu.crypto import digest_of_file
from hypergpu.ids import Digest


class DigestFile(msgspec.Struct, frozen=True, tag=True):
    """Digest a file."""

    path: Path
    threads: int = 1
    """Most threads to hash with, on a machine with as many cores."""


class FoldShard(msgspec.Struct, frozen=True, tag=True):
    """Fold some coordinates of an outer step."""

    request: ShardRequest


class FileDigested(msgspec.Struct, frozen=True, tag=True):
    """The digest of a file."""

    digest: Digest


class ShardFolded(msgspec.Struct, frozen=True, tag=True):
    """A shard is written."""

    is_finite: bool


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """The task cannot be done with the files as they are."""

    reason: str


Task = DigestFile | FoldShard
TaskResult = FileDigested | ShardFolded | TaskFailed


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_path)
_tasks = msgspec.msgpack.Decoder(Task, dec_hook=_decode_path)
_results = msgspec.msgpack.Decoder(TaskResult)


def encode(value: Task | TaskResult) -> bytes:
    """The bytes in which it travels."""
    return _encoder.encode(value)


def decode_result(payload: bytes) -> TaskResult:
    """Read a result; raises `msgspec.MsgspecError` where it is none."""
    result: TaskResult = _results.decode(payload)
    return result


def compute(task: Task) -> TaskResult:
    """Do a task here. Blocks."""
    try:
        match task:
            case DigestFile(path=path, threads=threads):
                most = min(threads, os.cpu_count() or 1)
                return FileDigested(digest_of_file(path, most))
            case FoldShard(request=request):
                return ShardFolded(fold_shard(request))
    except (InputError, OSError) as broken:
        return TaskFailed(str(broken))


def compute_encoded(payload: bytes) -> bytes:
    """The same for a task and a result as bytes: what other processes call."""
    return encode(compute(_tasks.decode(payload)))
