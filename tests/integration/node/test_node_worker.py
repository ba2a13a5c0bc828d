"""Worker processes, supervised: started, warm or not, ended with all that they started."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hooks.warm_client import LIBRARIES, WARM_VARIABLE
from benchmarks.ours.warm import HOOKS, changed_environment, warm_starts
from gpu_node.core.events import NodeEvent, TrainingFailed, WorkerDied, WorkerReady
from gpu_node.core.memory import TrainingStart
from gpu_node.shell.owner.interpreter import WorkerPython, worker_kind
from gpu_node.shell.worker.protocol import CallOutput, TrainShard, WorkerCapabilities, encode
from gpu_node.shell.worker_host.supervision import WorkerSupervisor, worker_caps
from gpu_node.shell.worker_host.worker_process import WorkerLaunch
from hypergpu.assignment import FailureCause
from hypergpu.errors import HyperGPUError
from hypergpu.frames import frame
from hypergpu.units import Bytes
from tests.unit.node.node_states import assignment


class SupervisedWorker(WorkerSupervisor):
    """A worker whose events a test takes one by one."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        super().__init__(WorkerLaunch(command, os.environ), report=self.events.put_nowait)

    async def next_event(self) -> NodeEvent:
        async with asyncio.timeout(240):
            return await self.events.get()


def script_worker(text: str) -> SupervisedWorker:
    """A worker that runs a script instead of training."""
    return SupervisedWorker((sys.executable, "-c", text))


