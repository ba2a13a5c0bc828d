"""One outer step by an engine: shards of coordinates, so that any number of them gives the same
bits. A fold over shards of nodes would reorder float32 sums.

Whatever goes wrong is left to the fold in this process, which says what and leaves out what is
damaged: that is rare.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import structlog

from coordinator.shell.aggregation.fold import CoordinateRange, ShardRequest, fold
from coordinator.shell.aggregation.fold_files import output_sizes, work_path
from coordinator.shell.aggregation.fold_request import FoldedFile, FoldRequest, FoldResult, Reuse
from coordinator.shell.engine.tasks import (
    DigestFile,
    FileDigested,
    FoldShard,
    FoldTask,
    ShardFolded,
    run_fold_tasks,
)
from hypergpu.engine.engine import Engine
from hypergpu.ids import Digest
from hypergpu.tensors.codec import sections_of
from hypergpu.units import Bytes

log = structlog.get_logger()

BLOCK = 1 << 20
"""Coordinates between two borders: a multiple of whatever codecs handle at a time."""
_SHARDS_A_WORKER = 2
"""A worker that is done early takes another."""


def fold_by(engine: Engine | None, request: FoldRequest, reuse: Reuse) -> FoldResult:
    """Take one outer step, as `fold` does, by an engine where there is one."""
    if engine is None:
        return fold(request, reuse=reuse)
    return fold_in_shards(engine, request, engine.workers * _SHARDS_A_WORKER, reuse=reuse)


def fold_in_shards(
    engine: Engine, request: FoldRequest, shards: int, *, reuse: Reuse, block: int = BLOCK
) -> FoldResult:
    """Take one outer step in shards; arguments and errors as of `fold`.

    Args:
        engine: Computes them.
        request: The step.
        shards: How many, if there are as many blocks.
        reuse: Where the files to write may come from.
        block: Coordinates between two borders.
    """
    if all(update.weight >= 1 and update.clip >= 1 for update in request.updates):
        paths = {name: work_path(request.output_dir) for name in output_sizes(request)}
        try:
            _make_files(request, paths, reuse)
            problem = _fold(engine, request, shard_requests(request, paths, shards, block))
            if not problem:
                return _result(engine, paths)
            log.warning("a fold in shards is done again in one", reason=problem)
        except BaseException:
            _unlink(paths)
            raise
        _unlink(paths)
    return fold(request, reuse=reuse)


def shard_requests(
    request: FoldRequest, paths: dict[str, Path], shards: int, block: int = BLOCK
) -> list[ShardRequest]:
    """The step in at most so many parts of about as many blocks; the first has the integers."""
    blocks = [
        CoordinateRange(place, start, min(start + block, section.values_count))
        for place, section in enumerate(sections_of(request.layout, request.down).floats)
        for start in range(0, section.values_count, block)
    ]
    count = max(1, min(shards, len(blocks)))
    borders = [len(blocks) * index // count for index in range(count + 1)]
    return [
        ShardRequest(
            fold=request,
            ranges=tuple(blocks[first:last]),
            has_integers=first == 0,
            outputs=paths,
        )
        for first, last in pairwise(borders)
    ]


def _make_files(request: FoldRequest, paths: dict[str, Path], reuse: Reuse) -> None:
    for name, size_bytes in output_sizes(request).items():
        reuse(paths[name], size_bytes)
        descriptor = os.open(paths[name], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)


def _fold(engine: Engine, request: FoldRequest, shards: Sequence[ShardRequest]) -> str:
    """Check every input and write every shard; returns why the result is of no use."""
    bases = [request.base_model, *([request.outer_state] if request.outer_state else [])]
    inputs = [(each.path, each.digest) for each in bases]
    inputs += [(each.path, each.digest) for each in request.updates]
    checks: list[FoldTask] = [DigestFile(path) for path, _ in inputs]
    folds: list[FoldTask] = [FoldShard(shard) for shard in shards]
    results = run_fold_tasks(engine, [*folds, *checks])
    for result in results[: len(folds)]:
        if result != ShardFolded(is_finite=True):
            return f"a shard: {result}"
    for (path, digest), result in zip(inputs, results[len(folds) :], strict=True):
        if result != FileDigested(digest):
            return f"{path.name}: {result}"
    return ""


def _result(engine: Engine, paths: dict[str, Path]) -> FoldResult:
    # The outer state is most of the bytes: whoever has no file left would wait for it.
    digests = [DigestFile(path, engine.workers) for path in paths.values()]
    results = run_fold_tasks(engine, digests)
    files = {
        name: FoldedFile(path, _digest(result), Bytes(path.stat().st_size))
        for (name, path), result in zip(paths.items(), results, strict=True)
    }
    return FoldResult(
        model=files["model"], outer_state=files.get("outer_state"), delta=files.get("delta")
    )


def _digest(result: object) -> Digest:
    if isinstance(result, FileDigested):
        return result.digest
    raise OSError(f"what was folded cannot be read: {result}")


def _unlink(paths: dict[str, Path]) -> None:
    for path in paths.values():
        path.unlink(missing_ok=True)
