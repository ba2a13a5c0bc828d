"""A fold of a large model in shards by each engine: the same bits, how fast, in what memory."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.ours.table import PartFigures
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_files import (
    FoldRequest,
    FoldResult,
    StoredBlob,
    StoredUpdate,
)
from coordinator.shell.engine.sharded_fold import BLOCK, fold_in_shards
from hypergpu.crypto import digest_of_file
from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.engine.ray_engine import RayEngine
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import codec_named
from hypergpu.tensors.layout import TensorSpec, layout_of

SHARDS = (1, 2, 7, 16)
_TURNS = 2
_UPDATES = 2
_CODEC = "int4"
_LOOK_EVERY_S = 0.05


def fold_figures(parameters: int) -> PartFigures:
    """Fold updates of a model of so many parameters by each engine."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-fold-") as name:
        (Path(name) / "small").mkdir()
        small = _request(Path(name) / "small", 2 * BLOCK)
        request = _request(Path(name), parameters // BLOCK * BLOCK)
        began_s = time.perf_counter()
        expected = _take_digests(fold(request))
        alone_s = time.perf_counter() - began_s
        with _peak() as local_peak:
            one_s, two_s, mismatches = _time_folds(small, request, expected)
        mismatches += _mismatches(LocalEngine(2), request, expected)
        with _peak() as ray_peak:
            mismatches += _mismatches(RayEngine("ray"), request, expected)
    return PartFigures(
        rows=[
            ["digests that differ, 2 engines x 1, 2, 7 and 16 shards", str(mismatches)],
            ["threads of the coordinator, s", f"{alone_s:.1f}"],
            ["one process, s", f"{one_s:.1f}"],
            ["two processes, s", f"{two_s:.1f} ({one_s / two_s:.2f} times as fast as one)"],
            ["memory of all processes at most, GB", f"{local_peak[0] / 1e9:.2f}"],
            ["the same with a Ray on this machine, GB", f"{ray_peak[0] / 1e9:.2f}"],
        ],
        metrics={
            "digest_mismatches": float(mismatches),
            "fold_parameters": float(parameters // BLOCK * BLOCK),
            "fold_threads_s": alone_s,
            "fold_speedup_2": one_s / two_s,
            "fold_parameters_per_core_s": _UPDATES * (parameters // BLOCK * BLOCK) / one_s,
            "fold_peak_gb": local_peak[0] / 1e9,
            "fold_ray_peak_gb": ray_peak[0] / 1e9,
        },
        notes=[
            f"{_UPDATES} {_CODEC} updates of {parameters / 1e6:.0f}M parameters, files on disk.",
            f"One and two processes by turns, {_TURNS} folds each; their sums.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ],
    )


def _request(folder: Path, parameters: int) -> FoldRequest:
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    codec = codec_named(_CODEC)
    payload = np.empty(codec.encoded_bytes(BLOCK), np.uint8)
    with (folder / "base").open("wb") as base, (folder / "update").open("wb") as update:
        for number in range(parameters // BLOCK):
            turned = np.roll(values, number)
            base.write(turned.data)
            codec.encode(turned * np.float32(0.01), payload)
            update.write(payload.data)
    stored = folder / "update", digest_of_file(folder / "update")
    return FoldRequest(
        layout=layout_of([TensorSpec("weight", (parameters,))]),
        down=_CODEC,
        outer=Outer(),
        base_model=StoredBlob(folder / "base", digest_of_file(folder / "base")),
        outer_state=None,
        updates=tuple(StoredUpdate(*stored, 1 + slot, _CODEC) for slot in range(_UPDATES)),
        output_dir=folder,
    )


def _mismatches(engine: Engine, request: FoldRequest, expected: list[Digest]) -> int:
    found = [_shards(engine, request, shards) for shards in SHARDS]
    engine.close()
    if isinstance(engine, RayEngine) and engine.lost_count:
        raise RuntimeError(f"Ray did not compute {engine.lost_count} tasks: see what it said above")
    return sum(digests != expected for digests in found)


def _time_folds(
    small: FoldRequest, request: FoldRequest, expected: list[Digest]
) -> tuple[float, float, int]:
    """Seconds of a fold by one process and by two, which run already, and how many differ."""
    engines = LocalEngine(1), LocalEngine(2)
    for engine in engines:
        _shards(engine, small, engine.workers)
    seconds, mismatches = [0.0, 0.0], 0
    for _ in range(_TURNS):
        for place, engine in enumerate(engines):
            began_s = time.perf_counter()
            mismatches += _shards(engine, request, SHARDS[-1]) != expected
            seconds[place] += (time.perf_counter() - began_s) / _TURNS
    for engine in engines:
        engine.close()
    return seconds[0], seconds[1], mismatches


def _shards(engine: Engine, request: FoldRequest, shards: int) -> list[Digest]:
    return _take_digests(fold_in_shards(engine, request, shards, reuse=lambda _path, _size: False))


def _take_digests(result: FoldResult) -> list[Digest]:
    """Digests of its files, which are deleted."""
    for file in result.files:
        file.path.unlink()
    return [file.digest for file in result.files]


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Most resident bytes of this process and all below it, within the block."""
    most = [0]
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            most[0] = max(most[0], _resident_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        is_over.set()
        looking.join()


def _resident_bytes() -> int:
    here = psutil.Process()
    total = here.memory_info().rss
    for child in here.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
