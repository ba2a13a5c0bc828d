"""A real worker process and the files around it, driven like the daemon does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from gpu_node.core.events import TrainedUpdate
from gpu_node.core.memory import TrainingStart
from gpu_node.shell.worker import protocol
from hypergpu.assignment import Assignment, Lease, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.frames import frame, read_frame
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.jobfile.spec import Inner
from hypergpu.sandbox.sandbox import Sandbox
from hypergpu.tensors.codec import decode_parameters
from hypergpu.tensors.layout import Flat, Layout, pack
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.layouts import numpy_layout
from hypergpu.workloads.registry import build, find
from tests.warm_workers import warm_variables

JOB = JobId("job-000000000001")


class Subject(NamedTuple):
    """One kind of worker with a workload it trains in this suite."""

    kind: str
    workload: str
    options: dict[str, str | int | float | bool]
    optimizer: str = "adamw"


SUBJECTS = (
    Subject("torch", "digits-cnn", {"channels": 8}),
    Subject("torch", "digits-cnn", {"channels": 8}, "muon"),
    Subject("torch", "digits-softmax", {}),
    Subject("numpy", "digits-softmax", {}),
    Subject("numpy", "digits-softmax", {}, "muon"),
    Subject("null", "null", {"parameters": 20_000}),
)


class Worker:
    """A worker process of some kind. Use it through `spawn_worker`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.progress: list[protocol.ShardProgress] = []
        first = self.next_reply()
        assert isinstance(first, protocol.WorkerCapabilities)
        self.capabilities = first

    def send(self, request: protocol.Request) -> None:
        """Send one request."""
        assert self.process.stdin is not None
        self.process.stdin.write(frame(protocol.encode(request)))
        self.process.stdin.flush()

    def next_reply(self) -> protocol.Reply:
        """Wait for the next reply, progress included."""
        assert self.process.stdout is not None
        payload = read_frame(cast(BinaryIO, self.process.stdout))
        assert payload is not None, "the worker closed its pipe"
        return protocol.decode_reply(payload)

    def answer(self) -> protocol.Reply:
        """Wait for the reply that ends a request; progress is kept aside."""
        while isinstance(reply := self.next_reply(), protocol.ShardProgress):
            self.progress.append(reply)
        return reply

    def train(self, request: protocol.TrainShard) -> TrainedUpdate:
        """Train a shard that must succeed."""
        self.send(request)
        reply = self.answer()
        assert isinstance(reply, protocol.ShardTrained), reply
        return reply.update


@contextmanager
def spawn_worker(
    kind: str, environment: dict[str, str] | None = None, sandbox: Sandbox | None = None
) -> Iterator[Worker]:
    """A worker that is ready; killed at the end if it still lives. One without a sandbox is a fork
    where such are wanted.
    """
    command = [sys.executable, "-m", "gpu_node.shell.worker", "--kind", kind]
    starts = {} if sandbox else warm_variables()
    variables = {**os.environ, **starts, **(environment or {})}
    process = subprocess.Popen(
        command if sandbox is None else sandbox.command(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables if sandbox is None else sandbox.environment(variables),
    )
    with process:
        try:
            yield Worker(process)
        finally:
            process.kill()


class ShardKit:
    """A folder with a model in it, and requests about it."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder = folder
        self.subject = subject
        self.layout = _write_model(folder / "model", subject)

    def request(self, round: int, *, state: str = "state") -> protocol.TrainShard:
        """Round ``round`` of a job: four inner steps on the positions after the round before."""
        task = Task(
            workload=self.subject.workload,
            workload_version=find(self.subject.workload).version,
            options=self.subject.options,
            inner_steps=4,
            batch_size=16,
            learning_rate=1e-3,
            optimizer=Inner(optimizer=self.subject.optimizer).rule,
            codec="int4",
            seed=round,
            ranges=(SampleRange(64 * round, Samples(40)), SampleRange(9000, Samples(24))),
            model=BlobRef(Digest(f"{round:064}"), Bytes(0)),
            layout=self.layout.digest,
        )
        return protocol.TrainShard(
            assignment=Assignment(lease=Lease(JOB, round, round + 1), slot=Slot(0), task=task),
            start=TrainingStart(round - 1 if round else None),
            model_path=str(self.folder / "model"),
            state_dir=str(self.folder / state),
            update_path=str(self.folder / f"update-{round}"),
        )

    def initial_request(self, seed: int) -> protocol.WriteInitialModel:
        """A request for the first model of a job with this seed."""
        return protocol.WriteInitialModel(
            number=seed,
            workload=self.subject.workload,
            workload_version=find(self.subject.workload).version,
            options=self.subject.options,
            seed=seed,
            model_path=str(self.folder / f"initial-{seed}"),
        )

    def initial_model(self, worker: Worker, seed: int) -> bytes:
        """The first model of a job, which must succeed."""
        request = self.initial_request(seed)
        worker.send(request)
        assert worker.answer() == protocol.InitialModelWritten(seed)
        return Path(request.model_path).read_bytes()

    def update(self, worker: Worker, request: protocol.TrainShard) -> bytes:
        """Train and give the update's bytes."""
        worker.train(request)
        return Path(request.update_path).read_bytes()


def change(request: protocol.TrainShard, **fields: object) -> protocol.TrainShard:
    """The request with fields replaced: its own or those of its task, assignment or start."""

    def take(kind: type) -> dict[str, object]:
        names = kind.__struct_fields__  # type: ignore[attr-defined]
        return {name: fields.pop(name) for name in names if name in fields}

    task = replace(request.task, **take(Task))
    start = replace(request.start, **take(TrainingStart))
    assignment = replace(request.assignment, task=task, **take(Assignment))
    return replace(request, assignment=assignment, start=start, **fields)


def _write_model(path: Path, subject: Subject) -> Layout:
    entry = find(subject.workload)
    workload = build(entry, subject.options)
    if entry.kind == "torch":
        import torch

        from hypergpu.workloads.networks.task import module_layout, store_module

        torch.manual_seed(0)
        module = workload.model()
        layout = module_layout(module)
        flat = Flat.empty(layout)
        store_module(module, layout, flat)
    else:
        layout = numpy_layout(workload)
        flat = Flat.empty(layout)
        pack(layout, workload.initial(0), flat)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(vector.tobytes() for vector in flat))
    return layout


def pseudo_gradient(
    kit: ShardKit, payload: bytes, codec: str = "int4"
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The pseudo-gradient in an update."""
    return decode_parameters(kit.layout, codec, payload)
