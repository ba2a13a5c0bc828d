"""The round machine's commands performed: aggregation, datasets, layouts; failpoints."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.job.commands import Aggregate, FoldedUpdate
from coordinator.core.training.job.events import Event, JobCreated, ModelInitialised
from coordinator.core.training.job.state import Job, Model, Phase
from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.training.trust.weights import whole_weighing
from coordinator.core.work.work_events import (
    JobPaused,
    JobResumed,
    NodeJoined,
    NodeLost,
    StampedEvent,
)
from coordinator.shell.driver.driver import Driver
from coordinator.shell.evaluator.process import Evaluate, Evaluated, Initialise, Initialised
from coordinator.shell.failpoints import NAMES, arm
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.store.blobs.manifests import packed_manifest
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.datasets import (
    clear_unfinished,
    lay_out_dataset,
    remove_dataset,
)
from coordinator.shell.store.layouts import save_layout, stored_layout
from coordinator.shell.translate import Capabilities
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId, Slot
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import encode_update, update_bytes
from hypergpu.tensors.layout import TensorSpec, layout_of
from hypergpu.units import Milliseconds, Samples
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.messages import blob_message
from tests.journals import FolderJournal
from tests.unit.aggregation.fold_files import LAYOUT, random_flat
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    SPEC,
    NoEvaluators,
    WholeShell,
    driving,
    prepared_job,
    services_in,
)

NOW = Milliseconds(0)
CREATED = JobCreated(at_ms=NOW, job_id=JOB, spec=SPEC)


class BreakingEvaluator(NoEvaluators):
    """Ends each request, once it may, with the next error; the last one for ever."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self._errors = list(errors)
        self.may_go_on = asyncio.Event()

    async def initialise(self, job: EvaluatorJob, request: Initialise) -> Initialised:
        await self.may_go_on.wait()
        raise self._errors.pop(0) if len(self._errors) > 1 else self._errors[0]


class ForgetfulEvaluator(NoEvaluators):
    """Breaks on every model."""

    async def evaluate(self, job: EvaluatorJob, request: Evaluate) -> Evaluated:
        raise MemoryError("no more")


@asynccontextmanager
async def acting(services: WholeShell) -> AsyncIterator[None]:
    """Run the driver and perform its commands inside the block."""
    driver = services.driver
    driver_task = asyncio.create_task(driver.run(services.performing.perform, lambda *_: None))
    try:
        yield
    finally:
        for runtime in driver.runtimes.values():
            runtime.close()
        driver.close()
        await driver_task


async def until(runtime: JobRuntime, is_so: Callable[[], bool]) -> None:
    """Wait for a state of the job."""
    while not is_so():
        await runtime.change().wait()


async def test_a_command_that_breaks_is_performed_again(tmp_path: Path) -> None:
    spec_error = HyperGPUError(Reason.SPEC_INVALID, "the data is odd. Fix: look at it")
    evaluator = BreakingEvaluator(MemoryError(), spec_error)
    evaluator.may_go_on.set()
    services = services_in(tmp_path).replace(evaluator=evaluator)
    async with acting(services):
        await services.driver.submit(JOB, CREATED)
        runtime = services.jobs[JOB]
        await until(runtime, lambda: runtime.job.phase is Phase.FAILED)
    assert runtime.job.reason == "the data is odd. Fix: look at it"


async def test_a_command_that_breaks_too_often_pauses_its_job_with_the_reason(
    tmp_path: Path,
) -> None:
    evaluator = BreakingEvaluator(MemoryError("no more"))
    services = services_in(tmp_path).replace(evaluator=evaluator)
    async with acting(services):
        await services.driver.submit(JOB, CREATED)
        runtime = services.jobs[JOB]
        runtime.failures["initialise", 0] = 3
        evaluator.may_go_on.set()
        await until(runtime, lambda: runtime.job.phase is Phase.PAUSED)
        why = "initialise broke 4 times, the last time by MemoryError: no more"
        assert runtime.job.reason == why

        evaluator.may_go_on.clear()
        await services.driver.submit(JOB, JobResumed(at_ms=NOW))
        services.performing.retry_after_resume(runtime)
        assert ("initialise", 0) in runtime.tasks
        assert (runtime.is_given_up, runtime.failures) == (False, {})


