"""A fold of a large model in shards by each engine: the same bits, how fast, in what memory."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.ours.table import PartFigures
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import (
    FoldRequest,
    FoldResult,
    StoredBlob,
    StoredUpdate,
)
from coordinator.shell.engine.sharded_fold import BLOCK, fold_in_shards
from hypergpu.digests import digest_of_file
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
_MEMORY = Path("/dev/shm")  # noqa: S108 - for the speed, in a folder of its own
_PIECE_BYTES = 64 << 20
_DISK_PIECES = 32


def fold_figures(parameters: int) -> PartFigures:
    """Fold updates of a model of so many parameters by each engine, in files held in memory."""
    folder = _memory_folder(parameters)
    folds = _fold_in(folder, parameters)
    where = "in memory" if folder else "on disk"
    return PartFigures(
        rows=[
            ["digests that differ, 2 engines x 1, 2, 7 and 16 shards", str(folds.mismatches)],
            [f"threads of the coordinator, files {where}, s", f"{folds.threads_s:.1f}"],
            [f"one process, files {where}, s", f"{folds.one_s:.1f}"],
            [f"two processes, files {where}, s", folds.two_processes],
            [
                "memory of all processes at most, without files, GB",
                f"{folds.peak_gb:.2f}",
            ],
            ["the same with a Ray on this machine, GB", f"{folds.ray_peak_gb:.2f}"],
        ],
        metrics={
            "digest_mismatches": float(folds.mismatches),
            "fold_parameters": float(parameters // BLOCK * BLOCK),
            "fold_threads_s": folds.threads_s,
            "fold_speedup_2": folds.one_s / folds.two_s,
            "fold_parameters_per_core_s": _UPDATES * (parameters // BLOCK * BLOCK) / folds.one_s,
            "fold_peak_gb": folds.peak_gb,
            "fold_ray_peak_gb": folds.ray_peak_gb,
        },
        notes=_notes(parameters, f"files {where}"),
    )


def disk_fold_figures(parameters: int) -> PartFigures:
    """The same on disk, and what the disk alone takes for what a fold writes."""
    written_gb = sum(_written_bytes(parameters)) / 1e9
    disk_gb_per_s = _disk_gb_per_s()
    folds = _fold_in(None, parameters)
    return PartFigures(
        rows=[
            ["digests that differ, 2 engines x 1, 2, 7 and 16 shards", str(folds.mismatches)],
            ["threads of the coordinator, files on disk, s", f"{folds.threads_s:.1f}"],
            ["one process, files on disk, s", f"{folds.one_s:.1f}"],
            ["two processes, files on disk, s", folds.two_processes],
            ["what a fold writes takes the disk alone, s", f"{written_gb / disk_gb_per_s:.1f}"],
            ["memory of all processes at most, GB", f"{folds.peak_gb:.2f}"],
        ],
        metrics={
            "fold_disk_mismatches": float(folds.mismatches),
            "fold_disk_parameters": float(parameters // BLOCK * BLOCK),
            "fold_disk_threads_s": folds.threads_s,
            "fold_disk_two_s": folds.two_s,
            "fold_disk_speedup_2": folds.one_s / folds.two_s,
            "fold_disk_gb_per_s": disk_gb_per_s,
            "fold_disk_peak_gb": folds.peak_gb,
        },
        notes=[
            *_notes(parameters, "files on disk"),
            f"A fold writes {written_gb:.1f} GB; the disk wrote {disk_gb_per_s:.2f} GB/s, synced.",
        ],
    )


class _Folds(NamedTuple):
    """How folds went."""

    mismatches: int
    threads_s: float
    one_s: float
    two_s: float
    peak_gb: float
    ray_peak_gb: float

    @property
    def two_processes(self) -> str:
        """Their cell of the table."""
        return f"{self.two_s:.1f} ({self.one_s / self.two_s:.2f} times as fast as one)"


def _fold_in(folder: str | None, parameters: int) -> _Folds:
    with tempfile.TemporaryDirectory(prefix="hypergpu-fold-", dir=folder) as name:
        (Path(name) / "small").mkdir()
        small = _request(Path(name) / "small", 2 * BLOCK)
        request = _request(Path(name), parameters // BLOCK * BLOCK)
        began_s = time.perf_counter()
        expected_digests = _take_digests(fold(request))
        threads_s = time.perf_counter() - began_s
        with _peak() as local_peak:
            one_s, two_s, mismatches = _time_folds(small, request, expected_digests)
        mismatches += _mismatches(LocalEngine(2), request, expected_digests)
        with _peak() as ray_peak:
            mismatches += _mismatches(RayEngine("ray"), request, expected_digests)
    return _Folds(mismatches, threads_s, one_s, two_s, local_peak[0] / 1e9, ray_peak[0] / 1e9)


def _notes(parameters: int, where: str) -> list[str]:
    return [
        f"{_UPDATES} {_CODEC} updates of {parameters / 1e6:.0f}M parameters, {where}.",
        f"One and two processes by turns, {_TURNS} folds each; their means.",
        "Memory is resident in processes; files, in memory or in the page cache, are not in it.",
        f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
    ]


def _written_bytes(parameters: int) -> tuple[int, int, int]:
    """Model, outer state and delta of a fold with momentum."""
    return 4 * parameters, 8 * parameters, codec_named(_CODEC).encoded_bytes(parameters)


def _memory_folder(parameters: int) -> str | None:
    """A file system in memory with room for a fold and its inputs; None: the machine has none."""
    needed_bytes = 2 * sum(_written_bytes(parameters))
    if not _MEMORY.is_dir() or psutil.disk_usage(str(_MEMORY)).free < needed_bytes:
        return None
    return str(_MEMORY) if psutil.virtual_memory().available > needed_bytes else None


def _disk_gb_per_s() -> float:
    """What the disk takes of new files, of which the last byte is on it when it ends."""
    piece = np.random.default_rng(0).bytes(_PIECE_BYTES)
    with tempfile.TemporaryFile(prefix="hypergpu-disk-", buffering=0) as file:
        began_s = time.perf_counter()
        for _ in range(_DISK_PIECES):
            file.write(piece)
        os.fdatasync(file.fileno())
        return _PIECE_BYTES * _DISK_PIECES / 1e9 / (time.perf_counter() - began_s)


def _request(folder: Path, parameters: int) -> FoldRequest:
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    codec = codec_named(_CODEC)
    payload = np.empty(codec.encoded_bytes(BLOCK), np.uint8)
    with (folder / "base").open("wb") as base, (folder / "update").open("wb") as update:
        for number in range(parameters // BLOCK):
            rolled_values = np.roll(values, number)
            base.write(rolled_values.data)
            codec.encode(rolled_values * np.float32(0.01), payload)
            update.write(payload.data)
    update_file = folder / "update", digest_of_file(folder / "update")
    return FoldRequest(
        layout=layout_of([TensorSpec("weight", (parameters,))]),
        down=_CODEC,
        outer=Outer(),
        base_model=StoredBlob(folder / "base", digest_of_file(folder / "base")),
        outer_state=None,
        updates=tuple(StoredUpdate(*update_file, 1 + slot, _CODEC) for slot in range(_UPDATES)),
        output_dir=folder,
    )


def _mismatches(engine: Engine, request: FoldRequest, expected: list[Digest]) -> int:
    digest_lists = [_shards(engine, request, shards) for shards in SHARDS]
    engine.close()
    if isinstance(engine, RayEngine) and engine.lost_count:
        raise RuntimeError(f"Ray did not compute {engine.lost_count} tasks: see what it said above")
    return sum(digests != expected for digests in digest_lists)


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

    look_thread = threading.Thread(target=look)
    look_thread.start()
    try:
        yield most
    finally:
        is_over.set()
        look_thread.join()


def _resident_bytes() -> int:
    here = psutil.Process()
    total = here.memory_info().rss
    for child in here.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
