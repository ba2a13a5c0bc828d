"""What an engine computes of a fold: digests of files, and shards."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.shell.aggregation.digested_files import InputError
from coordinator.shell.aggregation.fold import ShardRequest, fold_shard
from hypergpu.digests import digest_of_file
from hypergpu.engine.engine import Engine, run_all
from hypergpu.engine.tasks import EngineTask, decode_path, encode_path
from hypergpu.ids import Digest

KIND = "fold"


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


FoldTask = DigestFile | FoldShard
FoldTaskResult = FileDigested | ShardFolded | TaskFailed

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_path)
_tasks = msgspec.msgpack.Decoder(FoldTask, dec_hook=decode_path)
_results = msgspec.msgpack.Decoder(FoldTaskResult)


def run_fold_tasks(engine: Engine, tasks: Sequence[FoldTask]) -> list[FoldTaskResult]:
    """Results in the order of the tasks. Blocks."""
    answers = run_all(engine, [EngineTask(KIND, _encoder.encode(each)) for each in tasks])
    return [_results.decode(each) for each in answers]


def compute(arguments: bytes) -> bytes:
    """Compute a task of a fold: the function of its kind."""
    return _encoder.encode(_compute(_tasks.decode(arguments)))


def _compute(task: FoldTask) -> FoldTaskResult:
    try:
        match task:
            case DigestFile(path=path, threads=threads):
                most = min(threads, os.cpu_count() or 1)
                return FileDigested(digest_of_file(path, most))
            case FoldShard(request=request):
                return ShardFolded(fold_shard(request))
    except (InputError, OSError) as error:
        return TaskFailed(str(error))
