"""Real evaluators of several jobs: one process a job, in a sandbox, within limits."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import psutil
import pytest

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.process import (
    Evaluate,
    GradientMeasured,
    Initialise,
    Initialised,
    MeasureGradient,
)
from coordinator.shell.evaluator.seat import (
    EVALUATORS,
    EvaluatorLimits,
    SeatMaker,
    limits_here,
    machine_limits,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, TokenId
from hypergpu.sandbox.sandbox import SandboxKind
from hypergpu.tensors.layout import layout_from_json
from tests import unruly_workload
from tests.polling import ASK_EVERY_S

EVIL = EvaluatorJob(JobId("job-00000000000e"), TokenId("eve"))
GOOD = EvaluatorJob(JobId("job-00000000000a"), TokenId("ada"))
GIB = 1 << 30


class PoolKit:
    """A coordinator's folder with a pool, and models that its evaluators made."""

    def __init__(self, folder: Path, limits: EvaluatorLimits) -> None:
        self.data_dir = folder / "coordinator"
        self.packages = unruly_workload.install(folder / "packages")
        self.environment = {**os.environ, "PYTHONPATH": self.packages}
        maker = SeatMaker(self.data_dir, machine_limits(limits), environment=self.environment)
        self.pool = EvaluatorPool(maker)

    def paths(self, job: EvaluatorJob) -> dict[str, str]:
        folder = self.data_dir / "models" / job.job_id
        folder.mkdir(parents=True, exist_ok=True)
        return {"model_path": str(folder / "model"), "layout_path": str(folder / "layout")}

    async def initialise(self, job: EvaluatorJob, workload: str, **options: str) -> Initialised:
        paths = self.paths(job)
        request = Initialise(
            workload=workload,
            options=dict(options),
            model_path=paths["model_path"],
            layout_path=paths["layout_path"],
        )
        return await self.pool.initialise(job, request)

    async def deed(self, job: EvaluatorJob, deed: str) -> GradientMeasured:
        """The gradient of the unruly workload, which does the deed."""
        initial_model = await self.initialise(job, unruly_workload.NAME, deed=deed)
        return await self.gradient(job, deed, initial_model)

    async def gradient(self, job: EvaluatorJob, deed: str, made: Initialised) -> GradientMeasured:
        """The second half of it."""
        return await self.pool.measure_gradient(
            job,
            MeasureGradient(
                workload=unruly_workload.NAME,
                options={"deed": deed},
                model_path=self.paths(job)["model_path"],
                layout_digest=layout_from_json(made.layout_json).digest,
                samples_most=512,
                sketch_secret=bytes(32),
            ),
        )

    async def loss(self, job: EvaluatorJob) -> float:
        """Loss of the first model of the digits."""
        initial_model = await self.initialise(job, "digits-softmax")
        request = Evaluate(
            workload="digits-softmax",
            model_path=self.paths(job)["model_path"],
            layout_digest=layout_from_json(initial_model.layout_json).digest,
        )
        return (await self.pool.evaluate(job, request)).loss


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[PoolKit]:
    limits = EvaluatorLimits(answer_s=60, memory_bytes=3 * GIB // 2, places=2, spares=0)
    kit = PoolKit(tmp_path, limits)
    yield kit
    await kit.pool.stop()
    folder = kit.data_dir / EVALUATORS
    assert list(folder.iterdir()) == [], "evaluators leave files"


async def refusal_of(asking: Awaitable[object]) -> HyperGPUError:
    with pytest.raises(HyperGPUError) as failure:
        await asking
    return failure.value


async def test_each_job_has_a_process_of_its_own_which_ends_with_it(kit: PoolKit) -> None:
    first, second = await kit.loss(GOOD), await kit.loss(EVIL)
    assert first == second
    processes = kit.pool.serving_processes()
    assert len(set(processes.values())) == 2
    kit.pool.end_job(EVIL.job_id)
    assert set(kit.pool.serving_processes()) == {GOOD.job_id}
    third = EvaluatorJob(JobId("job-00000000000c"), TokenId("eve"))
    await kit.initialise(third, "digits-softmax")
    assert kit.pool.serving_processes()[third.job_id] not in processes.values()


async def test_an_error_of_a_jobs_code_is_told_to_that_job_and_ends_no_process(
    kit: PoolKit,
) -> None:
    refusal = await refusal_of(kit.deed(EVIL, "miss"))
    assert refusal.reason is Reason.PROGRAM_FAILED
    assert refusal.message == (
        "the gradient of its held-out loss failed in the code of unruly:"
        " IndexError: list index out of range."
        " Fix: mend the workload's code, and submit the job again"
    )
    before = kit.pool.serving_processes()
    await refusal_of(kit.deed(EVIL, "miss"))
    assert kit.pool.serving_processes() == before


async def test_a_job_that_takes_too_much_memory_is_told_the_limit(kit: PoolKit) -> None:
    refusal = await refusal_of(kit.deed(EVIL, "devour"))
    assert refusal.reason is Reason.EVALUATOR_LIMIT
    assert refusal.message == (
        "the gradient of its held-out loss needs more memory than the 1.6 GB that an evaluator may"
        " take. Fix: raise HYPERGPU_COORDINATOR_EVALUATOR_MEMORY_BYTES where the coordinator runs"
    )


async def test_a_job_that_never_ends_delays_no_other_owner_and_ends_when_it_is_stopped(
    kit: PoolKit,
) -> None:
    initial_model = await kit.initialise(EVIL, unruly_workload.NAME, deed="hold_lock")
    loop_task = asyncio.create_task(refusal_of(kit.gradient(EVIL, "hold_lock", initial_model)))
    more = EvaluatorJob(JobId("job-00000000000f"), TokenId("eve"))
    await kit.initialise(GOOD, "digits-softmax")
    wait_task = asyncio.create_task(refusal_of(kit.initialise(more, "digits-softmax")))
    assert await kit.loss(GOOD) > 0
    process = psutil.Process(kit.pool.serving_processes()[EVIL.job_id])
    assert not loop_task.done()
    assert EVIL.job_id in kit.pool.waiting_reason(more)
    kit.pool.end_job(more.job_id)
    kit.pool.end_job(EVIL.job_id)
    for task in (loop_task, wait_task):
        assert (await task).reason is Reason.JOB_PHASE
    assert await kit.loss(GOOD) > 0
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=30)
    assert not process.is_running()


