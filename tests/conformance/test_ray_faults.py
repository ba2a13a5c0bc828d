"""A Ray whose head is killed costs a fold time alone; tasks that want a GPU are given one."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, FoldResult
from coordinator.shell.engine.sharded_fold import fold_in_shards
from coordinator.shell.engine.tasks import DigestFile
from hypergpu.engine.ray_engine import RayEngine
from hypergpu.engine.tasks import EngineTask
from hypergpu.ids import Digest
from hypergpu.tensors.records import RECORD
from tests.ray_head import CPUS, RayHead
from tests.unit.aggregation.fold_files import FoldSetting, first_request

pytestmark = pytest.mark.full

UNTIL_THE_GPU_IS_TAKEN = """
import os, sys, threading
os.environ["RAY_AUTH_MODE"] = "token"
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
while ray.available_resources().get("GPU"):
    threading.Event().wait(0.05)
"""
LOOK_EVERY_S = 0.01


@pytest.fixture
def head() -> Iterator[RayHead]:
    ray_head = RayHead()
    try:
        ray_head.start()
        yield ray_head
    finally:
        ray_head.close()


def digests(result: FoldResult) -> list[Digest]:
    return [file.digest for file in result.files]


def fold_by(engine: RayEngine, request: FoldRequest) -> list[Digest]:
    return digests(
        fold_in_shards(engine, request, 7, reuse=lambda _path, _size: False, block=RECORD)
    )


def fold_until_ray_does(engine: RayEngine, request: FoldRequest, expected: list[Digest]) -> None:
    """Fold again until nothing is lost: a Ray that has just started may not answer in time."""
    lost_count = -1
    while lost_count != engine.lost_count:
        lost_count = engine.lost_count
        assert fold_by(engine, request) == expected


def pipe_task(path: Path, *, wants_gpu: bool = False) -> EngineTask:
    """A task that ends once the named pipe, which it makes, is written."""
    os.mkfifo(path)
    arguments = msgspec.msgpack.encode(DigestFile(path), enc_hook=str)
    return EngineTask("fold", arguments, wants_gpu=wants_gpu)


def end_pipe(path: Path, task: "Future[list[bytes | None]]") -> None:
    """Open and close a named pipe for whoever reads it, until its task is done."""
    while not task.done():
        with contextlib.suppress(OSError):  # nobody reads it
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        threading.Event().wait(LOOK_EVERY_S)


def test_head_that_is_killed_in_a_fold_costs_it_time_alone_and_is_asked_again(
    head: RayHead, tmp_path: Path
) -> None:
    engine = RayEngine(head.address, again_s=0.0)
    request = first_request(tmp_path, [3, 1, 2], FoldSetting())
    expected_digests = digests(fold(request))
    pipes = [tmp_path / f"pipe-{number}" for number in range(CPUS)]
    try:
        fold_until_ray_does(engine, request, expected_digests)
        lost_count, before = engine.lost_count, set(request.output_dir.iterdir())
        with ThreadPoolExecutor(CPUS + 1) as threads:
            tasks = [threads.submit(engine.run, [pipe_task(pipe)]) for pipe in pipes]
            writers = [pipe.open("wb") for pipe in pipes]
            fold_task = threads.submit(fold_by, engine, request)
            while set(request.output_dir.iterdir()) == before:
                threading.Event().wait(LOOK_EVERY_S)
            head.kill()
            for writer in writers:
                writer.close()
            # This machine computes what Ray had in hand, and what it still had to do.
            for pipe, task in zip(pipes, tasks, strict=True):
                end_pipe(pipe, task)
            assert fold_task.result() == expected_digests
        assert engine.lost_count > lost_count + len(pipes)
        head.start()
        fold_until_ray_does(engine, request, expected_digests)
    finally:
        engine.close()


def test_task_that_wants_a_gpu_has_that_of_the_cluster(head: RayHead, tmp_path: Path) -> None:
    engine = RayEngine(head.address)
    pipe = tmp_path / "pipe"
    try:
        with ThreadPoolExecutor(1) as threads:
            gpu_task = threads.submit(engine.run, [pipe_task(pipe, wants_gpu=True)])
            with pipe.open("wb"):
                command = [sys.executable, "-c", UNTIL_THE_GPU_IS_TAKEN, head.address]
                subprocess.run(command, check=True, timeout=300)
            assert gpu_task.result() != [None]
        assert engine.lost_count == 0
    finally:
        engine.close()