async def test_a_command_that_cannot_be_started_does_not_stop_the_driver(tmp_path: Path) -> None:
    evaluator = BreakingEvaluator(MemoryError())
    services = services_in(tmp_path).replace(evaluator=evaluator)
    async with acting(services):
        runtime = await prepared_job(services)
        services.nodes.connect(ControlStream(NODE, Capabilities(workloads={}), "test"))
        runtime.job = replace(runtime.job, layout=Digest("no digest"))
        assert await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE)) == ""
        assert runtime.failures["AssignShard", 0] == 1
        assert await services.driver.submit(JOB, JobPaused(at_ms=NOW)) == ""


async def test_an_evaluation_that_breaks_too_often_is_left_out(tmp_path: Path) -> None:
    services = services_in(tmp_path).replace(evaluator=ForgetfulEvaluator())
    model = Model(1, services.blobs.put(b"a model"))
    async with driving(services):
        runtime = await prepared_job(services)
        runtime.job = replace(runtime.job, evaluating=(model,))
        runtime.layout = LAYOUT
        runtime.failures["evaluate", 1] = 3
        services.performing.perform_outstanding(runtime)
        await until(runtime, lambda: not runtime.job.evaluating)
    assert services.journal.read(JOB).entries[-1].kind == "EvaluationFailed"
    assert runtime.job.phase is Phase.WAITING


async def aware_job(services: WholeShell) -> JobRuntime:
    """A job that plans, with its first model and no node."""
    spec = with_strategy(SPEC, "aware")
    await services.driver.submit(JOB, JobCreated(at_ms=NOW, job_id=JOB, spec=spec))
    runtime = services.jobs[JOB]
    runtime.layout = LAYOUT
    first = Model(0, services.blobs.put(b"a model"))
    event = ModelInitialised(at_ms=NOW, model=first, partition_sizes=(Samples(100),))
    assert await services.driver.submit(JOB, event) == ""
    return runtime


async def test_a_plan_whose_nodes_have_gone_meanwhile_is_made_again(tmp_path: Path) -> None:
    services = services_in(tmp_path).replace(evaluator=BreakingEvaluator(MemoryError()))
    other = NodeId("0x" + "b2" * 20)
    async with acting(services):
        runtime = await aware_job(services)
        events_at_once: list[Event] = [
            NodeJoined(at_ms=NOW, node=NODE),
            NodeLost(at_ms=NOW, node=NODE, reason="silent"),
            NodeJoined(at_ms=NOW, node=other),
        ]
        await asyncio.gather(*(services.driver.submit(JOB, event) for event in events_at_once))
        await until(runtime, lambda: runtime.job.phase is Phase.TRAINING)
    assert runtime.job.round is not None
    assert list(runtime.job.round.participants) == [other]
    kinds = [entry.kind for entry in services.journal.read(JOB).entries]
    assert kinds[-2:] == ["RoundPlanned", "RoundPlanned"]


class NotedBlobs(BlobStore):
    """Notes what is made durable."""

    def __init__(self, folder: Path, space: Space, notes: list[str]) -> None:
        super().__init__(folder, space)
        self._notes = notes

    def sync(self, digest: Digest) -> None:
        self._notes.append(digest)
        super().sync(digest)


