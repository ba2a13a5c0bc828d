"""One suite for every engine: any number of shards gives the same bits, a loss costs its task."""

import contextlib
import os
from pathlib import Path

import psutil
import pytest
from blake3 import blake3
from msgspec.structs import replace

from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import DivergedError, FoldResult, StoredUpdate
from coordinator.shell.engine.sharded_fold import fold_in_shards
from coordinator.shell.engine.tasks import DigestFile, FileDigested, TaskFailed, run_fold_tasks
from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.engine.ray_engine import RayEngine
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.records import RECORD
from tests.unit.aggregation.fold_files import FoldSetting, first_request, next_request

SAMPLES = [3, 1, 2]


def no_reuse(_path: Path, _size_bytes: int) -> bool:
    return False


def digests(result: FoldResult) -> list[tuple[Digest, int]]:
    return [(file.digest, file.size_bytes) for file in result.files]


@pytest.mark.parametrize(
    "setting",
    [
        FoldSetting(),
        FoldSetting(up=("topk64", "int8", "fp32"), down="bf16", outer=Outer(momentum=0.0)),
        FoldSetting(up="bf16", down="fp32"),
    ],
    ids=["int4", "mixed", "whole"],
)
def test_shards_give_the_bits_of_one_fold_in_two_rounds(
    engine: Engine, setting: FoldSetting, tmp_path: Path
) -> None:
    first = first_request(tmp_path, SAMPLES, setting)
    whole = fold(first)
    second = next_request(first, whole)
    for request, expected_fold in ((first, whole), (second, fold(second))):
        for shards in (1, 2, 7, 16):
            sharded_fold = fold_in_shards(engine, request, shards, reuse=no_reuse, block=RECORD)
            assert digests(sharded_fold) == digests(expected_fold)


def test_results_come_in_the_order_of_tasks(engine: Engine, tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(9)]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    results = run_fold_tasks(engine, [DigestFile(path) for path in paths])
    assert results == [
        FileDigested(Digest(blake3(path.read_bytes()).hexdigest())) for path in paths
    ]


def test_task_without_its_file_fails_and_no_other_does(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    failure, there = run_fold_tasks(
        engine, [DigestFile(tmp_path / "none"), DigestFile(tmp_path / "there")]
    )
    assert isinstance(failure, TaskFailed)
    assert isinstance(there, FileDigested)


def test_damaged_update_is_left_out_as_by_one_fold(engine: Engine, tmp_path: Path) -> None:
    request = first_request(tmp_path, SAMPLES, FoldSetting())
    damaged_path = request.updates[1].path
    damaged_path.write_bytes(bytes(damaged_path.stat().st_size))
    expected_fold = fold(request)
    sharded_fold = fold_in_shards(engine, request, 4, reuse=no_reuse, block=RECORD)
    assert digests(sharded_fold) == digests(expected_fold)
    assert [each.index for each in sharded_fold.omitted] == [1]
    assert len(list(request.output_dir.iterdir())) == 2 * len(sharded_fold.files)


def test_model_that_left_the_range_of_floats_is_not_written(engine: Engine, tmp_path: Path) -> None:
    request = first_request(tmp_path, SAMPLES, FoldSetting(outer=Outer(1e38, 0.9)))
    huge = replace(request, scale=3e38)
    with pytest.raises(DivergedError):
        fold_in_shards(engine, huge, 4, reuse=no_reuse, block=RECORD)
    assert list(request.output_dir.iterdir()) == []


def test_lost_worker_costs_its_task_only(tmp_path: Path) -> None:
    engine = LocalEngine(2)
    request = first_request(tmp_path, SAMPLES, FoldSetting())
    expected_digests = digests(fold(request))
    try:
        for _ in range(2):
            sharded_fold = fold_in_shards(engine, request, 7, reuse=no_reuse, block=RECORD)
            assert digests(sharded_fold) == expected_digests
            for child in engine.children:
                assert child.process_id is not None
                psutil.Process(child.process_id).kill()
    finally:
        engine.close()


def test_workers_that_never_start_leave_the_tasks_to_this_process(tmp_path: Path) -> None:
    engine = LocalEngine(2, ["false"])
    request = first_request(tmp_path, SAMPLES, FoldSetting())
    sharded_fold = fold_in_shards(engine, request, 7, reuse=no_reuse, block=RECORD)
    assert digests(sharded_fold) == digests(fold(request))


def test_ray_that_does_not_start_leaves_the_tasks_to_this_machine(tmp_path: Path) -> None:
    engine = RayEngine("ray://127.0.0.1:9", ["false"])
    request = first_request(tmp_path, SAMPLES, FoldSetting())
    try:
        sharded_fold = fold_in_shards(engine, request, 7, reuse=no_reuse, block=RECORD)
    finally:
        engine.close()
    assert digests(sharded_fold) == digests(fold(request))


def members(group: int) -> list[psutil.Process]:
    """Living processes of a group."""
    living_members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living_members.append(process)
    return living_members


@pytest.mark.full
def test_driver_of_ray_that_is_killed_in_a_fold_leaves_it_to_this_machine(tmp_path: Path) -> None:
    engine = RayEngine("ray")
    request = first_request(tmp_path, SAMPLES, FoldSetting())
    expected_digests = digests(fold(request))
    try:
        sharded_fold = fold_in_shards(engine, request, 7, reuse=no_reuse, block=RECORD)
        assert (digests(sharded_fold), engine.lost_count) == (expected_digests, 0)
        assert engine.driver is not None
        group = engine.driver.process_id or 0
        psutil.Process(group).kill()
        sharded_fold = fold_in_shards(engine, request, 7, reuse=no_reuse, block=RECORD)
        assert digests(sharded_fold) == expected_digests
        assert engine.lost_count > 0
    finally:
        engine.close()
    psutil.wait_procs(members(group))
    assert members(group) == []


def test_updates_without_weight_are_left_out_as_by_one_fold(tmp_path: Path) -> None:
    request = first_request(tmp_path, SAMPLES, FoldSetting())
    none: tuple[StoredUpdate, ...] = (replace(request.updates[0], weight=0), *request.updates[1:])
    engine = LocalEngine(1)
    sharded_fold = fold_in_shards(
        engine, replace(request, updates=none), 4, reuse=no_reuse, block=RECORD
    )
    assert [each.index for each in sharded_fold.omitted] == [0]
    engine.close()
