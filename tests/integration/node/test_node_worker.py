import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gpu_node.core.events import Event, WorkerDied, WorkerReady
from gpu_node.shell.state.places import Places
from gpu_node.shell.supervision import (
    Ears,
    WorkerProcess,
    worker_caps,
    worker_command,
    worker_kind,
)
from gpu_node.shell.training import Trainer
from gpu_node.shell.worker.messages import Ready, Reply, Train, encode
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.units import Bytes
from hypergpu.wire.frames import frame


class Listener:
    """Hears a worker."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.deaths: asyncio.Queue[str] = asyncio.Queue()

    def hold(self, command: tuple[str, ...]) -> WorkerProcess:
        worker = WorkerProcess(command, os.environ)
        worker.listen(Ears(self.replies.put_nowait, self.deaths.put_nowait))
        return worker

    async def death(self) -> str:
        async with asyncio.timeout(240):
            return await self.deaths.get()


def script(text: str) -> tuple[str, ...]:
    """A worker that does as the text says instead of training."""
    return (sys.executable, "-c", text)


READY = Ready(device="cpu", device_name="??", memory_bytes=Bytes(1), kind="numpy", workloads={})
REQUEST = Train(
    job_id=JobId("job-a"),
    round=0,
    lease=1,
    slot=Slot(0),
    workload="none such",
    workload_version=1,
    inner_steps=1,
    batch_size=1,
    learning_rate=0.1,
    codec="fp32",
    seed=0,
    ranges=(),
    model_path="",
    layout_digest=Digest("00" * 32),
    state_dir="",
    update_path="",
)


async def test_a_worker_says_what_it_can_do_and_stops_when_told() -> None:
    listener = Listener()
    worker = listener.hold(worker_command("numpy"))
    ready = await worker.ready()
    assert ready.kind == "numpy"
    assert "digits-softmax" in ready.workloads
    await worker.stop()
    assert worker.process_id is None
    assert listener.deaths.empty()


async def test_a_killed_worker_is_mourned_and_the_next_request_spawns_another() -> None:
    listener = Listener()
    worker = listener.hold(worker_command("null"))
    await worker.ready()
    first = worker.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert await listener.death() == "it was ended by SIGKILL"
    await worker.train(REQUEST)
    async with asyncio.timeout(240):
        reply = await listener.replies.get()
    assert worker.process_id not in {None, first}
    assert isinstance(reply, Ready)
    await worker.stop()


async def test_a_worker_that_never_gets_ready_says_why() -> None:
    worker = Listener().hold(script("import sys; sys.exit(3)"))
    with pytest.raises(HyperGPUError, match="it left with status 3"):
        await worker.ready()


NO_TEXT = frame(encode(READY).replace(b"??", b"\xff\xff"))


@pytest.mark.parametrize("written", [b"hello, this is not a frame", NO_TEXT])
async def test_a_worker_that_writes_nonsense_is_ended(written: bytes) -> None:
    listener = Listener()
    worker = listener.hold(
        script(f"import sys; sys.stdout.buffer.write({written!r}); sys.stdout.flush(); input()")
    )
    with pytest.raises(HyperGPUError, match="not understood"):
        await worker.ready()
    assert "not understood" in await listener.death()


async def test_a_worker_that_floods_its_pipe_is_ended() -> None:
    worker = Listener().hold(script("import sys; sys.stdout.write('x' * 2_000_000); input()"))
    async with asyncio.timeout(240):
        with pytest.raises(HyperGPUError, match="not understood"):
            await worker.ready()


async def test_a_death_is_heard_while_what_the_worker_started_holds_its_log(tmp_path: Path) -> None:
    held, ended = tmp_path / "held", tmp_path / "ended"
    os.mkfifo(held)
    os.mkfifo(ended)
    holding = f"out = open({str(ended)!r}, 'w'); open({str(held)!r}).read()"
    inner = f"import os; {holding}; os._exit(0)"
    text = (
        "import os, subprocess as s, sys; "
        f"s.Popen([sys.executable, '-c', {inner!r}], stdin=s.DEVNULL, stdout=s.DEVNULL); "
        "os._exit(3)"
    )
    worker = Listener().hold(script(text))
    waiting = asyncio.ensure_future(worker.ready())
    with await asyncio.to_thread(ended.open) as reader:
        with await asyncio.to_thread(held.open, "w"):
            async with asyncio.timeout(240):
                with pytest.raises(HyperGPUError, match="it left with status 3"):
                    await waiting
        assert worker.process_id is None
        assert await asyncio.to_thread(reader.read) == ""
    for _ in range(10):  # until asyncio has seen that the log is closed at last
        await asyncio.sleep(0)


async def test_a_worker_that_starts_after_all_is_told_apart_from_one_that_never_gets_ready(
    tmp_path: Path,
) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    once = f"import os; os.open({str(tmp_path / 'mark')!r}, os.O_CREAT | os.O_EXCL); os._exit(7)"
    then = f"import os, sys; os.execv(sys.executable, {list(worker_command('null'))!r})"
    text = f"try:\n  {once}\nexcept FileExistsError:\n  {then}"
    worker = WorkerProcess(script(text), os.environ)
    with Places(tmp_path / "node") as places:
        trainer = Trainer(places, worker, report=events.put_nowait, send=lambda _: None)
        async with asyncio.timeout(240):
            await trainer.start_worker()
            failed = await events.get()
            await trainer.start_worker()
            ready = await events.get()
            trainer.end_worker("it hangs")
            ended = await events.get()
    assert isinstance(failed, WorkerDied)
    assert (failed.reason, failed.was_ready) == ("it left with status 7", False)
    assert isinstance(ready, WorkerReady)
    assert isinstance(ended, WorkerDied)
    assert (ended.reason, ended.was_ready) == ("it hangs", True)


async def test_a_program_that_is_missing_is_a_death_too() -> None:
    with pytest.raises(HyperGPUError, match="cannot be started"):
        await Listener().hold(("/nowhere/python",)).ready()


async def test_the_loop_goes_on_while_a_worker_holds_its_own_lock() -> None:
    busy = script("import time, re; re.match('(a+)+$', 'a' * 30 + 'b')")
    listener = Listener()
    worker = listener.hold(busy)
    await worker.start()
    waiting = asyncio.ensure_future(worker.ready())
    await asyncio.sleep(0)
    process_id = worker.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(HyperGPUError):
        await waiting


def test_caps_are_told_only_where_they_are_set() -> None:
    assert worker_caps(0, 0) == {}
    assert worker_caps(2, 1 << 30) == {
        "HYPERGPU_WORKER_THREADS": "2",
        "HYPERGPU_WORKER_MEMORY_BYTES": str(1 << 30),
    }


def test_an_unnamed_kind_is_torch_where_torch_is() -> None:
    assert worker_kind("auto") in {"torch", "numpy"}
    assert worker_kind("null") == "null"