class NotingDriver(Driver):
    """Notes what is about to be journalled, and accepts all of it."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        super().__init__(FolderJournal(folder), KINDS)
        self._notes = notes

    async def insist(self, job_id: JobId, event: StampedEvent) -> str:
        self._notes.append(type(event).__name__)
        return ""


def closed_round(services: WholeShell) -> Aggregate:
    """A round with one update, on the first model, that is weighed already."""
    base = services.blobs.put(b"".join(part.tobytes() for part in random_flat(0)), keep_s=-1)
    payload = encode_update(LAYOUT, SPEC.codec.up, random_flat(1, 0.01)).payload.tobytes()
    update = services.blobs.put(payload, keep_s=-1)
    term = FoldedUpdate(NODE, Slot(0), update, 10, SPEC.codec.up, inner_steps=1)
    return Aggregate(
        round=0,
        base=Model(0, base),
        updates=(term,),
        spec=SPEC,
        down=SPEC.codec.down,
        outer=Outer(),
        outer_reason="",
        trust=TrustMemory(),
        weighing=whole_weighing(TrustMemory()),
        manifest=None,
    )


def test_a_fold_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    space = Space(tmp_path, 2 * LAYOUT.model_bytes + 20_000)
    services = services_in(tmp_path).replace(blobs=BlobStore(tmp_path, space))
    command = closed_round(services)
    work = services.blobs.work_path("any").parent

    with pytest.raises(HyperGPUError, match="DISK_FULL"):
        services.training.aggregation.fold_updates(LAYOUT, command)
    assert list(work.iterdir()) == []
    assert services.pins.all() == frozenset()


async def test_a_model_is_durable_before_one_made_of_it_is_journalled(tmp_path: Path) -> None:
    notes: list[str] = []
    blobs = NotedBlobs(tmp_path, Space(tmp_path), notes)
    services = services_in(tmp_path).replace(
        blobs=blobs, driver=NotingDriver(tmp_path / "noted", notes)
    )
    runtime = JobRuntime(Job(job_id=JOB, spec=SPEC), 0)
    runtime.layout = LAYOUT
    command = closed_round(services)

    await services.training.aggregation.aggregate(runtime, command)
    assert notes[:2] == [command.base.blob.digest, "AggregateReady"]
    assert len(notes) == 5
    assert services.pins.all() == frozenset()


def test_a_fold_takes_each_update_in_its_own_codec_and_writes_the_planned_delta(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path).replace(blobs=BlobStore(tmp_path, Space(tmp_path)))
    command = closed_round(services)
    payload = encode_update(LAYOUT, "topk64", random_flat(2, 0.01)).payload.tobytes()
    sparse = services.blobs.put(payload, keep_s=-1)
    term = FoldedUpdate(NODE, Slot(1), sparse, 30, "topk64", inner_steps=1)
    command = replace(command, updates=(*command.updates, term), down="int8")

    event = services.training.aggregation.fold_updates(LAYOUT, command).event
    assert event.omitted == ()
    (delta,) = event.model.deltas
    assert (delta.codec, delta.blob.size_bytes) == ("int8", update_bytes(LAYOUT, "int8"))


async def test_a_fold_that_nobody_waits_for_leaves_no_pins(tmp_path: Path) -> None:
    services = services_in(tmp_path).replace(blobs=BlobStore(tmp_path, Space(tmp_path)))
    runtime = JobRuntime(Job(job_id=JOB, spec=SPEC), 0)
    runtime.layout = LAYOUT
    command = closed_round(services)
    fold_task = asyncio.create_task(services.training.aggregation.aggregate(runtime, command))
    await asyncio.sleep(0)
    fold_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fold_task
    threads = os.cpu_count() or 1
    barrier = threading.Barrier(threads)  # Each thread comes once it has ended what it did.
    await asyncio.gather(*(services.heavy.run(barrier.wait) for _ in range(threads)))
    assert services.pins.all() == frozenset()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, Space(tmp_path))


def manifest(blobs: BlobStore, files: dict[str, bytes]) -> tensor_pb2.Manifest:
    """A manifest of stored files."""
    return tensor_pb2.Manifest(
        entries=[
            tensor_pb2.ManifestEntry(path=path, blob=blob_message(blobs.put(content)))
            for path, content in files.items()
        ]
    )


def test_a_manifest_is_laid_out_as_the_folder_it_describes(
    blobs: BlobStore, tmp_path: Path
) -> None:
    files = {"a.txt": b"one", "deep/er/b.txt": b"two"}
    stored_manifest = blobs.put(packed_manifest(manifest(blobs, files)))

    folder = lay_out_dataset(blobs, stored_manifest, tmp_path / "datasets")
    laid_out_files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert laid_out_files == files
    assert lay_out_dataset(blobs, stored_manifest, tmp_path / "datasets") == folder


def test_the_order_of_entries_does_not_change_a_manifests_bytes(blobs: BlobStore) -> None:
    there = manifest(blobs, {"a": b"1", "b": b"2"})
    back = manifest(blobs, {"b": b"2", "a": b"1"})
    assert packed_manifest(there) == packed_manifest(back)


def test_a_dataset_wanted_twice_at_once_is_laid_out_for_both(
    blobs: BlobStore, tmp_path: Path
) -> None:
    files = {f"{number}/file.txt": b"%d" % number for number in range(300)}
    stored_manifest = blobs.put(packed_manifest(manifest(blobs, files)))
    datasets = tmp_path / "datasets"
    with ThreadPoolExecutor(4) as pool:
        folders = set(
            pool.map(lambda _: lay_out_dataset(blobs, stored_manifest, datasets), range(4))
        )

    assert list(datasets.iterdir()) == list(folders)
    assert len(list(datasets.rglob("file.txt"))) == 300


def test_a_dataset_that_lacks_a_file_leaves_nothing_behind(
    blobs: BlobStore, tmp_path: Path
) -> None:
    stored_manifest = blobs.put(packed_manifest(manifest(blobs, {"a": b"1", "b": b"2"})))
    blobs.path(digest_of(b"2")).unlink()
    with pytest.raises(HyperGPUError, match="BLOB_UNKNOWN"):
        lay_out_dataset(blobs, stored_manifest, tmp_path / "datasets")
    assert list((tmp_path / "datasets").iterdir()) == []


def test_unfinished_and_removed_datasets_are_gone(blobs: BlobStore, tmp_path: Path) -> None:
    datasets = tmp_path / "datasets"
    stored_manifest = blobs.put(packed_manifest(manifest(blobs, {"a": b"1"})))
    folder = lay_out_dataset(blobs, stored_manifest, datasets)
    (datasets / "other.00000000.part").mkdir()
    clear_unfinished(datasets)
    assert list(datasets.iterdir()) == [folder]
    for _ in range(2):
        remove_dataset(datasets, stored_manifest.digest)
    assert list(datasets.iterdir()) == []


def test_a_manifest_whose_paths_make_no_folder_is_refused() -> None:
    entries = [tensor_pb2.ManifestEntry(path=path) for path in ("a", "a/b")]
    with pytest.raises(HyperGPUError, match="MANIFEST_INVALID"):
        packed_manifest(tensor_pb2.Manifest(entries=entries))


STORED_LAYOUT = layout_of([TensorSpec("weight", (3, 4)), TensorSpec("bias", (4,))])


def test_a_damaged_layout_counts_as_missing(tmp_path: Path) -> None:
    assert stored_layout(tmp_path) is None
    save_layout(tmp_path, STORED_LAYOUT)
    assert stored_layout(tmp_path) == STORED_LAYOUT
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"bias", b"bibs"))
    assert stored_layout(tmp_path) is None


def test_saving_another_layout_replaces_the_first(tmp_path: Path) -> None:
    other = layout_of([TensorSpec("weight", (5,))])
    save_layout(tmp_path, STORED_LAYOUT)
    save_layout(tmp_path, other)
    assert stored_layout(tmp_path) == other


ROOT = Path(__file__).parents[3]


def run_passes(armed: str) -> subprocess.CompletedProcess[bytes]:
    """A process that passes one point three times, saying so each time."""
    script = (
        "import os; from coordinator.shell.failpoints import arm, failpoint\n"
        f"arm({armed!r})\n"
        "for _ in range(3): os.write(1, b'.'); failpoint('act.done')\n"
    )
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, cwd=ROOT, check=False)


def test_the_process_is_killed_at_the_pass_that_is_named() -> None:
    process = run_passes("persist.written,act.done:2")
    assert (process.returncode, process.stdout) == (-signal.SIGKILL, b"..")


def test_a_point_that_is_not_armed_is_passed() -> None:
    assert run_passes("").returncode == 0


@pytest.mark.parametrize("text", ["nowhere", "act.done:0", "act.done:x", "act.done:-1"])
def test_a_wrong_activation_is_refused(text: str) -> None:
    with pytest.raises(HyperGPUError, match="list-failpoints"):
        arm(text)


def test_every_name_is_passed_somewhere_and_every_pass_has_a_name() -> None:
    sources = (ROOT / "coordinator").rglob("*.py")
    passed_names = {
        name
        for path in sources
        for name in re.findall(r'failpoint\("([a-z._]+)"\)', path.read_text())
    }
    assert passed_names == set(NAMES)


class WaitingEvaluators(NoEvaluators):
    """Every request waits for its turn."""

    def waiting_reason(self, job: EvaluatorJob) -> str:
        return "it waits for an evaluator"


async def test_a_job_says_that_it_waits_for_an_evaluator_and_for_which_nodes(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path).replace(evaluator=WaitingEvaluators())
    async with driving(services):
        assert await services.driver.submit(JOB, CREATED) == ""
        runtime = services.jobs[JOB]
        assert services.reasons.waiting_reason(runtime) == "it waits for an evaluator"
        first = Model(0, services.blobs.put(b"a model"))
        initialisation = ModelInitialised(at_ms=NOW, model=first, partition_sizes=(Samples(100),))
        assert await services.driver.submit(JOB, initialisation) == ""
        assert runtime.job.phase is Phase.WAITING
        services.nodes.connect(ControlStream(NODE, Capabilities(workloads={}), "test"))
        why = "0 of 1 nodes fit; another one does not: it does not offer digits-softmax 1"
        assert services.reasons.waiting_reason(runtime) == why
