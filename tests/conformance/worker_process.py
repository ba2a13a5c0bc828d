"""A real worker process and the files around it, driven like the daemon does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from gpu_node.shell.worker.messages import (
    Draw,
    Drawn,
    PositionRange,
    Progress,
    Ready,
    Reply,
    Request,
    Train,
    Trained,
    decode_reply,
    encode,
)
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.tensors.layout import Flat, Layout, pack
from hypergpu.units import Samples
from hypergpu.wire.frames import frame, read_frame
from hypergpu.workloads.registry import build, find
from hypergpu.workloads.workload import numpy_layout


class Subject(NamedTuple):
    """One kind of worker with a workload it trains in this suite."""

    kind: str
    workload: str
    options: dict[str, str | int | float | bool]


SUBJECTS = (
    Subject("torch", "digits-cnn", {"channels": 8}),
    Subject("torch", "digits-softmax", {}),
    Subject("numpy", "digits-softmax", {}),
    Subject("null", "null", {"parameters": 20_000}),
)


class Worker:
    """A worker process of some kind. Use it through `spawned`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.progress: list[Progress] = []
        first = self.next_reply()
        assert isinstance(first, Ready)
        self.ready = first

    def say(self, request: Request) -> None:
        """Send one request."""
        assert self.process.stdin is not None
        self.process.stdin.write(frame(encode(request)))
        self.process.stdin.flush()

    def next_reply(self) -> Reply:
        """Wait for the next reply, progress included."""
        assert self.process.stdout is not None
        payload = read_frame(cast(BinaryIO, self.process.stdout))
        assert payload is not None, "the worker closed its pipe"
        return decode_reply(payload)

    def answer(self) -> Reply:
        """Wait for the reply that ends a request; progress is kept aside."""
        while isinstance(reply := self.next_reply(), Progress):
            self.progress.append(reply)
        return reply

    def trained(self, request: Train) -> Trained:
        """Train a shard that must succeed."""
        self.say(request)
        reply = self.answer()
        assert isinstance(reply, Trained), reply
        return reply


@contextmanager
def spawned(kind: str, environment: dict[str, str] | None = None) -> Iterator[Worker]:
    """A worker that is ready; killed at the end if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpu_node.shell.worker", "--kind", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    with process:
        try:
            yield Worker(process)
        finally:
            process.kill()


class Desk:
    """A folder with a model in it, and requests about it."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder = folder
        self.subject = subject
        self.layout = _write_model(folder / "model", subject)

    def request(self, round: int, *, state: str = "state") -> Train:
        """Round ``round`` of a job: four inner steps on the positions after the round before."""
        return Train(
            job_id=JobId("job-000000000001"),
            round=round,
            lease=round + 1,
            slot=Slot(0),
            workload=self.subject.workload,
            workload_version=find(self.subject.workload).version,
            options=self.subject.options,
            inner_steps=4,
            batch_size=16,
            learning_rate=1e-3,
            weight_decay=0.01,
            codec="int4",
            seed=round,
            ranges=(PositionRange(64 * round, Samples(40)), PositionRange(9000, Samples(24))),
            model_path=str(self.folder / "model"),
            layout_digest=self.layout.digest,
            state_dir=str(self.folder / state),
            resume_from=round - 1 if round else None,
            update_path=str(self.folder / f"update-{round}"),
        )

    def drawing(self, seed: int) -> Draw:
        """The first model of a job with this seed."""
        return Draw(
            number=seed,
            workload=self.subject.workload,
            workload_version=find(self.subject.workload).version,
            options=self.subject.options,
            seed=seed,
            model_path=str(self.folder / f"drawn-{seed}"),
        )

    def drawn(self, worker: Worker, seed: int) -> bytes:
        """Draw a first model, which must succeed."""
        request = self.drawing(seed)
        worker.say(request)
        assert worker.answer() == Drawn(seed)
        return Path(request.model_path).read_bytes()

    def update(self, worker: Worker, request: Train) -> bytes:
        """Train and give the update's bytes."""
        worker.trained(request)
        return Path(request.update_path).read_bytes()


def changed(request: Train, **fields: object) -> Train:
    """The request with some fields replaced."""
    return msgspec.structs.replace(request, **fields)


def _write_model(path: Path, subject: Subject) -> Layout:
    entry = find(subject.workload)
    workload = build(entry, subject.options)
    if entry.kind == "torch":
        import torch

        from hypergpu.workloads.networks.tensors import module_layout, store_module

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


def unknown_digest() -> Digest:
    """A digest of nothing there is."""
    return Digest("0" * 64)


def decoded(
    desk: Desk, payload: bytes, codec: str = "int4"
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The pseudo-gradient an update says."""
    from hypergpu.tensors.codec import decode_parameters

    return decode_parameters(desk.layout, codec, payload)