async def test_a_job_that_is_stopped_ends_no_evaluation_but_its_own(kit: PoolKit) -> None:
    initial_model = await kit.initialise(EVIL, unruly_workload.NAME, deed="hold_lock")
    good_loss = await kit.loss(GOOD)
    good_task = asyncio.create_task(kit.loss(GOOD))
    loop_task = asyncio.create_task(refusal_of(kit.gradient(EVIL, "hold_lock", initial_model)))
    while not kit.pool.is_asked(EVIL.job_id) or not kit.pool.is_asked(GOOD.job_id):
        await asyncio.wait([good_task, loop_task], timeout=ASK_EVERY_S)
    kit.pool.end_job(EVIL.job_id)
    assert (await loop_task).reason is Reason.JOB_PHASE
    assert await good_task == good_loss


async def test_a_job_over_its_time_is_ended_with_the_limit(tmp_path: Path) -> None:
    kit = PoolKit(tmp_path, EvaluatorLimits(answer_s=15, places=2, spares=0))
    refusal = await refusal_of(kit.deed(EVIL, "hold_lock"))
    assert refusal.message == (
        "the gradient of its held-out loss took more than 15 s, the most that an evaluator may"
        " take. Fix: raise HYPERGPU_COORDINATOR_EVALUATOR_LIMIT_S where the coordinator runs"
    )
    assert kit.pool.serving_processes() == {}
    await kit.pool.stop()


async def test_a_job_whose_code_crashes_costs_no_other_one(kit: PoolKit) -> None:
    await kit.loss(GOOD)
    before = kit.pool.serving_processes()[GOOD.job_id]
    refusal = await refusal_of(kit.deed(EVIL, "crash"))
    assert "died twice" in refusal.message
    await kit.loss(GOOD)
    assert kit.pool.serving_processes()[GOOD.job_id] == before