def descriptors() -> int:
    """How many this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


CAPABILITIES = WorkerCapabilities(
    device="cpu", device_name="??", memory_bytes=Bytes(1), kind="numpy", workloads={}
)
REQUEST = TrainShard(
    assignment=assignment(), start=TrainingStart(), model_path="", state_dir="", update_path=""
)


async def test_a_worker_names_its_capabilities_and_stops_when_told() -> None:
    worker = SupervisedWorker(WorkerPython("numpy").command())
    capabilities = await worker.capabilities()
    assert capabilities.kind == "numpy"
    assert "digits-softmax" in capabilities.workloads
    await worker.stop()
    assert worker.process_id is None
    assert isinstance(await worker.next_event(), WorkerReady)
    assert worker.events.empty()


async def test_a_killed_worker_is_reported_and_the_next_request_spawns_another() -> None:
    worker = SupervisedWorker(WorkerPython("null").command())
    await worker.capabilities()
    first = worker.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert isinstance(await worker.next_event(), WorkerReady)
    death = await worker.next_event()
    assert isinstance(death, WorkerDied)
    assert death.reason == "it was ended by SIGKILL"
    await worker.compute(REQUEST)
    assert isinstance(await worker.next_event(), WorkerReady)
    assert worker.process_id not in {None, first}
    assert isinstance(await worker.next_event(), TrainingFailed)
    await worker.stop()


async def test_a_worker_that_dies_ends_its_open_calls_at_once() -> None:
    greeting = frame(encode(CAPABILITIES))
    worker = script_worker(
        f"import sys; out = sys.stdout.buffer; out.write({greeting!r}); out.flush();"
        " sys.stdin.buffer.read()"
    )
    outputs = list[CallOutput]()
    worker.report_output = outputs.append
    await worker.capabilities()
    await worker.compute(REQUEST)
    assert worker.call(5, b"somebody waits for the answer")
    os.kill(worker.process_id or 0, signal.SIGKILL)
    while not isinstance(await worker.next_event(), WorkerDied):
        pass
    assert outputs == [CallOutput(REQUEST.lease, 5, b"", is_last=True, is_urgent=True)]
    await worker.stop()


async def test_a_worker_that_never_gets_ready_says_why() -> None:
    with pytest.raises(HyperGPUError, match="it left with status 3"):
        await script_worker("import sys; sys.exit(3)").capabilities()


NO_TEXT = frame(encode(CAPABILITIES).replace(b"??", b"\xff\xff"))


@pytest.mark.parametrize("written", [b"hello, this is not a frame", NO_TEXT, b"x" * 2_000_000])
async def test_a_worker_that_writes_nonsense_is_ended(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "written"
    path.write_bytes(written)
    text = f"import sys; sys.stdout.buffer.write(open({str(path)!r}, 'rb').read())"
    worker = script_worker(f"{text}; sys.stdout.flush(); input()")
    async with asyncio.timeout(240):
        with pytest.raises(HyperGPUError, match="not understood"):
            await worker.capabilities()
    death = await worker.next_event()
    assert isinstance(death, WorkerDied)
    assert "not understood" in death.reason


async def test_a_death_is_reported_while_a_child_of_the_worker_holds_its_log(
    tmp_path: Path,
) -> None:
    count_before = descriptors()
    held_path, end_path = tmp_path / "held", tmp_path / "ended"
    os.mkfifo(held_path)
    os.mkfifo(end_path)
    hold_code = f"out = open({str(end_path)!r}, 'w'); open({str(held_path)!r}).read()"
    inner = f"import os; {hold_code}; os._exit(0)"
    text = (
        "import os, subprocess as s, sys; "
        f"s.Popen([sys.executable, '-c', {inner!r}], stdin=s.DEVNULL, stdout=s.DEVNULL); "
        "os._exit(3)"
    )
    worker = script_worker(text)
    capabilities_task = asyncio.ensure_future(worker.capabilities())
    with await asyncio.to_thread(end_path.open) as reader:
        with await asyncio.to_thread(held_path.open, "w"):
            async with asyncio.timeout(240):
                with pytest.raises(HyperGPUError, match="it left with status 3"):
                    await capabilities_task
        assert worker.process_id is None
        assert await asyncio.to_thread(reader.read) == ""
    # Asyncio sees that the log is closed at last, and has no event for it.
    while descriptors() > count_before:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_worker_that_starts_after_all_is_told_apart_from_one_that_never_gets_ready(
    tmp_path: Path,
) -> None:
    once = f"import os; os.open({str(tmp_path / 'mark')!r}, os.O_CREAT | os.O_EXCL); os._exit(7)"
    then = f"import os, sys; os.execv(sys.executable, {list(WorkerPython('null').command())!r})"
    worker = script_worker(f"try:\n  {once}\nexcept FileExistsError:\n  {then}")
    await worker.start_worker()
    first_death = await worker.next_event()
    await worker.start_worker()
    ready = await worker.next_event()
    worker.end_worker("it fills the disk", FailureCause.OWNER)
    second_death = await worker.next_event()
    assert isinstance(first_death, WorkerDied)
    assert (first_death.reason, first_death.was_ready) == ("it left with status 7", False)
    assert isinstance(ready, WorkerReady)
    assert isinstance(second_death, WorkerDied)
    assert (second_death.reason, second_death.was_ready) == ("it fills the disk", True)
    assert (first_death.cause, second_death.cause) == (FailureCause.OTHER, FailureCause.OWNER)


async def test_a_worker_that_hangs_as_it_starts_anew_is_ended() -> None:
    worker = script_worker("input()")
    async with asyncio.timeout(60):
        with pytest.raises(HyperGPUError, match=r"it was not ready within 0\.2 s"):
            await worker.start_anew(0.2)
    death = await worker.next_event()
    assert isinstance(death, WorkerDied)
    assert worker.process_id is None


async def test_a_program_that_is_missing_is_a_death_too() -> None:
    with pytest.raises(HyperGPUError, match="cannot be started"):
        await SupervisedWorker(("/nowhere/python",)).capabilities()


async def test_the_loop_goes_on_while_a_worker_holds_its_own_lock() -> None:
    worker = script_worker("import time, re; re.match('(a+)+$', 'a' * 30 + 'b')")
    await worker.start_worker()
    capabilities_task = asyncio.ensure_future(worker.capabilities())
    await asyncio.sleep(0)
    process_id = worker.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(HyperGPUError):
        await capabilities_task


def test_only_caps_that_are_set_are_in_the_environment() -> None:
    assert worker_caps(0, 0) == {}
    assert worker_caps(2, 1 << 30) == {
        "HYPERGPU_WORKER_THREADS": "2",
        "HYPERGPU_WORKER_MEMORY_BYTES": str(1 << 30),
    }


def test_an_unnamed_kind_is_torch_where_torch_is() -> None:
    assert worker_kind("auto", has_torch=True) == "torch"
    assert worker_kind("auto", has_torch=False) == "numpy"
    assert worker_kind("null", has_torch=True) == "null"


def answer_of_a_worker() -> tuple[int, bytes]:
    """Start a torch worker that finds its stdin at an end; return its status and its words."""
    argv = [sys.executable, "-P", "-m", "gpu_node.shell.worker", "--kind", "torch"]
    environment = {**os.environ, **LIBRARIES}
    process = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False
    )
    return process.returncode, process.stdout


def test_a_fork_answers_as_a_started_worker_does() -> None:
    with warm_starts():
        of_a_fork = answer_of_a_worker()
    assert of_a_fork == answer_of_a_worker()


def test_without_its_server_a_worker_starts_by_itself(tmp_path: Path) -> None:
    with changed_environment({WARM_VARIABLE: str(tmp_path / "gone"), "PYTHONPATH": str(HOOKS)}):
        status, words = answer_of_a_worker()
    assert status == 0
    assert words