def with_secrets(kit: PoolKit) -> PoolKit:
    """A coordinator's folder with a key and the data of another job, as deeds look for them."""
    folder = kit.data_dir
    (folder / "jobs" / "job-000000000009").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "identity.key").write_text("key")
    folder.with_name(f"{folder.name}.passphrase").write_text("passphrase")
    return kit


async def deeds_in(kind: SandboxKind, folder: Path) -> set[str] | None:
    """What code of a job gets done in a sandbox; None: that one does not start here."""
    kit = with_secrets(PoolKit(folder, EvaluatorLimits(spares=0, sandbox=kind)))
    options = {"deed": "escape", "path": str(kit.data_dir)}
    refusal = await refusal_of(kit.initialise(EVIL, unruly_workload.NAME, **options))
    await kit.pool.stop()
    if refusal.reason is Reason.MACHINE_UNFIT:
        return None
    return set(refusal.detail.partition("did: ")[2].split(", "))


async def test_an_evaluator_reaches_no_network_no_key_and_no_data_of_others(
    tmp_path: Path,
) -> None:
    kinds = (SandboxKind.BWRAP, SandboxKind.LANDLOCK)
    deeds_by_kind = {kind: await deeds_in(kind, tmp_path / kind) for kind in kinds}
    deeds_of_sandbox = {kind: deeds for kind, deeds in deeds_by_kind.items() if deeds is not None}
    assert deeds_of_sandbox, "neither bubblewrap nor landlock starts here"
    for kind, deeds in deeds_of_sandbox.items():
        # In a namespace of its own a process may open a socket, which leads nowhere.
        empty = {"socket", "unix socket"} if kind is SandboxKind.BWRAP else set()
        assert deeds - empty == {"null device", "home", "pair", "child"}, kind


async def test_without_a_sandbox_the_same_evaluator_does_get_out(tmp_path: Path) -> None:
    """The deeds above are tried in earnest."""
    kit = PoolKit(tmp_path, EvaluatorLimits(spares=0, sandbox=SandboxKind.OFF))
    kit.data_dir.mkdir()
    (kit.data_dir / "identity.key").write_text("key")
    options = {"deed": "escape", "path": str(kit.data_dir)}
    refusal = await refusal_of(kit.initialise(EVIL, unruly_workload.NAME, **options))
    assert "read key" in refusal.detail
    (Path(unruly_workload.__file__).with_name("written")).unlink()
    await kit.pool.stop()


async def test_a_spare_serves_the_next_job_and_is_replaced(tmp_path: Path) -> None:
    kit = PoolKit(tmp_path, EvaluatorLimits(memory_bytes=GIB, places=2, spares=1))
    await kit.loss(GOOD)
    spare = await kit.pool.spare_process_id()
    await kit.loss(EVIL)
    assert kit.pool.serving_processes()[EVIL.job_id] == spare
    assert await kit.pool.spare_process_id() not in {None, spare}
    await kit.pool.stop()


def test_limits_suit_the_machine() -> None:
    limits = EvaluatorLimits()
    large = limits_here(limits, machine_bytes=64 * GIB, processors=16)
    assert (large.memory_bytes, large.places) == (16 * GIB, 3)
    usual = limits_here(limits, machine_bytes=24 * GIB, processors=2)
    assert (usual.memory_bytes, usual.places, usual.resting) == (9 * GIB, 2, 6)
    huge = limits_here(limits, machine_bytes=256 * GIB, processors=64)
    assert (huge.memory_bytes, huge.places) == (32 * GIB, 6)
    small = limits_here(limits, machine_bytes=4 * GIB, processors=2)
    assert (small.memory_bytes, small.places) == (3 * GIB // 2, 2)
    stated_limits = limits_here(EvaluatorLimits(memory_bytes=GIB, places=1), 64 * GIB, 16)
    assert (stated_limits.memory_bytes, stated_limits.places) == (GIB, 1)
